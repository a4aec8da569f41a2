"""From what is wanted and what exists: what to apply, what to delete, and what is in the way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from banyan_operator.api import Resource
from banyan_operator.api.quantity import amount
from banyan_operator.desired.drift import settled
from banyan_operator.desired.metadata import ADOPT, APPLIED_HASH, MANAGED_BY, kind_of, owner_label
from banyan_operator.plan import Event, Manifest, Ref

KINDS: Final = frozenset({"ServiceAccount", "PersistentVolumeClaim", "Service", "Deployment", "Ingress", "Job"})
"""Kinds that we make ourselves. Others among the children (Pods, ReplicaSets) belong to controllers of Kubernetes."""


@dataclass(slots=True)
class Difference:
    """Between the children that are wanted and those that exist."""

    apply: list[Manifest] = field(default_factory=list)
    delete: list[Ref] = field(default_factory=list)
    conflicts: list[Ref] = field(default_factory=list)
    """Objects of somebody else that have the name of a child."""
    waiting: list[Ref] = field(default_factory=list)
    """Objects that have to go first: of an earlier resource of this name, or being deleted."""
    events: list[Event] = field(default_factory=list)


def ref(manifest: Manifest) -> Ref:
    return Ref(manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"])


def find(children: Iterable[Manifest], wanted: Ref) -> Manifest | None:
    return next((child for child in children if ref(child) == wanted), None)


def difference(resource: Resource, wanted: Sequence[Manifest], children: Iterable[Manifest]) -> Difference:
    """What has to be done so that `children` become `wanted`. Objects of others are never applied to and never deleted."""
    live = {ref(child): child for child in children if child["kind"] in KINDS}
    found = Difference()
    for manifest in wanted:
        name = ref(manifest)
        existing = live.get(name)
        if existing is None:
            found.apply.append(manifest)
        elif is_stale(existing, resource) or existing["metadata"].get("deletionTimestamp"):
            found.waiting.append(name)
        elif not is_ours(existing, resource):
            found.conflicts.append(name)
        else:
            _update(manifest, existing, found)
    names = {ref(manifest) for manifest in wanted}
    unwanted = [child for name, child in live.items() if name not in names and _controlled(child, resource)]
    found.delete = sorted((ref(child) for child in unwanted if not child["metadata"].get("deletionTimestamp")), key=str)
    return found


def is_ours(live: Manifest, resource: Resource) -> bool:
    """Whether an existing object may be changed: we own it, made it to outlive its resource, or are told to adopt it."""
    metadata = live["metadata"]
    if _controlled(live, resource):
        return True
    if any(owner.get("controller") for owner in metadata.get("ownerReferences") or ()):
        return False
    if (metadata.get("annotations") or {}).get(ADOPT) == "true":
        return True
    labels = metadata.get("labels") or {}
    kept = live["kind"] == "PersistentVolumeClaim" and labels.get("app.kubernetes.io/managed-by") == MANAGED_BY
    return kept and labels.get(owner_label(resource)) == resource.metadata.name


def is_stale(live: Manifest, resource: Resource) -> bool:
    """Whether it belongs to a deleted resource of the same name: garbage that is about to be collected."""
    return any(
        owner.get("kind") == kind_of(resource) and owner.get("name") == resource.metadata.name and owner.get("uid") != resource.metadata.uid
        for owner in live["metadata"].get("ownerReferences") or ()
    )


def _controlled(live: Manifest, resource: Resource) -> bool:
    owners = live["metadata"].get("ownerReferences") or ()
    return any(owner.get("uid") == resource.metadata.uid and owner.get("controller") for owner in owners)


def _update(wanted: Manifest, live: Manifest, found: Difference) -> None:
    if wanted["kind"] == "PersistentVolumeClaim":
        changed = (live["metadata"].get("annotations") or {}).get(APPLIED_HASH) != wanted["metadata"]["annotations"][APPLIED_HASH]
        fixed = _grown(wanted, live)
        if changed and not settled(live["spec"], wanted["spec"]) and fixed["spec"] != wanted["spec"]:
            text = f"claim {wanted['metadata']['name']} exists: only its size can change, and only grow"
            found.events.append(Event("Warning", "ClaimSpecFixed", text))
        wanted = fixed
    if not settled(live, wanted):
        found.apply.append(wanted)


def _grown(wanted: Manifest, live: Manifest) -> Manifest:
    """The claim with its live spec, which is fixed, but for a size that may grow."""
    asked = wanted["spec"]["resources"]["requests"]["storage"]
    has = ((live["spec"].get("resources") or {}).get("requests") or {}).get("storage", "0")
    spec = {key: live["spec"][key] for key in wanted["spec"] if key in live["spec"]}
    spec["resources"] = {"requests": {"storage": asked if amount(asked) > amount(has) else has}}
    return {**wanted, "spec": spec}
