"""Deciding about an InferenceServer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from banyan_operator.api import InferenceServer, SpecError
from banyan_operator.desired import server as desired_server
from banyan_operator.desired.difference import Difference, difference
from banyan_operator.desired.drift import settled
from banyan_operator.desired.metadata import SPEC_HASH, owner
from banyan_operator.desired.monitors import wanted_optional
from banyan_operator.kube.kinds import CONTROLLER_REVISION, DEPLOYMENT, DISRUPTION_BUDGET
from banyan_operator.kube.objects import Ref, condition
from banyan_operator.observed import events
from banyan_operator.observed import server as observed_server
from banyan_operator.observed.conditions import Finding, no
from banyan_operator.observed.counting import so_many
from banyan_operator.observed.written import contested_until, written
from banyan_operator.plan import Event, Manifest, Outcome, Plan, Report, Settings, World
from banyan_operator.reconcile.common import MISSING, MISSING_S, UNTOLD_S, WAIT_S, WATCH_S, acceptable, blocking, carried_out, if_changed
from banyan_operator.times import seconds


def decide_server(server: InferenceServer, world: World, prior: Mapping[str, Any], settings: Settings) -> ServerDecision:
    live = observed_server.own_deployment(server, world)
    wanted: tuple[Manifest, ...] = ()
    changes = Difference()
    accepted = acceptable(server, world, settings)
    lacks = accepted.reason in MISSING.values() and live is not None
    if accepted.status == "True" or lacks:
        try:
            wanted = desired_server.children(server, settings, world.children, world.absent)
            changes = difference(owner(server), wanted, world.children)
        except SpecError as error:
            accepted = no("InvalidSpec", str(error))
    deployment = next((manifest for manifest in wanted if manifest["kind"] == DEPLOYMENT.kind), None)
    if lacks and live is not None and deployment is not None:
        deployment, changes = _upkeep(deployment, live, changes)
    return ServerDecision(server, world, prior, accepted, changes, deployment, live)


def _upkeep(wanted: Manifest, live: Manifest, changes: Difference) -> tuple[Manifest | None, Difference]:
    """What of a server is kept up while something is missing that new pods would need: all of it, as long as it makes none. Where the pods
    are to be others nothing is changed: what leads to them might not fit those that run."""
    if _revision(wanted) != _revision(live):
        return None, Difference()
    changes = replace(changes, delete=[one for one in changes.delete if one["kind"] == DISRUPTION_BUDGET.kind])
    more = wanted["spec"]["replicas"] > live["spec"].get("replicas", 1)
    if more or not settled(live["spec"]["template"], wanted["spec"]["template"]):
        changes = replace(changes, apply=[one for one in changes.apply if one["kind"] != DEPLOYMENT.kind])
    return wanted, changes


@dataclass(frozen=True, slots=True)
class ServerDecision:
    server: InferenceServer
    world: World
    prior: Mapping[str, Any]
    accepted: Finding
    changes: Difference
    wanted: Manifest | None  # the Deployment as rendered; None where the spec cannot be
    live: Manifest | None

    @property
    def acts(self) -> bool:
        return not self.server.spec.paused and not blocking(self.changes)

    @property
    def plan(self) -> Plan:
        if blocking(self.changes):
            return Plan()
        if self.server.spec.paused:
            return Plan(self._record())
        return Plan(tuple(self.changes.apply), tuple(self.changes.delete), frozenset(self.changes.drifted))

    def _record(self) -> tuple[Manifest, ...]:
        """What is written while paused: the record of what runs, so that going on takes no defaults of another operator."""
        if self.live is None or self.wanted is None or _revision(self.live) != _revision(self.wanted):
            return ()
        return tuple(one for one in self.changes.apply if one["kind"] == CONTROLLER_REVISION.kind)

    def report(self, outcome: Outcome) -> Report:
        accepted = carried_out(self.accepted, self.changes, outcome)
        came = written(owner(self.server), wanted_optional(self.server), self.changes.waiting, self.world, outcome, self.prior)
        status = observed_server.status(self.server, accepted, self.wanted, came, self.world, self.prior).dump()
        told = [*self.changes.events, *self._rollout_events(outcome)] if self.acts else []
        return Report(
            status=if_changed(status, self.prior),
            events=(*told, *events.of_server(self.prior, status)),
            requeue_after_s=self._look_again(accepted, status),
        )

    def _look_again(self, accepted: Finding, status: Mapping[str, Any]) -> float | None:
        if accepted.reason in MISSING.values():
            return MISSING_S
        if self.changes.waiting:
            return WAIT_S
        settled = condition({"status": status}, "Progressing").get("reason") == "UpToDate"
        ready = observed_server.serves_as_wanted({"status": status})
        quiet = accepted.status == "False" or (settled and ready) or self.server.spec.paused
        told_until = contested_until(status)
        due = [] if quiet else [WATCH_S]
        due += [observed_server.SETTLED_S] if condition({"status": status}, "Ready").get("reason") == "EndpointsPending" else []
        untold = quiet and status.get("readyReplicas") and not status["model"].get("contextLength")
        if untold:  # its last answer is older than its readiness, or got lost
            since = seconds(condition({"status": status}, "Ready").get("lastTransitionTime")) or 0.0
            due.append(min(max(self.world.now - since, UNTOLD_S[0]), UNTOLD_S[1]))
        due += [] if told_until is None else [max(1.0, told_until - self.world.now)]
        return min(due, default=None)

    def _rollout_events(self, outcome: Outcome) -> list[Event]:
        if self.wanted is None or self.wanted not in self.changes.apply or not outcome.wrote(Ref.of(self.wanted)):
            return []
        if self.live is None:
            replicas = so_many(self.wanted["spec"]["replicas"], "replica")
            return [Event("Normal", "Created", f"Deployment {self.wanted['metadata']['name']} with {replicas}")]
        found = []
        before, after = (_revision(one) for one in (self.live, self.wanted))
        if before != after:
            found.append(Event("Normal", "RolloutStarted", f"Revision {before or 'unknown'} is to be replaced by {after}"))
        had, wants = self.live["spec"].get("replicas"), self.wanted["spec"]["replicas"]
        if had != wants:
            found.append(Event("Normal", "Scaled", f"From {had} to {wants} replicas"))
        return found


def _revision(deployment: Manifest) -> str:
    return str((deployment["spec"]["template"].get("metadata", {}).get("annotations") or {}).get(SPEC_HASH, ""))
