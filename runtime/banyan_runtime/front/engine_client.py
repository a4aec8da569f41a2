"""The front's end of the wire: requests go to the engine, what comes back goes to the listener of each request.

Runs on the event loop alone. The link is watched by its file descriptor and drained in one go, so a burst of steps costs
one wake-up, and each listener is called once with everything that the burst brought. What takes longer than a turn goes on in
further ones. As long as it took to tell the listeners, nothing more is taken in: so half of the time is left for everything else, such
as new requests, and where hundreds of streams take more than that, each is told of several tokens together.
Whatever way a request ends (finished, failed, aborted, engine gone), its entry here is gone too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final

from banyan_runtime import wire
from banyan_runtime.front.logprobs import rows_of
from banyan_runtime.front.loop_link import LoopLink
from banyan_runtime.front.submission import EngineError, Listener, Stream, Submission, Unstarted
from banyan_runtime.front.turns import in_turns
from banyan_runtime.link import Link

log = logging.getLogger("banyan")

_ACCEPT_AGAIN_S: Final = 1.0
_AT_ONCE_S: Final = 0.0005  # telling that took less is followed by no rest
_REST_S: Final = 0.02  # the longest

LatencyObserver = Callable[[float, int], None]
"""Called as (seconds between two tokens of a request, number of such gaps)."""


class EngineClient:
    """Speaks to one engine process over one `Link`.

    `max_open` bounds the requests between submission and end, so a hung engine cannot fill the memory of the front. Background
    (a priority below 0) is counted apart, so that it keeps nobody else out.
    """

    def __init__(self, *, max_open: int = 20_000, number: int = 0, clients: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        """`number`: which of the engine's clients this is (`wire.client_of`), of so many."""
        self.max_open = max_open
        self.stats: wire.Stats | None = None  # the newest snapshot
        self.last_heard = 0.0  # monotonic seconds of the newest message
        self.last_step = 0.0  # monotonic seconds of the newest tokens, or of the newest snapshot that tells of steps, whoever they were for
        self.on_startup_progress: Callable[[wire.StartupProgress], None] = lambda phase: None
        self.on_inter_token_latency: LatencyObserver = lambda gap, requests: None
        self.fatal: wire.Fatal | None = None  # why the engine said it would exit
        self._clock = clock
        self._info: wire.EngineInfo | None = None
        self._open: dict[int, Submission] = {}
        self._open_background: set[int] = set()  # those of them that are background
        self._unstarted = {False: Unstarted(), True: Unstarted()}  # online, background
        self._untold: dict[Submission, None] = {}  # whose listeners must hear of something
        self._draining = False  # what has come is being taken in, and told
        self._flushes: dict[int, asyncio.Future[bool]] = {}
        self._next_id = (number << wire.CLIENT_BITS) + 1
        self._clients = clients
        self._ping: tuple[int, float] | None = None  # the unanswered one: number, monotonic seconds
        self._dead: str | None = None  # why the engine is gone
        self.lost = False  # nobody is at the other end of the link any more; whoever watches the process will say why
        self.on_lost: Callable[[], None] = lambda: None
        self._ready = asyncio.Event()
        self._listening: socket.socket | None = None  # until the engine has come
        self._link: LoopLink | None = None

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
        constraint: wire.Constraint | None = None,
        pooling: int = 0,
    ) -> Submission:
        """Start one request; `token_ids` as wire.pack_ids makes them, not kept here. `listener` hears of it later, never from
        within this call. Raises EngineError at once when the engine is gone, not there yet, or far too busy."""
        if self._dead is not None:
            raise EngineError("engine_died", self._dead)
        if self._info is None:
            raise EngineError("unavailable", "The model is still loading.")
        behind, background = priority < 0, self._open_background
        if (len(background) if behind else len(self._open) - len(background)) >= self.max_open:
            raise EngineError("queue_full", "The request queue is full.")
        size, unstarted = len(wire.unpack_ids(token_ids)), self._unstarted[behind]
        submission = Submission(self, self._next_id, listener, size, unstarted.may_fill(self._info, size, self._clients))
        unstarted.add(size)
        self._next_id += 1
        self._open[submission.id] = submission
        if behind:
            background.add(submission.id)
        asked = wire.Submit(submission.id, token_ids, sampling, priority, salt, logprobs=logprobs, constraint=constraint, pooling=pooling)
        self._send(asked)
        return submission

    def generate(self, token_ids: wire.TokenIds | list[int], sampling: wire.Sampling, *, priority: int = 0, salt: str = "") -> Stream:
        """`submit`, for who reads the tokens as a stream."""
        stream = Stream()
        stream.submission = self.submit(stream, wire.pack_ids(token_ids), sampling, priority=priority, salt=salt)
        return stream

    def abort(self, submission: Submission) -> None:
        """End it in the engine, unless it has ended; its listener still hears of that."""
        if submission.id in self._open and self._dead is None:
            self._send(wire.Abort(submission.id))

    def forget(self, submission: Submission) -> None:
        """Its listener hears nothing more."""
        self._close(submission.id)

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
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise EngineError("timeout", f"The engine did not answer within {timeout_s:g} s.") from None
        finally:
            self._flushes.pop(number, None)

    # --- for the composition root ---

    def bind(self, address: str) -> None:
        """Listen for the engine at a path. Needs the running event loop."""
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(address)
        self._listening.listen(1)
        self._listening.setblocking(False)
        self._await_engine()

    def _await_engine(self) -> None:
        if self._listening is not None:
            asyncio.get_running_loop().add_reader(self._listening.fileno(), self._accept)

    def _accept(self) -> None:
        """The engine has come; nobody else is let in."""
        assert self._listening is not None
        loop = asyncio.get_running_loop()
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, ConnectionError):  # it is gone again
            return
        except OSError:  # no descriptor or memory is left for it; asked again at once, the system would say so for ever
            loop.remove_reader(self._listening.fileno())
            loop.call_later(_ACCEPT_AGAIN_S, self._await_engine)
            return
        self._stop_listening()
        self._link = LoopLink(Link(connection))
        self._listen()

    def adopt(self, connection: socket.socket, info: wire.EngineInfo) -> None:
        """Speak to an engine that is ready, over a connection that it has been given the other end of. Needs the running event loop."""
        self._link, self._info = LoopLink(Link(connection)), info
        self._listen()
        self._ready.set()

    def join(self, number: int) -> socket.socket | None:
        """Let the engine hear one client more: the connection that is to be given to it. None: no descriptor is left. Where the engine is
        gone, so is the connection's other end."""
        try:
            ours, theirs = socket.socketpair()
        except OSError:
            return None
        with theirs:
            if self._send(wire.Join(number), theirs.fileno()):
                theirs.detach()  # which went there
        return ours

    def _stop_listening(self) -> None:
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening.fileno())
            with contextlib.suppress(OSError):  # the folder may be gone
                Path(self._listening.getsockname()).unlink()
            self._listening.close()
            self._listening = None

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
        self._open_background.clear()
        self._unstarted = {False: Unstarted(), True: Unstarted()}
        for submission in submissions:
            if self._dead is None:
                self._send(wire.Abort(submission.id))
            submission.error = EngineError(code, message)
            submission.deliver()

    def close(self) -> None:
        self._stop_listening()
        if self._link is not None:
            self._link.close()
            self._link = None

    # --- the wire ---

    def _close(self, request_id: int) -> Submission | None:
        """It has ended. None: it had before."""
        submission = self._open.pop(request_id, None)
        if submission is not None and submission.first_token is None:
            self._started(submission)
        self._open_background.discard(request_id)
        return submission

    def _started(self, submission: Submission) -> None:
        """It waits no more in the engine's queue."""
        self._unstarted[submission.id in self._open_background].remove(submission.size)

    def _send(self, message: wire.FrontMessage, descriptor: int | None = None) -> bool:
        """Send, or drop what nobody would read. Never waits, never raises: how a request ends is told to its listener. What may be
        outstanding is bounded by max_open."""
        return self._link is not None and not self.lost and self._link.send(wire.encode(message), descriptor)

    def _lose(self, link: LoopLink) -> None:
        """The engine is gone. What it was is for `died` to say, which fails all that is open."""
        if not self.lost:
            self.lost = True
            link.leave()
            self.on_lost()

    def _drain(self) -> None:
        """Take in all that has come, then tell the listeners."""
        if not self._draining:
            self._draining = True
            in_turns(self._drained())

    def _drained(self) -> Iterator[None]:
        """`_drain`, piece by piece. What comes while listeners are told is there at the next wake-up."""
        if (link := self._link) is not None and not self.lost:
            for raw in link.received():
                self.last_heard = self._clock()
                try:
                    self._receive(wire.decode_engine(raw))
                except Exception:
                    log.exception("a message of the engine could not be handled")
                yield
                if self._link is None:  # closed meanwhile
                    break
            if link.ended:
                self._lose(link)
        untold, self._untold = self._untold, {}
        try:
            self._observe_gaps(untold)
        except Exception:
            log.exception("the times between tokens could not be counted")
        spent = 0.0
        for submission in untold:
            begun = time.perf_counter()
            submission.deliver()
            spent += time.perf_counter() - begun
            yield
        self._draining = False
        if spent >= _AT_ONCE_S and (link := self._link) is not None and not self.lost:
            link.rest()
            asyncio.get_running_loop().call_later(min(spent, _REST_S), self._listen)

    def _listen(self) -> None:
        """Hear the engine, from now on."""
        if self._link is not None and not self.lost:
            self._link.listen(self._drain)

    def _receive(self, message: wire.EngineMessage) -> None:
        match message:
            case wire.StepOutput():
                self._step(message)
            case wire.Stats():
                if self.stats is not None and _steps(message) > _steps(self.stats):
                    self.last_step = self.last_heard
                self.stats = message
            case wire.Failed():
                if (submission := self._close(message.id)) is not None:
                    submission.error = EngineError(message.code, message.message, message.again_s)
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
        tokens = wire.unpack_ids(output.token_ids).tolist()
        pieces = _cut(tokens, output.counts) if output.counts else [[token] for token in tokens]
        if len(pieces) != len(output.ids):
            raise ValueError(f"tokens for {len(pieces)} requests, ids of {len(output.ids)}")
        for request_id, ids in zip(output.ids, pieces, strict=True):
            submission = submissions.get(request_id)
            if submission is None:
                continue
            if submission.first_token is None:
                self._started(submission)
                submission.first_token = submission.last_token = now
            else:
                submission.untimed += len(ids)
            if submission.ids:
                submission.ids += ids
            else:
                submission.ids = ids
            untold[submission] = None
        if output.logprobs is not None:
            self._score(output, tokens)
        for part in output.prompt_logprobs:
            if (submission := submissions.get(part.id)) is not None:
                submission.prompt_logprobs = [*(submission.prompt_logprobs or ()), part]
                untold[submission] = None
        for vector in output.vectors:
            if (submission := submissions.get(vector.id)) is not None:
                submission.vector = vector.values
        for finish in output.finished:
            if (submission := self._close(finish.id)) is not None:
                submission.finish = finish
                untold[submission] = None

    def _observe_gaps(self, told: Iterable[Submission]) -> None:
        """How long ago the last token before was told, shared out to those that are told now."""
        now = self.last_heard
        gaps: dict[tuple[float, int], int] = {}  # requests that were told of as many at the same two times
        for submission in told:
            if submission.untimed:
                gap = submission.last_token, submission.untimed
                gaps[gap] = gaps.get(gap, 0) + 1
                submission.last_token, submission.untimed = now, 0
        for (last, tokens), requests in gaps.items():
            self.on_inter_token_latency((now - last) / tokens, tokens * requests)

    def _score(self, output: wire.StepOutput, tokens: list[int]) -> None:
        """Give the log probabilities of a step to the requests whose tokens have some."""
        assert output.logprobs is not None
        scored = wire.unpack_ids(output.scored).tolist()
        owners = [
            request_id for request_id, count in zip(output.ids, output.counts or [1] * len(output.ids), strict=True) for _ in range(count)
        ]
        for at, row in zip(scored, rows_of(output.logprobs, [tokens[at] for at in scored]), strict=True):
            if (submission := self._open.get(owners[at])) is not None:
                if submission.logprobs is None:
                    submission.logprobs = []
                submission.logprobs.append(row)


def _steps(stats: wire.Stats) -> int:
    return stats.prefill.steps + stats.decode.steps


def _cut(tokens: list[int], counts: list[int]) -> list[list[int]]:
    """The tokens of each request. Raises ValueError when the counts do not add up."""
    ends = [0, *accumulate(counts)]
    if ends[-1] != len(tokens):
        raise ValueError(f"{len(tokens)} tokens for counts that add up to {ends[-1]}")
    return [tokens[start:end] for start, end in pairwise(ends)]
