"""How many requests may be in flight, from what came of those that were."""

from __future__ import annotations

from typing import Final

START: Final = 32  # for each endpoint
_FAST: Final = 0.25  # growth a round until the server first refuses
_SLOW: Final = 0.05
_SPAN: Final = 1.25  # throughputs are compared over such a growth: over less, chance hides the difference
_GAIN: Final = 0.3  # of a growth must be seen in the throughput, else the server is full: more would only wait in its queue
_HELD_ROUNDS: Final = 8  # then more is tried again: the server may have grown


class Concurrency:
    """Grows while throughput grows, shrinks to 70 % when the server refuses for want of room.

    One decrease a cohort: refusals of requests sent before the last decrease are old news. No clock: `now` is in seconds.
    """

    def __init__(self, *, maximum: int, start: int = START) -> None:
        self.maximum = maximum
        self.limit = min(start, maximum)
        self._epoch = 0
        self._growth = _FAST
        self._anchor: tuple[int, float] | None = None  # a limit, and the work a second that was seen with it
        self._held = 0  # rounds to stay as it is
        self._settled = True  # false: the answers that come now belong to requests of the last limit
        self._answers = 0
        self._work = 0.0
        self._round_began: float | None = None

    @property
    def epoch(self) -> int:
        """Note it when a request is sent, and hand it back with the outcome."""
        return self._epoch

    def passed(self, now: float, *, work: float = 1.0, full: bool = True) -> None:
        """A request was answered. `work`: its tokens, or 1; `full`: as many were in flight as may be."""
        if not full:
            self._round_began = None  # too few lines to tell anything of the server
            return
        if self._round_began is None:
            self._begin_round(now)
            return
        self._answers += 1
        self._work += work
        if self._answers >= self.limit and now > self._round_began:
            rate = self._work / (now - self._round_began)
            self._begin_round(now)
            if self._settled:
                self._end_round(rate)
            self._settled = True

    def refused(self, epoch: int) -> None:
        """The server had no room for a request that was sent in `epoch`."""
        if epoch == self._epoch:
            self._epoch += 1
            self._growth = _SLOW
            self._restart(max(1, int(self.limit * 0.7)))

    def joined(self, endpoints: int) -> None:
        """So many more endpoints serve now."""
        self._restart(min(self.maximum, self.limit + START * endpoints))

    def _begin_round(self, now: float) -> None:
        self._round_began, self._answers, self._work = now, 0, 0.0

    def _end_round(self, rate: float) -> None:
        if self._held:
            self._held -= 1
            self._anchor = self.limit, rate
            return
        if self._anchor is None:
            self._anchor = self.limit, rate
        before, then = self._anchor
        grown = self.limit / before
        if grown >= _SPAN:
            if rate < then * (1 + _GAIN * (grown - 1)):
                self.limit, self._held, self._settled = before, _HELD_ROUNDS, False
                return
            self._anchor = self.limit, rate
        self.limit = min(self.maximum, self.limit + max(1, round(self.limit * self._growth)))
        self._settled = False

    def _restart(self, limit: int) -> None:
        self.limit = limit
        self._anchor = self._round_began = None
        self._held = 0
