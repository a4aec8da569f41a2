"""The front's end of the wire: requests go to the engine, tokens come back to the stream that waits for them.

Runs on the event loop alone. The socket is watched by its file descriptor and drained in one go, so a burst of steps costs
one wake-up; a stream hands out everything that came since its reader last looked. Whatever way a request ends (finished,
failed, aborted, engine gone), its entry here is gone too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import zmq

from banyan_runtime import wire

log = logging.getLogger("banyan")

LatencyObserver = Callable[[float, int], None]
"""Called as (seconds between two tokens of a request, number of requests with this gap)."""


class EngineError(Exception):
    """A request that cannot be answered. `code` is a row of the HTTP error table (queue_full, unavailable, internal_error ...)."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class Tokens:
    """What one request got since its reader last looked. `finish` is set on the last of a stream, whose `ids` may be empty."""

    ids: list[int]
    finish: wire.Finish | None = None


class Stream:
    """The tokens of one request: an async iterator of `Tokens`, to be read by one task.

    Raises EngineError when the request fails. `abort()` may be called at any time; the stream then still ends with a
    `Finish` (code ABORT, or the end it just reached), which tells what was cached and how long it waited. Use it as
    `async with client.generate(...) as stream`, and leaving the block early aborts.
    """

    __slots__ = ("_client", "_error", "_finish", "_ids", "_over", "_waiter", "first_token", "id", "last_token")

    def __init__(self, client: EngineClient, request_id: int) -> None:
        self.id = request_id
        self.first_token: float | None = None
        self.last_token = 0.0
        self._client = client
        self._ids: list[int] = []
        self._finish: wire.Finish | None = None
        self._error: EngineError | None = None
        self._over = False
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Tokens:
        while True:
            if self._over:
                raise StopAsyncIteration
            if self._ids or self._finish is not None:
                tokens = Tokens(self._ids, self._finish)
                self._ids = []
                self._over = self._finish is not None
                return tokens
            if self._error is not None:
                self._over = True
                raise self._error
            assert self._waiter is None, "a stream has one reader"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.abort()

    def abort(self) -> None:
        """End the request in the engine, unless it has ended. Never waits."""
        self._client._abort(self)

    # --- fed by the client ---

    def _push(self, token: int, finish: wire.Finish | None) -> None:
        self._ids.append(token)
        self._end(finish)

    def _end(self, finish: wire.Finish | None) -> None:
        self._finish = finish
        self._wake()

    def _fail(self, error: EngineError) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """Speaks to one engine process over one ZeroMQ PAIR.

    `max_open` bounds the requests between submission and end, so a hung engine cannot fill the memory of the front.
    """

    def __init__(self, *, max_open: int = 20_000, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_open = max_open
        self.stats: wire.Stats | None = None  # the newest snapshot
        self.last_heard = 0.0  # monotonic seconds of the newest message
        self.last_step = 0.0  # monotonic seconds of the newest tokens
        self.on_startup_progress: Callable[[wire.StartupProgress], None] = lambda phase: None
        self.on_inter_token_latency: LatencyObserver = lambda gap, requests: None
        self.fatal: wire.Fatal | None = None  # why the engine said it would exit
        self._clock = clock
        self._info: wire.EngineInfo | None = None
        self._streams: dict[int, Stream] = {}
        self._flushes: dict[int, asyncio.Future[bool]] = {}
        self._next_id = 1
        self._ping: tuple[int, float] | None = None  # the unanswered one: number, monotonic seconds
        self._dead: str | None = None  # why the engine is gone
        self._ready = asyncio.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._fd = -1

    # --- for requests ---

    @property
    def info(self) -> wire.EngineInfo:
        """What the engine found out about itself; only once it is ready."""
        assert self._info is not None, "the engine is not ready yet"
        return self._info

    @property
    def open_requests(self) -> int:
        return len(self._streams)

    def generate(self, token_ids: wire.TokenIds | list[int], sampling: wire.Sampling, *, priority: int = 0, salt: str = "") -> Stream:
        """Start one request. Raises EngineError at once when the engine is gone, not there yet, or far too busy."""
        if self._dead is not None:
            raise EngineError("engine_died", self._dead)
        if self._info is None:
            raise EngineError("unavailable", "The model is still loading.")
        if len(self._streams) >= self.max_open:
            raise EngineError("queue_full", "The request queue is full.")
        request_id = self._next_id
        self._next_id += 1
        stream = Stream(self, request_id)
        self._send(wire.Submit(request_id, wire.pack_ids(token_ids), sampling, priority, salt))
        self._streams[request_id] = stream
        return stream

    async def flush(self, timeout_s: float = 20.0) -> bool:
        """Empty the prefix cache; False when the engine refuses because requests run or wait."""
        if self._dead is not None:
            raise EngineError("engine_died", self._dead)
        number = self._next_id
        self._next_id += 1
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._flushes[number] = future
        try:
            self._send(wire.Flush(number))
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise EngineError("timeout", f"The engine did not answer within {timeout_s:g} s.") from None
        finally:
            self._flushes.pop(number, None)

    # --- for the composition root ---

    def bind(self, address: str) -> None:
        """Listen for the engine at a ZeroMQ address. Needs the running event loop."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        # Sends never wait: what may be outstanding is bounded by max_open, not by the socket.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(address)
        fd = self._socket.getsockopt(zmq.FD)
        assert isinstance(fd, int)
        self._fd = fd
        asyncio.get_running_loop().add_reader(self._fd, self._drain)

    async def wait_ready(self) -> wire.EngineInfo:
        """Wait for the engine's Ready. Raises EngineError when it ends before."""
        await self._ready.wait()
        if self._dead is not None:
            raise EngineError("engine_died", self._dead)
        return self.info

    def heartbeat(self) -> float:
        """Ping the engine unless a ping is out; returns the seconds that the oldest one has been waiting for its answer."""
        now = self._clock()
        if self._dead is None and self._info is not None and self._ping is None:
            self._ping = (self._next_id, now)
            self._send(wire.Ping(self._next_id))
            self._next_id += 1
        return 0.0 if self._ping is None else now - self._ping[1]

    def shutdown(self) -> None:
        """Ask the engine to exit."""
        if self._dead is None and self._info is not None:
            self._send(wire.Shutdown())

    def died(self, message: str) -> None:
        """The engine is gone: fail every open request, and every later one."""
        self._dead = message
        self.fail_open("engine_died", message)
        for future in self._flushes.values():
            if not future.done():
                future.set_exception(EngineError("engine_died", message))
        self._ping = None
        self._ready.set()

    def fail_open(self, code: str, message: str) -> None:
        """End every open request with an EngineError; a living engine is told to drop them."""
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            if self._dead is None:
                self._send(wire.Abort(stream.id))
            stream._fail(EngineError(code, message))

    def close(self) -> None:
        if self._socket is None or self._context is None:
            return
        asyncio.get_running_loop().remove_reader(self._fd)
        self._socket.close()
        self._context.term()
        self._socket = self._context = None

    # --- the wire ---

    def _abort(self, stream: Stream) -> None:
        if self._streams.get(stream.id) is stream and self._dead is None:
            self._send(wire.Abort(stream.id))

    def _send(self, message: wire.FrontMessage) -> None:
        assert self._socket is not None
        self._socket.send(wire.encode(message), zmq.NOBLOCK)
        # ZeroMQ's descriptor is edge-triggered: sending may swallow the edge of a message that came meanwhile.
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            asyncio.get_running_loop().call_soon(self._drain)

    def _drain(self) -> None:
        while self._socket is not None:
            try:
                raw = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.last_heard = self._clock()
            try:
                self._receive(wire.decode_engine(raw))
            except Exception:
                log.exception("a message of the engine could not be handled")

    def _receive(self, message: wire.EngineMessage) -> None:
        match message:
            case wire.StepOutput():
                self._step(message)
            case wire.Stats():
                self.stats = message
            case wire.Failed():
                if (stream := self._streams.pop(message.id, None)) is not None:
                    stream._fail(EngineError(message.code, message.message))
            case wire.Pong():
                if self._ping is not None and self._ping[0] == message.seq:
                    self._ping = None
            case wire.Flushed():
                if (future := self._flushes.get(message.seq)) is not None and not future.done():
                    future.set_result(message.ok)
            case wire.StartupProgress():
                self.on_startup_progress(message)
            case wire.Ready():
                self._info = message.info
                self._ready.set()
            case wire.Fatal():
                self.fatal = message

    def _step(self, output: wire.StepOutput) -> None:
        """Hand a step's columns to their streams; one dictionary look-up a token."""
        now = self.last_step = self.last_heard
        finished: dict[int, wire.Finish] = {finish.id: finish for finish in output.finished}
        gaps: dict[float, int] = {}  # requests decoded in the same two steps share the time of the last token
        streams = self._streams
        for request_id, token in zip(output.ids, wire.unpack_ids(output.token_ids).tolist(), strict=True):
            finish = finished.pop(request_id, None) if finished else None
            stream = streams.get(request_id)
            if stream is None:
                continue
            if stream.first_token is None:
                stream.first_token = now
            else:
                gaps[stream.last_token] = gaps.get(stream.last_token, 0) + 1
            stream.last_token = now
            if finish is not None:
                del streams[request_id]
            stream._push(token, finish)
        for request_id, finish in finished.items():
            if (stream := streams.pop(request_id, None)) is not None:
                stream._end(finish)
        for last, requests in gaps.items():
            self.on_inter_token_latency(now - last, requests)
