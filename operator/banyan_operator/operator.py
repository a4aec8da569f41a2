"""The operator as kopf sees it: what it watches, and what each event sets off.

Kopf owns the process's loop: signals, login, watches, probes, start and clean-up. An event goes to the store, which queues the
resources that it concerns; workers reconcile them. A handler writes nothing and returns None: kopf would patch a returned value into
the object's status. Kopf's change handlers, timers and daemons are not used, since they write annotations and finalizers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import kopf

from banyan_operator.kube import kinds
from banyan_operator.kube.kinds import Role


@kopf.on.login()
async def login(memo: kopf.Memo, **_: Any) -> kopf.ConnectionInfo:
    return await memo.manager.connection.login()  # type: ignore[no-any-return]


@kopf.on.startup(errors=kopf.ErrorsMode.PERMANENT)
async def start(memo: kopf.Memo, **_: Any) -> None:
    await memo.manager.start()


@kopf.on.cleanup(errors=kopf.ErrorsMode.PERMANENT)
async def stop(memo: kopf.Memo, **_: Any) -> None:
    await memo.manager.stop()


@kopf.on.probe()
async def alive(memo: kopf.Memo, **_: Any) -> str:
    if (trouble := memo.manager.trouble()) is not None:
        raise kopf.PermanentError(trouble)
    return "ok"


@kopf.on.event("serving.banyan.dev/v1alpha1", "inferenceservers")
@kopf.on.event("serving.banyan.dev/v1alpha1", "batchjobs")
async def resource_event(event: Mapping[str, Any], resource: kopf.Resource, memo: kopf.Memo, **_: Any) -> None:
    """Queue the resource. An InferenceServer queues the BatchJobs that use it, too."""
    _seen(event, resource, memo)


@kopf.on.event("v1", "serviceaccounts")
@kopf.on.event("v1", "persistentvolumeclaims")
@kopf.on.event("v1", "services")
@kopf.on.event("apps/v1", "controllerrevisions")
@kopf.on.event("apps/v1", "deployments")
@kopf.on.event("batch/v1", "jobs")
@kopf.on.event("policy/v1", "poddisruptionbudgets")
@kopf.on.event("networking.k8s.io/v1", "networkpolicies")
@kopf.on.event("networking.k8s.io/v1", "ingresses")
async def child_event(event: Mapping[str, Any], resource: kopf.Resource, memo: kopf.Memo, **_: Any) -> None:
    """Queue the resource that we made the object for. PodMonitors and ServiceMonitors are not watched: their API may be missing."""
    _seen(event, resource, memo)


@kopf.on.event("apps/v1", "replicasets")
@kopf.on.event("v1", "pods")
@kopf.on.event("discovery.k8s.io/v1", "endpointslices")
async def grandchild_event(event: Mapping[str, Any], resource: kopf.Resource, memo: kopf.Memo, **_: Any) -> None:
    """Queue the resource that Kubernetes made the object for."""
    _seen(event, resource, memo)


def _seen(event: Mapping[str, Any], resource: kopf.Resource, memo: kopf.Memo) -> None:
    kind = kinds.find(f"{resource.group}/{resource.version}".removeprefix("/"), resource.kind or "")
    manifest = {"apiVersion": kind.api_version, "kind": kind.kind, **event["object"]}  # the objects of a list do not say it
    memo.manager.driver.seen(kind, event["type"], manifest)


def settings() -> kopf.OperatorSettings:
    made = kopf.OperatorSettings()
    made.scanning.disabled = True
    made.posting.enabled = False
    made.peering.standalone = True
    made.networking.error_backoffs = itertools.repeat(5.0)  # without end: kopf would give up and end
    made.networking.request_timeout = 60
    made.networking.connect_timeout = 10
    made.networking.enforce_retry_after = True
    made.watching.server_timeout = 300
    made.watching.inactivity_timeout = 70
    made.watching.chunk_size = 500
    for kind in kinds.WATCHED:
        if kind.role is not Role.RESOURCE:
            made.watching.label_selectors[kind.group, kind.version, kind.plural] = kinds.CHILD_SELECTOR
    made.persistence.finalizer = "serving.banyan.dev/unused"  # never written; a leak would show
    made.persistence.diffbase_storage = NoEssence()
    made.queueing.worker_limit = None  # a worker waits idle_timeout for more of its object: a limit is one of objects in that time
    made.queueing.idle_timeout = 1
    made.queueing.exit_timeout = 1
    return made


class NoEssence(kopf.DiffBaseStorage):
    """Kopf's memory of what it has handled: none. (It would copy each object that it hears of, to find out what has changed.)"""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> Any:
        return None

    def store(self, **_: Any) -> None:
        raise AssertionError("kopf writes nothing")
