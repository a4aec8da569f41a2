"""What a batch run decides, without I/O, clock or chance: the window of lines under way and the order of what is written,
whether a line is tried again and when, how many requests are in flight, and which objects may be written.

A run over one shard and a run over the whole file are the same here: ordinals count from 0 in whatever is being run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from banyan_runtime.batch.records import ERRORS, MANIFEST, OUTPUT, Record
from banyan_runtime.storage.store import ObjectInfo

RUN_METADATA: Final = "banyan-run"


# --- order ---


class Window:
    """Lines between the oldest that is not done and the newest that was begun; gives records out in input order.

    Memory is bounded by `max_lines` and `max_bytes`: a slow line holds back new ones once the window behind it is full,
    until it is done or out of time.
    """

    def __init__(self, *, max_lines: int, max_bytes: int) -> None:
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self._next = 0  # ordinal of the next line begun
        self._watermark = 0  # all lines below are written
        self._sizes: dict[int, int] = {}  # bytes that each line under way holds
        self._bytes = 0
        self._done: dict[int, Record] = {}

    @property
    def watermark(self) -> int:
        """Every line below this ordinal was given out by `take`."""
        return self._watermark

    @property
    def open(self) -> int:
        """Lines begun and not yet given out."""
        return self._next - self._watermark

    @property
    def has_room(self) -> bool:
        return self.open == 0 or (self.open < self._max_lines and self._bytes < self._max_bytes)

    def begin(self, size: int) -> int:
        """Start the next line, which holds `size` bytes while it is under way; returns its ordinal."""
        ordinal = self._next
        self._next += 1
        self._resize(ordinal, size)
        return ordinal

    def finish(self, ordinal: int, record: Record) -> None:
        """Note the outcome of a line. A line has one outcome."""
        assert self._watermark <= ordinal < self._next and ordinal not in self._done, ordinal
        self._done[ordinal] = record
        self._resize(ordinal, len(record.line))

    def take(self) -> list[Record]:
        """The records that are next in input order, each exactly once."""
        ready = []
        while (record := self._done.pop(self._watermark, None)) is not None:
            ready.append(record)
            self._resize(self._watermark, 0)
            self._watermark += 1
        return ready

    def _resize(self, ordinal: int, size: int) -> None:
        self._bytes += size - self._sizes.pop(ordinal, 0)
        if size:
            self._sizes[ordinal] = size


# --- retries ---


class Trouble(Enum):
    """What one try met, if not an answer that ends the line."""

    UNREACHABLE = "unreachable"  # no connection: says nothing about the line
    BUSY = "busy"  # 429, 503: the server wants less
    BROKEN = "broken"  # connected, then cut, timed out, or answered nonsense
    FAILED = "failed"  # 5xx and the other statuses worth another try


RETRIED: Final = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 507, 508, 529})
BUSY: Final = frozenset({429, 503})
MISCONFIGURED: Final = frozenset({401, 403, 404})
MISCONFIGURED_LINES: Final = 8  # so many first lines, all refused this way: the job is wrong, not its lines
POISON_CUTS: Final = 3


def trouble_of(status: int) -> Trouble | None:
    """Whether an answer with this status is worth another try."""
    if status in BUSY:
        return Trouble.BUSY
    return Trouble.FAILED if status in RETRIED else None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    max_attempts: int = 5  # counted tries of a line
    max_backoff_s: float = 60.0
    line_budget_s: float = 3600.0  # a line that the server keeps refusing gives up after this
    silence_s: float = 600.0  # the server counts as gone after this without one success


@dataclass(slots=True)
class Tries:
    """What a line went through. Times are seconds on the run's monotonic clock."""

    started: float
    counted: int = 0
    total: int = 0
    cuts: int = 0
    others_seen: int = 0  # successes of the whole run at this line's last try


@dataclass(frozen=True, slots=True)
class Again:
    after_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    reason: str


@dataclass(frozen=True, slots=True)
class ServerLost:
    """Not the line's fault: nothing has succeeded for too long."""

    silent_s: float


def next_try(
    tries: Tries,
    trouble: Trouble,
    policy: RetryPolicy,
    *,
    now: float,
    successes: int,
    last_success: float,
    retry_after: float | None,
    jitter: float,
) -> Again | GiveUp | ServerLost:
    """Decide after a try that met `trouble`; `tries` is brought up to date.

    `successes` counts the answered lines of the run, `last_success` is when the last of them ended (or the run began),
    `retry_after` is what the server asked for, in seconds, and `jitter` is drawn from [0, 1).
    """
    others_pass = successes > tries.others_seen
    tries.others_seen = successes
    tries.total += 1
    if trouble in (Trouble.BROKEN, Trouble.FAILED):
        tries.counted += 1
    if trouble is Trouble.BROKEN and others_pass:
        tries.cuts += 1
        if tries.cuts >= POISON_CUTS:
            return GiveUp(f"the connection broke {tries.cuts} times on this line while other lines passed")
    if tries.counted >= policy.max_attempts:
        return GiveUp(f"gave up after {tries.counted} attempts")
    silent = now - last_success
    if trouble in (Trouble.UNREACHABLE, Trouble.BUSY) and silent > policy.silence_s:
        return ServerLost(silent)
    if others_pass and now - tries.started > policy.line_budget_s:
        return GiveUp(f"the server refused this line for {now - tries.started:.0f} s")
    backoff = jitter * min(policy.max_backoff_s, 2.0 ** min(tries.total, 30))
    return Again(max(backoff, min(retry_after or 0.0, policy.max_backoff_s)))


# --- concurrency ---


class Concurrency:
    """How many requests may be in flight: grows by 5 % a round of answers, shrinks to 70 % when the server is busy.

    One decrease per cohort: refusals of requests sent before the last decrease are old news.
    """

    def __init__(self, *, maximum: int, start: int = 32) -> None:
        self.maximum = maximum
        self.limit = min(start, maximum)
        self._healthy = 0
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """Note it when a request is sent, and hand it back with the outcome."""
        return self._epoch

    def passed(self) -> None:
        self._healthy += 1
        if self._healthy >= self.limit:
            self._healthy = 0
            self.limit = min(self.maximum, self.limit + max(1, self.limit // 20))

    def refused(self, epoch: int) -> None:
        if epoch == self._epoch:
            self._epoch += 1
            self._healthy = 0
            self.limit = max(1, int(self.limit * 0.7))


# --- publication ---


@dataclass(frozen=True, slots=True)
class Condition:
    """Under which condition a final object is written."""

    if_match: str | None = None
    if_none_match: bool = False


@dataclass(frozen=True, slots=True)
class Publish:
    """Go on, with these conditions by object name."""

    conditions: Mapping[str, Condition]


@dataclass(frozen=True, slots=True)
class Published:
    """This run's results are there already."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Another run's object is in the way."""

    name: str


def plan_publication(
    found: Mapping[str, ObjectInfo | None], *, run: str, published_run: str | None, overwrite: bool
) -> Publish | Published | Refuse:
    """Decide by what lies at the output: `found` by object name, `published_run` from the manifest there, if any.

    Results without a manifest that carry a run's mark are what a run left that died while publishing; they are replaced.
    """
    if published_run == run:
        return Published()
    for name in (MANIFEST, OUTPUT, ERRORS):
        info = found[name]
        abandoned = info is not None and found[MANIFEST] is None and RUN_METADATA in info.metadata
        if info is not None and not overwrite and not abandoned:
            return Refuse(name)
    return Publish({name: Condition(if_none_match=True) if info is None else Condition(if_match=info.tag) for name, info in found.items()})
