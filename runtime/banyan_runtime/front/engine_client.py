"""The front's end of the wire: requests go to the engine, what comes back goes to the listener of each request.

Runs on the event loop alone. The socket is watched by its file descriptor and drained in one go, so a burst of steps costs
one wake-up, and each listener is called once with everything that the burst brought. What takes longer than a turn goes on in
further ones. Whatever way a request ends (finished, failed, aborted, engine gone), its entry here is gone too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from types import TracebackType
from typing import Protocol, Self

import msgspec
import zmq

from banyan_runtime import wire
from banyan_runtime.front.logprobs import Row, rows_of
from banyan_runtime.front.turns import in_turns

log = logging.getLogger("banyan")

LatencyObserver = Callable[[float, int], None]
"""Called as (seconds between two tokens of a request, number of requests with this gap)."""


class EngineError(Exception):
    """A request that cannot be answered. `code` is a row of the HTTP error table (queue_full, unavailable, internal_error ...);
    `engine_died`: the whole engine is gone, and the message says why."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Tokens(msgspec.Struct, frozen=True, gc=False):
    """What one request got since its listener was last told. `finish` comes with the last of a request, whose `ids` may be empty."""

    ids: list[int]
    finish: wire.Finish | None = None
    logprobs: Sequence[Row] = ()  # of each of `ids`, where the request asked for them
    prompt_logprobs: Sequence[wire.PromptLogprobs] = ()


class Listener(Protocol):
    """Who waits for one request. Called on the event loop, from within the client: it must not wait, and may abort or submit.

    After the Tokens with `finish`, or after `on_failure`, nothing more comes.
    """

    def on_tokens(self, tokens: Tokens) -> None: ...

    def on_failure(self, error: EngineError) -> None: ...


class Submission:
    """One request in the engine. After `abort()` its listener still hears of the end: a `Finish` (code ABORT, or the end it just
    reached), which tells what was cached and how long it waited."""

    __slots__ = ("_client", "_error", "_finish", "_ids", "_listener", "_logprobs", "_prompt_logprobs", "first_token", "id", "last_token")

    def __init__(self, client: EngineClient, request_id: int, listener: Listener) -> None:
        self.id = request_id
        self.first_token: float | None = None  # monotonic seconds
        self.last_token = 0.0
        self._client = client
        self._listener = listener
        self._ids: list[int] = []  # from here on: what the listener has not been told yet
        self._finish: wire.Finish | None = None
        self._error: EngineError | None = None
        self._logprobs: list[Row] | None = None
        self._prompt_logprobs: list[wire.PromptLogprobs] | None = None

    def abort(self) -> None:
        """End the request in the engine, unless it has ended. Never waits, never raises."""
        self._client._abort(self)

    def _deliver(self) -> None:
        """Tell the listener. A listener that fails costs its own request, no other."""
        try:
            self._tell()
        except Exception:
            log.exception("what the engine sent for a request could not be handled")
            self._client._abort(self)
            self._client._forget(self)
            with contextlib.suppress(Exception):
                self._listener.on_failure(EngineError("internal_error", "Internal server error"))

    def _tell(self) -> None:
        ids, finish = self._ids, self._finish
        if ids or finish is not None or self._prompt_logprobs is not None:
            tokens = Tokens(ids, finish, self._logprobs or (), self._prompt_logprobs or ())
            self._ids, self._logprobs, self._prompt_logprobs = [], None, None
            self._listener.on_tokens(tokens)
        if self._error is not None:
            error, self._error = self._error, None
            self._listener.on_failure(error)


class Stream:
    """The tokens of one request, for who only wants to read them: an async iterator of `Tokens`, to be read by one task.

    Raises EngineError when the request fails. Use it as `async with client.generate(...) as stream`; leaving the block early
    aborts.
    """

    def __init__(self) -> None:
        self._news: asyncio.Queue[Tokens | EngineError] = asyncio.Queue()
        self._over = False
        self.submission: Submission | None = None

    @property
    def id(self) -> int:
        assert self.submission is not None
        return self.submission.id

    def on_tokens(self, tokens: Tokens) -> None:
        self._news.put_nowait(tokens)

    def on_failure(self, error: EngineError) -> None:
        self._news.put_nowait(error)

    def abort(self) -> None:
        assert self.submission is not None
        self.submission.abort()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Tokens:
        if self._over:
            raise StopAsyncIteration
        news = await self._news.get()
        if isinstance(news, EngineError):
            self._over = True
            raise news
        self._over = news.finish is not None
        return news

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.abort()


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
        self._open: dict[int, Submission] = {}
        self._untold: dict[Submission, None] = {}  # whose listeners must hear of something
        self._draining = False  # what has come is being taken in, and told
        self._flushes: dict[int, asyncio.Future[bool]] = {}
        self._next_id = 1
        self._ping: tuple[int, float] | None = None  # the unanswered one: number, monotonic seconds
        self._dead: str | None = None  # why the engine is gone
        self.lost = False  # nobody is at the other end of the socket any more; whoever watches the process will say why
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
        return len(self._open)

    def submit(
        self,
        listener: Listener,
        token_ids: bytes,
        sampling: wire.Sampling,
        *,
        logprobs: wire.LogprobRequest | None = None,
        priority: int = 0,
        salt: str = "",
    ) -> Submission:
        """Start one request; `token_ids` as wire.pack_ids makes them, not kept here. `listener` hears of it later, never from
        within this call. Raises EngineError at once when the engine is gone, not there yet, or far too busy."""
        if self._dead is not None:
            raise EngineError("engine_died", self._dead)
        if self._info is None:
            raise EngineError("unavailable", "The model is still loading.")
        if len(self._open) >= self.max_open:
            raise EngineError("queue_full", "The request queue is full.")
        submission = Submission(self, self._next_id, listener)
        self._next_id += 1
        self._open[submission.id] = submission
        self._send(wire.Submit(submission.id, token_ids, sampling, priority, salt, logprobs=logprobs))
        return submission

    def generate(self, token_ids: wire.TokenIds | list[int], sampling: wire.Sampling, *, priority: int = 0, salt: str = "") -> Stream:
        """`submit`, for who reads the tokens as a stream."""
        stream = Stream()
        stream.submission = self.submit(stream, wire.pack_ids(token_ids), sampling, priority=priority, salt=salt)
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
        submissions, self._open = list(self._open.values()), {}
        for submission in submissions:
            if self._dead is None:
                self._send(wire.Abort(submission.id))
            submission._error = EngineError(code, message)
            submission._deliver()

    def close(self) -> None:
        if self._socket is None or self._context is None:
            return
        asyncio.get_running_loop().remove_reader(self._fd)
        self._socket.close()
        self._context.term()
        self._socket = self._context = None

    # --- the wire ---

    def _abort(self, submission: Submission) -> None:
        if submission.id in self._open and self._dead is None:
            self._send(wire.Abort(submission.id))

    def _forget(self, submission: Submission) -> None:
        self._open.pop(submission.id, None)

    def _send(self, message: wire.FrontMessage) -> None:
        """Send, or drop what nobody would read. Never waits, never raises: how a request ends is told to its listener."""
        if self._socket is None:
            return
        try:
            self._socket.send(wire.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # Sends have no limit, so this is a peer that is gone. What it was is for `died` to say, which fails all that is open.
            if not self.lost:
                log.warning("the engine cannot be reached: %s", error)
            self.lost = True
            return
        # ZeroMQ's descriptor is edge-triggered: sending may swallow the edge of a message that came meanwhile.
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            asyncio.get_running_loop().call_soon(self._drain)

    def _drain(self) -> None:
        """Take in all that has come, then tell the listeners."""
        if not self._draining:
            self._draining = True
            in_turns(self._drained())

    def _drained(self) -> Iterator[None]:
        """`_drain`, piece by piece. It ends when nothing is left to be taken in or told, so that a wake-up meanwhile is not lost."""
        while True:
            while (raw := self._next_message()) is not None:
                self.last_heard = self._clock()
                try:
                    self._receive(wire.decode_engine(raw))
                except Exception:
                    log.exception("a message of the engine could not be handled")
                yield
            if not self._untold:
                self._draining = False
                return
            untold, self._untold = self._untold, {}
            for submission in untold:
                submission._deliver()
                yield

    def _next_message(self) -> bytes | None:
        if self._socket is None:
            return None
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.ZMQError:  # Again: that was all
            return None

    def _receive(self, message: wire.EngineMessage) -> None:
        match message:
            case wire.StepOutput():
                self._step(message)
            case wire.Stats():
                self.stats = message
            case wire.Failed():
                if (submission := self._open.pop(message.id, None)) is not None:
                    submission._error = EngineError(message.code, message.message)
                    self._untold[submission] = None
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
        """Sort a step's columns by request."""
        now = self.last_step = self.last_heard
        submissions, untold = self._open, self._untold
        gaps: dict[float, int] = {}  # requests decoded in the same two steps share the time of the last token
        tokens = wire.unpack_ids(output.token_ids).tolist()
        pieces = _cut(tokens, output.counts) if output.counts else [[token] for token in tokens]
        if len(pieces) != len(output.ids):
            raise ValueError(f"tokens for {len(pieces)} requests, ids of {len(output.ids)}")
        for request_id, ids in zip(output.ids, pieces, strict=True):
            submission = submissions.get(request_id)
            if submission is None:
                continue
            if submission.first_token is None:
                submission.first_token = now
            elif len(ids) == 1:
                gaps[submission.last_token] = gaps.get(submission.last_token, 0) + 1
            elif ids:
                self.on_inter_token_latency((now - submission.last_token) / len(ids), len(ids))
            submission.last_token = now
            if submission._ids:
                submission._ids += ids
            else:
                submission._ids = ids
            untold[submission] = None
        if output.logprobs is not None:
            self._score(output, tokens)
        for part in output.prompt_logprobs:
            if (submission := submissions.get(part.id)) is not None:
                submission._prompt_logprobs = [*(submission._prompt_logprobs or ()), part]
                untold[submission] = None
        for finish in output.finished:
            if (submission := submissions.pop(finish.id, None)) is not None:
                submission._finish = finish
                untold[submission] = None
        for last, requests in gaps.items():
            self.on_inter_token_latency(now - last, requests)

    def _score(self, output: wire.StepOutput, tokens: list[int]) -> None:
        """Give the log probabilities of a step to the requests whose tokens have some."""
        assert output.logprobs is not None
        scored = wire.unpack_ids(output.scored).tolist()
        owners = [
            request_id for request_id, count in zip(output.ids, output.counts or [1] * len(output.ids), strict=True) for _ in range(count)
        ]
        for at, row in zip(scored, rows_of(output.logprobs, [tokens[at] for at in scored]), strict=True):
            if (submission := self._open.get(owners[at])) is not None:
                if submission._logprobs is None:
                    submission._logprobs = []
                submission._logprobs.append(row)


def _cut(tokens: list[int], counts: list[int]) -> list[list[int]]:
    """The tokens of each request. Raises ValueError when the counts do not add up."""
    ends = [0, *accumulate(counts)]
    if ends[-1] != len(tokens):
        raise ValueError(f"{len(tokens)} tokens for counts that add up to {ends[-1]}")
    return [tokens[start:end] for start, end in pairwise(ends)]
