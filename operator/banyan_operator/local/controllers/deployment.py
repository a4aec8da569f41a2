"""Deployment → ReplicaSets: a ReplicaSet for each pod template, and a rolling update from the old ones to the new."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

from banyan_operator.kube.objects import condition, key_of, owner_reference
from banyan_operator.local.controllers.actions import Action, Create, Replace, SetStatus, delete, knows, new_condition, template_hash
from banyan_operator.plan import Manifest
from banyan_operator.times import seconds, stamp

REVISION = "deployment.kubernetes.io/revision"
HASH = "pod-template-hash"


def decide(deployment: Manifest, replicasets: Sequence[Manifest], now: float) -> list[Action]:
    """One step of the rollout. `replicasets`: those that the Deployment controls, with their status."""
    _check(deployment["spec"])
    found = template_hash(deployment["spec"]["template"])
    new = next((one for one in replicasets if one["metadata"]["labels"][HASH] == found), None)
    old = sorted((one for one in replicasets if one is not new), key=_revision)
    if new is None:
        last = max(map(_revision, old), default=0)
        return [Create(_replicaset(deployment, found, last + 1))]
    if old and _revision(new) < _revision(old[-1]):  # back to an earlier template
        return [Replace(_with_revision(new, _revision(old[-1]) + 1))]
    actions = _roll(deployment, new, old)
    keep: int = deployment["spec"]["revisionHistoryLimit"]
    empty = [one for one in old if _replicas(one) == 0 and one.get("status", {}).get("replicas", 0) == 0]
    actions += [delete(one) for one in empty[: max(0, len(empty) - keep)]]
    actions.append(SetStatus(key_of(deployment), _status(deployment, new, old, now)))
    return actions


def _check(spec: Mapping[str, Any]) -> None:
    """Assert that the Deployment is of the form that this controller carries out: all that the operator renders, and no more."""
    fields = ("replicas", "selector", "strategy", "progressDeadlineSeconds", "revisionHistoryLimit", "template")
    going_on = ("paused",) if spec.get("paused") is False else ()
    knows("Deployment.spec", spec, *fields, *going_on, needs=fields)
    knows("Deployment.spec.selector", spec["selector"], "matchLabels", needs=("matchLabels",))
    knows("Deployment.spec.strategy", spec["strategy"], "type", "rollingUpdate", needs=("type",))
    assert spec["strategy"]["type"] in ("RollingUpdate", "Recreate"), spec["strategy"]
    if spec["strategy"]["type"] == "RollingUpdate":
        limits = ("maxSurge", "maxUnavailable")
        knows("Deployment.spec.strategy.rollingUpdate", spec["strategy"]["rollingUpdate"], *limits, needs=limits)


def _roll(deployment: Manifest, new: Manifest, old: Sequence[Manifest]) -> list[Action]:
    wanted = _wanted(deployment)
    sizes = {id(one): _replicas(one) for one in (new, *old)}
    if deployment["spec"]["strategy"]["type"] == "Recreate":
        sizes |= {id(one): 0 for one in old}
        if not any(one.get("status", {}).get("replicas") for one in old):
            sizes[id(new)] = wanted
    else:
        surge, unavailable = _limits(deployment)
        room = wanted + surge - sum(sizes.values())
        sizes[id(new)] = min(wanted, sizes[id(new)] + max(0, room))
        # never fewer available pods than promised; new pods that are not there yet count as missing
        new_missing = max(0, sizes[id(new)] - _available(new))
        spare = sum(sizes.values()) - (wanted - unavailable) - new_missing
        for broken in (True, False):  # old pods that do not work go first
            for one in old:
                gone = min(spare, max(0, sizes[id(one)] - _available(one)) if broken else sizes[id(one)])
                if gone > 0:
                    sizes[id(one)] -= gone
                    spare -= gone
    return [Replace(_resized(one, sizes[id(one)])) for one in (new, *old) if sizes[id(one)] != _replicas(one)]


def _status(deployment: Manifest, new: Manifest, old: Sequence[Manifest], now: float) -> dict[str, Any]:
    before = deployment.get("status", {})
    wanted = _wanted(deployment)
    counts = {
        "replicas": sum(one.get("status", {}).get("replicas", 0) for one in (new, *old)),
        "updatedReplicas": new.get("status", {}).get("replicas", 0),
        "readyReplicas": sum(map(_available, (new, *old))),
        "availableReplicas": sum(map(_available, (new, *old))),
    }
    counts["unavailableReplicas"] = max(0, max(wanted, counts["replicas"]) - counts["availableReplicas"])
    status: dict[str, Any] = {name: count for name, count in counts.items() if count}
    status["observedGeneration"] = deployment["metadata"]["generation"]
    if counts["availableReplicas"] >= wanted - _limits(deployment)[1]:
        said = ("True", "MinimumReplicasAvailable", "Deployment has minimum availability.")
    else:
        said = ("False", "MinimumReplicasUnavailable", "Deployment does not have minimum availability.")
    available = new_condition(deployment, "Available", *said, now)
    status["conditions"] = [available, _progressing(deployment, new, counts, before, now)]
    return status


def _progressing(deployment: Manifest, new: Manifest, counts: dict[str, int], before: dict[str, Any], now: float) -> Manifest:
    last = condition(deployment, "Progressing")
    name = new["metadata"]["name"]
    complete = counts["updatedReplicas"] == counts["availableReplicas"] == counts["replicas"] == _wanted(deployment)
    moved = (
        any(counts[key] != before.get(key, 0) for key in counts) or before.get("observedGeneration") != deployment["metadata"]["generation"]
    )
    since = stamp(now) if moved or not last else last["lastUpdateTime"]
    late = now - seconds(since) >= deployment["spec"]["progressDeadlineSeconds"]
    settled = last.get("reason") == "NewReplicaSetAvailable" and not moved
    if complete:
        said = ("True", "NewReplicaSetAvailable", f'ReplicaSet "{name}" has successfully progressed.')
    elif late and not settled:
        said = ("False", "ProgressDeadlineExceeded", f'ReplicaSet "{name}" has timed out progressing.')
    else:
        said = ("True", "ReplicaSetUpdated", f'ReplicaSet "{name}" is progressing.')
    return new_condition(deployment, "Progressing", *said, now, lastUpdateTime=since)


def _replicaset(deployment: Manifest, found: str, revision: int) -> Manifest:
    template = copy.deepcopy(deployment["spec"]["template"])
    template["metadata"]["labels"][HASH] = found
    return {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {
            "name": f"{deployment['metadata']['name']}-{found}",
            "namespace": deployment["metadata"]["namespace"],
            "labels": dict(template["metadata"]["labels"]),
            "annotations": {**deployment["metadata"].get("annotations", {}), REVISION: str(revision)},
            "ownerReferences": [owner_reference(deployment)],
        },
        "spec": {
            "replicas": 0,
            "selector": {"matchLabels": {**deployment["spec"]["selector"]["matchLabels"], HASH: found}},
            "template": template,
        },
    }


def _resized(replicaset: Manifest, replicas: int) -> Manifest:
    return {**replicaset, "spec": {**replicaset["spec"], "replicas": replicas}}


def _with_revision(replicaset: Manifest, revision: int) -> Manifest:
    metadata = replicaset["metadata"]
    return {**replicaset, "metadata": {**metadata, "annotations": {**metadata["annotations"], REVISION: str(revision)}}}


def _revision(replicaset: Manifest) -> int:
    return int(replicaset["metadata"]["annotations"][REVISION])


def _replicas(replicaset: Manifest) -> int:
    return int(replicaset["spec"]["replicas"])


def _available(replicaset: Manifest) -> int:
    return int(replicaset.get("status", {}).get("availableReplicas", 0))


def _wanted(deployment: Manifest) -> int:
    return int(deployment["spec"]["replicas"])


def _limits(deployment: Manifest) -> tuple[int, int]:
    """maxSurge (rounded up) and maxUnavailable (rounded down), in pods; never both 0, or nothing could ever move."""
    rolling = deployment["spec"]["strategy"].get("rollingUpdate")
    if rolling is None:  # Recreate: all at once
        return 0, 0
    wanted = _wanted(deployment)

    def pods(value: int | str, round_up: bool) -> int:
        if isinstance(value, int):
            return value
        share = int(value.removesuffix("%")) * wanted / 100
        return math.ceil(share) if round_up else math.floor(share)

    surge, unavailable = pods(rolling["maxSurge"], True), pods(rolling["maxUnavailable"], False)
    return surge, unavailable if surge or unavailable else 1
