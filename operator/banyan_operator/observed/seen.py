"""What the world shows of one BatchJob: its Jobs, their pods, how they ended, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from banyan_operator.api import BatchJob
from banyan_operator.desired.batchjob import run_of
from banyan_operator.desired.batchpod import CONTAINER, PHASES, Phase, run_id
from banyan_operator.desired.metadata import owner
from banyan_operator.desired.names import derived
from banyan_operator.kube.kinds import JOB
from banyan_operator.kube.objects import condition, is_true, uid_of
from banyan_operator.observed import answers, diagnosis
from banyan_operator.observed.answers import Readiness
from banyan_operator.observed.conditions import messages
from banyan_operator.observed.diagnosis import Diagnosis, View
from banyan_operator.observed.ending import Ending, ending
from banyan_operator.observed.pods import End, Pod, orphans, pods_of
from banyan_operator.plan import Manifest, World
from banyan_operator.times import seconds

_NOTED_S: Final = 30.0  # at most between the first pod that a Job's controller makes and the start that it notes


@dataclass(frozen=True, slots=True)
class Stage:
    """One Job that this very BatchJob controls."""

    phase: Phase
    job: Manifest
    pods: tuple[Pod, ...]  # of that Job, newest first
    ending: Ending | None  # None while it goes on
    gone: bool = False  # somebody removed it when it had ended, or does: what it did is done, and nothing of it is left to be changed
    before: tuple[Pod, ...] = ()  # of one that goes on: pods of it that had ended when they went, as those that are suspended do

    @property
    def begun(self) -> bool:
        return not self.job["spec"].get("suspend")

    @property
    def running_since(self) -> str | None:
        """Since when its longest-running worker runs, as far as its node tells."""
        return min((one.running_since for _, one in self._workers if one.running_since), default=None)

    @property
    def worker_ended(self) -> bool:
        """Its newest pod's worker has ended, and the pod not yet."""
        container = self.pods[0].container(CONTAINER) if self.pods else None
        return container is not None and container.ended is not None and self.pods[0].may_run

    @property
    def failure(self) -> tuple[Pod, End] | None:
        """The newest worker that failed."""
        ends = ((pod, one.ended) for pod in self.pods if (one := pod.container(CONTAINER)) is not None)
        return next(((pod, end) for pod, end in ends if end is not None and end.exit_code != 0), None)

    @property
    def words(self) -> Mapping[str, Any]:
        """Of the worker that succeeded, or decided the failure: its last words."""
        end = self.ending.end if self.ending is not None else None
        return {} if end is None else end.message.report

    @property
    def said(self) -> Iterator[Mapping[str, Any]]:
        """The last words of all its workers that have ended, whyever."""
        for pod in (*self.pods, *self.before):
            if (container := pod.container(CONTAINER)) is not None and container.ended is not None:
                yield container.ended.message.report

    @property
    def unheard(self) -> bool:
        """It succeeded, and what it came to was not heard: its last words were lost, or its pod was never seen."""
        return self.ending is not None and self.ending.succeeded and answers.counts(self.words.get("requestCounts")) is None

    @property
    def finished(self) -> str | None:
        """When the last of its workers ended."""
        ends = [container.ended.finished for pod in self.pods if (container := pod.container(CONTAINER)) and container.ended]
        return max((end for end in ends if end), default=None)

    @property
    def unreplaced(self) -> list[Pod]:
        """Pods that have failed since the Job began or went on, and in whose place no other has come; newest first. Of earlier failures
        nothing is to be told any more."""
        if self.job["spec"].get("suspend") or is_true(self.job, "Suspended"):
            return []
        since = seconds((self.job.get("status") or {}).get("startTime")) or 0.0
        newest = {pod.place: pod.name for pod in reversed(self.pods)}.values()
        return [pod for pod in self.pods if pod.name in newest and pod.phase == "Failed" and _ended(pod) >= since]

    def over(self, now: float) -> bool:
        """Whether it has ended, and nothing more is to be learned of it."""
        return self.ending is not None and self.ending.over(now)

    def done(self, now: float) -> bool:
        """Whether it has ended well, and nothing more is to be learned of it."""
        return self.ending is not None and self.ending.succeeded and self.over(now)

    def at_rest(self, *, but_lost: bool = False) -> bool:
        """Nothing of it runs, and nothing will: it is seen suspended, by its controller too.

        `but_lost`: what may run on nodes that do not answer is not waited for.
        """
        open_pods = [pod for pod in self.pods if pod.may_run]
        lost = sum(pod.lost for pod in open_pods) if but_lost else 0
        status = self.job.get("status") or {}
        suspended = self.job["spec"].get("suspend") and is_true(self.job, "Suspended")
        return bool(suspended) and len(open_pods) <= lost and (status.get("active") or 0) + (status.get("terminating") or 0) <= lost

    @property
    def _workers(self) -> Iterator[tuple[Pod, Any]]:
        for pod in self.pods:
            if (container := pod.container(CONTAINER)) is not None and pod.may_run and not pod.lost:
                yield pod, container


def _ended(pod: Pod) -> float:
    """When its last container did, or at least when it was made: a controller notes a Job's start behind its first pods."""
    ends = [container.ended.finished for container in pod.containers if container.ended is not None]
    known = [seconds(end) for end in ends if end]
    return max(known) if known else seconds(pod.created) + _NOTED_S


@dataclass(frozen=True, slots=True)
class Seen:
    """All of it. At most one of the stages is at work."""

    plan: Stage | None
    work: Stage | None
    merge: Stage | None
    left: tuple[Pod, ...]  # of Jobs that are gone, not collected yet
    told_fenced: bool | None  # by the plan; None: its report was never seen
    fenced: bool  # what is written by a worker that was given up for lost, the storage refuses
    diagnosis: Diagnosis | None = None  # of the stage at work

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(stage for stage in (self.plan, self.work, self.merge) if stage is not None)

    @property
    def now(self) -> Stage | None:
        """The one that is at work, or was last."""
        return self.merge or self.work or self.plan

    @property
    def running(self) -> bool:
        return self.now is not None and self.now.running_since is not None

    @property
    def stopping(self) -> tuple[Pod, ...]:
        """Pods whose processes run or may yet."""
        return tuple(pod for pods in (*(stage.pods for stage in self.stages), self.left) for pod in pods if pod.may_run)

    @property
    def at_rest(self) -> bool:
        """Nothing runs, and nothing will while all is as it is."""
        return not self.stopping and self.held

    @property
    def held(self) -> bool:
        """Nothing of the stage at work runs, but perhaps on nodes that do not answer, and nothing will."""
        return not self.running and (self.now is None or self.now.ending is not None or self.now.at_rest(but_lost=True))


def see(job: BatchJob, world: World, prior: Mapping[str, Any]) -> Seen:
    """Sort Jobs and pods, and find what is wrong with them."""
    plan, work, merge = (_stage(job, phase, world) for phase in PHASES)
    told = _told_fenced(prior, plan, world.now)
    # without a report: a plan accepts unfenced storage only where the spec allows it
    fenced = told if told is not None else not job.spec.output.allow_unfenced
    fenced &= job.spec.output.uri.startswith("s3://")  # a folder's locks hold between the processes of a node
    seen = Seen(plan, work, merge, orphans(world.children), told, fenced)
    if seen.now is not None and seen.now.ending is not None:
        return seen  # what went wrong on the way to its end no longer keeps anything from working
    return replace(seen, diagnosis=_diagnosis(seen.now, view_of(job, world, prior, fenced=fenced)))


def _told_fenced(prior: Mapping[str, Any], plan: Stage | None, now: float) -> bool | None:
    if plan is not None and plan.done(now) and isinstance(said := plan.words.get("fenced"), bool):
        return said
    return {"True": True, "False": False}.get(str(condition({"status": prior}, "Fenced").get("status")))


def view_of(job: BatchJob, world: World, prior: Mapping[str, Any], *, fenced: bool) -> View:
    own = job.spec.server
    return View(
        now=world.now,
        startup_timeout_s=own.probes.startup_timeout_seconds if own else 1800,
        accelerators=own.accelerator.text if own else "",
        sole=not fenced,
        readyz=Readiness.of(world.readyz),
        model_uri=own.model.uri if own else "",
        events=world.events,
        told=messages(prior),
    )


def _stage(job: BatchJob, phase: Phase, world: World) -> Stage | None:
    there = {uid_of(one) for one in world.children}
    gone = tuple(one for one in world.remains if uid_of(one) not in there)
    known = (*world.children, *gone)
    name = derived(job.metadata.name, phase)
    for one in world.children:
        if one["kind"] == JOB.kind and one["metadata"]["name"] == name and _is_own(job, one):
            pods = pods_of([one], world.children)
            if ending(one, pods) is None:
                return Stage(phase, one, pods, None, before=pods_of([one], gone))
            pods = pods_of([one], known)  # who removes it in the foreground removes its pods first
            return Stage(phase, one, pods, ending(one, pods), gone=bool(one["metadata"].get("deletionTimestamp")))
    for one in reversed(world.remains):
        if one["kind"] == JOB.kind and one["metadata"]["name"] == name and _is_own(job, one):
            pods = pods_of([one], known)
            if (how := ending(one, pods)) is not None:
                return Stage(phase, one, pods, how, gone=True)
    return None


def _is_own(job: BatchJob, work: Manifest) -> bool:
    """Whether a Job does this BatchJob's work: it owns it, or nobody does and it was made for this very run."""
    mine = owner(job)
    return mine.controls(work) or (mine.may_change(work) and run_of(work) == run_id(job))


def _diagnosis(stage: Stage | None, view: View) -> Diagnosis | None:
    known = () if stage is None else stage.pods
    active = [pod for pod in known if pod.active]
    lost = [one for pod in known if pod.may_run and (one := diagnosis.node_lost(pod, view))]
    creation = [str(event.get("message") or "") for event in view.events if event.get("reason") == "FailedCreate"]
    found = lost[0] if lost else diagnosis.creation_diagnosis(creation) if not active else None
    found = found or diagnosis.worst([pod for pod in active if not pod.ready], view)
    if found is None and not active and stage is not None:
        found = diagnosis.worst(stage.unreplaced[:1], view)
    return found
