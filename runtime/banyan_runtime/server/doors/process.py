"""A door: a process that takes connections beside the first one of the front, and answers what any process of it may.

It has everything that a request goes through: HTTP, planning by workers of its own, a connection to the engine, a detokenizer. What there
is one of in a server is the first process's: the state, the probes, stored responses, batches, the process that forks workers. A request
for those goes there with its connection, and comes back with the next one. Its standard input is the link to the first process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Final, NoReturn

import uvloop

from banyan_runtime import logs
from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import UserError
from banyan_runtime.front import errors
from banyan_runtime.front.auth import Gate
from banyan_runtime.front.body import BodyBudget
from banyan_runtime.front.current import log_fields
from banyan_runtime.front.engine_client import EngineClient
from banyan_runtime.front.loop_link import LoopLink
from banyan_runtime.front.openai.responses.store import ResponseStore
from banyan_runtime.front.prepare.worker_pool import WorkerPool
from banyan_runtime.front.text.text import Text
from banyan_runtime.link import Link
from banyan_runtime.process import collect_rarely, die_with
from banyan_runtime.server.doors import messages
from banyan_runtime.server.doors.claims import SharedClaims
from banyan_runtime.server.doors.forks import DistantForks
from banyan_runtime.server.doors.paths import Paths
from banyan_runtime.server.front import LAST_ANSWERS_S, Front
from banyan_runtime.server.http import CONNECTIONS_CLOSE_S, HANDLERS_END_S
from banyan_runtime.server.termination import EXIT_INTERNAL
from banyan_runtime.server.threads import on_thread

log = logging.getLogger("banyan")

READ_TURNS: Final = 3  # of the loop, until a request has begun of which something lay here unread
WORD_S: Final = 2.0  # without its connection to the engine: for the first process to say why


class Door:
    """One door, over its link to the first process."""

    def __init__(self, link: LoopLink, opening: messages.Open, engine: socket.socket) -> None:
        """`engine`: the connection to it. Raises ConfigError."""
        config = ServerConfig.from_engine_json(opening.config)
        writer = logs.configure("api", level=config.log_level, http_level=config.log_level_http, form=config.log_format)
        writer.fields = log_fields
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # the first process tells how the server is
        self._link = link
        self._opening = opening
        self._config = config
        client = EngineClient(max_open=config.max_queued_requests * 2, number=opening.number, clients=opening.doors + 1)
        client.max_open = max(client.max_open, opening.info.most_requests)
        client.on_lost = self._on_lost
        client.adopt(engine, opening.info)
        self._front = Front(config, writer, client, Gate.of_told(opening.gate))
        self._front.http.elsewhere = self
        self._front.context.responses = ResponseStore(None, 0.0)  # a door is asked for none where any are kept
        self._front.context.bodies = BodyBudget.shared(opening.doors + 1)
        self._front.metrics.engine_ready(opening.info)  # on which buckets depend
        self._ledger = self._front.metrics.ledger
        self._ledger.news()  # what is there from the start the first process counts itself
        self._paths = Paths(config)
        self._taking: set[asyncio.Task[None]] = set()
        self._aborting: set[asyncio.Task[None]] = set()
        self._aborts = asyncio.Lock()  # one a turn
        self._end = asyncio.Event()
        self._engine_died = False  # as the first process has said
        self._code = 0

    async def run(self, heard: list[bytes]) -> int:
        """Serve until the first process says that it is over; returns the exit code. `heard`: what it has said already. Raises
        UserError."""
        opening, context, http = self._opening, self._front.context, self._front.http
        serving = asyncio.create_task(http.serve([]))
        folder = None if opening.tokenizer_dir is None else Path(opening.tokenizer_dir)
        context.text = await on_thread(Text.load, self._config, Path(opening.model_dir), folder, None, opening.tokenizer)
        forks = DistantForks(self._ask_for_worker, self._on_unforked)
        pool = WorkerPool(forks, workers=opening.workers)
        pool.on_lack = self._on_lack
        for raw in heard:
            self._hear(messages.to_door.decode(raw))
        self._link.listen(self._heard)
        await pool.warm_up()
        self._front.prepare_with(pool)
        collect_rarely()
        self._link.send(messages.encode(messages.Opened()))
        ended = asyncio.create_task(self._end.wait())
        await asyncio.wait({ended, serving}, return_when=asyncio.FIRST_COMPLETED)
        if self._front.counter.open:
            await asyncio.sleep(LAST_ANSWERS_S)
        http.give_up(errors.shutting_down())
        http.end()
        await asyncio.wait({serving}, timeout=CONNECTIONS_CLOSE_S + HANDLERS_END_S + 1)
        pool.close()
        await self._front.last_spans()
        return self._code

    # --- server.http.Elsewhere: what is not for a door ---

    def answers(self, begun: bytes) -> bool:
        return not self._paths.spread(begun)

    def may_stay(self, method: bytes, url: bytes) -> bool:
        return self._paths.asked(method, url)

    def take(self, connection: int, begun: bytes) -> bool:
        return self._link.send(messages.encode(messages.Back(begun)), connection)

    # --- what is heard ---

    def _heard(self) -> None:
        for raw in self._link.received():
            try:
                self._hear(messages.to_door.decode(raw))
            except Exception:
                log.exception("a message of the first process could not be handled")
        if self._link.ended:
            logs.exit_now(0)  # the first process is gone

    def _hear(self, message: messages.ToDoor) -> None:
        front = self._front
        match message:
            case messages.Take(begun=begun):
                if (descriptor := self._link.descriptor()) is not None:  # else there was no room for it, and its client is cut off
                    _start(front.http.take(socket.socket(fileno=descriptor), begun), self._taking)
                self._link.send(messages.encode(messages.Taken(self._connections)))
            case messages.Tell(seq=seq):
                self._link.send(messages.encode(self._report(seq)))
            case messages.Ids():
                if (descriptor := self._link.descriptor()) is not None:
                    try:
                        front.context.live.claims = SharedClaims(descriptor)
                    finally:
                        os.close(descriptor)
            case messages.State():
                front.state.context_length = message.context_length
                front.state.enter(message.phase)  # type: ignore[arg-type]
                front.state.leaving, front.state.hung = message.leaving, message.hung
            case messages.Abort():
                _start(self._abort(message), self._aborting)
            case messages.Heard(seq=seq):
                _start(self._heard_all(seq, set(self._aborting)), self._aborting)
            case messages.FailOpen(code=code, message=why):
                front.client.fail_open(code, why)
            case messages.Died(message=why):
                self._engine_died = True
                front.client.died(why)
            case messages.Drain():
                front.http.drain()
            case messages.End():
                self._end.set()
            case messages.Open():
                raise AssertionError("opened twice")

    async def _abort(self, message: messages.Abort) -> None:
        """It is meant for requests that came before it, and they may lie here unread."""
        if self._taking:
            await asyncio.wait(set(self._taking))
        for _ in range(READ_TURNS):
            await asyncio.sleep(0)
        live = self._front.context.live
        async with self._aborts:
            if message.ids is None:
                live.abort_all()
            else:
                live.abort_each(message.ids, message.by)
            await asyncio.sleep(0)

    async def _heard_all(self, seq: int, before: set[asyncio.Task[None]]) -> None:
        if before:
            await asyncio.wait(before)
        self._link.send(messages.encode(messages.HeardAll(seq)))

    @property
    def _connections(self) -> int:
        return len(self._front.http.connections) + len(self._taking)

    def _report(self, seq: int) -> messages.Report:
        front = self._front
        return messages.Report(
            seq=seq,
            connections=self._connections,
            under_way=front.counter.open + len(self._taking),
            sought=front.http.sought,
            sequences=front.client.open_requests,
            own=front.metrics.own(),
            counted=self._ledger.news(),
        )

    def _ask_for_worker(self, theirs: int) -> bool:
        return self._link.send(messages.encode(messages.Fork()), theirs)

    def _on_unforked(self) -> None:
        self._link.send(messages.encode(messages.Unforked()))

    def _on_lack(self, why: str) -> None:
        self._front.state.impaired = why
        self._link.send(messages.encode(messages.Lack(why)))

    def _on_lost(self) -> None:
        """The engine has ended, which the first process will say; or it has cut this process off."""
        self._link.send(messages.encode(messages.Closed()))
        asyncio.get_running_loop().call_later(WORD_S, self._give_up)

    def _give_up(self) -> None:
        if not self._engine_died and not self._end.is_set():
            log.error("the engine has cut this process off, which had not read what it sent; it ends")
            self._front.client.died("the connection to the engine was lost")
            self._code = EXIT_INTERNAL
            self._end.set()


def _start(work: Coroutine[None, None, None], under_way: set[asyncio.Task[None]]) -> None:
    task = asyncio.create_task(work)
    under_way.add(task)
    task.add_done_callback(under_way.discard)


async def live(control: socket.socket) -> int:
    """Wait to be opened, and be a door; returns the exit code."""
    link = LoopLink(Link(control))
    come = asyncio.Event()
    link.listen(come.set)
    heard: list[bytes] = []
    while not heard and not link.ended:
        await come.wait()
        come.clear()
        heard += link.received()
    link.rest()
    if not heard:
        return 0  # the first process is gone
    opening = messages.to_door.decode(heard[0])
    assert isinstance(opening, messages.Open)
    die_with(opening.parent)
    engine = link.descriptor()
    assert engine is not None, "this process has opened nothing yet"
    try:
        return await Door(link, opening, socket.socket(fileno=engine)).run(heard[1:])
    except UserError as error:
        log.error("%s", error)
        return error.exit_code


def main() -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM):  # a Ctrl-C reaches the whole group; the first process drains, then tells us
        signal.signal(number, signal.SIG_IGN)
    with contextlib.closing(socket.socket(fileno=os.dup(0))) as control, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(live(control))
    logs.exit_now(code)


if __name__ == "__main__":
    main()
