"""ReplicaSet → pods: as many active ones as spec.replicas says."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from banyan_operator.kube.objects import is_true, key_of, owner_reference
from banyan_operator.local.controllers.actions import Action, Create, SetStatus, delete, first_to_go, is_active
from banyan_operator.plan import Manifest


def decide(replicaset: Manifest, pods: Sequence[Manifest]) -> list[Action]:
    """`pods`: those that the ReplicaSet controls. Deleted and finished ones are replaced at once, as in a cluster."""
    active = [pod for pod in pods if is_active(pod)]
    wanted: int = replicaset["spec"]["replicas"]
    actions: list[Action] = [Create(_pod(replicaset)) for _ in range(wanted - len(active))]
    actions += [delete(pod) for pod in first_to_go(active)[: max(0, len(active) - wanted)]]
    actions += [delete(pod) for pod in pods if not is_active(pod)]
    ready = sum(is_true(pod, "Ready") for pod in active)
    counts = {"readyReplicas": ready, "availableReplicas": ready}
    status = {"replicas": len(active), "observedGeneration": replicaset["metadata"]["generation"]}
    actions.append(SetStatus(key_of(replicaset), status | {name: count for name, count in counts.items() if count}))
    return actions


def _pod(replicaset: Manifest) -> Manifest:
    template = copy.deepcopy(replicaset["spec"]["template"])
    metadata = template.get("metadata", {})
    metadata |= {
        "generateName": replicaset["metadata"]["name"] + "-",
        "namespace": replicaset["metadata"]["namespace"],
        "ownerReferences": [owner_reference(replicaset)],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
