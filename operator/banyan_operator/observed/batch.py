"""The status of a BatchJob."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from banyan_operator.api import BatchJob
from banyan_operator.api.status import BatchJobStatus, BatchPhase, RequestCounts, Usage, Workers
from banyan_operator.desired.batch import CONTAINER, run_id, run_of
from banyan_operator.desired.metadata import owner
from banyan_operator.kube.kinds import JOB
from banyan_operator.kube.objects import is_true
from banyan_operator.observed import answers, diagnosis
from banyan_operator.observed.answers import Progress, Readiness
from banyan_operator.observed.conditions import Finding, conditions, messages, no, unknown, yes
from banyan_operator.observed.diagnosis import Diagnosis, View
from banyan_operator.observed.ending import Ending, ending
from banyan_operator.observed.failures import kept, last_failure
from banyan_operator.observed.pods import End, LastWords, Pod, orphans, pods_of
from banyan_operator.observed.written import Written
from banyan_operator.plan import Manifest, Settings, World
from banyan_operator.times import rough, seconds, stamp

TERMINAL: Final = ("Succeeded", "Failed", "Cancelled", "Expired")
BAR_CELLS: Final = 20
PLAN_CODES: Final = (64, 65, 77, 78)  # the worker found before any request that it cannot do this
UNREPORTED: Final = "The report of the worker's pod was never seen: counts are as last known."


@dataclass(frozen=True, slots=True)
class Stop:
    """Why the job is to end before its work is done."""

    ending: BatchPhase
    ended: BatchPhase
    message: str


CANCEL: Final = Stop("Cancelling", "Cancelled", "spec.cancel is true. Nothing was published; progress is as counted.")
EXPIRE: Final = Stop("Cancelling", "Expired", "spec.deadlineSeconds has passed. Nothing was published; progress is as counted.")


@dataclass(frozen=True, slots=True)
class Course:
    """What is to become of the work."""

    accepted: Finding
    hold: Finding | None  # why it has to wait for its server
    stop: Stop | None  # why it is to end early

    @property
    def refused(self) -> bool:
        return self.accepted.status != "True"


@dataclass(frozen=True, slots=True)
class Seen:
    """What the world shows of one job."""

    work: Manifest | None  # the Job that this very BatchJob controls
    pods: tuple[Pod, ...]  # of that Job, newest first
    left: tuple[Pod, ...]  # of Jobs that are gone, not collected yet
    ending: Ending | None
    diagnosis: Diagnosis | None
    running_since: str | None  # the worker of the newest pod runs since then, as far as its node tells
    failure: tuple[Pod, End] | None  # the newest worker that failed

    @property
    def words(self) -> LastWords | None:
        """Of the worker that published."""
        end = self.ending.end if self.ending is not None and self.ending.succeeded else None
        return None if end is None else end.words

    @property
    def stopping(self) -> tuple[Pod, ...]:
        """Pods whose processes run or may yet."""
        return tuple(pod for pod in (*self.pods, *self.left) if pod.may_run)

    @property
    def at_rest(self) -> bool:
        """Nothing of it runs, and nothing will: there is no Job, or it is seen suspended, by its controller too."""
        if self.stopping:
            return False
        if self.work is None:
            return True
        status = self.work.get("status") or {}
        suspended = self.work["spec"].get("suspend") and is_true(self.work, "Suspended")
        return bool(suspended) and not status.get("active") and not status.get("terminating")


def is_terminal(prior: Mapping[str, Any]) -> bool:
    return prior.get("phase") in TERMINAL


def see(job: BatchJob, world: World, prior: Mapping[str, Any], settings: Settings) -> Seen:
    """Sort the pods, and find what is wrong with them."""
    view = _view(job, world, prior, settings)
    work = next((one for one in world.children if one["kind"] == JOB.kind and _is_own(job, one)), None)
    known = pods_of([] if work is None else [work], world.children)
    workers = [(pod, container) for pod in known if (container := pod.container(CONTAINER)) is not None]
    active = [pod for pod in known if pod.active]
    lost = [one for pod in known if pod.may_run and (one := diagnosis.node_lost(pod, view))]
    creation = [str(event.get("message") or "") for event in world.events if event.get("reason") == "FailedCreate"]
    found = lost[0] if lost else diagnosis.creation_diagnosis(creation) if not active else None
    found = found or diagnosis.worst([pod for pod in active if not pod.ready], view)
    if found is None and not active:
        found = diagnosis.worst([pod for pod in known if pod.phase == "Failed"][:1], view)
    return Seen(
        work=work,
        pods=known,
        left=orphans(world.children),
        ending=ending(work, known),
        diagnosis=found,
        running_since=next((one.running_since for pod, one in workers if one.running_since and pod.may_run and not pod.lost), None),
        failure=next(((pod, one.ended) for pod, one in workers if one.ended is not None and one.ended.exit_code != 0), None),
    )


def _is_own(job: BatchJob, work: Manifest) -> bool:
    """Whether a Job does this BatchJob's work: it owns it, or nobody does and it was made for this very run."""
    mine = owner(job)
    return mine.controls(work) or (mine.may_change(work) and run_of(work) == run_id(job))


def _view(job: BatchJob, world: World, prior: Mapping[str, Any], settings: Settings) -> View:
    own = job.spec.server
    accelerator = own.accelerator if own else None
    return View(
        now=world.now,
        startup_timeout_s=own.probes.startup_timeout_seconds if own else 1800,
        accelerators=f"{accelerator.count} x {accelerator.resource_name}" if accelerator and accelerator.count else "",
        local=settings.platform == "local",
        sole=True,
        readyz=Readiness.of(world.readyz),
        events=world.events,
        told=messages(prior),
    )


def status(
    job: BatchJob, course: Course, seen: Seen, written: Written, world: World, prior: Mapping[str, Any], settings: Settings
) -> BatchJobStatus:
    """The whole status of a job that is not over. `prior`: as it was."""
    progress = Progress.of(world.progress)
    phase = _phase(job, course, seen, written, progress, world, prior)
    counts = _counts(seen, progress, prior)
    done = (counts.completed or 0) + (counts.failed or 0)
    over = phase in TERMINAL
    began = prior.get("startTime") or seen.running_since or _finished(seen)
    live = progress if phase in ("Running", "Merging") else None
    percent = 100 if phase == "Succeeded" else min(99, math.floor(100 * done / counts.total)) if counts.total else 0
    found = _findings(job, course, phase, seen, written, world)
    uris = _uris(job, seen, settings)
    eta_s = live.eta_s if live else None
    job_status = (seen.work or {}).get("status") or {}
    moved = done != sum((prior.get("requestCounts") or {}).get(key) or 0 for key in ("completed", "failed"))
    return BatchJobStatus(
        observed_generation=job.metadata.generation,
        phase=phase,
        conditions=conditions(prior, found, job.metadata.generation, world.now),
        request_counts=counts,
        progress_percent=percent,
        progress=bar(percent),
        requests=f"{done}/{counts.total}" if counts.total is not None else None,
        workers=Workers(
            desired=0 if over or (course.hold and not seen.stopping) else job.spec.workers,
            active=0 if over else job_status.get("active") or 0,
            ready=0 if over else job_status.get("ready") or 0,
            failed=job_status.get("failed") or (prior.get("workers") or {}).get("failed") or 0,
        ),
        tokens_per_second=live.tokens_per_second if live else None,
        eta=stamp(world.now + eta_s) if eta_s is not None else None,
        eta_text=rough(eta_s) if eta_s is not None else None,
        run_id=run_id(job),
        usage=_usage(seen, progress) or answers.usage(prior.get("usage")),
        output_uri=uris.output,
        errors_uri=uris.errors,
        manifest_uri=uris.manifest,
        start_time=began,
        completion_time=(_finished(seen) or stamp(world.now)) if over else None,
        last_progress_time=stamp(world.now) if moved else prior.get("lastProgressTime"),
        last_failure=last_failure(seen.pods, _view(job, world, prior, settings)) or kept(prior),
    )


def deadline(job: BatchJob, prior: Mapping[str, Any]) -> float | None:
    """When spec.deadlineSeconds ends, unix seconds; None where there is none, or nothing has started."""
    began = seconds(prior.get("startTime"))
    return began + job.spec.deadline_seconds if began is not None and job.spec.deadline_seconds is not None else None


def bar(percent: int) -> str:
    """`########------------  41%`"""
    filled = percent * BAR_CELLS // 100
    return "#" * filled + "-" * (BAR_CELLS - filled) + f" {percent:3d}%"


# --- phase and conditions ---


def _phase(
    job: BatchJob, course: Course, seen: Seen, written: Written, progress: Progress | None, world: World, prior: Mapping[str, Any]
) -> BatchPhase:
    running = seen.running_since is not None
    if seen.ending is not None:
        if not (seen.ending.over(world.now) and written.complete):
            return "Running"
        return "Succeeded" if seen.ending.succeeded else "Failed"
    if course.stop is not None:
        return course.stop.ended if seen.at_rest and written.complete else course.stop.ending
    if job.spec.suspend and not running:
        return "Pending" if course.refused else "Suspended"
    if course.hold is not None or (course.refused and not running):
        return "Pending"
    if running:
        return "Merging" if progress is not None and progress.phase == "publishing" else "Running"
    if seen.diagnosis is not None and seen.diagnosis.reason == "NodeLost":
        return "Pending"
    # between two attempts of a worker the job still counts as running; its condition says what went wrong
    return "Running" if prior.get("startTime") and seen.work is not None else "Pending"


def _findings(job: BatchJob, course: Course, phase: BatchPhase, seen: Seen, written: Written, world: World) -> dict[str, Finding]:
    accepted, running = course.accepted, _running(course, phase, seen)
    if written.pending and phase not in TERMINAL:
        running = replace(running, message=f"{running.message} {written.pending}")
    complete, failed = no("InProgress", "The work is not over."), no("AsExpected", "Nothing fails.")
    if phase == "Failed":
        assert seen.ending is not None
        failed, refusal = _failed(seen.ending)
        complete = no(failed.reason, failed.message)
        accepted = refusal or accepted
    elif phase == "Succeeded":
        assert seen.ending is not None
        complete = yes("Succeeded", "All results are published." + ("" if seen.ending.reported else f" {UNREPORTED}"))
    elif phase in TERMINAL:
        assert course.stop is not None
        complete = yes(phase, course.stop.message)
    elif running.status != "True":
        complete = no(running.reason, running.message)
    found = {
        "Accepted": accepted,
        "Running": running,
        "Complete": complete,
        "Failed": failed,
        "Suspended": _suspended(job, seen),
        **written.found,
    }
    if phase in ("Running", "Merging") and running.status == "True":
        if world.progress is None:
            found["ProgressKnown"] = no("WorkersUnreachable", "the worker does not answer on its progress port; counts may be old.")
        else:
            found["ProgressKnown"] = yes("Reported", "The worker reports its progress.")
    return found


def _running(course: Course, phase: BatchPhase, seen: Seen) -> Finding:
    if phase in TERMINAL:
        return no("Finished", "The work is over.")
    if seen.ending is not None:
        return no("WaitingForReport", seen.ending.waiting)
    if phase == "Cancelling":
        return no("Cancelling", stopping(seen) or "The Job is being suspended.")
    if course.refused and seen.running_since is None:
        return no(course.accepted.reason, course.accepted.message)
    if phase == "Suspended":
        return no("Suspended", f"spec.suspend is true. {stopping(seen)}".strip())
    if course.hold is not None:
        return course.hold
    if seen.diagnosis is not None and seen.diagnosis.reason == "NodeLost":
        return unknown(seen.diagnosis.reason, seen.diagnosis.message)
    if seen.running_since is not None:
        return yes("WorkersRunning", "The worker runs.")
    if seen.diagnosis is not None:
        return no(seen.diagnosis.reason, seen.diagnosis.message)
    return no("Starting", "Waiting for the worker's pod.")


def _suspended(job: BatchJob, seen: Seen) -> Finding:
    if not job.spec.suspend:
        return no("Resumed", "spec.suspend is false.")
    if seen.at_rest:
        return yes("Suspended", "spec.suspend is true, and nothing runs.")
    return no("Suspending", stopping(seen) or "The Job is being suspended.")


def stopping(seen: Seen) -> str:
    """What still runs while all is to stop."""
    if not seen.stopping:
        return ""
    lost = [f" on node {pod.node}, which does not answer" for pod in seen.stopping if pod.lost]
    return f"Waiting for pod {seen.stopping[0].name} to end{lost[0] if lost else ''}."


def _failed(ending: Ending) -> tuple[Finding, Finding | None]:
    """The Failed condition, and the Accepted one where the worker found that the spec asks for what cannot be."""
    tail = "" if ending.reported else f" {UNREPORTED}"
    container = ending.pod.container(CONTAINER) if ending.pod is not None else None
    if ending.pod is None or container is None or ending.end is None:
        why = f" (pod {ending.pod.name}: {ending.pod.reason or ending.pod.disrupted or 'failed'})" if ending.pod is not None else ""
        return yes("WorkersFailed", f"{ending.message or 'The Job failed'}{why}. Make a new BatchJob to try again.{tail}"), None
    found = diagnosis.crash(ending.pod, container, ending.end, View(now=0.0, startup_timeout_s=0.0, accelerators=""))
    refusal = no(found.reason, found.message) if ending.end.exit_code in PLAN_CODES else None
    return yes("WorkersFailed" if found.reason == "CrashLoop" else found.reason, found.message + tail), refusal


# --- counts ---


def _counts(seen: Seen, progress: Progress | None, prior: Mapping[str, Any]) -> RequestCounts:
    """From the worker that published, else from one that runs or has just failed, else what was known before."""
    said = answers.counts(seen.words.details.get("requestCounts")) if seen.words is not None else None
    said = said or (progress.counts if progress is not None else None)
    if said is None and progress is None and seen.failure is not None:
        said = answers.counts(seen.failure[1].words.details.get("requestCounts"))
    return said or answers.counts(prior.get("requestCounts")) or RequestCounts()


def _usage(seen: Seen, progress: Progress | None) -> Usage | None:
    if seen.words is not None and seen.words.details:
        return answers.usage(seen.words.details.get("usage"))
    return progress.usage if progress is not None else None


@dataclass(frozen=True, slots=True)
class Uris:
    """Where results appear."""

    output: str
    errors: str
    manifest: str


def _uris(job: BatchJob, seen: Seen, settings: Settings) -> Uris:
    """As the spec says it; in local mode as the worker says it, which are files that one can open."""
    base = job.spec.output.uri
    told = seen.words.details if settings.platform == "local" and seen.words is not None else {}
    return Uris(
        output=str(told.get("output") or f"{base}output.jsonl"),
        errors=str(told.get("errors") or f"{base}errors.jsonl"),
        manifest=str(told.get("manifest") or f"{base}manifest.json"),
    )


def _finished(seen: Seen) -> str | None:
    """When the worker ended that decided it."""
    ends = [container.ended.finished for pod in seen.pods if (container := pod.container(CONTAINER)) and container.ended]
    return max((end for end in ends if end), default=None)
