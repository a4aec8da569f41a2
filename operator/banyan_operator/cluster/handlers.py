"""The operator as kopf sees it: what it watches, and what each sighting sets off.

Kopf owns the process's loop: signals, login, watches, probes, start and clean-up. Its handlers here write nothing and return
None: a returned value would be patched into the object's status. What they hear goes to the life's store and queue, where workers
take it up; kopf's own change handlers, timers and daemons would write annotations and finalizers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any, Final

import kopf

from banyan_operator.cluster.life import Life
from banyan_operator.kube import kinds
from banyan_operator.kube.kinds import Kind, Role


def declare(life: Life) -> kopf.OperatorRegistry:
    """All handlers of one life of the operator."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        return await life.login()

    @kopf.on.startup(registry=registry, errors=kopf.ErrorsMode.PERMANENT)
    async def start(**_: Any) -> None:
        await life.start()

    @kopf.on.cleanup(registry=registry, errors=kopf.ErrorsMode.PERMANENT)
    async def stop(**_: Any) -> None:
        await life.stop()

    @kopf.on.probe(registry=registry)
    async def alive(**_: Any) -> str:
        if (trouble := life.trouble()) is not None:
            raise kopf.PermanentError(trouble)
        return "ok"

    def watch(kind: Kind) -> None:
        @kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, id="seen")
        async def seen(event: Mapping[str, Any], **_: Any) -> None:
            life.seen(kind, event["type"], {"apiVersion": kind.api_version, "kind": kind.kind, **event["object"]})

    # Our resources, what we make for them, and what Kubernetes makes of that. A resource's sighting queues it, and the BatchJobs
    # that use a server; a child's queues the resource that it belongs to. Kinds whose API may be missing are asked for instead.
    for kind in kinds.WATCHED:
        if not kind.optional:
            watch(kind)
    return registry


class EndlessBackoffs:
    """Delays between tries of one API call, s. Endless, or kopf would give up after a minute and end."""

    FIRST: Final = (1, 1, 2, 3, 5, 8, 13, 21)

    def __iter__(self) -> Iterator[float]:
        for delay in self.FIRST:
            yield delay * random.uniform(0.8, 1.2)
        while True:
            yield 30 * random.uniform(0.8, 1.2)


def settings() -> kopf.OperatorSettings:
    made = kopf.OperatorSettings()
    made.scanning.disabled = True
    made.posting.enabled = False
    made.peering.standalone = True
    made.networking.error_backoffs = EndlessBackoffs()
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
    made.persistence.progress_storage = NoProgress()
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


class NoProgress(kopf.ProgressStorage):
    """Kopf's memory of handlers that have to be run again: none."""

    def fetch(self, **_: Any) -> Any:
        return None

    def store(self, **_: Any) -> None:
        raise AssertionError("kopf writes nothing")

    def purge(self, **_: Any) -> None:
        pass

    def touch(self, **_: Any) -> None:
        pass

    def clear(self, *, essence: Any) -> Any:
        return essence
