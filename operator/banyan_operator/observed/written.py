"""What came of the writes, as a status tells it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from banyan_operator.kube.objects import Ref, condition, find_object
from banyan_operator.kube.ownership import Owner, whose
from banyan_operator.observed.conditions import Finding, no, yes
from banyan_operator.plan import Outcome, World
from banyan_operator.times import seconds

CONTESTED_S: Final = 600.0
"""How long a fight over an object is told at least. It is put back once a minute, so between two blows all looks well."""


@dataclass(frozen=True, slots=True)
class Written:
    """What is to be told of the writes beside what the world shows."""

    complete: bool = True  # everything was carried out
    pending: str = ""  # what could not be written for now, in sentences
    waiting: bool = False  # some of that because what has its name is to go first
    found: Mapping[str, Finding] = field(default_factory=dict)  # conditions that are there only where they have something to say


def written(
    mine: Owner, optional: Iterable[Ref], waiting: Sequence[Ref], world: World, outcome: Outcome, prior: Mapping[str, Any]
) -> Written:
    """`mine`: the resource. `optional`: the wanted objects of kinds that a cluster may lack. `waiting`: `Difference.waiting`."""
    found: dict[str, Finding] = {}
    if refs := tuple(optional):
        found["Monitored"] = _monitored(mine, refs, world, outcome)
    if fight := _contested(outcome, prior, world.now):
        found["Contested"] = fight
    names = "; ".join(f"{ref.kind} {ref.name} ({said})" for ref, said in sorted(outcome.failed.items(), key=str))
    pending = [f"Could not be written for now, and is tried again: {names}."] if names else []
    pending += [_leaving(ref, world) for ref in waiting]
    return Written(outcome.complete, " ".join(pending), bool(waiting), found)


def _leaving(ref: Ref, world: World) -> str:
    """Of an object that has to go before what is wanted can be made, with what keeps it."""
    live = find_object(world.children, ref) or {"metadata": {}}
    kept = ", ".join(live["metadata"].get("finalizers") or ())
    leaving = "is being deleted" if live["metadata"].get("deletionTimestamp") else "belongs to an earlier resource of this name"
    return f"{ref.kind} {ref.name} {leaving}{f' (finalizers: {kept})' if kept else ''}; it is made again as soon as that is gone."


def _monitored(mine: Owner, refs: tuple[Ref, ...], world: World, outcome: Outcome) -> Finding:
    if missing := sorted({f"{ref.kind} ({ref.api_version})" for ref in refs if ref.kind in world.absent}):
        text = f"this cluster has no {' and no '.join(missing)}: install the Prometheus operator, or disable it in spec.metrics"
        return no("MissingAPI", f"{text}. It is made as soon as its API is there.")
    for ref in refs:
        if said := outcome.refused.get(ref) or outcome.forbidden.get(ref) or outcome.taken.get(ref) or outcome.failed.get(ref):
            return no("NotWritten", f"{ref.kind} {ref.name} could not be written: {said}.")
        live = find_object(world.children, ref)
        if live is None:
            return no("Reconciling", f"{ref.kind} {ref.name} is being made.")
        if live["metadata"].get("deletionTimestamp") or mine.outlived_by(live):
            return no("NotWritten", f"{ref.kind} {ref.name} is being deleted; it is made again after that.")
        if not mine.may_change(live):
            return no("NotWritten", f"{ref.kind} {ref.name} could not be written: it exists and belongs to {whose(live)}.")
    return yes("Applied", f"{', '.join(f'{ref.kind} {ref.name}' for ref in refs)} is there.")


def _contested(outcome: Outcome, prior: Mapping[str, Any], now: float) -> Finding | None:
    if outcome.contested:
        names = ", ".join(sorted(f"{ref.kind} {ref.name}" for ref in outcome.contested))
        text = f"somebody else changes {names} again and again; it is put back at most once a minute"
        return yes("DriftLoop", f"{text}. 'kubectl get -o yaml --show-managed-fields' tells who; stop one of the two.")
    told_until = contested_until(prior)
    if told_until is not None and now < told_until:
        return yes("DriftLoop", str(condition({"status": prior}, "Contested").get("message") or ""))
    return None


def contested_until(status: Mapping[str, Any]) -> float | None:
    """Until when a fight is told, unix seconds; None where there is none."""
    since = seconds(condition({"status": status}, "Contested").get("lastTransitionTime"))
    return None if since is None else since + CONTESTED_S
