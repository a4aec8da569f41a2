"""The status of a BatchJob."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from banyan_operator.api import BatchJob
from banyan_operator.api.status import BatchJobStatus, BatchPhase, Workers
from banyan_operator.desired.batchjob import partial_of
from banyan_operator.desired.batchpod import run_id
from banyan_operator.kube.objects import condition
from banyan_operator.observed import answers
from banyan_operator.observed.answers import Progress
from banyan_operator.observed.conditions import Finding, conditions, no, said_once, unknown, yes
from banyan_operator.observed.counting import Counted, count, so_many
from banyan_operator.observed.course import NOTHING_FAILS, UNREPORTED, Course, Known, Wish
from banyan_operator.observed.failures import last_failure, recorded
from banyan_operator.observed.pods import age_s
from banyan_operator.observed.seen import Seen, view_of
from banyan_operator.observed.written import Written
from banyan_operator.plan import World
from banyan_operator.times import rough, seconds, stamp

TERMINAL: Final = ("Succeeded", "Failed", "Cancelled", "Expired")
BAR_CELLS: Final = 10  # a row of `kubectl get` is to fit in 80 columns
STALLED_S: Final = 1800.0
WITHOUT_POD_S: Final = 60.0
FIRST_ANSWER_S: Final = 60.0  # a worker that runs for less may not answer yet
COURSE: Final = ("Pending", "Planning", "Running", "Merging")
"""Phases that follow on each other, and of which none comes back."""


@dataclass(frozen=True, slots=True)
class Observed:
    """One job that is not over in its status, and all that is known of it."""

    job: BatchJob
    world: World
    prior: Mapping[str, Any]  # the status as it was
    seen: Seen
    known: Known
    wish: Wish
    course: Course

    @property
    def progress(self) -> Progress | None:
        """Of those who work on lines now."""
        work = self.seen.work
        if work is None or self.seen.now is not work or work.ending is not None:
            return None
        names = {pod.name for pod in work.pods if pod.may_run}
        return Progress.of(body for name, body in self.world.progress.items() if name in names)

    @property
    def refused(self) -> bool:
        return self.wish.accepted.status != "True"


def is_terminal(prior: Mapping[str, Any]) -> bool:
    return prior.get("phase") in TERMINAL


def status(one: Observed, written: Written) -> BatchJobStatus:
    """The whole status of a job that is not over."""
    job, seen, prior, now = one.job, one.seen, one.prior, one.world.now
    progress = one.progress
    counted = count(seen, progress, prior, now)
    phase = _phase(one, written)
    over, ended = phase in TERMINAL, seen.now is not None and seen.now.ending is not None
    live = progress if phase == "Running" else None
    total = counted.requests.total
    finished = math.floor(100 * counted.done / total) if total else 0
    percent = 100 if phase == "Succeeded" else finished if over else min(99, finished)  # before its end nothing is published
    last_progress = stamp(now) if counted.moved else prior.get("lastProgressTime")
    eta_s = counted.eta_s if live else None
    base = job.spec.output.uri
    pods = tuple(pod for stage in seen.stages for pod in stage.pods)
    view = view_of(job, one.world, prior, fenced=seen.fenced)
    found = said_once(_findings(one, phase, written, counted), ("Failed", "Cancelled", "Expired", "Accepted", "Running"))
    return BatchJobStatus(
        observed_generation=job.metadata.generation,
        phase=phase,
        conditions=conditions(prior, found, job.metadata.generation, now),
        request_counts=counted.requests,
        shards=counted.shards,
        shards_text=f"{counted.shards.completed}/{counted.shards.total}" if counted.shards is not None else None,
        progress_percent=percent,
        progress=bar(percent),
        requests=f"{counted.done}/{total}" if total is not None and not counted.lost else None,
        workers=_workers(one, over),
        tokens_per_second=live.tokens_per_second if live else None,
        requests_per_hour=counted.requests_per_hour,
        eta=stamp(now + eta_s) if eta_s is not None else None,
        eta_text=rough(eta_s) if eta_s is not None else None,
        run_id=run_id(job),
        jobs=one.known.made,
        usage=counted.usage,
        output_uri=f"{base}output.jsonl",
        errors_uri=f"{base}errors.jsonl",
        manifest_uri=f"{base}manifest.json",
        plan_time=prior.get("planTime") or _planned_at(one),
        start_time=prior.get("startTime") or _began(seen),
        completion_time=((seen.now.finished if ended and seen.now is not None else None) or stamp(now)) if over else None,
        last_progress_time=last_progress,
        last_failure=recorded(last_failure(pods, view), prior, found),
    )


def deadline(job: BatchJob, prior: Mapping[str, Any]) -> float | None:
    """When spec.deadlineSeconds ends, unix seconds; None where there is none, or nothing has started."""
    began = seconds(prior.get("startTime"))
    return began + job.spec.deadline_seconds if began is not None and job.spec.deadline_seconds is not None else None


def bar(percent: int) -> str:
    """`####------  41%`"""
    filled = percent * BAR_CELLS // 100
    return "#" * filled + "-" * (BAR_CELLS - filled) + f" {percent:3d}%"


# --- phase ---


def _phase(one: Observed, written: Written) -> BatchPhase:
    phase, before = _phase_seen(one, written), one.prior.get("phase")
    return max(phase, before, key=COURSE.index) if phase in COURSE and before in COURSE else phase


def _phase_seen(one: Observed, written: Written) -> BatchPhase:
    seen, wish, over = one.seen, one.wish, one.course.over
    if over is not None and written.complete:
        return over.phase
    if seen.merge is not None:
        if partial_of(seen.merge.job) in ("cancelled", "expired"):
            return "Cancelling"
        suspended = one.job.spec.suspend and wish.stop is None and seen.held and seen.merge.ending is None
        return "Suspended" if suspended else "Merging"
    ended = seen.now is not None and seen.now.ending is not None
    if ended and seen.work is not None:
        suspended = one.job.spec.suspend and wish.stop is None and seen.work.over(one.world.now)
        return "Suspended" if suspended else "Merging" if seen.work.over(one.world.now) else "Running"
    if wish.stop is not None and (not ended or one.known.planned):
        return "Cancelling"
    if one.job.spec.suspend and seen.held and not (ended and not one.known.planned):
        return "Pending" if one.refused else "Suspended"
    if seen.work is None:
        return "Planning" if seen.plan is not None and not one.known.planned and (seen.running or ended or _begun(one)) else "Pending"
    if wish.hold is not None or (one.refused and not seen.running):
        return "Pending"
    # between two attempts of a worker the job still counts as running; its condition says what went wrong
    return "Running" if seen.running or _begun(one) else "Pending"


def _begun(one: Observed) -> bool:
    """Whether the stage at work had a worker that ran."""
    stage, prior = one.seen.now, one.prior
    assert stage is not None
    if stage.phase == "plan":
        return bool(prior.get("startTime"))
    return prior.get("phase") == "Running" or bool(prior.get("lastProgressTime")) or stage.failure is not None


# --- conditions ---


def _findings(one: Observed, phase: BatchPhase, written: Written, counted: Counted) -> dict[str, Finding]:
    accepted, running, over = one.wish.accepted, _running(one, phase), one.course.over
    if written.pending and phase not in TERMINAL:
        running = replace(running, message=f"{running.message} {written.pending}")
    complete, failed = no("InProgress", "The work is not over."), NOTHING_FAILS
    if phase in TERMINAL:
        assert over is not None
        complete, failed, accepted = over.complete, over.failed, over.refusal or accepted
    elif running.status != "True":
        complete = no(running.reason, running.message)
    found = {"Accepted": accepted, **_of_the_plan(one, phase), "Running": running, "Complete": complete, "Failed": failed}
    found["Suspended"] = _suspended(one)
    if phase in ("Cancelled", "Expired"):
        found[phase] = yes(phase, complete.message)
    found |= written.found
    if phase in ("Running", "Merging") and running.status == "True":
        found["ProgressKnown"] = _progress_known(one)
        if (stalled := _stalled(one, counted)) is not None:
            found["Stalled"] = stalled
    return found


def _of_the_plan(one: Observed, phase: BatchPhase) -> dict[str, Finding]:
    """Whether there is one, and what it found of the storage."""
    found: dict[str, Finding] = {}
    told = {kind: condition({"status": one.prior}, kind) for kind in ("Planned", "Fenced")}
    plan, over = one.seen.plan, one.course.over
    if one.known.planned:
        found["Planned"] = yes("Planned", str(told["Planned"].get("message") or "The work is planned."))
        if told["Planned"].get("status") != "True" and plan is not None and plan.ending is not None:
            found["Planned"] = yes("Planned", _plan_message(plan.words) if plan.ending.reported else f"The work is planned. {UNREPORTED}")
    elif phase == "Failed" and over is not None:
        found["Planned"] = no("PlanFailed", over.failed.message)
    else:
        found["Planned"] = no("Planning", "The work is not planned yet.")
    unfenced = one.seen.told_fenced is False
    if phase == "Failed" and over is not None and over.failed.reason == "ConditionalWritesUnsupported":
        unfenced = True
    if one.seen.told_fenced is True:
        found["Fenced"] = yes("ConditionalWrites", "The storage refuses what a worker writes that was given up for lost.")
    elif unfenced:
        found["Fenced"] = no("ConditionalWritesUnsupported", "The storage has no conditional writes: one worker only.")
    return found


def _plan_message(words: Mapping[str, Any]) -> str:
    counts, shards = answers.counts(words.get("requestCounts")), answers.whole(words.get("shards"))
    total = counts.total if counts is not None else None
    requests = "Unknown requests" if total is None else so_many(total, "request")
    return f"{requests}." if shards is None else f"{requests} in {so_many(shards, 'shard')}."


def _running(one: Observed, phase: BatchPhase) -> Finding:
    seen, wish, course = one.seen, one.wish, one.course
    stage = seen.now
    if phase in TERMINAL:
        return no("Finished", "The work is over.")
    if stage is not None and stage.ending is not None and (not stage.over(one.world.now) or course.over is not None):
        return no("WaitingForReport", stage.ending.waiting)
    if seen.merge is None and phase == "Cancelling":
        return no("Cancelling", course.waits or stopping(seen) or "The Job is being suspended.")
    if one.refused and not seen.running:
        return no(wish.accepted.reason, wish.accepted.message)
    if phase == "Suspended":
        return no("Suspended", f"spec.suspend is true. {stopping(seen)}".strip())
    if course.waits:
        return no("WaitingForPods", f"An earlier Job's worker may still run, and two must not write to one output. {course.waits}")
    to_work = seen.merge is None and (one.known.planned if seen.work is None else seen.work.ending is None)
    if wish.hold is not None and to_work:
        return wish.hold
    if seen.diagnosis is not None and seen.diagnosis.reason == "NodeLost" and not seen.running:
        return unknown(seen.diagnosis.reason, seen.diagnosis.message)
    if seen.work is not None and stage is seen.work and seen.running:
        return _at_work(one)
    if seen.diagnosis is not None and not seen.running:
        return no(seen.diagnosis.reason, seen.diagnosis.message)
    if seen.merge is not None or phase == "Merging":
        return no("Merging", "Results are put together and published.")
    if stage is seen.plan and seen.running:
        return no("Planning", "The input is read and cut into shards.")
    if stage is not None and stage.worker_ended:
        return no("WaitingForReport", "The worker has ended. Its Job has yet to say how it did.")
    return no("Starting", _without_pod(one) or "Waiting for the worker's pod.")


def _without_pod(one: Observed) -> str:
    """Of a Job that nothing holds, and that nobody makes a pod for. Kubernetes' own controller forgets one now and then that follows
    another of its name, until something of it changes."""
    stage = one.seen.now
    if stage is None or stage.pods or not stage.begun:
        return ""
    told = stage.job.get("status") or {}
    made = None if told.get("conditions") else stage.job["metadata"].get("creationTimestamp")  # it may have been suspended since
    since = seconds(told.get("startTime") or made)
    waited = 0.0 if since is None else one.world.now - since
    if waited < WITHOUT_POD_S:
        return ""
    name, namespace = stage.job["metadata"]["name"], one.job.metadata.namespace
    return (
        f"Job {name} began {rough(waited)} ago and has no pod, although nothing holds it. Kubernetes' kube-controller-manager makes it; "
        f"'kubectl -n {namespace} annotate job {name} looked-at=1' has it look again."
    )


def _at_work(one: Observed) -> Finding:
    work = one.seen.work
    assert work is not None
    if one.job.spec.workers == 1:
        return yes("WorkersRunning", "The worker runs.")
    active = (work.job.get("status") or {}).get("active") or 0
    why = f" {one.seen.diagnosis.message}" if one.seen.diagnosis is not None else ""
    return yes("WorkersRunning", f"{active} of {one.job.spec.workers} workers are there.{why}")


def _suspended(one: Observed) -> Finding:
    if not one.job.spec.suspend:
        return no("Resumed", "spec.suspend is false.")
    if one.wish.stop is not None:  # which does not wait until it is resumed
        return no("Ending", f"{one.wish.stop.message} It ends although spec.suspend is true.")
    if one.seen.at_rest:
        return yes("Suspended", "spec.suspend is true, and nothing runs.")
    return no("Suspending", stopping(one.seen) or "The Job is being suspended.")


def _progress_known(one: Observed) -> Finding:
    progress, stage = one.progress, one.seen.now
    if progress is None and stage is not None and age_s(stage.running_since, one.world.now) < FIRST_ANSWER_S:
        return unknown("Starting", "The worker has just begun, and has not answered yet.")
    if progress is None:
        return no("WorkersUnreachable", "no worker answers on its progress port; counts may be old.")
    return yes("Reported", "The worker reports its progress." if one.job.spec.workers == 1 else "Workers report their progress.")


def _stalled(one: Observed, counted: Counted) -> Finding | None:
    """Since the workers run, or since something was done last."""
    if counted.moved:
        return None
    running = condition({"status": one.prior}, "Running")
    since = seconds(running.get("lastTransitionTime")) if running.get("status") == "True" else None
    if since is None or one.world.now - max(since, seconds(one.prior.get("lastProgressTime")) or 0.0) < STALLED_S:
        return None
    return yes("NoProgress", f"no request was finished for {round(STALLED_S / 60)} minutes. See the workers' logs, and the server's.")


def stopping(seen: Seen) -> str:
    """What still runs while all is to stop."""
    if not seen.stopping:
        return ""
    lost = [f" on node {pod.node}, which does not answer" for pod in seen.stopping if pod.lost]
    return f"Waiting for pod {seen.stopping[0].name} to end{lost[0] if lost else ''}."


# --- the rest ---


def _workers(one: Observed, over: bool) -> Workers:
    job_status = (one.seen.work.job.get("status") or {}) if one.seen.work is not None else {}
    idle = over or one.seen.merge is not None
    return Workers(
        desired=0 if idle or (one.wish.hold and not one.seen.stopping) else one.job.spec.workers,
        active=0 if idle else job_status.get("active") or 0,
        ready=0 if idle else job_status.get("ready") or 0,
        failed=job_status.get("failed") or (one.prior.get("workers") or {}).get("failed") or 0,
    )


def _began(seen: Seen) -> str | None:
    """When the first worker ran, as far as that is still seen."""
    running = [stage.running_since for stage in seen.stages if stage.running_since]
    ended = [stage.finished for stage in seen.stages if stage.finished]
    return min((*running, *ended), default=None)


def _planned_at(one: Observed) -> str | None:
    plan = one.seen.plan
    return plan.finished if one.known.planned and plan is not None else None
