"""How far a batch is: what its workers and its merge say, put beside what was known before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from banyan_operator.api.status import RequestCounts, Shards, Usage
from banyan_operator.desired.batchjob import partial_of
from banyan_operator.observed import answers
from banyan_operator.observed.answers import Progress, finished
from banyan_operator.observed.course import ENDED_EARLY, PUBLISHED
from banyan_operator.observed.seen import Seen
from banyan_operator.times import seconds

HALF_LIFE_S: Final = 300.0
"""A rate that is five minutes old weighs half in the mean from which the end is foretold."""
TELLING_REQUESTS: Final = 50  # nothing is foretold from fewer
TELLING_S: Final = 60.0  # or before so long after the start


@dataclass(frozen=True, slots=True)
class Counted:
    """Of the whole run."""

    requests: RequestCounts
    usage: Usage | None
    shards: Shards | None
    lost: bool  # all is done and published, and how many requests failed was never heard
    moved: bool  # more is done than was known before
    requests_per_hour: int | None
    eta_s: float | None

    @property
    def done(self) -> int:
        return finished(self.requests)


def count(seen: Seen, progress: Progress | None, prior: Mapping[str, Any], now: float) -> Counted:
    """`progress`: of the workers that answered while lines are worked on. `prior`: the status as it was. `now`: unix seconds."""
    requests, usage = _requests(seen, progress, prior), _usage(seen, progress, prior)
    lost = _all_published_unheard(seen, now) and (requests.total is None or finished(requests) != requests.total)
    if lost:  # what was polled before the end is less than what was done, and would be taken for what came of it
        requests, usage = RequestCounts(total=requests.total), None
    before = answers.counts(prior.get("requestCounts")) or RequestCounts()
    moved = finished(requests) > finished(before)
    per_hour = mean_per_hour(progress, moved, prior, now)
    return Counted(
        requests=requests,
        usage=usage,
        shards=_shards(seen, progress, prior),
        lost=lost,
        moved=moved,
        requests_per_hour=per_hour,
        eta_s=seconds_left(requests, per_hour, prior, now) if progress is not None else None,
    )


def _final(seen: Seen) -> Mapping[str, Any]:
    """The last words of the merge: they count, whatever was said before. One that failed may have read nothing."""
    return seen.merge.words if seen.merge is not None and seen.merge.words.get("code") in PUBLISHED else {}


def _all_published_unheard(seen: Seen, now: float) -> bool:
    """All of the run is published, and what that came to will not be heard any more."""
    return seen.merge is not None and seen.merge.unheard and seen.merge.over(now) and partial_of(seen.merge.job) is None


def _requests(seen: Seen, progress: Progress | None, prior: Mapping[str, Any]) -> RequestCounts:
    if (final := answers.counts(_final(seen).get("requestCounts"))) is not None:
        return final
    said = [progress.counts if progress is not None else None, answers.counts(prior.get("requestCounts"))]
    if seen.work is not None:
        said += [answers.counts(words.get("requestCounts")) for words in seen.work.said]  # each knows of the whole run
    if seen.plan is not None:
        said.append(answers.counts(seen.plan.words.get("requestCounts")))
    known = [one for one in said if one is not None and one.total != 0]  # 0: who says so has not read the plan
    # of two that know of as many, the one that knows the total; what a worker had not saved when it ended is done once more
    return max(known, key=lambda one: (finished(one), one.total or 0), default=RequestCounts())


def _usage(seen: Seen, progress: Progress | None, prior: Mapping[str, Any]) -> Usage | None:
    if (final := answers.usage(_final(seen).get("usage"))) is not None:
        return final
    said = [progress.usage if progress is not None else None, answers.usage(prior.get("usage"))]
    if seen.work is not None:
        said += [answers.usage(words.get("usage")) for words in seen.work.said]
    return max((one for one in said if one is not None), key=lambda one: one.total_tokens or 0, default=None)


def _shards(seen: Seen, progress: Progress | None, prior: Mapping[str, Any]) -> Shards | None:
    told = answers.shards(prior.get("shards")) or Shards()
    now = (progress.shards if progress is not None else None) or Shards()
    planned = answers.whole(seen.plan.words.get("shards")) if seen.plan is not None else None
    total = next((one for one in (now.total, told.total, planned) if one), None)  # 0: who says so has not read the plan
    if total is None:
        return None
    done = max(now.completed or 0, told.completed or 0)
    worked = seen.work is not None and seen.work.ending is not None and seen.work.ending.succeeded
    over = worked or (seen.merge is not None and partial_of(seen.merge.job) is None)  # a merge of a part is made for what is not done
    over = over and not any(str(stage.words.get("code")) in ENDED_EARLY for stage in seen.stages)
    running = 0 if over or seen.merge is not None else now.running or 0
    return Shards(total=total, completed=total if over else done, running=running)


def mean_per_hour(progress: Progress | None, moved: bool, prior: Mapping[str, Any], now: float) -> int | None:
    """The mean, moved on where something was done; a rate that was measured a while ago stands until then."""
    before: int | None = prior.get("requestsPerHour")
    rate = progress.requests_per_second if progress is not None else None
    if not rate:
        return before
    if before is None:
        return round(rate * 3600)
    if not moved:
        return before
    elapsed_s = max(0.0, now - (seconds(prior.get("lastProgressTime")) or now))
    weight: float = 0.5 ** (elapsed_s / HALF_LIFE_S)
    return round(before * weight + rate * 3600 * (1 - weight))


def seconds_left(requests: RequestCounts, per_hour: int | None, prior: Mapping[str, Any], now: float) -> float | None:
    began = seconds(prior.get("startTime"))
    if not per_hour or requests.total is None or began is None:
        return None
    if finished(requests) < TELLING_REQUESTS or now - began < TELLING_S:
        return None
    return min(answers.MAX_ETA_S, max(0, requests.total - finished(requests)) / per_hour * 3600)


def so_many(count: int, noun: str) -> str:
    """'1 shard', '4 shards'."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
