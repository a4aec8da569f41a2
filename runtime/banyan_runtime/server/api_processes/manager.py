"""The other API processes, as the first process of a server has them: started, asked, started again when they end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Final

from banyan_runtime.errors import UnavailableError
from banyan_runtime.front.loop_link import LoopLink
from banyan_runtime.front.metrics import Elsewhere
from banyan_runtime.link import Link
from banyan_runtime.server.api_processes import messages
from banyan_runtime.server.api_processes.claims import SharedClaims
from banyan_runtime.server.api_processes.early import Early
from banyan_runtime.server.front import Front

log = logging.getLogger("banyan")

READY_S: Final = 20.0  # that a start waits for all to be ready; then it goes on with those that are there
TELL_S: Final = 0.1  # for a report that somebody waits for
HEARD_S: Final = 1.0  # for what somebody who is told that it is done relies on
LOOK_EVERY_S: Final = 2.0
END_S: Final = 3.0
BACKOFF_S: Final = (0.5, 30.0)  # the first and the longest pause between two lives
STEADY_S: Final = 60.0  # a process that lived for so long begins its back-off anew
HUNG_S: Final = 60.0  # without a report
OPEN_S: Final = 120.0  # from its start until it is there


class Status:
    """State of one API process, from its start to its end. Pure: callers pass the time, in monotonic seconds."""

    def __init__(self, begun: float) -> None:
        self.open = False  # it answers requests
        self.report: messages.Report | None = None  # the newest
        self.hung = False  # it was silent for too long when somebody looked last
        self._heard_at = begun  # of its newest report, or when it began

    def reported(self, report: messages.Report, now: float) -> None:
        self.report, self._heard_at = report, now

    def under_way(self, since: int) -> int:
        """Requests that are not over there, by a report of the `Tell` of this number or a later one; until there is one: at least one."""
        told = 0 if self.report is None else self.report.under_way
        return told if self.told(since) else max(told, 1)

    def sought(self, since: int) -> bool:
        """Whether some client may still ask there, likewise."""
        return not self.told(since) or (self.report is not None and self.report.sought)

    def look(self, now: float) -> bool:
        """Whether it is to be ended: it was too long silent, and also when somebody looked before. Of a pause of this process itself it
        has told by then."""
        again = self.hung
        self.hung = now - self._heard_at > (HUNG_S if self.open else OPEN_S)
        return again and self.hung

    def told(self, since: int) -> bool:
        """Whether it has answered the `Tell` of this number, or a later one."""
        return self.report is not None and self.report.seq >= since


class _Handle(Status):
    """One API process and the link to it."""

    def __init__(self, number: int, early: Early) -> None:
        super().__init__(time.monotonic())
        self.number = number
        self.process = early.process
        self.link = LoopLink(Link(early.control))
        self.heard = 0  # number of the newest `Heard` that it has answered


class ApiProcesses:
    """They accept connections from the listening socket of the first process, and proxy to it what only it can answer (`proxy.py`)."""

    def __init__(self, front: Front, early: list[Early], listener: socket.socket) -> None:
        """`early`: the processes beside this one; `listener`: the socket on which all of them listen."""
        self._front = front
        self._early = early
        self._listener = listener
        self._handles: list[_Handle] = []
        self._lives: list[asyncio.Task[None]] = []
        self._looking: asyncio.Task[None] | None = None
        self._opening: Callable[[int], messages.Open] | None = None
        self._ledger = front.metrics.ledger
        self._gone = Elsewhere()  # what processes that have ended had counted of themselves
        self._numbers = 0
        self._tells = 0
        self._asked_heard = 0
        self._news = asyncio.Event()  # one has opened, reported or ended
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

    async def open(self, opening: Callable[[int], messages.Open]) -> None:
        """Start them; returns when they are there, or have had READY_S. `opening`: the first message to the process of this number."""
        if not self._early:
            return
        self._opening = opening
        early, self._early = self._early, []
        self._lives = [asyncio.create_task(self._supervise(each)) for each in early]
        self._looking = asyncio.create_task(self._look_after())
        await self._until(lambda: sum(handle.open for handle in self._handles) >= len(early), READY_S)
        there = sum(handle.open for handle in self._handles)
        if there == len(early):
            log.info("%d API processes are ready", there + 1)
        else:
            log.warning("%d of %d API processes are ready so far", there + 1, len(early) + 1)

    async def _supervise(self, early: Early | None) -> None:
        """Keep one process running."""
        backoff, longest = BACKOFF_S
        while not self._end.is_set():
            began = time.monotonic()
            try:
                begun, early = early or Early(), None
                await self._live(begun)
            except (OSError, UnavailableError) as error:
                log.error("an API process cannot be started: %s", error)
            if time.monotonic() - began > STEADY_S:
                backoff = BACKOFF_S[0]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._end.wait(), backoff)
            backoff = min(2 * backoff, longest)

    async def _live(self, early: Early) -> None:
        """One life. Raises OSError where it cannot begin."""
        assert self._opening is not None
        self._numbers += 1
        handle = _Handle(self._numbers, early)
        self._handles.append(handle)
        try:
            connection = self._front.client.join(handle.number)
            if connection is None:
                raise OSError("no file descriptor is left")
            with connection:
                handle.link.listen(lambda: self._heard(handle))
                if handle.link.send(messages.encode(self._opening(handle.number)), connection.fileno()):
                    connection.detach()  # which went there
            for message, shared in ((messages.Listen(), self._listener.fileno()), (messages.Ids(), self._ids)):
                if not handle.link.send(messages.encode(message), descriptor := os.dup(shared)):
                    os.close(descriptor)
            handle.link.send(messages.encode(self._state()))
            code = await early.process.wait()
            if not self._end.is_set():
                log.error("an API process ended with exit code %d, and its clients are cut off", code)
        finally:
            early.process.kill()
            self._heard(handle)  # its last words
            self._handles.remove(handle)
            handle.link.close()
            if handle.report is not None:
                own, gone = handle.report.own, self._gone
                self._gone = Elsewhere(0, gone.cpu_seconds + own.cpu_seconds, 0, gone.log_dropped + own.log_dropped)
            self._news.set()

    async def _look_after(self) -> None:
        """Ask each how it is, and end one that says nothing."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self._tell()
            for handle in self._handles:
                known = handle.hung
                if handle.look(time.monotonic()):
                    log.error("an API process says nothing and is ended (pid %d)", handle.process.pid)
                    handle.process.kill()
                elif handle.hung and not known:
                    handle.process.signal(signal.SIGUSR2)  # the stacks of its threads

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
        """Each answer is the last of its connection."""
        self._say(messages.Drain())

    async def ask(self) -> None:
        """Hear how each is and what it has counted, as far as they answer within TELL_S."""
        asked = self._tell()
        await self._until(lambda: all(handle.told(asked) for handle in self._handles if handle.open), TELL_S)

    async def _heard_all(self) -> None:
        """Have all that was said to them be done, where they get to it within HEARD_S."""
        self._asked_heard += 1
        asked = self._asked_heard
        self._say(messages.Heard(asked))
        await self._until(lambda: all(handle.heard >= asked for handle in self._handles if handle.open), HEARD_S)

    async def _until(self, done: Callable[[], bool], seconds: float) -> None:
        """Wait for processes to open, report or end, until it is done, so many seconds at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not done():
                    self._news.clear()
                    await self._news.wait()

    @property
    def sought(self) -> bool:
        """As `Http.sought`, as of the newest `ask`; one that has not answered may well be."""
        return any(handle.open and handle.sought(self._tells) for handle in self._handles)

    @property
    def under_way(self) -> int:
        """Requests that are not over, likewise."""
        return sum(handle.under_way(self._tells) for handle in self._handles if handle.open)

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
        for handle in self._handles:
            handle.process.kill()
        for task in (*self._lives, self._looking):
            if task is not None:
                task.cancel()

    # --- the links ---

    def _say(self, message: messages.ToProcess) -> None:
        raw = messages.encode(message)
        for handle in self._handles:
            handle.link.send(raw)

    def _state(self) -> messages.State:
        state = self._front.state
        return messages.State(state.phase, state.leaving, state.hung, state.context_length)

    def _tell(self) -> int:
        self._tells += 1
        self._say(messages.Tell(self._tells))
        return self._tells

    def _heard(self, handle: _Handle) -> None:
        for raw in handle.link.received():
            try:
                self._hear(handle, messages.from_process.decode(raw))
            except Exception:
                log.exception("a message of an API process could not be handled")
        if handle.link.ended:  # it can neither be told anything nor tell
            handle.open = False
            handle.link.leave()
            handle.process.kill()

    def _hear(self, handle: _Handle, message: messages.FromProcess) -> None:
        match message:
            case messages.Opened():
                handle.open = True
                self._news.set()
            case messages.HeardAll(seq=seq):
                handle.heard = seq
                self._news.set()
            case messages.Closed():
                handle.open = False
            case messages.Report():
                handle.reported(message, time.monotonic())
                self._news.set()
                self._ledger.add(message.counted)

    async def _sequences(self) -> int:
        await self.ask()
        return sum(handle.report.sequences for handle in self._handles if handle.report is not None)

    def _elsewhere(self) -> Elsewhere:
        each = [self._gone, *(handle.report.own for handle in self._handles if handle.report is not None)]
        return Elsewhere(
            in_flight=sum(own.in_flight for own in each),
            cpu_seconds=sum(own.cpu_seconds for own in each),
            resident_bytes=sum(own.resident_bytes for own in each),
            log_dropped=sum(own.log_dropped for own in each),
        )
