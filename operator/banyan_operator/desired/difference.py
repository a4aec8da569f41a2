"""From what is wanted and what exists: what to apply, what to delete, and what is in the way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from banyan_operator.api.quantity import amount
from banyan_operator.desired.drift import settled
from banyan_operator.kube.kinds import MADE, Manifest
from banyan_operator.kube.objects import Ref
from banyan_operator.kube.ownership import APPLIED_HASH, Owner
from banyan_operator.plan import Event


@dataclass(slots=True)
class Difference:
    """Between the children that are wanted and those that exist."""

    apply: list[Manifest] = field(default_factory=list)
    drifted: list[Ref] = field(default_factory=list)
    """Of those to apply: objects that were so already, and that somebody else has changed."""
    delete: list[Manifest] = field(default_factory=list)
    """Live objects of ours that are wanted no more."""
    conflicts: list[Ref] = field(default_factory=list)
    """Objects of somebody else that have the name of a child."""
    waiting: list[Ref] = field(default_factory=list)
    """Objects that have to go first: of an earlier resource of this name, or being deleted."""
    events: list[Event] = field(default_factory=list)


def difference(owner: Owner, wanted: Sequence[Manifest], children: Iterable[Manifest]) -> Difference:
    """What has to be done so that `children` become `wanted`. Objects of others are never applied to and never deleted."""
    live = {Ref.of(child): child for child in children if child["kind"] in MADE}
    found = Difference()
    for manifest in wanted:
        name = Ref.of(manifest)
        existing = live.get(name)
        if existing is None:
            found.apply.append(manifest)
        elif owner.outlived_by(existing) or existing["metadata"].get("deletionTimestamp"):
            found.waiting.append(name)
        elif not owner.may_change(existing):
            found.conflicts.append(name)
        else:
            _update(manifest, existing, found)
    names = {Ref.of(manifest) for manifest in wanted}
    unwanted = [child for name, child in live.items() if name not in names and owner.controls(child)]
    found.delete = sorted((one for one in unwanted if not one["metadata"].get("deletionTimestamp")), key=lambda one: str(Ref.of(one)))
    return found


def _update(wanted: Manifest, live: Manifest, found: Difference) -> None:
    if wanted["kind"] == "PersistentVolumeClaim":
        changed = (live["metadata"].get("annotations") or {}).get(APPLIED_HASH) != wanted["metadata"]["annotations"][APPLIED_HASH]
        fixed = _grown(wanted, live)
        if changed and not settled(live["spec"], wanted["spec"]) and fixed["spec"] != wanted["spec"]:
            text = f"claim {wanted['metadata']['name']} exists: only its size can change, and only grow"
            found.events.append(Event("Warning", "ClaimSpecFixed", text))
        wanted = fixed
    if settled(live, wanted):
        return
    found.apply.append(wanted)
    before = (live["metadata"].get("annotations") or {}).get(APPLIED_HASH)
    if before == wanted["metadata"]["annotations"][APPLIED_HASH]:
        found.drifted.append(Ref.of(wanted))


def _grown(wanted: Manifest, live: Manifest) -> Manifest:
    """The claim with its live spec, which is fixed, but for a size that may grow."""
    asked = wanted["spec"]["resources"]["requests"]["storage"]
    has = ((live["spec"].get("resources") or {}).get("requests") or {}).get("storage", "0")
    spec = {key: live["spec"][key] for key in wanted["spec"] if key in live["spec"]}
    spec["resources"] = {"requests": {"storage": asked if amount(asked) > amount(has) else has}}
    return {**wanted, "spec": spec}
