"""An API process beside the first one of a server.

It has everything that a request goes through: HTTP, a fork server and its workers, a connection to the engine, a detokenizer. What a
server has only one of belongs to the first process: the state, the probes, stored responses, batches. A request for those is proxied to
it (`proxy.py`). Standard input is the link to the first process.
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
from banyan_runtime.front.prepare import fork_server
from banyan_runtime.link import Link
from banyan_runtime.process import collect_rarely, die_with
from banyan_runtime.server.api_processes import messages
from banyan_runtime.server.api_processes.claims import SharedClaims
from banyan_runtime.server.front import LAST_ANSWERS_S, Front
from banyan_runtime.server.http import CONNECTIONS_CLOSE_S, HANDLERS_END_S
from banyan_runtime.server.termination import EXIT_INTERNAL

log = logging.getLogger("banyan")

READ_TURNS: Final = 3  # of the loop, until a request has begun of which something lay here unread
WORD_S: Final = 2.0  # without its connection to the engine: for the first process to say why


class ApiProcess:
    """This process, over its link to the first one."""

    def __init__(self, link: LoopLink, opening: messages.Open, engine: socket.socket, early: fork_server.Early) -> None:
        """`engine`: the connection to it; `early`: the process that forks workers. Raises ConfigError."""
        config = ServerConfig.from_engine_json(opening.config)
        writer = logs.configure("api", level=config.log_level, http_level=config.log_level_http, form=config.log_format)
        writer.fields = log_fields
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # the first process tells how the server is
        self._link = link
        folder = None if opening.tokenizer_dir is None else Path(opening.tokenizer_dir)
        self._fork_server = fork_server.ForkServer(config, Path(opening.model_dir), folder, early)
        self._workers = opening.workers
        client = EngineClient(max_open=config.max_queued_requests * 2, number=opening.number, clients=opening.processes)
        client.max_open = max(client.max_open, opening.info.most_requests)
        client.on_lost = self._on_lost
        client.adopt(engine, opening.info)
        self._front = Front(config, writer, client, Gate.of_told(opening.gate), opening.first)
        self._front.context.responses = ResponseStore(None, 0.0)  # where any are kept, requests for them are proxied
        self._front.context.bodies = BodyBudget.shared(opening.processes)
        self._front.metrics.engine_ready(opening.info)  # on which buckets depend
        self._ledger = self._front.metrics.ledger
        self._ledger.news()  # what is there from the start the first process counts itself
        self._listener: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        self._aborting: set[asyncio.Task[None]] = set()
        self._aborts = asyncio.Lock()  # one a turn
        self._end = asyncio.Event()
        self._engine_died = False  # as the first process has said
        self._code = 0

    async def run(self, heard: list[bytes]) -> int:
        """Serve until the first process says that it is over; returns the exit code. `heard`: what it has said already. Raises
        UserError."""
        http = self._front.http
        await self._front.load_text(self._fork_server)
        for raw in heard:
            self._hear(messages.to_process.decode(raw))
        self._link.listen(self._heard)
        pool = await self._front.prepare_with(self._fork_server, self._workers)
        serving = asyncio.create_task(http.serve([await self._listener]))
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

    # --- what is heard ---

    def _heard(self) -> None:
        for raw in self._link.received():
            try:
                self._hear(messages.to_process.decode(raw))
            except Exception:
                log.exception("a message of the first process could not be handled")
        if self._link.ended:
            logs.exit_now(0)  # the first process is gone

    def _hear(self, message: messages.ToProcess) -> None:
        front = self._front
        match message:
            case messages.Listen():
                if (descriptor := self._link.descriptor()) is None:
                    raise OSError("no file descriptor is left")
                self._listener.set_result(socket.socket(fileno=descriptor))
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

    def _report(self, seq: int) -> messages.Report:
        front = self._front
        return messages.Report(
            seq=seq,
            under_way=front.counter.open,
            sought=front.http.sought,
            sequences=front.client.open_requests,
            own=front.metrics.own(),
            counted=self._ledger.news(),
        )

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
    """Wait for the first message, and serve; returns the exit code. Raises OSError, UnavailableError where no process can be started."""
    early = fork_server.Early(tokenizes=True)
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
    opening = messages.to_process.decode(heard[0])
    assert isinstance(opening, messages.Open)
    die_with(opening.parent)
    engine = link.descriptor()
    assert engine is not None, "this process has opened nothing yet"
    try:
        return await ApiProcess(link, opening, socket.socket(fileno=engine), early).run(heard[1:])
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
