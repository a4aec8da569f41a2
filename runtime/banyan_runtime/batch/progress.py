"""How far a run is: counters, rates, and the JSON of /progress."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from banyan_runtime.batch.records import Record, RequestCounts, Usage
from banyan_runtime.batch.sender import Load

Phase = Literal["starting", "planning", "running", "publishing", "done"]
RATE_WINDOW_S: Final = 30.0

_Sample = tuple[float, int, int]  # seconds, lines, tokens


class Shards(msgspec.Struct, frozen=True):
    """Of the whole run, but `running` of this worker."""

    total: int = 0
    completed: int = 0
    running: int = 0


class Report(msgspec.Struct, frozen=True, rename="camel"):
    """GET /progress."""

    phase: Phase
    total: int | None
    completed: int
    failed: int
    percent: int  # 100 only once the results are published
    tokens_per_second: float
    requests_per_second: float
    eta_seconds: int | None
    usage: Usage
    shards: Shards
    fenced: bool
    waiting_for: str


@dataclass(slots=True)
class Progress:
    """The counters of one run: lines, usage and shards of all its workers as far as this one knows, rates of its own work.
    `now` is always given, in seconds of one monotonic clock.
    """

    phase: Phase = "starting"
    total: int | None = None
    completed: int = 0
    failed: int = 0
    ask_load: Callable[[], Load] = Load  # the sender's
    shards: Shards = field(default_factory=Shards)
    workers: int = 1
    fenced: bool = True
    waiting_for_storage: str = ""  # while it is away
    waiting_for_others: str = ""  # while they have all shards that are left
    done_here: int = 0
    tokens_here: int = 0
    usage: Usage = field(default_factory=Usage)
    storage_errors: Counter[str] = field(default_factory=Counter)  # by operation
    storage_bytes: Counter[str] = field(default_factory=Counter)  # by direction: read, write
    _samples: deque[_Sample] = field(default_factory=deque)
    _first: _Sample = (0.0, 0, 0)  # when the first line was sent
    _last: _Sample | None = None  # when the last line had its outcome

    @property
    def load(self) -> Load:
        return self.ask_load()

    @property
    def in_flight(self) -> int:
        return self.load.in_flight

    @property
    def limit(self) -> int:
        return self.load.limit

    @property
    def retries(self) -> int:
        return self.load.retries

    @property
    def counts(self) -> RequestCounts:
        return RequestCounts(self.completed + self.failed if self.total is None else self.total, self.completed, self.failed)

    def did(self, record: Record) -> None:
        """This worker finished a line. Tokens are those generated; for embeddings, which generate none, those that were read."""
        self.done_here += 1
        if record.usage is not None:
            self.tokens_here += record.usage.completion_tokens or record.usage.prompt_tokens

    def report(self, now: float) -> Report:
        done = self.completed + self.failed
        lines_per_s, tokens_per_s = self._rates(now)
        percent = 100 if self.phase == "done" else min(99, 100 * done // self.total) if self.total else 0
        eta = None
        if self.total is not None and done == self.total:
            eta = 0
        elif self.total is not None and lines_per_s > 0:
            eta = int((self.total - done) / lines_per_s) + 1
        return Report(
            self.phase,
            self.total,
            self.completed,
            self.failed,
            percent,
            round(tokens_per_s, 1),
            round(lines_per_s, 2),
            eta,
            self.usage,
            self.shards,
            self.fenced,
            self._waiting_for,
        )

    @property
    def _waiting_for(self) -> str:
        """What keeps the run from going on; the server only as long as there are lines for it."""
        return self.waiting_for_storage or (self.waiting_for_others or self.load.waiting_for if self.phase == "running" else "")

    def begin(self, total: int, now: float) -> None:
        """The lines are counted and the first is about to be sent."""
        self.total = total
        self.phase = "running"
        self._first = (now, 0, 0)
        self._samples.append(self._first)

    def end(self, now: float) -> None:
        """Every line has its outcome."""
        self.phase = "publishing"
        self._last = self._sample(now)

    def _sample(self, now: float) -> _Sample:
        return now, self.done_here, self.tokens_here

    def _rates(self, now: float) -> tuple[float, float]:
        """Lines and tokens per second over the last RATE_WINDOW_S, at one sample a second at most; in the end, over all."""
        if self._last is None:
            until = self._sample(now)
            if self._samples and now - self._samples[-1][0] >= 1.0:
                self._samples.append(until)
            while len(self._samples) > 1 and now - self._samples[0][0] > RATE_WINDOW_S:
                self._samples.popleft()
            then = self._samples[0] if self._samples else until
        else:
            then, until = self._first, self._last
        elapsed = until[0] - then[0]
        return ((until[1] - then[1]) / elapsed, (until[2] - then[2]) / elapsed) if elapsed > 0 else (0.0, 0.0)
