"""A BatchJob, its Jobs and their pods as a cluster holds them, and what the operator makes of them."""

from __future__ import annotations

import json
from typing import Any

from banyan_operator import api
from banyan_operator.desired import batch
from banyan_operator.desired.batchjob import Order
from banyan_operator.plan import Manifest, Outcome, World
from banyan_operator.times import stamp
from tests.unit.operator.conftest import DONE, SETTINGS, Turn, a_batch, a_server, controlled, merge, turn
from tests.unit.operator.test_desired import URL, workload

NOW = 1_700_000_000.0
BATCH = a_batch()
SERVING = a_server() | {"status": {"conditions": [{"type": "Accepted", "status": "True"}, {"type": "Available", "status": "True"}]}}
PROGRESS = {
    "phase": "running",
    "total": 1000,
    "completed": 400,
    "failed": 12,
    "tokensPerSecond": 185.6,
    "requestsPerSecond": 0.19,
    "shards": {"total": 4, "completed": 1, "running": 2},
    "usage": {"promptTokens": 10, "cachedTokens": 2, "completionTokens": 5, "totalTokens": 15},
}
PUBLISHED = {
    "code": "succeeded",
    "message": "done",
    "requestCounts": {"total": 1000, "completed": 988, "failed": 12},
    "usage": {"promptTokens": 20, "cachedTokens": 4, "completionTokens": 10, "totalTokens": 30},
    "output": "/data/out/output.jsonl",
    "errors": "/data/out/errors.jsonl",
    "manifest": "/data/out/manifest.json",
}


def job(manifest: Manifest = BATCH, *, phase: str = "work", suspend: bool = False, partial: Any = None, **status: Any) -> Manifest:
    """The Job of one phase as it is in the cluster."""
    parsed = api.parse(merge(manifest, {"spec": {"suspend": False}}))
    assert isinstance(parsed, api.BatchJob)
    order = Order(phase, partial=partial)  # type: ignore[arg-type]
    made = workload(batch.children(parsed, SETTINGS, [order], server_url=URL), phase)
    live: Manifest = merge(made, {"metadata": {"uid": f"uid-{phase}", "generation": 1}, "spec": {"suspend": suspend}})
    live["spec"] |= {
        "selector": {"matchLabels": {"batch.kubernetes.io/controller-uid": live["metadata"]["uid"]}},
        "backoffLimit": 2147483647,
    }
    return live | {"status": status}


def pod(state: dict[str, Any], phase: str, manifest: Manifest = BATCH, name: str = "nightly--work-0-x", of: str = "work") -> Manifest:
    template = job(manifest, phase=of)["spec"]["template"]
    one = {"name": "worker", "image": "i", "ready": phase == "Running", "started": phase == "Running", "restartCount": 0, "state": state}
    ready = [{"type": "Ready", "status": "True"}] if phase == "Running" else []
    found = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**template["metadata"], "name": name, "uid": f"uid-{name}", "creationTimestamp": stamp(NOW - 60)},
        "spec": {**template["spec"], "nodeName": "n7"},
        "status": {"phase": phase, "conditions": ready, "containerStatuses": [one]},
    }
    return controlled(found, job(manifest, phase=of))


def running(index: int = 0, of: str = "work") -> Manifest:
    return pod({"running": {"startedAt": stamp(NOW - 50)}}, "Running", name=f"nightly--{of}-{index}-x", of=of)


def ended(code: int, words: dict[str, Any], of: str = "work", index: int = 0) -> Manifest:
    state = {"terminated": {"exitCode": code, "reason": "Error", "message": json.dumps(words), "finishedAt": stamp(NOW - 5)}}
    return pod(state, "Succeeded" if code == 0 else "Failed", name=f"nightly--{of}-{index}-x", of=of)


def named(one: Manifest, name: str, created: float) -> Manifest:
    """Another pod like it."""
    return merge(one, {"metadata": {"name": name, "uid": f"uid-{name}", "creationTimestamp": stamp(created)}})


PLAN_WORDS = {"code": "planned", "message": "", "requestCounts": {"total": 1000, "completed": 0, "failed": 0}, "shards": 4, "fenced": True}
WORKED = {"code": "worked", "message": "", "requestCounts": {"total": 1000, "completed": 988, "failed": 12}, "usage": {"totalTokens": 30}}


def planned(manifest: Manifest = BATCH) -> Manifest:
    """The resource whose plan was made, by its status."""
    return after(observe(manifest, job(manifest, phase="plan", **COMPLETE), ended(0, PLAN_WORDS, of="plan")), manifest)


def published(partial: Any = None, code: int = 0, code_word: str = "succeeded", **words: Any) -> tuple[Manifest, ...]:
    """The merge, over."""
    status = COMPLETE if code == 0 else FAILED
    return job(phase="merge", partial=partial, **status), ended(code, PUBLISHED | {"code": code_word} | words, of="merge")


def observe(
    manifest: Manifest, *children: Manifest, settings: Any = SETTINGS, outcome: Outcome = DONE, progress: Any = None, **world: Any
) -> Turn:
    """`progress`: what the first worker says, or by pod name what each does."""
    said = progress or {}
    said = said if all(name.startswith("nightly--") for name in said) else {"nightly--work-0-x": said}
    return turn(manifest, World(children=children, progress=said, **({"now": NOW, "server": SERVING} | world)), settings, outcome)


def after(plan: Turn, manifest: Manifest = BATCH) -> Manifest:
    """The same resource with the status that the plan wrote."""
    return manifest | {"status": json.loads(json.dumps(plan.status))}


def condition(plan: Turn, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in plan.status["conditions"] if one["type"] == kind)
    return found


def reasons(plan: Turn) -> list[str]:
    return [event.reason for event in plan.events]


AT = {"lastTransitionTime": stamp(NOW - 4)}
COMPLETE = {"conditions": [{"type": "Complete", "status": "True", **AT}], "completionTime": stamp(NOW - 4)}
COUNTED = {"conditions": [{"type": "Failed", "status": "True", "message": "Job has failed indexes", **AT}], "failed": 1}
FAILED = merge(COUNTED, {})
FAILED["conditions"][0]["reason"] = "PodFailurePolicy"
SUSPENDED = {"conditions": [{"type": "Suspended", "status": "True", **AT}]}
