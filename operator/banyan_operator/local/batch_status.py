"""How far a batch is, and the status that is filled from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from banyan_operator.api import BatchJob
from banyan_operator.api.status import BatchJobStatus, BatchPhase, RequestCounts, Shards, Usage, Workers
from banyan_operator.desired.batchjob import Because
from banyan_operator.desired.batchpod import CONTAINER, Partial, Phase, run_id
from banyan_operator.kube.kinds import Manifest
from banyan_operator.kube.objects import is_true
from banyan_operator.local.pod import Pod
from banyan_operator.observed import answers, diagnosis, pods
from banyan_operator.observed.answers import Progress, finished
from banyan_operator.observed.batch import COURSE, bar
from banyan_operator.observed.conditions import Finding, conditions, no, yes
from banyan_operator.observed.counting import mean_per_hour, seconds_left
from banyan_operator.observed.course import ENDED_EARLY, NOTHING_FAILS, Over, Stop
from banyan_operator.observed.diagnosis import Diagnosis, View
from banyan_operator.observed.failures import last_failure, recorded
from banyan_operator.times import rough, stamp

_AT_WORK: Final[Mapping[Phase, tuple[BatchPhase, str]]] = {
    "plan": ("Planning", "The input is read and cut into shards."),
    "work": ("Running", "The workers run."),
    "merge": ("Merging", "Results are put together and published."),
}


@dataclass(slots=True)
class Worker:
    """One of a phase's workers: its pod, or how it failed last and when it is tried again."""

    pod: Pod | None = None
    last: pods.Pod | None = None
    failures: int = 0
    retry_at: float = 0.0  # time.monotonic()


@dataclass(slots=True)
class Stage:
    """The phase at work."""

    phase: Phase
    partial: Partial | None = None  # why a merge publishes what is not done
    because: Because | None = None  # why the work failed whose rest it publishes
    workers: dict[int, Worker] = field(default_factory=dict)  # by index
    begun: bool = False

    @property
    def pods(self) -> list[pods.Pod]:
        found = [one.pod.observed() if one.pod is not None else one.last for one in self.workers.values()]
        return [one for one in found if one is not None]


class Batch:
    """What is known of one batch, as it goes on where the status `prior` of an earlier run left it."""

    def __init__(self, prior: Mapping[str, Any]) -> None:
        self.planned = is_true({"status": prior}, "Planned")
        self.stage = Stage("work" if self.planned else "plan")
        self.over: Over | None = None
        self.progress: Progress | None = None  # as the workers answer now
        self.requests = answers.counts(prior.get("requestCounts")) or RequestCounts()
        self.usage: Usage | None = answers.usage(prior.get("usage"))
        self.shards: Shards | None = answers.shards(prior.get("shards"))
        self.files: Mapping[str, Any] = {}  # where the merge says that its results are

    def hear_progress(self, progress: Progress | None) -> None:
        self.progress = progress
        if progress is not None:
            self._hear(progress.counts, progress.usage)
            self._hear_of_shards(progress.shards)

    def hear_report(self, report: Mapping[str, Any]) -> None:
        """Of a worker that ended, however. What a merge that has published says counts, whatever was said before."""
        requests, usage = answers.counts(report.get("requestCounts")), answers.usage(report.get("usage"))
        if self.stage.phase != "merge":
            self._hear(requests, usage)
            self._hear_of_shards(answers.shards({"total": report.get("shards")}))
        elif report.get("output"):
            self.files, self.requests, self.usage = report, requests or self.requests, usage or self.usage
            if self.shards is not None and self.stage.partial is None and report.get("code") not in ENDED_EARLY:
                self.shards = Shards(total=self.shards.total, completed=self.shards.total, running=0)

    def _hear(self, requests: RequestCounts | None, usage: Usage | None) -> None:
        """Each worker knows of the whole run: of two that know of as many, the one that knows the total counts."""
        if requests is not None and requests.total != 0:  # 0: who says so has not read the plan
            self.requests = max(self.requests, requests, key=lambda one: (finished(one), one.total or 0))
        known = [one for one in (self.usage, usage) if one is not None]
        self.usage = max(known, key=lambda one: one.total_tokens or 0, default=None)

    def _hear_of_shards(self, told: Shards | None) -> None:
        if told is not None and told.total:
            done = max(told.completed or 0, (self.shards and self.shards.completed) or 0)
            self.shards = Shards(total=told.total, completed=done, running=told.running or 0)


def batch_status(job: BatchJob, batch: Batch, wish: tuple[Finding, Finding | None, Stop | None], prior: Manifest, now: float) -> Manifest:
    """`wish`: whether the spec is accepted, why the work waits for its server, and why it is to end early."""
    accepted, hold, stop = wish
    own, over, stage, requests = job.spec.server, batch.over, batch.stage, batch.requests
    view = View(
        now=now,
        startup_timeout_s=own.probes.startup_timeout_seconds if own else 1800,
        accelerators=own.accelerator.text if own else "",
        local=True,
        model_uri=own.model.uri if own else "",
    )
    seen = stage.pods
    workers = [container for pod in seen if pod.may_run and (container := pod.container(CONTAINER)) is not None]
    running = [container.running_since for container in workers if container.running_since]
    start_time = prior.get("startTime") or min(running, default=None)
    problem = diagnosis.worst([pod for pod in seen if pod.deleted is None and not pod.ready], view)
    phase = _phase(job, batch, hold, stop, any(pod.may_run for pod in seen), bool(start_time), str(prior.get("phase")))
    at_work = _running(batch, wish, phase, len(running), problem)
    complete = no("InProgress", "The work is not over.") if at_work.status == "True" else at_work
    found = {
        "Accepted": (over and over.refusal) or accepted,
        "Planned": yes("Planned", "The work is planned.") if batch.planned else no("Planning", "The work is not planned yet."),
        "Running": at_work,
        "Complete": over.complete if over else complete,
        "Failed": over.failed if over else NOTHING_FAILS,
    }
    if over and phase in ("Cancelled", "Expired"):
        found[phase] = yes(phase, over.complete.message)
    done, before = finished(requests), answers.counts(prior.get("requestCounts"))
    moved = done > (finished(before) if before else 0)
    rate = mean_per_hour(batch.progress, moved, prior, now)
    live = batch.progress if phase == "Running" else None
    left_s = seconds_left(requests, rate, prior, now) if live else None
    share = 100 * done // requests.total if requests.total else 0
    percent = 100 if phase == "Succeeded" else share if over else min(99, share)  # before its end nothing is published
    files = {name: str(batch.files.get(name) or job.spec.output.uri + file) for name, file in _FILES.items()}
    counted = stage.phase == "work" and not over
    return BatchJobStatus(
        observed_generation=job.metadata.generation,
        phase=phase,
        conditions=conditions(prior, found, job.metadata.generation, now),
        request_counts=requests,
        shards=batch.shards,
        shards_text=f"{batch.shards.completed}/{batch.shards.total}" if batch.shards else None,
        progress_percent=percent,
        progress=bar(percent),
        requests=f"{done}/{requests.total}" if requests.total is not None else None,
        workers=Workers(desired=job.spec.workers if counted else 0, active=len(workers) * counted, ready=len(running) * counted),
        tokens_per_second=live.tokens_per_second if live else None,
        requests_per_hour=rate,
        eta=stamp(now + left_s) if left_s is not None else None,
        eta_text=rough(left_s) if left_s is not None else None,
        run_id=run_id(job),
        usage=batch.usage,
        output_uri=files["output"],
        errors_uri=files["errors"],
        manifest_uri=files["manifest"],
        plan_time=prior.get("planTime") or (stamp(now) if batch.planned else None),
        start_time=start_time,
        completion_time=stamp(now) if over else None,
        last_progress_time=stamp(now) if moved else prior.get("lastProgressTime"),
        last_failure=recorded(last_failure(seen, view), prior, found),
    ).dump()


_FILES: Final = {"output": "output.jsonl", "errors": "errors.jsonl", "manifest": "manifest.json"}


def _phase(job: BatchJob, batch: Batch, hold: Finding | None, stop: Stop | None, active: bool, begun: bool, was: str) -> BatchPhase:
    if batch.over is not None:
        return batch.over.phase
    if stop is not None:
        return "Cancelling"
    if job.spec.suspend and not active:
        return "Suspended"
    here: BatchPhase = _AT_WORK[batch.stage.phase][0] if begun and hold is None else "Pending"
    later = COURSE[COURSE.index(here) :]
    return next((one for one, _ in _AT_WORK.values() if one == was and one in later), here)  # none comes back


def _running(
    batch: Batch, wish: tuple[Finding, Finding | None, Stop | None], phase: BatchPhase, running: int, problem: Diagnosis | None
) -> Finding:
    accepted, hold, stop = wish
    stage = batch.stage.phase
    if batch.over:
        return no("Finished", "The work is over.")
    if accepted.status != "True" and not running:
        return no(accepted.reason, accepted.message)
    if stop is not None and stage != "merge":
        return no("Cancelling", stop.message)
    if phase == "Suspended":
        return no("Suspended", "spec.suspend is true.")
    if hold is not None:
        return hold
    if stage == "work" and running:
        return yes("WorkersRunning", f"{running} of {len(batch.stage.workers)} workers run.{f' {problem.message}' if problem else ''}")
    if problem is not None and not running:
        return no(problem.reason, problem.message)
    return no(*_AT_WORK[stage]) if running or stage == "merge" else no("Starting", "Waiting for the worker's pod.")
