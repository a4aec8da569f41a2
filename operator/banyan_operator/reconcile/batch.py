"""Deciding about a BatchJob."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from banyan_operator.api import BatchJob, SpecError
from banyan_operator.desired import batch as desired_batch
from banyan_operator.desired.batch import run_id, run_of
from banyan_operator.desired.difference import Difference, difference
from banyan_operator.desired.metadata import owner
from banyan_operator.desired.monitors import wanted_optional
from banyan_operator.desired.names import work_name
from banyan_operator.kube.addresses import service_url
from banyan_operator.kube.kinds import JOB
from banyan_operator.kube.objects import Ref, condition, is_true
from banyan_operator.observed import batch as observed_batch
from banyan_operator.observed import events
from banyan_operator.observed.batch import CANCEL, EXPIRE, Course, Seen, Stop
from banyan_operator.observed.conditions import Finding, no
from banyan_operator.observed.written import contested_until, written
from banyan_operator.plan import Manifest, Outcome, Plan, Report, Settings, World
from banyan_operator.reconcile.common import MISSING, MISSING_S, WAIT_S, WATCH_S, Decision, acceptable, blocking, carried_out, if_changed
from banyan_operator.times import seconds

KEEP_JOB_S: Final = 600.0  # a finished Job stays so long, for its pods' logs


def decide_batch(job: BatchJob, resource: Manifest, world: World, stored: Mapping[str, Any], settings: Settings) -> Decision:
    prior = stored if stored.get("runID", run_id(job)) == run_id(job) else {}  # a copy's, or a backup's: it is of another run
    if observed_batch.is_terminal(prior):
        return _finished(job, resource, world, prior)
    seen = observed_batch.see(job, world, prior, settings)
    hold, stop = _left(seen) or _hold(job, world, seen.work), _stop(job, world, prior)
    accepted = _of_another_run(job, world) or acceptable(job, world, settings)
    changes = Difference()
    # work that is to end early is suspended whatever else is wrong with its spec, and nothing is made for it any more
    if seen.ending is None and accepted.reason != "NameConflict" and (accepted.status == "True" or stop is not None):
        try:
            suspend = job.spec.suspend or hold is not None or stop is not None
            url = world.server_url or (service_url(world.server) if world.server is not None else None)
            wanted = desired_batch.children(job, settings, server_url=url, suspend=suspend, live=world.children, absent=world.absent)
            if stop is not None:
                wanted = tuple(one for one in wanted if one["kind"] == JOB.kind)
            changes = difference(owner(job), wanted, world.children)
        except SpecError as error:
            accepted = no("InvalidSpec", str(error))
    return BatchDecision(job, world, stored, prior, settings, seen, Course(accepted, hold, stop), changes)


@dataclass(frozen=True, slots=True)
class BatchDecision:
    job: BatchJob
    world: World
    stored: Mapping[str, Any]  # the status as it is
    prior: Mapping[str, Any]  # the same, where it is of this run
    settings: Settings
    seen: Seen
    course: Course
    changes: Difference

    @property
    def plan(self) -> Plan:
        if blocking(self.changes):
            return Plan()
        tidy = not self.course.refused and self.course.stop is None
        delete = tuple(one for one in self.changes.delete if one["kind"] != JOB.kind) if tidy else ()
        return Plan(tuple(self.changes.apply), delete, frozenset(self.changes.drifted))

    def report(self, outcome: Outcome) -> Report:
        course = replace(self.course, accepted=carried_out(self.course.accepted, self.changes, outcome))
        came = written(owner(self.job), wanted_optional(self.job), self.world, outcome, self.prior)
        status = observed_batch.status(self.job, course, self.seen, came, self.world, self.prior, self.settings).dump()
        return Report(
            status=if_changed(status, self.stored),
            events=(*self.changes.events, *events.of_batch(self.prior, status)),
            requeue_after_s=self._look_again(course, status),
        )

    def _look_again(self, course: Course, status: Mapping[str, Any]) -> float | None:
        now, watch_s = self.world.now, WATCH_S[self.settings.platform]
        if status["phase"] in observed_batch.TERMINAL:
            ttl = self.job.spec.ttl_seconds_after_finished
            return KEEP_JOB_S if ttl is None else min(KEEP_JOB_S, ttl)
        due: list[float] = []
        if course.accepted.reason in MISSING.values():
            due.append(MISSING_S)
        elif not course.refused and (course.hold is not None or self.changes.waiting):
            due.append(min(WAIT_S, watch_s))
        elif not course.refused and status["phase"] != "Suspended":
            due.append(watch_s)
        ends = observed_batch.deadline(self.job, status)
        report_due = self.seen.ending.due if self.seen.ending is not None else None
        due += [max(1.0, at - now) for at in (ends, report_due, contested_until(status)) if at is not None and at > now]
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
    left = [one for one in difference(owner(job), [], world.children).delete if one["kind"] == JOB.kind]
    if world.now < ended + KEEP_JOB_S:
        if any(_is_over(one) for one in left):
            due.append(ended + KEEP_JOB_S)
        left = [one for one in left if not _is_over(one)]  # made by a write whose answer was lost: it must not run
    return Finished(Plan(delete=tuple(left)), max(1.0, min(due) - world.now) if due else None)


def _is_over(work: Manifest) -> bool:
    ends = ("Complete", "SuccessCriteriaMet", "Failed", "FailureTarget")
    return bool(work["spec"].get("suspend")) or any(is_true(work, one) for one in ends)


def _left(seen: Seen) -> Finding | None:
    """Why the work has to wait for pods of a Job that is gone: two workers must not write to one output."""
    if seen.work is not None or not seen.stopping:
        return None
    step = "" if seen.stopping[0].deleted else " Nobody ends it: delete the pod, or wait until its work is done."
    text = "An earlier Job's worker may still run, and two must not write to one output."
    return no("WaitingForPods", f"{text} {observed_batch.stopping(seen)}{step}")


def _of_another_run(job: BatchJob, world: World) -> Finding | None:
    """A Job of this name that was left behind by another BatchJob: its workers write for that one's run."""
    name, mine = work_name(job, world.children), owner(job)
    for one in world.children:
        if Ref.of(one) == Ref.to(JOB, name) and not mine.controls(one) and mine.may_change(one) and run_of(one) != run_id(job):
            text = f"Job {name} was left by another BatchJob of this name and writes for its run"
            return no("NameConflict", f"{text}. Delete it: kubectl delete job {name}")
    return None


def _hold(job: BatchJob, world: World, work: Manifest | None) -> Finding | None:
    """Why the work has to wait for its InferenceServer."""
    if job.spec.server_ref is None:
        return None
    name = job.spec.server_ref.name
    if world.server is None or world.server["metadata"].get("deletionTimestamp"):
        return no("WaitingForServer", f"InferenceServer {name} does not exist in namespace {job.metadata.namespace}. Create it.")
    if work is not None and not work["spec"].get("suspend"):
        return None  # it has begun: the worker itself waits out what is temporary, and a server that is not accepted serves on
    accepted = condition(world.server, "Accepted")
    if accepted.get("status") == "False":
        return no("WaitingForServer", f"InferenceServer {name} is not accepted: {accepted.get('message')}")
    if not is_true(world.server, "Available"):
        why = condition(world.server, "Available").get("message") or "no status yet"
        return no("WaitingForServer", f"InferenceServer {name} takes no requests yet: {why}")
    return None


def _stop(job: BatchJob, world: World, prior: Mapping[str, Any]) -> Stop | None:
    if job.spec.cancel:
        return CANCEL
    ends = observed_batch.deadline(job, prior)
    return EXPIRE if ends is not None and world.now >= ends else None
