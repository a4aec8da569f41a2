"""The doors of a server as its first process has them: started, given connections, asked, started again when they end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Final

from banyan_runtime.errors import UnavailableError
from banyan_runtime.front.loop_link import LoopLink
from banyan_runtime.front.metrics import Elsewhere
from banyan_runtime.front.prepare.fork_server import ForkServer
from banyan_runtime.link import Link
from banyan_runtime.server.doors import messages
from banyan_runtime.server.doors.claims import SharedClaims
from banyan_runtime.server.doors.early import Early
from banyan_runtime.server.doors.paths import Paths
from banyan_runtime.server.doors.seen import Seen, least_busy
from banyan_runtime.server.front import Front

log = logging.getLogger("banyan")

READY_S: Final = 20.0  # that a start waits for all doors to open; then it goes on with those that are there
TELL_S: Final = 0.1  # for a report that somebody waits for
HEARD_S: Final = 1.0  # for what somebody who is told that it is done relies on
LOOK_EVERY_S: Final = 2.0
END_S: Final = 3.0
BACKOFF_S: Final = (0.5, 30.0)  # the first and the longest pause between two lives
STEADY_S: Final = 60.0  # a door that lived for so long begins its back-off anew


class _Door(Seen):
    """One life of a door, with its process and the link to it."""

    def __init__(self, number: int, early: Early) -> None:
        super().__init__(time.monotonic())
        self.number = number
        self.process = early.process
        self.link = LoopLink(Link(early.control))
        self.heard = 0  # number of the newest `Heard` that it has answered


class Doors:
    """They take the connections whose requests any process of the front may answer (`http.Elsewhere`). While none takes any, the first
    process answers everything itself."""

    def __init__(self, front: Front, early: list[Early]) -> None:
        self._front = front
        self._early = early
        self._paths = Paths(front.context.config)
        self._doors: list[_Door] = []
        self._lives: list[asyncio.Task[None]] = []
        self._looking: asyncio.Task[None] | None = None
        self._coming: set[asyncio.Task[None]] = set()  # connections that come back
        self._opening: Callable[[int], messages.Open] | None = None
        self._zygote: ForkServer | None = None
        self._ledger = front.metrics.ledger
        self._gone = Elsewhere()  # what doors that have ended had counted of themselves
        self._numbers = 0
        self._tells = 0
        self._asked_heard = 0
        self._news = asyncio.Event()  # a door has opened, reported or ended
        self._draining = False
        self._end = asyncio.Event()
        if early:
            front.metrics.elsewhere = self._elsewhere
            front.metrics.before = self.ask
            front.context.live.on_abort = lambda ids, by: self._say(messages.Abort(None if ids is None else list(ids), by))
            front.context.live.heard = self._heard_all
            front.context.sequences_elsewhere = self._sequences
            self._ids = SharedClaims.new()
            front.context.live.claims = SharedClaims(self._ids)

    # --- their lives ---

    async def open(self, opening: Callable[[int], messages.Open], zygote: ForkServer) -> None:
        """Start them; returns when they are there, or have had READY_S. `opening`: what a door of this number is told first; `zygote`: has
        their workers forked."""
        if not self._early:
            return
        self._opening, self._zygote = opening, zygote
        early, self._early = self._early, []
        self._lives = [asyncio.create_task(self._supervise(each)) for each in early]
        self._looking = asyncio.create_task(self._look_after())
        self._front.http.elsewhere = self
        await self._until(lambda: sum(door.open for door in self._doors) >= len(early), READY_S)
        there = sum(door.open for door in self._doors)
        if there == len(early):
            log.info("%d processes take connections", there)
        else:
            log.warning("%d of %d processes take connections so far", there, len(early))

    async def _supervise(self, early: Early | None) -> None:
        """One door after another."""
        backoff, longest = BACKOFF_S
        while not self._end.is_set():
            began = time.monotonic()
            try:
                begun, early = early or Early(), None
                await self._live(begun)
            except (OSError, UnavailableError) as error:
                log.error("a process that takes connections cannot be started: %s", error)
            if time.monotonic() - began > STEADY_S:
                backoff = BACKOFF_S[0]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._end.wait(), backoff)
            backoff = min(2 * backoff, longest)

    async def _live(self, early: Early) -> None:
        """One life. Raises OSError where it cannot begin."""
        assert self._opening is not None
        self._numbers += 1
        door = _Door(self._numbers, early)
        self._doors.append(door)
        try:
            connection = self._front.client.join(door.number)
            if connection is None:
                raise OSError("no file descriptor is left")
            with connection:
                door.link.listen(lambda: self._heard(door))
                if door.link.send(messages.encode(self._opening(door.number)), connection.fileno()):
                    connection.detach()  # which went there
            if not door.link.send(messages.encode(messages.Ids()), ids := os.dup(self._ids)):
                os.close(ids)
            door.link.send(messages.encode(self._state()))
            code = await early.process.wait()
            if not self._end.is_set():
                log.error("a process that takes connections ended with exit code %d, and its clients are cut off", code)
        finally:
            early.process.kill()
            self._heard(door)  # its last words
            self._doors.remove(door)
            door.link.close()
            if door.report is not None:
                own, gone = door.report.own, self._gone
                self._gone = Elsewhere(0, gone.cpu_seconds + own.cpu_seconds, 0, gone.log_dropped + own.log_dropped)
            self._news.set()

    async def _look_after(self) -> None:
        """Ask each door how it is, and end one that says nothing."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self._tell()
            for door in self._doors:
                known = door.hung
                if door.look(time.monotonic()):
                    log.error("a process that takes connections says nothing and is ended (pid %d)", door.process.pid)
                    door.process.kill()
                elif door.hung and not known:
                    door.process.signal(signal.SIGUSR2)  # the stacks of its threads

    # --- connections: http.Elsewhere ---

    def answers(self, begun: bytes) -> bool:
        return not self._draining and self._paths.spread(begun)

    def may_stay(self, method: bytes, url: bytes) -> bool:
        return True

    def take(self, connection: int, begun: bytes) -> bool:
        now = time.monotonic()
        while (door := least_busy(self._doors, now)) is not None:
            if door.link.send(messages.encode(messages.Take(begun)), connection):
                door.given(now)
                return True
            door.open = False
        return False

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
        """They are given nothing more, and each answer is the last of its connection."""
        self._draining = True
        self._say(messages.Drain())

    async def ask(self) -> None:
        """Hear how each is and what it has counted, as far as they answer within TELL_S."""
        asked = self._tell()
        await self._until(lambda: all(door.told(asked) for door in self._doors if door.open), TELL_S)

    async def _heard_all(self) -> None:
        """Have all that was said to them be done, where they get to it within HEARD_S."""
        self._asked_heard += 1
        asked = self._asked_heard
        self._say(messages.Heard(asked))
        await self._until(lambda: all(door.heard >= asked for door in self._doors if door.open), HEARD_S)

    async def _until(self, done: Callable[[], bool], seconds: float) -> None:
        """Wait for doors to open, report or end, until it is done, so many seconds at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not done():
                    self._news.clear()
                    await self._news.wait()

    @property
    def sought(self) -> bool:
        """As `Http.sought`, as of the newest `ask`; a door that has not answered may well be."""
        return any(door.open and door.sought(self._tells) for door in self._doors)

    @property
    def under_way(self) -> int:
        """Requests that are not over, likewise."""
        return len(self._coming) + sum(door.under_way(self._tells) for door in self._doors if door.open)

    def end(self) -> None:
        """They may give the answers that are under way, and go."""
        self._end.set()
        for early in self._early:
            early.process.kill()
        self._say(messages.End())

    async def close(self) -> None:
        """Wait for them to have gone, END_S at most."""
        if self._lives:
            await asyncio.wait(self._lives, timeout=END_S)
        for door in self._doors:
            door.process.kill()
        for task in (*self._lives, self._looking):
            if task is not None:
                task.cancel()

    # --- the links ---

    def _say(self, message: messages.ToDoor) -> None:
        raw = messages.encode(message)
        for door in self._doors:
            door.link.send(raw)

    def _state(self) -> messages.State:
        state = self._front.state
        return messages.State(state.phase, state.leaving, state.hung, state.context_length)

    def _tell(self) -> int:
        self._tells += 1
        self._say(messages.Tell(self._tells))
        return self._tells

    def _heard(self, door: _Door) -> None:
        for raw in door.link.received():
            try:
                self._hear(door, messages.from_door.decode(raw))
            except Exception:
                log.exception("a message of a process that takes connections could not be handled")
        if door.link.ended:  # it can neither be told anything nor tell
            door.open = False
            door.link.leave()
            door.process.kill()

    def _hear(self, door: _Door, message: messages.FromDoor) -> None:
        assert self._zygote is not None, "opened with it"
        match message:
            case messages.Opened():
                door.open = True
                self._news.set()
            case messages.Taken(connections=connections):
                door.taken(connections)
            case messages.Lack(why=why):
                door.lack = why
            case messages.HeardAll(seq=seq):
                door.heard = seq
                self._news.set()
            case messages.Closed():
                door.open = False
            case messages.Back(begun=begun):
                if (descriptor := door.link.descriptor()) is not None:  # else there was no room for it, and its client is cut off
                    self._come_back(self._front.http.take(socket.socket(fileno=descriptor), begun))
            case messages.Fork():
                if (descriptor := door.link.descriptor()) is not None:
                    self._zygote.fork_for(descriptor)
            case messages.Unforked():
                self._zygote.doubt()
            case messages.Report():
                door.reported(message, time.monotonic())
                self._news.set()
                self._ledger.add(message.counted)

    def _come_back(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._coming.add(task)
        task.add_done_callback(self._coming.discard)

    async def _sequences(self) -> int:
        await self.ask()
        return sum(door.report.sequences for door in self._doors if door.report is not None)

    def _elsewhere(self) -> Elsewhere:
        each = [self._gone, *(door.report.own for door in self._doors if door.report is not None)]
        return Elsewhere(
            in_flight=sum(own.in_flight for own in each),
            cpu_seconds=sum(own.cpu_seconds for own in each),
            resident_bytes=sum(own.resident_bytes for own in each),
            log_dropped=sum(own.log_dropped for own in each),
        )
