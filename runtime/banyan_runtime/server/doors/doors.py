"""The doors of a server as its first process sees them: started, given connections, asked, started again when they end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Final

from banyan_runtime.child import Child
from banyan_runtime.errors import UnavailableError
from banyan_runtime.exposition import Ledger
from banyan_runtime.front.loop_link import LoopLink
from banyan_runtime.front.metrics import Elsewhere
from banyan_runtime.front.state import ServerState
from banyan_runtime.link import Link
from banyan_runtime.server.doors import messages
from banyan_runtime.server.doors.early import Early
from banyan_runtime.server.doors.paths import Paths
from banyan_runtime.server.front import Front

log = logging.getLogger("banyan")

OPEN_S: Final = 60.0  # for a door to be there; until then the server does without it
TELL_S: Final = 0.1  # for a report that somebody waits for
LOOK_EVERY_S: Final = 2.0
HUNG_S: Final = 60.0  # without a report
END_S: Final = 5.0
UNTAKEN: Final = 64  # messages that a door may not have taken: beyond them it is given nothing
BACKOFF_S: Final = (0.5, 30.0)  # the first and the longest pause between two lives
STEADY_S: Final = 60.0  # a door that lived for so long begins its back-off anew


@dataclass(eq=False)
class _Door:
    """One life of a door."""

    number: int
    process: Child
    link: LoopLink
    open: bool = False
    reported: messages.Report | None = None
    reported_at: float = field(default_factory=time.monotonic)  # or when it began
    given: int = 0  # connections since the newest report
    hung: bool = False

    @property
    def connections(self) -> int:
        """About how many it has."""
        return self.given + (0 if self.reported is None else self.reported.connections)


class Doors:
    """They take the connections whose requests any process of the front may answer (`Http.elsewhere`). While there is none, the first
    process answers everything itself."""

    def __init__(self, front: Front, early: list[Early], fork: Callable[[int], None]) -> None:
        """`fork`: passes a worker's end of its socket on to the process that forks."""
        self._front = front
        self._early = early
        self._fork = fork
        self._paths = Paths(front.context.config)
        self._doors: list[_Door] = []
        self._supervising: list[asyncio.Task[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._opening: Callable[[int], messages.Open] | None = None
        self._ledger: Ledger = front.metrics.ledger
        self._numbers = 0
        self._tells = 0
        self._news = asyncio.Event()  # a door has opened, reported or ended
        self._leaving = False
        if early:
            front.metrics.elsewhere = self._elsewhere
            front.metrics.before = self.ask
            front.context.live.on_abort = lambda request_id, by: self._say(messages.Abort(request_id, by))
            front.context.sequences_elsewhere = self._sequences

    # --- their lives ---

    async def open(self, opening: Callable[[int], messages.Open]) -> None:
        """Start them; returns when they are there, or have had OPEN_S. `opening`: what a door of this number is told first."""
        if not self._early:
            return
        self._opening = opening
        self._supervising = [asyncio.create_task(self._supervise(early)) for early in self._early]
        self._supervising.append(asyncio.create_task(self._look_after()))
        wanted, self._early = len(self._early), []
        self._front.http.elsewhere = self
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPEN_S):
                while len(self._open) < wanted:
                    self._news.clear()
                    await self._news.wait()
        log.info("%d processes take connections", len(self._open))

    async def _supervise(self, early: Early | None) -> None:
        """One door after another."""
        backoff, longest = BACKOFF_S
        while not self._leaving:
            began = time.monotonic()
            try:
                early, process = None, early or Early()
                await self._live(process)
            except (OSError, UnavailableError) as error:
                log.error("a process that takes connections cannot be started: %s", error)
            if self._leaving:
                return
            if time.monotonic() - began > STEADY_S:
                backoff = BACKOFF_S[0]
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, longest)

    async def _live(self, early: Early) -> None:
        """One life. Raises OSError where it cannot begin."""
        assert self._opening is not None
        self._numbers += 1
        door = _Door(self._numbers, early.process, LoopLink(Link(early.control)))
        self._doors.append(door)
        try:
            connection = self._front.client.join(door.number)
            if connection is None:
                raise OSError("no file descriptor is left")
            door.link.listen(lambda: self._heard(door))
            door.link.send(messages.encode(self._opening(door.number)), connection.detach())
            door.link.send(messages.encode(self._state()))
            code = await early.process.wait()
            if not self._leaving:
                log.error(
                    "a process that takes connections ended with exit code %d, and its clients are cut off; it is started again", code
                )
        finally:
            early.process.kill()
            self._heard(door)
            self._doors.remove(door)
            door.link.close()
            self._news.set()

    async def _look_after(self) -> None:
        """Ask each door how it is, and end one that says nothing."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self._tell()
            for door in self._open:
                silent = time.monotonic() - door.reported_at
                if silent > HUNG_S and not door.hung:
                    door.hung = True
                    log.error("a process that takes connections has said nothing for %.0f s and is ended", silent)
                    door.process.signal(signal.SIGUSR2)
                elif door.hung:
                    door.process.kill()

    # --- connections: server.http.Elsewhere ---

    def answers(self, begun: bytes) -> bool:
        return not self._leaving and self._paths.spread(begun)

    def may_stay(self, method: bytes, url: bytes) -> bool:
        return True

    def take(self, connection: int, begun: bytes) -> bool:
        door = min((each for each in self._open if each.link.unsent <= UNTAKEN), key=lambda each: each.connections, default=None)
        if door is None:
            return False
        door.given += 1
        door.link.send(messages.encode(messages.Take(begun)), connection)
        return True

    # --- what they are told and asked ---

    def tell_state(self) -> None:
        """The server's state has changed."""
        self._say(self._state())

    def fail_open(self, code: str, message: str) -> None:
        """As `EngineClient.fail_open`."""
        self._say(messages.FailOpen(code, message))

    def died(self, message: str) -> None:
        """As `EngineClient.died`."""
        self._say(messages.Died(message))

    def drain(self) -> None:
        """They take nothing more, and each answer is the last of its connection."""
        self._leaving = True
        self._say(messages.Drain())

    async def ask(self) -> None:
        """Hear how each is and what it has counted, as far as it answers at once."""
        if not self._open:
            return
        asked = self._tell()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TELL_S):
                while any(door.reported is None or door.reported.seq < asked for door in self._open):
                    self._news.clear()
                    await self._news.wait()

    @property
    def sought(self) -> bool:
        """As `Http.sought`."""
        return any(report.sought for report in self._reports)

    @property
    def under_way(self) -> int:
        """Requests that are not over, by the newest reports."""
        return sum(report.under_way for report in self._reports)

    def end(self) -> None:
        """They may give the answers that are under way, and go."""
        self._leaving = True
        for early in self._early:
            early.process.kill()
        self._say(messages.End())

    async def close(self) -> None:
        """Wait for them to have gone, END_S at most."""
        lives = self._supervising[:-1]
        if lives:
            await asyncio.wait(lives, timeout=END_S)
        for door in self._doors:
            door.process.kill()
        for task in self._supervising:
            task.cancel()

    # --- the links ---

    @property
    def _open(self) -> list[_Door]:
        return [door for door in self._doors if door.open]

    @property
    def _reports(self) -> Iterator[messages.Report]:
        return (door.reported for door in self._doors if door.reported is not None)

    def _say(self, message: messages.ToDoor) -> None:
        raw = messages.encode(message)
        for door in self._doors:
            door.link.send(raw)

    def _state(self) -> messages.State:
        return state_of(self._front.state)

    def _tell(self) -> int:
        self._tells += 1
        self._say(messages.Tell(self._tells))
        return self._tells

    def _heard(self, door: _Door) -> None:
        for raw in door.link.received():
            match messages.from_door.decode(raw):
                case messages.Opened():
                    door.open = True
                    self._news.set()
                case messages.Back(begun=begun):
                    door.given -= 1
                    self._spawn(self._front.http.take(socket.socket(fileno=door.link.descriptor()), begun))
                case messages.Fork():
                    self._fork(door.link.descriptor())
                case messages.Report() as report:
                    self._ledger.add(report.counted)
                    door.reported, door.reported_at, door.given = report, time.monotonic(), 0
                    self._news.set()
        if door.link.ended:
            door.link.leave()
            door.process.kill()  # it can neither be told anything nor tell

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _sequences(self) -> int:
        await self.ask()
        return sum(report.sequences for report in self._reports)

    def _elsewhere(self) -> Elsewhere:
        each = [report.own for report in self._reports]
        return Elsewhere(
            in_flight=sum(own.in_flight for own in each),
            cpu_seconds=sum(own.cpu_seconds for own in each),
            resident_bytes=sum(own.resident_bytes for own in each),
            log_dropped=sum(own.log_dropped for own in each),
        )


def state_of(state: ServerState) -> messages.State:
    return messages.State(state.phase, state.leaving, state.hung, state.impaired, state.context_length)
