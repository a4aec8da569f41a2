"""Deciding about a BatchJob."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from banyan_operator.api import BatchJob, SpecError
from banyan_operator.desired import batch as desired_batch
from banyan_operator.desired.batchjob import is_over, run_of
from banyan_operator.desired.batchpod import PHASES, run_id
from banyan_operator.desired.difference import Difference, difference
from banyan_operator.desired.metadata import owner
from banyan_operator.desired.monitors import wanted_optional
from banyan_operator.desired.names import derived
from banyan_operator.kube.addresses import pods_url
from banyan_operator.kube.kinds import JOB, POD
from banyan_operator.kube.objects import condition, is_true
from banyan_operator.observed import batch as observed_batch
from banyan_operator.observed import events
from banyan_operator.observed.batch import Observed
from banyan_operator.observed.conditions import Finding, no
from banyan_operator.observed.course import CANCEL, EXPIRE, Stop, Wish, course, known
from banyan_operator.observed.pods import given_up
from banyan_operator.observed.seen import Seen, see
from banyan_operator.observed.written import contested_until, written
from banyan_operator.plan import Manifest, Outcome, Plan, Report, Settings, World
from banyan_operator.reconcile.common import (
    MISSING,
    MISSING_S,
    WAIT_S,
    WATCH_S,
    Decision,
    acceptable,
    blocking,
    carried_out,
    if_changed,
    observed,
)
from banyan_operator.times import seconds

KEEP_JOB_S: Final = 600.0  # a finished Job stays so long, for its pods' logs


def decide_batch(job: BatchJob, resource: Manifest, world: World, stored: Mapping[str, Any], settings: Settings) -> Decision:
    prior = stored if stored.get("runID", run_id(job)) == run_id(job) else {}  # a copy's, or a backup's: it is of another run
    if observed_batch.is_terminal(prior):
        return _finished(job, resource, world, prior)
    seen = see(job, world, prior)
    memory = known(prior, seen, world.now)
    hold, stop = _hold(job, world, seen), _stop(job, world, prior)
    wish = Wish(_of_another_run(job, world) or acceptable(job, world, settings), hold, stop)
    way = course(job, seen, memory, wish, world.now)
    changes = Difference()
    # work that is to stop is suspended whatever else is wrong with its spec, and where it ends early nothing but a merge is made for it
    accepted, stops = wish.accepted, stop is not None or job.spec.suspend
    if way.over is None and accepted.reason != "NameConflict" and (accepted.status == "True" or stops):
        try:
            url = pods_url(world.server) if world.server is not None else None
            wanted = desired_batch.children(job, settings, way.orders, server_url=url, live=world.children, absent=world.absent)
            if accepted.status != "True" or (stop is not None and not any(order.phase == "merge" for order in way.orders)):
                wanted = tuple(one for one in wanted if one["kind"] == JOB.kind)
            changes = difference(owner(job), wanted, world.children)
        except SpecError as error:
            wish = replace(wish, accepted=no("InvalidSpec", str(error)))
    return BatchDecision(Observed(job, world, prior, seen, memory, wish, way), stored, changes)


@dataclass(frozen=True, slots=True)
class BatchDecision:
    observed: Observed
    stored: Mapping[str, Any]  # the status as it is, of whatever run
    changes: Difference

    @property
    def plan(self) -> Plan:
        status = _of_the_abandoned(self.observed.seen, self.observed.world)
        if blocking(self.changes):
            return Plan(status=status)
        tidy = not self.observed.refused and self.observed.wish.stop is None
        delete = tuple(one for one in self.changes.delete if one["kind"] != JOB.kind) if tidy else ()
        return Plan(tuple(self.changes.apply), delete, frozenset(self.changes.drifted), status)

    def report(self, outcome: Outcome) -> Report:
        one = self.observed
        wish = replace(one.wish, accepted=carried_out(one.wish.accepted, self.changes, outcome))
        one = replace(one, wish=wish)
        came = written(owner(one.job), wanted_optional(one.job), self.changes.waiting, one.world, outcome, one.prior)
        status = observed_batch.status(one, came).dump()
        return Report(
            status=if_changed(status, self.stored),
            events=(*self.changes.events, *events.of_batch(one.prior, status)),
            requeue_after_s=self._look_again(one, status),
        )

    def _look_again(self, one: Observed, status: Mapping[str, Any]) -> float | None:
        job, now = one.job, one.world.now
        if status["phase"] in observed_batch.TERMINAL:
            ttl = job.spec.ttl_seconds_after_finished
            return KEEP_JOB_S if ttl is None else min(KEEP_JOB_S, ttl)
        due: list[float] = []
        if one.wish.accepted.reason in MISSING.values():
            due.append(MISSING_S)
        elif not one.refused and (one.wish.hold is not None or one.course.waits or self.changes.waiting):
            due.append(WAIT_S)
        elif not one.refused and status["phase"] != "Suspended":
            due.append(WATCH_S)
        ends = observed_batch.deadline(job, status)
        stage = one.seen.now
        report_due = stage.ending.due if stage is not None and stage.ending is not None and not stage.over(now) else None
        due += [max(1.0, at - now) for at in (report_due, contested_until(status)) if at is not None and at > now]
        if ends is not None and one.wish.stop is None:  # which may be over when its start is first heard of
            due.append(max(1.0, ends - now))
        return min(due, default=None)


def _of_the_abandoned(seen: Seen, world: World) -> tuple[Manifest, ...]:
    """Of pods that no node ends: that they have failed, so that others come in their place. A storage that does not keep them from writing
    has them waited for."""
    names = {pod.name for pod in seen.stopping if pod.abandoned(world.now)} if seen.fenced else set()
    return tuple(given_up(one, world.now) for one in world.children if one["kind"] == POD.kind and one["metadata"]["name"] in names)


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing changes any more; what is left of the run goes away in time."""

    plan: Plan
    due_s: float | None
    seen: Mapping[str, Any] | None = None  # the status, where an edit was seen since, which changes nothing

    def report(self, outcome: Outcome) -> Report:
        return Report(status=self.seen, requeue_after_s=self.due_s)


def _finished(job: BatchJob, resource: Manifest, world: World, prior: Mapping[str, Any]) -> Finished:
    ended = seconds(prior.get("completionTime")) or world.now
    ttl = job.spec.ttl_seconds_after_finished
    if ttl is not None and world.now >= ended + ttl:
        return Finished(Plan(delete=(resource,)), None)
    due = [] if ttl is None else [ended + ttl]
    left = [one for one in difference(owner(job), [], world.children).delete if one["kind"] == JOB.kind]
    if world.now < ended + KEEP_JOB_S:
        if any(_stands_still(one) for one in left):
            due.append(ended + KEEP_JOB_S)
        left = [one for one in left if not _stands_still(one)]  # made by a write whose answer was lost: it must not run
    return Finished(Plan(delete=tuple(left)), max(1.0, min(due) - world.now) if due else None, observed(prior, job.metadata.generation))


def _stands_still(job: Manifest) -> bool:
    return bool(job["spec"].get("suspend")) or is_over(job)


def _of_another_run(job: BatchJob, world: World) -> Finding | None:
    """A Job of this name that was left behind by another BatchJob: its workers write for that one's run."""
    names, mine = {derived(job.metadata.name, phase) for phase in PHASES}, owner(job)
    for one in world.children:
        name = one["metadata"]["name"]
        if one["kind"] != JOB.kind or name not in names or mine.controls(one) or not mine.may_change(one) or run_of(one) == run_id(job):
            continue
        text = f"Job {name} was left by another BatchJob of this name and writes for its run"
        return no("NameConflict", f"{text}. Delete it: kubectl delete job {name}")
    return None


def _hold(job: BatchJob, world: World, seen: Seen) -> Finding | None:
    """Why the work has to wait for its InferenceServer."""
    if job.spec.server_ref is None:
        return None
    name = job.spec.server_ref.name
    if world.server is None or world.server["metadata"].get("deletionTimestamp"):
        return no("WaitingForServer", f"InferenceServer {name} does not exist in namespace {job.metadata.namespace}. Create it.")
    if seen.work is not None and seen.work.begun:
        return None  # the worker itself waits out what is temporary, and a server that is not accepted serves on
    accepted = condition(world.server, "Accepted")
    if accepted.get("status") == "False":
        return no("WaitingForServer", f"InferenceServer {name} is not accepted: {accepted.get('message')}")
    if not is_true(world.server, "Available"):
        why = condition(world.server, "Ready").get("message") or "no status yet"
        return no("WaitingForServer", f"InferenceServer {name} takes no requests yet: {why}")
    return None


def _stop(job: BatchJob, world: World, prior: Mapping[str, Any]) -> Stop | None:
    if job.spec.cancel:
        return CANCEL
    ends = observed_batch.deadline(job, prior)
    return EXPIRE if ends is not None and world.now >= ends else None
