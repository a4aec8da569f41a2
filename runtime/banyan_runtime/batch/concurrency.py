"""How many requests are in flight, and which line is sent next."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from dataclasses import dataclass, field
from typing import Final

from banyan_runtime.batch.retries import Tries

START: Final = 32  # requests in flight for each address at the start
_FAST: Final = 0.25  # growth a round of answers until the server is first busy
_SLOW: Final = 0.05
_DECREASE: Final = 0.7
OPENS_AFTER: Final = 5  # failures in a row


class Concurrency:
    """Limit of requests in flight: additive increase while the limit is reached, multiplicative decrease when the server is busy."""

    def __init__(self, *, maximum: int) -> None:
        self._maximum = maximum
        self._limit = float(min(START, maximum))
        self._growth = _FAST
        self.epoch = 0  # decreases so far; a request is sent in one epoch

    @property
    def limit(self) -> int:
        return int(self._limit)

    def passed(self) -> None:
        """Grow: a request was answered while the limit was reached."""
        self._limit = min(self._maximum, self._limit + self._growth)

    def busy(self, epoch: int) -> None:
        """Shrink, once for all the requests that were sent in one epoch."""
        if epoch == self.epoch:
            self.epoch += 1
            self._growth = _SLOW
            self._limit = max(1.0, self._limit * _DECREASE)

    def joined(self, addresses: int) -> None:
        """Make room for more addresses."""
        self._limit = min(self._maximum, self._limit + START * addresses)


class Breaker:
    """Circuit breaker: open after failures in a row; then one request at a time probes the server. `now`: monotonic seconds."""

    def __init__(self, first_s: float = 1.0, longest_s: float = 30.0) -> None:
        self._first_s = first_s  # between probes of a server that says that it is ready
        self._longest_s = longest_s
        self._interval_s = 0.0
        self._failures = 0
        self.is_open = False
        self.probe_at = 0.0

    def failed(self, now: float, *, asked_s: float = 0.0) -> None:
        """Count a failure of a request that was no probe. `asked_s`: the server's Retry-After."""
        self._failures += 1
        if not self.is_open and self._failures >= OPENS_AFTER:
            self.is_open = True
            self._wait(now, self._first_s, asked_s)

    def probe_failed(self, now: float, *, ready: bool, asked_s: float = 0.0) -> None:
        self._wait(now, self._first_s if ready else min(self._longest_s, 2 * self._interval_s), asked_s)

    def close(self) -> None:
        self.is_open = False
        self._failures = 0

    def _wait(self, now: float, interval_s: float, asked_s: float) -> None:
        self._interval_s = interval_s
        self.probe_at = now + max(interval_s, asked_s)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """Permission to send one request."""

    epoch: int
    probe: bool  # the only request that is sent while the breaker is open
    began: float


@dataclass(slots=True, order=True)
class _Waiting:
    order: int
    number: int
    tries: Tries = field(compare=False)
    turn: asyncio.Future[Turn] = field(compare=False)


class Limiter:
    """Queue of lines before the server. A turn is handed back with `leave`, after what came of it was told."""

    def __init__(self, concurrency: Concurrency, breaker: Breaker) -> None:
        self.concurrency = concurrency
        self.breaker = breaker
        self._turns: dict[Turn, None] = {}  # oldest first
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()
        self._probe: Turn | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._shut = False

    @property
    def in_flight(self) -> int:
        return len(self._turns)

    @property
    def oldest(self) -> float:
        """When the longest running request was sent; infinity if there is none."""
        return next((turn.began for turn in self._turns), float("inf"))

    async def enter(self, order: int, tries: Tries) -> Turn:
        """Wait for a turn; lines of lower `order` come first. Once the limiter is shut, whoever waits is cancelled."""
        if self._shut:
            raise asyncio.CancelledError
        waiting = _Waiting(order, next(self._numbers), tries, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting, waiting)
        self._admit()
        try:
            return await waiting.turn
        except asyncio.CancelledError:
            if waiting.turn.done() and not waiting.turn.cancelled():
                self.leave(waiting.turn.result())
            raise

    def leave(self, turn: Turn) -> None:
        del self._turns[turn]
        self._ends_probe(turn)
        self._admit()

    def passed(self, turn: Turn) -> None:
        """The server answered."""
        if len(self._turns) >= self.concurrency.limit:
            self.concurrency.passed()
        if self._ends_probe(turn) and any(waiting.tries.suspect and not waiting.turn.done() for waiting in self._waiting):
            self.breaker.probe_at = time.monotonic()  # suspects are sent alone, one after the other
        else:
            self.breaker.close()

    def busy(self, turn: Turn) -> None:
        """The server had no room: it is there."""
        self.concurrency.busy(turn.epoch)
        if self._ends_probe(turn):
            self.breaker.close()

    def failed(self, turn: Turn, *, ready: bool, asked_s: float = 0.0) -> None:
        """The server may be away. `ready`: what it said of itself before a probe."""
        if self._ends_probe(turn):
            self.breaker.probe_failed(time.monotonic(), ready=ready, asked_s=asked_s)
        else:
            self.breaker.failed(time.monotonic(), asked_s=asked_s)

    def release(self, turn: Turn, *, ready: bool) -> None:
        """A probe takes long: send the other lines if the server is ready, else another probe."""
        if self._ends_probe(turn):
            if ready:
                self.breaker.close()
            else:
                self.breaker.probe_failed(time.monotonic(), ready=False)
            self._admit()

    def shut(self) -> None:
        """Give no more turns."""
        self._shut = True
        for waiting in self._waiting:
            waiting.turn.cancel()
        self._waiting.clear()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _ends_probe(self, turn: Turn) -> bool:
        if turn is not self._probe:
            return False
        self._probe = None
        return True

    def _begin(self, waiting: _Waiting, *, probe: bool) -> None:
        turn = Turn(self.concurrency.epoch, probe, time.monotonic())
        self._turns[turn] = None
        if probe:
            self._probe = turn
        waiting.turn.set_result(turn)

    def _admit(self) -> None:
        """Give turns to the lines that may be sent now."""
        self.close()
        while self._waiting and (self._waiting[0].turn.done() or self._is_free()):
            waiting = heapq.heappop(self._waiting)
            if not waiting.turn.done():
                self._begin(waiting, probe=False)
        if self._waiting and self.breaker.is_open and self._probe is None:
            wait_s = self.breaker.probe_at - time.monotonic()
            if wait_s > 0:
                self._timer = asyncio.get_running_loop().call_later(wait_s, self._admit)
            else:
                self._begin(min((one for one in self._waiting if not one.turn.done()), key=_as_probe), probe=True)

    def _is_free(self) -> bool:
        return not self.breaker.is_open and len(self._turns) < self.concurrency.limit


def _as_probe(waiting: _Waiting) -> tuple[bool, int, int]:
    """Suspects first, then the line with the fewest tries: no line bears a whole outage."""
    return not waiting.tries.suspect, waiting.tries.total, waiting.order
