"""A BatchJob: plan, work, merge, one after the other, each as worker processes that are tried again with back-off."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final

import aiohttp

from banyan_operator.api import BatchJob, SpecError
from banyan_operator.desired.batchjob import FINAL_CODES, RETRIES, Because
from banyan_operator.desired.batchpod import CONTAINER, template
from banyan_operator.desired.names import derived
from banyan_operator.kube.addresses import PROGRESS_PORT
from banyan_operator.kube.kinds import Manifest
from banyan_operator.kube.objects import Key, condition
from banyan_operator.local.batch_status import Batch, Stage, Worker, batch_status
from banyan_operator.local.pod import Machine, Pod, ask
from banyan_operator.local.runner import SETTINGS, Runner
from banyan_operator.local.server_runner import ServerRunner
from banyan_operator.local.status import has_ended
from banyan_operator.observed import course, pods
from banyan_operator.observed.answers import Progress
from banyan_operator.observed.batch import deadline
from banyan_operator.observed.conditions import Finding, no
from banyan_operator.observed.course import CANCEL, EXPIRE, Stop

FIRST_RETRY_S: Final = 10.0
LONGEST_RETRY_S: Final = 360.0
"""As the Job controller: 10 s, doubled with each failure, at most six minutes."""
ASK_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a phase ended, and the pod that decided it."""

    succeeded: bool
    pod: pods.Pod

    @property
    def end(self) -> pods.End | None:
        container = self.pod.container(CONTAINER)
        return container.ended if container is not None else None

    @property
    def report(self) -> Mapping[str, Any]:
        return self.end.message.report if self.end is not None else {}

    def because(self, default: str) -> Because:
        """Why it failed, in the worker's words. `default`: the reason where these have none."""
        container = self.pod.container(CONTAINER)
        if container is None or self.end is None:
            return Because(default, f"The Job failed (pod {self.pod.name}: failed). Make a new BatchJob to try again.")
        return course.crashed(self.pod, container, self.end, default, local=True)


class BatchRunner(Runner):
    """`server_of`: the runner of an InferenceServer, if there is one."""

    def __init__(self, resource: Manifest, machine: Machine, server_of: Callable[[Key], ServerRunner | None]) -> None:
        super().__init__(resource, machine)
        self._server_of = server_of
        self._batch = Batch(resource.get("status") or {})
        self._verdict: Verdict | None = None  # of the phase at work, whose last pods may still be ending
        self._server_url: str | None = None  # as it was last known: a server may go while the work goes on

    @property
    def job(self) -> BatchJob:
        assert isinstance(self._parsed, BatchJob)
        return self._parsed

    @property
    def ended(self) -> bool:
        return self._batch.over is not None or has_ended(self.resource)

    def turn(self) -> None:
        for pod in self._reap():
            self._hear(pod)
        if self.leaving or self.ended:
            return
        stage, stop, verdict = self._batch.stage, self._stop, self._verdict
        stops = stop is not None and stage.phase != "merge"
        if stops or verdict is not None or (self.job.spec.suspend and stop is None):
            for pod in self.pods:
                if not pod.stopping:
                    pod.stop()
            if self.pods or (self.job.spec.suspend and stop is None):
                return
            if stop is not None and stops:
                self._end_early(stop)
            elif verdict is not None:
                self._go_on(stage, verdict)
            self._machine.changed()
        elif self.accepted.status == "True" and self._hold is None:
            self._keep_working(stage)

    def _begin(self, stage: Stage) -> None:
        self._batch.stage, self._verdict = stage, None

    def _end_early(self, stop: Stop) -> None:
        if self._batch.planned:
            self._begin(Stage("merge", stop.partial))
        else:
            self._batch.over = course.ended(stop, "The work was not planned yet, so there are no results.")

    def _go_on(self, stage: Stage, verdict: Verdict) -> None:
        if stage.phase == "merge":
            self._batch.over = course.published(stage.partial, stage.because, verdict.report, verdict.because, succeeded=verdict.succeeded)
        elif stage.phase == "plan" and not verdict.succeeded:
            self._batch.over = course.failed(verdict.because("PlanFailed"))
        elif stage.phase == "plan":
            self._batch.planned = True
            self._begin(Stage("work"))
        elif verdict.succeeded:
            self._begin(Stage("merge"))
        else:
            because = verdict.because("WorkersFailed")
            self._begin(Stage("merge", "too-many-errors" if because.reason == "TooManyErrors" else "failed", because))

    def _keep_working(self, stage: Stage) -> None:
        wanted = self.job.spec.workers if stage.phase == "work" else 1
        for index, worker in [one for one in stage.workers.items() if one[0] >= wanted]:
            if worker.pod is None:
                del stage.workers[index]
            elif not worker.pod.stopping:
                worker.pod.stop()
        for index in range(wanted):
            worker = stage.workers.setdefault(index, Worker())
            if worker.pod is None and not self._lost(worker) and time.monotonic() >= worker.retry_at:
                try:
                    worker.pod = self._start(f"{derived(self.key.name, stage.phase)}-{index}-", self._template(stage, index))
                except SpecError as error:
                    self._invalid = no("InvalidSpec", str(error))
                    return
                stage.begun = True
        lost = [(worker.retry_at, worker.last) for worker in stage.workers.values() if self._lost(worker) and worker.last is not None]
        if len(lost) == len(stage.workers):
            self._verdict = Verdict(False, max(lost, key=itemgetter(0))[1])

    def _template(self, stage: Stage, index: int) -> Manifest:
        if (server := self._server) is not None:
            self._server_url = server.proxy.url
        found = template(self.job, SETTINGS, stage.phase, server_url=self._server_url, partial=stage.partial)
        of_index = {"name": "JOB_COMPLETION_INDEX", "value": str(index)}
        containers = [{**one, "env": [*one.get("env", ()), of_index]} for one in found["spec"]["containers"]]
        return {**found, "spec": {**found["spec"], "containers": containers}}

    def _hear(self, pod: Pod) -> None:
        """Take note of how a pod ended."""
        stage, verdict = self._batch.stage, Verdict(not pod.failed, pod.observed())
        index, worker = next((index, one) for index, one in stage.workers.items() if one.pod is pod)
        worker.pod = None
        self._batch.hear_report(verdict.report)
        if verdict.succeeded:
            self._verdict = verdict
        elif pod.stopping:
            del stage.workers[index]
        elif verdict.end is not None and verdict.end.exit_code in FINAL_CODES:
            self._verdict = self._verdict or verdict
        else:
            worker.last, worker.failures = verdict.pod, worker.failures + 1
            worker.retry_at = time.monotonic() + min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(30, worker.failures - 1))

    def _lost(self, worker: Worker) -> bool:
        """Whether it has failed as often as it may."""
        limit = self.job.spec.worker_backoff_limit if self._batch.stage.phase == "work" else RETRIES
        return worker.pod is None and worker.failures > limit

    @property
    def _server(self) -> ServerRunner | None:
        named = self.job.spec.server_ref
        return self._server_of(Key("InferenceServer", self.key.namespace, named.name)) if named is not None else None

    @property
    def _hold(self) -> Finding | None:
        """Why the work has to wait for its server. A worker that has begun waits out itself what is temporary."""
        if self.job.spec.server_ref is None or self._batch.stage.begun or self._batch.stage.phase != "work":
            return None
        name, server = self.job.spec.server_ref.name, self._server
        if server is None:
            return no("WaitingForServer", f"InferenceServer {name} does not exist in namespace {self.key.namespace}. Create it.")
        if (accepted := server.accepted).status != "True":
            return no("WaitingForServer", f"InferenceServer {name} is not accepted: {accepted.message}")
        if not server.takes_requests:
            why = condition(server.resource, "Ready").get("message") or "no status yet"
            return no("WaitingForServer", f"InferenceServer {name} takes no requests yet: {why}")
        return None

    @property
    def _stop(self) -> Stop | None:
        if self.job.spec.cancel:
            return CANCEL
        ends = deadline(self.job, self.resource.get("status") or {})
        return EXPIRE if ends is not None and time.time() >= ends else None

    async def close(self) -> None:
        """It holds pods alone."""

    async def ask_progress(self, http: aiohttp.ClientSession) -> None:
        """Ask the workers how far they are."""
        urls = [f"{pod.url(PROGRESS_PORT)}/progress" for pod in self.pods if PROGRESS_PORT in pod.ports]
        answered = await asyncio.gather(*(ask(http, url, ASK_TIMEOUT_S) for url in urls if self._batch.stage.phase == "work"))
        self._batch.hear_progress(Progress.of(body for _, body, _ in answered if isinstance(body, dict)))

    def _status(self, prior: Manifest, now: float) -> Manifest:
        if has_ended(self.resource):  # an edit was seen since, which changes nothing
            return {**prior, "observedGeneration": self.job.metadata.generation}
        return batch_status(self.job, self._batch, (self.accepted, self._hold, self._stop), prior, now)
