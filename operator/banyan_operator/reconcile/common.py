"""What deciding about both resources has in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from banyan_operator import api
from banyan_operator.api import InferenceServer, Metadata, Resource
from banyan_operator.desired.difference import Difference
from banyan_operator.desired.references import references
from banyan_operator.kube.kinds import OPTIONAL
from banyan_operator.kube.objects import Ref
from banyan_operator.observed import batch as observed_batch
from banyan_operator.observed import events
from banyan_operator.observed.conditions import FORBIDDEN, Finding, no, refused, yes
from banyan_operator.plan import Manifest, Outcome, Plan, Report, Settings, World

WATCH_S: Final = 10.0
"""How often what is moving is looked at: progress and loading are seen by asking, not by a watch."""
UNTOLD_S: Final = (5.0, 300.0)  # a ready server that has not yet said what it serves: looked at after this, ever more seldom up to that
MISSING_S: Final = 30.0
WAIT_S: Final = 5.0

MISSING: Final = {"Secret": "SecretNotFound", "ConfigMap": "ConfigMapNotFound", "PersistentVolumeClaim": "ClaimNotFound"}


NOTHING: Final = Plan()


class Decision(Protocol):
    """What to do, and what to tell once it was tried."""

    @property
    def plan(self) -> Plan: ...

    def report(self, outcome: Outcome) -> Report: ...


@dataclass(frozen=True, slots=True)
class Told:
    """Nothing is to be done; the status is to be `status`."""

    status: Mapping[str, Any]
    prior: Mapping[str, Any]
    plan: Plan = NOTHING

    def report(self, outcome: Outcome) -> Report:
        return Report(status=if_changed(self.status, self.prior))


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The spec breaks the schema: children stay as they are, and no time will heal it."""

    resource: Manifest
    error: str
    world: World
    plan: Plan = NOTHING

    def report(self, outcome: Outcome) -> Report:
        prior: Mapping[str, Any] = self.resource.get("status") or {}
        generation = Metadata.of(self.resource).generation
        finding = no("InvalidSpec", self.error)
        if self.resource["kind"] == "InferenceServer":
            status = refused(prior, {"Accepted": finding, "Ready": finding}, "Failed", generation, self.world.now)
            return Report(status=if_changed(status, prior), events=tuple(events.of_server(prior, status)))
        if observed_batch.is_terminal(prior):
            return Report(status=observed(prior, generation))
        found = {"Accepted": finding, "Running": finding, "Complete": finding}
        status = refused(prior, found, prior.get("phase") or "Pending", generation, self.world.now)
        return Report(status=if_changed(status, prior), events=tuple(events.of_batch(prior, status)))


def acceptable(resource: Resource, world: World, settings: Settings) -> Finding:
    """Whether the spec can be carried out: all of it is built, and what it refers to exists."""
    if problems := api.unsupported(resource, settings.platform):
        return no("Unsupported", "; ".join(map(str, problems)) + ".")
    paths = references(resource)
    for missing in sorted(world.missing & paths.keys(), key=str):
        text = f"{missing.kind} {missing.name} ({paths[missing]}) does not exist in namespace {resource.metadata.namespace}."
        return no(MISSING[missing.kind], f"{text} {_remedy(missing, settings)}")
    if isinstance(resource, InferenceServer) and resource.spec.ingress is not None and settings.platform == "local":
        return yes("Accepted", "The spec can be carried out; spec.ingress has no effect in local mode.")
    return yes("Accepted", "The spec can be carried out.")


def _remedy(missing: Ref, settings: Settings) -> str:
    if settings.platform == "cluster":
        return "Create it."
    return f"Give it with --secret {missing.name}=DIR." if missing.kind == "Secret" else "Put it beside the manifests."


def blocking(changes: Difference) -> list[Ref]:
    """Objects in the way without which the resource cannot work."""
    return [ref for ref in changes.conflicts if ref.kind not in OPTIONAL]


def carried_out(accepted: Finding, changes: Difference, outcome: Outcome) -> Finding:
    """`accepted`, unless something is in the way of what was to be applied. Objects of optional kinds are told elsewhere."""

    def needed(said: Mapping[Ref, str]) -> list[tuple[Ref, str]]:
        return sorted(((ref, words) for ref, words in said.items() if ref.kind not in OPTIONAL), key=str)

    if accepted.status != "True":
        return accepted
    if taken := {*blocking(changes), *(ref for ref, _ in needed(outcome.taken))}:
        names = ", ".join(sorted(f"{one.kind} {one.name}" for one in taken))
        text = f"{names} exists and belongs to somebody else. Rename this resource, delete the object, or annotate it"
        return no("NameConflict", f"{text} with serving.banyan.dev/adopt=true.")
    for ref, said in needed(outcome.refused):
        reason = "QuotaExceeded" if "exceeded quota" in said else "InvalidSpec"
        return no(reason, f"the API server refuses {ref.kind} {ref.name}: {said}")
    for ref, said in needed(outcome.forbidden):
        text = f"the operator may not write {ref.kind} {ref.name}: {said}. Give its ServiceAccount the rights of the chart's RBAC."
        return no(FORBIDDEN, text)
    return accepted


def observed(prior: Mapping[str, Any], generation: int) -> Mapping[str, Any] | None:
    """The status as it is, of this generation, too; None where it is so."""
    return if_changed({**prior, "observedGeneration": generation}, prior)


def if_changed(status: Mapping[str, Any], prior: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return None if status == prior else status
