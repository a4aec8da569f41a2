"""Deciding about a BatchJob."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from banyan_operator.api import BatchJob, SpecError
from banyan_operator.desired import batch as desired_batch
from banyan_operator.desired.difference import Difference, difference
from banyan_operator.desired.metadata import owner
from banyan_operator.kube.addresses import service_url
from banyan_operator.kube.kinds import JOB
from banyan_operator.kube.objects import condition, is_true
from banyan_operator.observed import batch as observed_batch
from banyan_operator.observed import events
from banyan_operator.observed.batch import CANCEL, EXPIRE, Seen, Stop
from banyan_operator.observed.conditions import Finding, no
from banyan_operator.plan import Manifest, Outcome, Plan, Report, Settings, World
from banyan_operator.reconcile.common import MISSING, MISSING_S, WAIT_S, WATCH_S, Decision, acceptable, carried_out, if_changed
from banyan_operator.times import seconds

KEEP_JOB_S: Final = 600.0  # a finished Job stays so long, for its pods' logs


def decide_batch(job: BatchJob, resource: Manifest, world: World, prior: Mapping[str, Any], settings: Settings) -> Decision:
    if observed_batch.is_terminal(prior):
        return _finished(job, resource, world, prior)
    seen = observed_batch.see(job, world, settings)
    hold, stop = _hold(job, world, seen.work), _stop(job, world, prior)
    accepted = acceptable(job, world, settings)
    changes = Difference()
    if not (seen.complete or seen.failed) and (accepted.status == "True" or (stop is not None and seen.work is not None)):
        try:
            suspend = job.spec.suspend or hold is not None or stop is not None
            url = world.server_url or (service_url(world.server) if world.server is not None else None)
            wanted = desired_batch.children(job, settings, server_url=url, suspend=suspend, live=world.children, absent=world.absent)
            changes = difference(owner(job), wanted, world.children)
        except SpecError as error:
            accepted = no("InvalidSpec", str(error))
    return BatchDecision(job, world, prior, settings, seen, hold, stop, accepted, changes)


@dataclass(frozen=True, slots=True)
class BatchDecision:
    job: BatchJob
    world: World
    prior: Mapping[str, Any]
    settings: Settings
    seen: Seen
    hold: Finding | None  # why the work has to wait for its server
    stop: Stop | None  # why it is to end early
    accepted: Finding
    changes: Difference

    @property
    def plan(self) -> Plan:
        apply = () if self.changes.conflicts else tuple(self.changes.apply)
        delete = tuple(one for one in self.changes.delete if one["kind"] != JOB.kind) if self.accepted.status == "True" else ()
        return Plan(apply, delete, frozenset(self.changes.drifted))

    def report(self, outcome: Outcome) -> Report:
        accepted = carried_out(self.accepted, self.changes, outcome)
        status = observed_batch.status(self.job, accepted, self.hold, self.stop, self.seen, self.world, self.prior, self.settings).dump()
        return Report(
            status=if_changed(status, self.prior),
            events=(*self.changes.events, *events.of_batch(self.prior, status)),
            requeue_after_s=self._look_again(accepted, status),
        )

    def _look_again(self, accepted: Finding, status: Mapping[str, Any]) -> float | None:
        due: list[float] = []
        ends = observed_batch.deadline(self.job, status)
        if status["phase"] in observed_batch.TERMINAL:
            ttl = self.job.spec.ttl_seconds_after_finished
            due.append(KEEP_JOB_S if ttl is None else min(KEEP_JOB_S, ttl))
        elif accepted.reason in MISSING.values():
            due.append(MISSING_S)
        elif accepted.status == "True" and (self.hold is not None or self.changes.waiting):
            due.append(min(WAIT_S, WATCH_S[self.settings.platform]))
        elif accepted.status == "True" and status["phase"] != "Suspended":
            due.append(WATCH_S[self.settings.platform])
        if ends is not None and status["phase"] not in observed_batch.TERMINAL:
            due.append(max(1.0, ends - self.world.now))
        return min(due, default=None)


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing changes any more; what is left of the run goes away in time."""

    plan: Plan
    due_s: float | None

    def report(self, outcome: Outcome) -> Report:
        return Report(requeue_after_s=self.due_s)


def _finished(job: BatchJob, resource: Manifest, world: World, prior: Mapping[str, Any]) -> Finished:
    ended = seconds(prior.get("completionTime")) or world.now
    ttl = job.spec.ttl_seconds_after_finished
    if ttl is not None and world.now >= ended + ttl:
        return Finished(Plan(delete=(resource,)), None)
    due = [] if ttl is None else [ended + ttl]
    left = tuple(one for one in difference(owner(job), [], world.children).delete if one["kind"] == JOB.kind)
    if left and world.now < ended + KEEP_JOB_S:
        due.append(ended + KEEP_JOB_S)
        left = ()
    return Finished(Plan(delete=left), max(1.0, min(due) - world.now) if due else None)


def _hold(job: BatchJob, world: World, work: Manifest | None) -> Finding | None:
    """Why the work has to wait for its InferenceServer."""
    if job.spec.server_ref is None:
        return None
    name = job.spec.server_ref.name
    if world.server is None or world.server["metadata"].get("deletionTimestamp"):
        return no("WaitingForServer", f"InferenceServer {name} does not exist in namespace {job.metadata.namespace}. Create it.")
    accepted = condition(world.server, "Accepted")
    if accepted.get("status") == "False":
        return no("WaitingForServer", f"InferenceServer {name} is not accepted: {accepted.get('message')}")
    if work is not None and not work["spec"].get("suspend"):
        return None  # it has begun: the worker itself waits out what is temporary
    if not is_true(world.server, "Available"):
        why = condition(world.server, "Available").get("message") or "no status yet"
        return no("WaitingForServer", f"InferenceServer {name} takes no requests yet: {why}")
    return None


def _stop(job: BatchJob, world: World, prior: Mapping[str, Any]) -> Stop | None:
    if job.spec.cancel:
        return CANCEL
    ends = observed_batch.deadline(job, prior)
    return EXPIRE if ends is not None and world.now >= ends else None
