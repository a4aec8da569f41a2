"""Who may send: as many requests at once as the concurrency allows, the oldest line first, and one alone while the server is away."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from dataclasses import dataclass, field

from banyan_runtime.batch.breaker import Breaker, State
from banyan_runtime.batch.concurrency import Concurrency
from banyan_runtime.batch.retries import Tries


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """The right to send one request."""

    epoch: int  # of the concurrency
    probe: bool  # the circuit is open, and this is the one line that is sent
    began: float


@dataclass(slots=True, order=True)
class _Waiting:
    order: int
    number: int
    tries: Tries = field(compare=False)
    turn: asyncio.Future[Turn] = field(compare=False)


class Gate:
    """Gives turns. Whoever has one hands it back with `leave`, having told what came of it."""

    def __init__(self, concurrency: Concurrency, breaker: Breaker) -> None:
        self.concurrency = concurrency
        self.breaker = breaker
        self._turns: dict[Turn, None] = {}  # in the order in which they began
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
        """When the longest running request was sent; infinity if none is."""
        return next((turn.began for turn in self._turns), float("inf"))

    async def enter(self, order: int, tries: Tries) -> Turn:
        """Wait for a turn; lines of lower `order` come first. Once it is shut, whoever waits is cancelled."""
        if self._shut:
            raise asyncio.CancelledError
        if self.breaker.state is State.CLOSED and len(self._turns) < self.concurrency.limit and not self._waiting:
            return self._begin(probe=False)
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
        if turn is self._probe:  # it was cancelled
            self._probe = None
            self.breaker.probe_lost()
        self._admit()

    def passed(self, turn: Turn, *, work: float = 1.0) -> None:
        """The server answered."""
        self.concurrency.passed(time.monotonic(), work=work, full=len(self._turns) >= self.concurrency.limit)
        if turn is self._probe and any(waiting.tries.suspect and not waiting.turn.done() for waiting in self._waiting):
            self._probe = None
            self.breaker.probe_again(time.monotonic())  # those that may have brought the server down come first, one by one
            return
        self._probe = None
        self.breaker.passed()

    def refused(self, turn: Turn) -> None:
        """The server had no room: it is there."""
        self.concurrency.refused(turn.epoch)
        if turn is self._probe:
            self._probe = None
            self.breaker.passed()

    def troubled(self, turn: Turn, *, asked_s: float = 0.0) -> None:
        """The server may be away."""
        probe = turn is self._probe
        self._probe = None if probe else self._probe
        self.breaker.troubled(time.monotonic(), asked_s=asked_s, probe=probe)

    def trust(self, turn: Turn, *, well: bool) -> None:
        """The probe runs and runs. If the server says that it is well, the others may go too; else another line shall try."""
        if turn is self._probe:
            self._probe = None
            if well:
                self.breaker.passed()
            else:
                self.breaker.troubled(time.monotonic(), probe=True)
            self._admit()

    def healthy(self) -> None:
        """The server says that it is well."""
        self.breaker.healthy(time.monotonic())
        self._admit()

    def served(self) -> None:
        """The server answered what had no turn."""
        self.breaker.passed()
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

    def _begin(self, *, probe: bool) -> Turn:
        turn = Turn(self.concurrency.epoch, probe, time.monotonic())
        self._turns[turn] = None
        if probe:
            self._probe = turn
        return turn

    def _admit(self) -> None:
        """Give turns to those that may have one now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting and self._waiting[0].turn.done():
            heapq.heappop(self._waiting)
        if self.breaker.state is State.CLOSED:
            while self._waiting and len(self._turns) < self.concurrency.limit:
                waiting = heapq.heappop(self._waiting)
                if not waiting.turn.done():
                    waiting.turn.set_result(self._begin(probe=False))
        elif self.breaker.state is State.OPEN and self._waiting:
            now = time.monotonic()
            if not self.breaker.probe(now):
                self._timer = asyncio.get_running_loop().call_later(self.breaker.wait_s(now), self._admit)
                return
            chosen = min((one for one in self._waiting if not one.turn.done()), key=_as_probe)
            chosen.turn.set_result(self._begin(probe=True))


def _as_probe(waiting: _Waiting) -> tuple[bool, int, int]:
    """Suspects first, then who was tried least, so that no line has to bear a whole outage."""
    return not waiting.tries.suspect, waiting.tries.total, waiting.order
