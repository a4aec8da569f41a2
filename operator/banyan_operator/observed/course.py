"""What is to become of a BatchJob: which of its Jobs are wanted now, and whether it is over.

    plan → work → merge

Each is a Job that is made when the one before it is over, and none is ever unmade: a merge that exists, with the reason in its
arguments why it publishes what is not done, is what was decided. So this follows from what is seen alone, whoever looks. A Job that
was seen to end has ended, whoever has removed it since; one that went before is made again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from banyan_operator.api import BatchJob
from banyan_operator.api.status import MADE, BatchPhase, MadeJobs, RequestCounts
from banyan_operator.desired.batchjob import Because, Order, partial_of
from banyan_operator.desired.batchpod import CONTAINER, PHASES, Partial, Phase
from banyan_operator.kube.objects import condition, uid_of
from banyan_operator.observed import answers, diagnosis
from banyan_operator.observed.conditions import Finding, no, yes
from banyan_operator.observed.diagnosis import View, off
from banyan_operator.observed.ending import Ending
from banyan_operator.observed.pods import Container, End, Pod
from banyan_operator.observed.seen import Seen, Stage

REFUSAL_CODES: Final = (64, 65, 77, 78)
"""The plan, or the work before any request, found that this cannot be done."""
PUBLISHED: Final = ("succeeded", "cancelled", "expired", "failed", "too_many_errors", "all_lines_failed")
"""Codes of a merge that has published."""
ENDED_EARLY: Final = {
    "cancelled": "was cancelled",
    "expired": "had expired",
    "failed": "had failed",
    "too_many_errors": "had failed with too many errors",
}
"""Of these, those of a run that was published before all of it was done, and how it was."""
UNREPORTED: Final = "The report of the worker's pod was never seen: counts are as last known."
UNHEARD: Final = "What the run said at its end was lost: manifest.json, beside the output, has its counts."


@dataclass(frozen=True, slots=True)
class Stop:
    """Why the work is to end before it is done."""

    partial: Partial
    ended: BatchPhase
    message: str


CANCEL: Final = Stop("cancelled", "Cancelled", "spec.cancel is true.")
EXPIRE: Final = Stop("expired", "Expired", "spec.deadlineSeconds has passed.")


@dataclass(frozen=True, slots=True)
class Wish:
    """What the spec, the clock and the server ask for."""

    accepted: Finding
    hold: Finding | None  # why the work has to wait for its server
    stop: Stop | None  # why it is to end early


@dataclass(frozen=True, slots=True)
class Known:
    """What is remembered in the status beside what is seen."""

    planned: bool
    made: MadeJobs

    def spent(self, phase: Phase) -> bool:
        """Whether a Job that is not there was made as often as it may be."""
        return len(getattr(self.made, phase)) >= MADE


NOTHING_FAILS: Final = no("AsExpected", "Nothing fails.")


@dataclass(frozen=True, slots=True)
class Over:
    """How it is over: to be told once nothing is left to be written."""

    phase: BatchPhase
    complete: Finding
    failed: Finding = NOTHING_FAILS
    refusal: Finding | None = None  # the spec asks for what cannot be


@dataclass(frozen=True, slots=True)
class Course:
    orders: tuple[Order, ...] = ()
    over: Over | None = None
    waits: str = ""  # for what, where an order is held back by pods that may still run


def known(prior: Mapping[str, Any], seen: Seen, now: float) -> Known:
    """`prior`: the status as it was."""
    told = condition({"status": prior}, "Planned").get("status")
    done = seen.plan is not None and seen.plan.done(now)
    planned = told == "True" or done or seen.merge is not None or seen.work is not None
    return Known(planned, _made(prior, seen))


def _made(prior: Mapping[str, Any], seen: Seen) -> MadeJobs:
    """The uids that were told, and those that are seen."""
    told: Mapping[str, Any] = prior.get("jobs") or {}
    uids = {phase: list(told.get(phase) or ()) for phase in PHASES}
    for stage in seen.stages:
        if uid_of(stage.job) not in uids[stage.phase]:
            uids[stage.phase].append(uid_of(stage.job))
    return MadeJobs(**{phase: tuple(found[-MADE:]) for phase, found in uids.items()})


def course(job: BatchJob, seen: Seen, memory: Known, wish: Wish, now: float) -> Course:
    """The next step. `now`: unix seconds."""
    found = _step(job, seen, memory, wish, now)
    gone = {stage.phase for stage in seen.stages if stage.gone}
    return replace(found, orders=tuple(order for order in found.orders if order.phase not in gone))


def _step(job: BatchJob, seen: Seen, memory: Known, wish: Wish, now: float) -> Course:
    if seen.merge is not None:
        return _merging(job, seen, seen.merge, wish, now)
    if seen.work is not None:
        return _working(job, seen, seen.work, memory, wish, now)
    if memory.planned:
        return _planned(job, seen, memory, wish)
    return _planning(job, seen, seen.plan, memory, wish, now)


def _as_it_is(*stages: Stage | None) -> tuple[Order, ...]:
    return tuple(Order(stage.phase, suspend=not stage.begun) for stage in stages if stage is not None)


def _planning(job: BatchJob, seen: Seen, plan: Stage | None, memory: Known, wish: Wish, now: float) -> Course:
    waits = _left(seen)
    if plan is None:
        if wish.stop is not None:
            return Course(over=None if waits else ended(wish.stop, "Nothing had begun, so there are no results."), waits=waits)
        if memory.spent("plan"):
            return Course(over=failed(_deleted("plan")))
        return Course(orders=() if waits or job.spec.suspend else (Order("plan"),), waits=waits)
    if plan.ending is not None:
        over = failed(_why(plan.ending, "PlanFailed")) if plan.over(now) and not plan.ending.succeeded else None
        return Course(orders=_as_it_is(plan), over=over)
    if wish.stop is not None:
        rests = plan.at_rest(but_lost=True) and not waits
        over = ended(wish.stop, "The work was not planned yet, so there are no results.") if rests else None
        return Course(orders=(Order("plan", suspend=True),), over=over, waits=waits)
    return Course(orders=(Order("plan", suspend=job.spec.suspend),))


def _planned(job: BatchJob, seen: Seen, memory: Known, wish: Wish) -> Course:
    orders, waits = _as_it_is(seen.plan), _left(seen)
    if memory.spent("merge"):
        return Course(orders, over=None if waits else failed(_deleted("merge")), waits=waits)
    if waits:
        return Course(orders, waits=waits)
    if wish.stop is not None:
        return Course((*orders, Order("merge", partial=wish.stop.partial)))
    if job.spec.suspend:
        return Course(orders)
    if memory.spent("work"):
        return Course((*orders, Order("merge", partial="failed", because=_deleted("work"))))
    return Course(orders if wish.hold is not None else (*orders, Order("work")))


def _working(job: BatchJob, seen: Seen, work: Stage, memory: Known, wish: Wish, now: float) -> Course:
    before = _as_it_is(seen.plan)
    waits = _left(seen)
    if work.ending is None:
        suspend = job.spec.suspend or wish.hold is not None or wish.stop is not None
        orders = (*before, Order("work", suspend=suspend))
        if wish.stop is None or not work.at_rest(but_lost=seen.fenced):
            return Course(orders)
        merge = Order("merge", partial=wish.stop.partial)
    else:
        orders = (*before, *_as_it_is(work))
        if not work.over(now) or (job.spec.suspend and wish.stop is None):
            return Course(orders)
        merge = Order("merge")
        if not work.ending.succeeded:
            because = _why(work.ending, "WorkersFailed")
            merge = Order("merge", partial="too-many-errors" if because.reason == "TooManyErrors" else "failed", because=because)
    if waits:
        return Course(orders, waits=waits)
    if memory.spent("merge"):
        return Course(orders, over=failed(_deleted("merge")))
    return Course((*orders, merge))


def _merging(job: BatchJob, seen: Seen, merge: Stage, wish: Wish, now: float) -> Course:
    orders = [*_as_it_is(seen.plan), *([Order("work", suspend=True)] if seen.work is not None else [])]
    orders.append(Order("merge", suspend=job.spec.suspend and wish.stop is None))
    # a Job may have been made again before it was heard that the merge, which is gone, had ended: nothing is over while that one runs
    rests = all(stage.ending is not None or stage.at_rest(but_lost=seen.fenced) for stage in seen.stages)
    return Course(tuple(orders), over=_merged(merge) if rests and merge.over(now) else None)


# --- how it ends ---


def _merged(merge: Stage) -> Over:
    ending = merge.ending
    assert ending is not None
    return published(
        partial_of(merge.job),
        Because.of(merge.job),
        merge.words,
        functools.partial(_why, ending),
        succeeded=ending.succeeded,
        heard=_heard(merge),
        tail=_tail(ending),
    )


def published(
    partial: str | None,
    because: Because | None,
    report: Mapping[str, Any],
    why: Callable[[str], Because],
    *,
    succeeded: bool,
    heard: str = "",
    tail: str = "",
) -> Over:
    """How a batch is over whose merge has ended.

    `partial`, `because`: why the merge was to publish what is not done; `report`: the merge's termination message; `why`: why it failed,
    with the given reason where it tells none; `heard`, `tail`: what of its report is not known.
    """
    said = str(report.get("code") or "")
    if not succeeded and said not in PUBLISHED:
        failure = why("MergeFailed")
        if because is None:
            return failed(replace(failure, reason="MergeFailed", refusal=False))
        return failed(replace(because, message=f"{because.message} What was done could not be published either: {failure.message}"))
    match partial:
        case "cancelled":
            return ended(CANCEL, f"What was done by then is published.{heard}")
        case "expired":
            return ended(EXPIRE, f"What was done by then is published.{heard}")
        case None if said == "all_lines_failed":
            return failed(replace(why("AllLinesFailed"), refusal=False))
        case None if said in ENDED_EARLY:
            return _ended_early(said, answers.counts(report.get("requestCounts")), tail)
        case None:
            return Over("Succeeded", yes("Succeeded", f"All results are published.{heard}"))
    default = "TooManyErrors" if partial == "too-many-errors" else "WorkersFailed"
    because = because or Because(default, "The work failed.")
    return failed(replace(because, message=f"{because.message} What was done is published.{heard}"))


def ended(stop: Stop, results: str) -> Over:
    return Over(stop.ended, no(stop.ended, f"{stop.message} {results}"))


def _ended_early(said: str, counts: RequestCounts | None, tail: str) -> Over:
    """A run that was to be published as it is whole, but had been as it was: by a BatchJob whose run this one goes on with, or by a merge
    that went with its reason. What it lacks nobody runs any more."""
    lacking = "not all requests were run"
    if counts is not None and counts.total is not None:
        lacking = f"{max(0, counts.total - answers.finished(counts))} of {counts.total} requests were not run"
    message = f"The run {ENDED_EARLY[said]} before, and what was done by then is published: {lacking}."
    message += f" A new BatchJob with this output as its spec.input.failedOf runs those.{tail}"
    match said:
        case "cancelled":
            return Over("Cancelled", no("Cancelled", message))
        case "expired":
            return Over("Expired", no("Expired", message))
        case "too_many_errors":
            return failed(Because("TooManyErrors", message))
    return failed(Because("WorkersFailed", message))


def failed(because: Because) -> Over:
    refusal = no(because.reason, because.message) if because.refusal else None
    return Over("Failed", no(because.reason, because.message), yes(because.reason, because.message), refusal)


def _why(ending: Ending, default: str) -> Because:
    """Why a Job failed, in the words of the worker that decided it. `default`: the reason where these have none."""
    tail = _tail(ending)
    container = ending.pod.container(CONTAINER) if ending.pod is not None else None
    if ending.pod is None or container is None or ending.end is None:
        why = f" (pod {ending.pod.name}: {ending.pod.reason or ending.pod.disrupted or 'failed'})" if ending.pod is not None else ""
        return Because(default, f"{ending.message or 'The Job failed'}{why}. Make a new BatchJob to try again.{tail}")
    return crashed(ending.pod, container, ending.end, default, tail=tail)


def crashed(pod: Pod, container: Container, end: End, default: str, *, local: bool = False, tail: str = "") -> Because:
    """Why a worker ended as it did, for the last time. `default`: the reason where its message tells none."""
    found = diagnosis.crash(pod, container, end, View(now=0.0, startup_timeout_s=0.0, accelerators="", local=local, final=True))
    reason = default if found.reason == "CrashLoop" else found.reason
    return Because(reason, found.message + tail, refusal=end.exit_code in REFUSAL_CODES)


def _deleted(phase: Phase) -> Because:
    return Because(
        "InternalError",
        f"The Job that does the {phase} was deleted {MADE} times by somebody else. Find out who does that, then make a new BatchJob.",
    )


def _tail(ending: Ending) -> str:
    return "" if ending.reported else f" {UNREPORTED}"


def _heard(publisher: Stage) -> str:
    """Of one that has published: whether it is known what it came to. Counts that were polled are none that it ended with."""
    if not publisher.unheard:
        return _tail(publisher.ending) if publisher.ending is not None else ""
    return f" {UNHEARD}" if partial_of(publisher.job) is None else f" {UNHEARD} Those here are as last known."


def _left(seen: Seen) -> str:
    """Which pods of Jobs that are gone are waited for. What a fenced storage keeps out is not waited for on a node that is lost."""
    pods = [pod for pod in seen.left if pod.may_run and not (pod.lost and seen.fenced)]
    if not pods:
        return ""
    if pods[0].lost:
        return f"Waiting for pod {pods[0].name} to end on node {pods[0].node}, which does not answer. {off(pods[0].node)}."
    step = "" if pods[0].deleted else " Nobody ends it: delete the pod, or wait until its work is done."
    return f"Waiting for pod {pods[0].name} to end.{step}"
