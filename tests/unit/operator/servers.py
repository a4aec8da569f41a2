"""An InferenceServer, its Deployment and pods as a cluster holds them, and what the operator makes of them."""

from __future__ import annotations

from typing import Any

from banyan_operator.desired.metadata import SPEC_HASH
from banyan_operator.plan import Manifest, Outcome, World
from banyan_operator.times import stamp
from tests.unit.operator.conftest import DONE, SETTINGS, Turn, a_server, controlled, merge, turn
from tests.unit.operator.test_desired import render, workload

NOW = 1_700_000_000.0


def deployment(manifest: Manifest, **status: Any) -> Manifest:
    live: Manifest = merge(workload(render(manifest)), {"metadata": {"uid": "d", "generation": 1}})
    live["status"] = {"observedGeneration": 1, "conditions": []} | status
    return live


def replica_set(owner: Manifest, revision: str | None = None, **status: Any) -> Manifest:
    """Of a Deployment, for its own pods or those of an earlier revision."""
    template = owner["spec"]["template"]
    if revision is not None:
        template = merge(template, {"metadata": {"annotations": {SPEC_HASH: revision}}})
    revision = template["metadata"]["annotations"][SPEC_HASH]
    meta = {"name": f"tiny-{revision}", "uid": f"rs-{owner['metadata']['uid']}-{revision}", "labels": template["metadata"]["labels"]}
    one = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": meta, "spec": {"template": template}, "status": status}
    return controlled(one, owner)


def pod(manifest: Manifest, name: str = "tiny-x", *, age: float = 30, revision: str | None = None, **status: Any) -> Manifest:
    """A pod of the ReplicaSet of `revision`; `observe` puts that beside it."""
    above = replica_set(deployment(manifest), revision)
    template = above["spec"]["template"]
    one = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "uid": f"uid-{name}", **template["metadata"], "creationTimestamp": stamp(NOW - age)},
        "spec": {**template["spec"], "nodeName": "n7"},
        "status": {"phase": "Pending", "conditions": []} | status,
    }
    return controlled(one, above)


def container(state: dict[str, Any], **more: Any) -> dict[str, Any]:
    base = {"name": "server", "image": "registry.example/banyan-runtime:0.1", "ready": False, "started": False, "restartCount": 0}
    return base | {"state": state} | more


def ended(code: int, message: str = "", reason: str = "Error") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, "message": message, "finishedAt": stamp(NOW - 5)}}


def running(age: float = 10) -> dict[str, Any]:
    return {"running": {"startedAt": stamp(NOW - age)}}


def crashed(code: int, message: str = "", reason: str = "Error") -> dict[str, Any]:
    one = container({"waiting": {"reason": "CrashLoopBackOff"}}, lastState=ended(code, message, reason), restartCount=1)
    return {"phase": "Running", "containerStatuses": [one]}


READY = {
    "phase": "Running",
    "conditions": [{"type": "Ready", "status": "True"}],
    "containerStatuses": [container(running(), ready=True, started=True)],
}


def around(*children: Manifest) -> tuple[Manifest, ...]:
    """`children`, and the ReplicaSets of the pods among them."""
    known = {child["metadata"].get("uid") for child in children}
    sets: dict[str, Manifest] = {}
    for above in (child for child in children if child["kind"] == "Deployment"):
        for one in (child for child in children if child["kind"] == "Pod"):
            found = replica_set(above, one["metadata"]["annotations"][SPEC_HASH])
            sets[found["metadata"]["uid"]] = found
    return (*children, *(one for uid, one in sets.items() if uid not in known))


def observe(manifest: Manifest, *children: Manifest, settings: Any = SETTINGS, outcome: Outcome = DONE, **world: Any) -> Turn:
    return turn(manifest, World(**({"now": NOW} | world), children=around(*children)), settings, outcome)


def after(turned: Turn, manifest: Manifest) -> Manifest:
    return manifest | {"status": dict(turned.status)}


def conditions(plan: Turn) -> dict[str, dict[str, Any]]:
    return {one["type"]: one for one in plan.status["conditions"]}


def ready(plan: Turn) -> dict[str, Any]:
    return conditions(plan)["Ready"]


SERVER = a_server(resources={"limits": {"memory": "4Gi"}})
GPU = a_server(accelerator={"count": 1})


def unschedulable(text: str) -> dict[str, Any]:
    return {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text}]}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"containerStatuses": [container({"waiting": {"reason": reason, "message": message}})]}
