"""The status of a BatchJob."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from banyan_operator.api import BatchJob
from banyan_operator.api.base import Model
from banyan_operator.api.status import BatchJobStatus, BatchPhase, RequestCounts, Usage, Workers
from banyan_operator.desired.batch import CONTAINER, run_id, work_name
from banyan_operator.kube.objects import condition, is_true
from banyan_operator.observed import diagnosis
from banyan_operator.observed.conditions import Finding, conditions, no, yes
from banyan_operator.observed.diagnosis import Diagnosis, View
from banyan_operator.observed.failures import kept, last_failure
from banyan_operator.observed.pods import End, LastWords, Pod, pods
from banyan_operator.plan import Manifest, Settings, World
from banyan_operator.times import rough, seconds, stamp

M = TypeVar("M", bound=Model)

TERMINAL: Final = ("Succeeded", "Failed", "Cancelled", "Expired")
BAR_CELLS: Final = 20
PLAN_CODES: Final = (64, 65, 77, 78)  # the worker found before any request that it cannot do this


@dataclass(frozen=True, slots=True)
class Stop:
    """Why the job is to end before its work is done."""

    ending: BatchPhase
    ended: BatchPhase
    message: str


CANCEL: Final = Stop("Cancelling", "Cancelled", "spec.cancel is true. Nothing was published; progress is as counted.")
EXPIRE: Final = Stop("Cancelling", "Expired", "spec.deadlineSeconds has passed. Nothing was published; progress is as counted.")


@dataclass(frozen=True, slots=True)
class Seen:
    """What the world shows of one job."""

    work: Manifest | None
    pods: tuple[Pod, ...]  # newest first
    diagnosis: Diagnosis | None
    running_since: str | None  # the worker of the newest pod runs since then
    words: LastWords | None  # of the worker that published
    failure: tuple[Pod, End] | None  # the newest worker that failed

    @property
    def complete(self) -> bool:
        return is_true(self.work, "Complete") or is_true(self.work, "SuccessCriteriaMet")

    @property
    def failed(self) -> bool:
        return is_true(self.work, "Failed") or is_true(self.work, "FailureTarget")

    @property
    def busy(self) -> bool:
        """Processes of it may still run."""
        status = (self.work or {}).get("status") or {}
        return bool(status.get("active") or status.get("terminating") or any(pod.phase == "Running" for pod in self.pods))


def is_terminal(prior: Mapping[str, Any]) -> bool:
    return prior.get("phase") in TERMINAL


def see(job: BatchJob, world: World, settings: Settings) -> Seen:
    """Sort the pods, and find what is wrong with them."""
    work = next((one for one in world.children if one["kind"] == "Job" and one["metadata"]["name"] == work_name(job)), None)
    known = pods(world.children)
    workers = [(pod, container) for pod in known if (container := pod.container(CONTAINER)) is not None]
    ends = [(pod, container.ended) for pod, container in workers if container.ended is not None]
    active = [pod for pod in known if pod.active]
    events = [str(event.get("message") or "") for event in world.events if event.get("reason") == "FailedCreate"]
    found = diagnosis.creation_diagnosis(events) if not active else None
    found = found or diagnosis.worst([pod for pod in active if not pod.ready], _view(job, world, settings))
    if found is None and not active:
        found = diagnosis.worst([pod for pod in known if pod.phase == "Failed"][:1], _view(job, world, settings))
    return Seen(
        work=work,
        pods=known,
        diagnosis=found,
        running_since=next((container.running_since for _, container in workers if container.running_since), None),
        words=next((end.words for _, end in ends if end.exit_code == 0), None),
        failure=next(((pod, end) for pod, end in ends if end.exit_code != 0), None),
    )


def _view(job: BatchJob, world: World, settings: Settings) -> View:
    own = job.spec.server
    accelerator = own.accelerator if own else None
    return View(
        now=world.now,
        startup_timeout_s=own.probes.startup_timeout_seconds if own else 1800,
        accelerators=f"{accelerator.count} x {accelerator.resource_name}" if accelerator and accelerator.count else "",
        local=settings.platform == "local",
        readyz=world.readyz,
        events=world.events,
    )


def status(
    job: BatchJob,
    accepted: Finding,
    hold: Finding | None,
    stop: Stop | None,
    seen: Seen,
    world: World,
    prior: Mapping[str, Any],
    settings: Settings,
) -> BatchJobStatus:
    """The whole status of a job that is not over.

    `hold`: why the work may not run now (the Running condition); `stop`: why it is to end early; `prior`: as it was.
    """
    phase = _phase(job, accepted, hold, stop, seen, world, prior)
    report: Mapping[str, Any] = (seen.words.details if seen.words else None) or world.progress or {}
    counts = _counts(seen, world, prior)
    done = (counts.completed or 0) + (counts.failed or 0)
    over = phase in TERMINAL
    began = prior.get("startTime") or seen.running_since or _finished(seen)
    live = world.progress if phase in ("Running", "Merging") else None
    percent = 100 if phase == "Succeeded" else min(99, math.floor(100 * done / counts.total)) if counts.total else 0
    found = _findings(job, accepted, hold, phase, stop, seen, world)
    uris = _uris(job, seen, settings)
    eta_s = (live or {}).get("etaSeconds")
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
            desired=0 if over or (hold and not seen.busy) else job.spec.workers,
            active=0 if over else job_status.get("active") or 0,
            ready=0 if over else job_status.get("ready") or 0,
            failed=job_status.get("failed") or (prior.get("workers") or {}).get("failed") or 0,
        ),
        tokens_per_second=max(0, round(float(live.get("tokensPerSecond") or 0))) if live else None,
        eta=stamp(world.now + float(eta_s)) if eta_s is not None else None,
        eta_text=rough(float(eta_s)) if eta_s is not None else None,
        run_id=run_id(job),
        usage=_read(Usage, report.get("usage")) or _read(Usage, prior.get("usage")),
        output_uri=uris.output,
        errors_uri=uris.errors,
        manifest_uri=uris.manifest,
        start_time=began,
        completion_time=(_finished(seen) or stamp(world.now)) if over else None,
        last_progress_time=stamp(world.now) if moved else prior.get("lastProgressTime"),
        last_failure=last_failure(seen.pods, _view(job, world, settings)) or kept(prior),
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
    job: BatchJob, accepted: Finding, hold: Finding | None, stop: Stop | None, seen: Seen, world: World, prior: Mapping[str, Any]
) -> BatchPhase:
    if seen.complete:
        return "Succeeded"
    if seen.failed:
        return "Failed"
    if stop is not None:
        return stop.ending if seen.busy else stop.ended
    if accepted.status != "True":
        return "Pending"
    if job.spec.suspend:
        return "Suspended"
    if hold is not None:
        return "Pending"
    if seen.running_since is not None:
        return "Merging" if (world.progress or {}).get("phase") == "publishing" else "Running"
    # between two attempts of a worker the job still counts as running; its condition says what went wrong
    return "Running" if prior.get("startTime") and seen.work is not None else "Pending"


def _findings(
    job: BatchJob, accepted: Finding, hold: Finding | None, phase: BatchPhase, stop: Stop | None, seen: Seen, world: World
) -> dict[str, Finding]:
    running = _running(accepted, hold, phase, seen)
    complete, failed = no("InProgress", "The work is not over."), no("AsExpected", "Nothing fails.")
    if phase == "Failed":
        failed, refusal = _failed(seen)
        complete = no("Failed", failed.message)
        accepted = refusal or accepted
    elif phase == "Succeeded":
        complete = yes("Succeeded", "All results are published.")
    elif phase in TERMINAL:
        assert stop is not None
        complete = yes(phase, stop.message)
    elif running.status == "False":
        complete = no(running.reason, running.message)
    found = {
        "Accepted": accepted,
        "Running": running,
        "Complete": complete,
        "Failed": failed,
        "Suspended": yes("Suspended", "spec.suspend is true.") if phase == "Suspended" else no("Resumed", "spec.suspend is false."),
    }
    if phase in ("Running", "Merging") and running.status == "True":
        if world.progress is None:
            found["ProgressKnown"] = no("WorkersUnreachable", "the worker does not answer on its progress port; counts may be old.")
        else:
            found["ProgressKnown"] = yes("Reported", "The worker reports its progress.")
    return found


def _running(accepted: Finding, hold: Finding | None, phase: BatchPhase, seen: Seen) -> Finding:
    if phase in TERMINAL:
        return no("Finished", "The work is over.")
    if accepted.status != "True":
        return no(accepted.reason, accepted.message)
    if phase in ("Suspended", "Cancelling"):
        return no(phase, "spec.suspend is true." if phase == "Suspended" else "The worker is being stopped.")
    if hold is not None:
        return hold
    if seen.running_since is not None:
        return yes("WorkersRunning", "The worker runs.")
    if seen.diagnosis is not None:
        return no(seen.diagnosis.reason, seen.diagnosis.message)
    return no("Starting", "Waiting for the worker's pod.")


def _failed(seen: Seen) -> tuple[Finding, Finding | None]:
    """The Failed condition, and the Accepted one where the worker found that the spec asks for what cannot be."""
    if seen.failure is None:
        text = condition(seen.work, "Failed") or condition(seen.work, "FailureTarget")
        return yes("WorkersFailed", f"{text.get('message') or 'The Job failed'}. Make a new BatchJob to try again."), None
    pod, end = seen.failure
    container = pod.container(CONTAINER)
    assert container is not None
    found = diagnosis.crash(pod, container, end, View(now=0.0, startup_timeout_s=0.0, accelerators=""))
    if end.exit_code in PLAN_CODES:
        return yes("PlanFailed", found.message), no(found.reason, found.message)
    return yes("WorkersFailed", found.message), None


# --- counts ---


def _counts(seen: Seen, world: World, prior: Mapping[str, Any]) -> RequestCounts:
    """From the worker that published, else from one that runs or has just failed, else what was known before."""
    if seen.words is not None and (found := _read(RequestCounts, seen.words.details.get("requestCounts"))):
        return found
    if world.progress is not None:
        return _read(RequestCounts, {key: world.progress.get(key) for key in ("total", "completed", "failed")}) or RequestCounts()
    if seen.failure is not None and (found := _read(RequestCounts, seen.failure[1].words.details.get("requestCounts"))):
        return found
    return _read(RequestCounts, prior.get("requestCounts")) or RequestCounts()


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


def _read(model: type[M], body: Any) -> M | None:
    """Numbers that another process reports: taken if they have the form, else left out."""
    if not isinstance(body, Mapping):
        return None
    present = {
        key: value for key, value in body.items() if value is not None and key in {field.alias for field in model.model_fields.values()}
    }
    try:
        return model.model_validate_json(json.dumps(present), by_alias=True, by_name=False)
    except (ValidationError, TypeError):
        return None
