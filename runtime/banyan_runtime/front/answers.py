"""From a body to an answer: what chat completions, completions and /generate have in common.

Each endpoint gives a function that starts a plan and says what its answer is made of; here is the way there. A plan, which
holds the token ids of its prompts, is not kept beyond that function: thousands of long prompts may be waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from banyan_runtime import wire
from banyan_runtime.front.admission import admit
from banyan_runtime.front.auth import KEY_NAME
from banyan_runtime.front.body import read_body
from banyan_runtime.front.chat.events import ToolEvent
from banyan_runtime.front.context import Context
from banyan_runtime.front.deadline import Deadline
from banyan_runtime.front.deltas import Consumer, Delta, Finished
from banyan_runtime.front.errors import ApiError, ClientGone, invalid
from banyan_runtime.front.event_stream import PART_BYTES, EventStream
from banyan_runtime.front.generation import Call
from banyan_runtime.front.generation_group import GenerationGroup
from banyan_runtime.front.logprobs import Row
from banyan_runtime.front.parsing import MAX_IGNORED
from banyan_runtime.front.plan import AnswerPlan, Endpoint, GenerateRequest
from banyan_runtime.front.transport import while_connected
from banyan_runtime.front.turns import Turn

_NAMED: Final = 2 * MAX_IGNORED  # what has no effect, and what a model is not shown or held to
DONE: Final = b"data: [DONE]\n\n"
_REJECTIONS: Final = {"queue_full": "queue_full", "context_length_exceeded": "too_long", "server_overloaded": "unavailable"}
to_json: Final = msgspec.json.Encoder().encode
P = TypeVar("P")
W = TypeVar("W", bound="Frame")


def claim(context: Context, request_id: str, own_id: str, param: str) -> None:
    """The id that the client chose is this request's from here on. Raises ApiError when one with it is running."""
    if not context.live.claim(request_id):
        raise invalid(param, f"A request with {param} '{own_id}' is already running.")


def ignored(names: Sequence[str]) -> dict[str, str]:
    """The header that names the fields without effect, or the first of very many: proxies bound the headers that they pass on."""
    return {"X-Banyan-Ignored": ", ".join(names[:_NAMED])} if names else {}


def rejection(context: Context, error: ApiError) -> str | None:
    """The label under which a refused request is counted; None for what is no refusal."""
    if error.taken_on:
        return None
    if error.code in _REJECTIONS:
        return _REJECTIONS[error.code]
    if error.code == "unavailable":
        if context.state.phase in ("ready", "dead"):
            return "unavailable"  # or a part of it, which has no time or does not answer
        return "draining" if context.state.draining else "loading"
    return "invalid" if 400 <= error.status < 500 else None


def grammar_failure(error: ApiError) -> str | None:
    """The label under which a grammar that cannot be used is counted; None for what is none."""
    if error.code not in ("invalid_grammar", "invalid_json_schema"):
        return None
    if "could not be compiled within" in error.message:
        return "timeout"
    return "unsupported" if "not supported" in error.message else "invalid"


# --- the way to an answer ---


class Answer(Protocol):
    """An answer that is under way. Its `response` owns the generations: however it ends, they are closed."""

    async def response(self, http: Request) -> Response:
        """Raises ApiError, and ClientGone when nobody waits any more."""
        ...

    def expire(self) -> None:
        """Its time is over."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """When a request came and must be over, whose key it came with (`auth.KEY_NAME`), and the id it has unless it brings its own."""

    received: float = field(default_factory=time.monotonic)  # monotonic seconds
    deadline: Deadline = field(default_factory=Deadline)
    key: str | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


async def answer(
    context: Context,
    http: Request,
    endpoint: Endpoint,
    kind: type[P],
    start: Callable[[Context, Arrival, P], Answer],
    enrich: Callable[[bytearray], Awaitable[bytes | bytearray]] | None = None,
) -> Response:
    """Read the body, have it planned, start the plan, and wait for the answer. `enrich` adds to the body what the server knows.
    Raises ApiError, ClientGone."""
    received = time.monotonic()
    deadline = Deadline.of(context.config, http, received)
    arrival = Arrival(received=received, deadline=deadline, key=http.scope.get(KEY_NAME))
    # Body and plan get no names in this frame, which lives as long as the request.
    under_way = _started(context, arrival, await deadline.wait(_planned(context, http, endpoint, kind, arrival, enrich)), start)
    deadline.watch(http, under_way.expire)
    return await under_way.response(http)


def _started(context: Context, arrival: Arrival, plan: P, start: Callable[[Context, Arrival, P], Answer]) -> Answer:
    with context.live.starting():
        return start(context, arrival, plan)


async def _planned(
    context: Context,
    http: Request,
    endpoint: Endpoint,
    kind: type[P],
    arrival: Arrival,
    enrich: Callable[[bytearray], Awaitable[bytes | bytearray]] | None,
) -> P:
    with context.bodies.share() as share:
        body: bytes | bytearray = await read_body(http, share=share)
        admit(context)
        assert context.preparer is not None, "admitted before it was ready"
        if enrich is not None:
            assert isinstance(body, bytearray)
            body = await enrich(body)
        plan = await while_connected(http, context.preparer.plan(endpoint, body, arrival.id))
        assert isinstance(plan, kind)
        return plan


@dataclass(frozen=True, slots=True)
class Start:
    """What an answer starts with. Not to be kept: the requests hold the token ids of their prompts."""

    context: Context
    call: Call
    requests: Sequence[GenerateRequest]
    ids: Sequence[str]  # by which clients know the sequences
    ignored: Sequence[str]  # names of the fields without effect

    def group(self, consumer: Consumer) -> GenerationGroup:
        """Start the requests. Raises ApiError."""
        return GenerationGroup(self.context, self.call, self.requests, self.ids, consumer)


# --- without the engine ---


class Given:
    """An answer that its plan holds already."""

    def __init__(self, plan: AnswerPlan) -> None:
        self._response = Response(plan.body, headers=ignored(plan.ignored), media_type="application/json")

    def expire(self) -> None:
        """It is there already."""

    async def response(self, http: Request) -> Response:
        return self._response


def given(context: Context, arrival: Arrival, plan: AnswerPlan) -> Answer:
    """Starts what needs no start: for `answer`."""
    return Given(plan)


# --- whole ---


@dataclass(slots=True)
class Outcome:
    """One sequence, as far as it is known."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Row] = field(default_factory=list)
    prompt_logprobs: list[wire.PromptLogprobs] = field(default_factory=list)
    finished: Finished | None = None
    tools: list[ToolEvent] = field(default_factory=list)
    vector: bytes = b""  # float32, where one was asked for
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self._content.append(delta.content)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        self.tools += delta.tools
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.finished = delta.finished
        self.vector = delta.vector

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def end(self) -> Finished:
        assert self.finished is not None, "read before it was complete"
        return self.finished


class Collector:
    """The consumer of a whole answer."""

    def __init__(self, sequences: int) -> None:
        self.outcomes = [Outcome() for _ in range(sequences)]
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._error: ApiError | None = None

    def add(self, index: int, delta: Delta) -> None:
        self.outcomes[index].add(delta)

    def end(self, error: ApiError | None) -> None:
        if not self._over.done():
            self._error = error
            self._over.set_result(None)

    async def complete(self) -> None:
        """Wait for all sequences. Raises ApiError."""
        await self._over
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback holds this frame: no cycle for the garbage collector


class Whole:
    """An answer in one piece; a client that goes away ends it."""

    def __init__(self, start: Start, body: Callable[[list[Outcome]], Iterator[bytes]]) -> None:
        """Start the requests; `body` makes the JSON of all outcomes, in parts. Raises ApiError."""
        self._collector = Collector(len(start.requests))
        self._group = start.group(self._collector)
        self._body = body
        self._headers = ignored(start.ignored)

    def expire(self) -> None:
        self._group.expire()

    async def response(self, http: Request) -> Response:
        try:
            await while_connected(http, self._collector.complete())
        finally:
            self._group.close()
        return await _in_parts(self._body(self._collector.outcomes), self._headers)


async def _in_parts(body: Iterator[bytes], headers: Mapping[str, str] | None) -> Response:
    """A JSON body as a whole, or, where it is long, made while it is sent."""
    made: list[bytes] = []
    size, turn = 0, Turn()
    for part in body:
        made.append(part)
        size += len(part)
        if size >= PART_BYTES:
            return _Long(itertools.chain([b"".join(made)], body), headers)
        if turn.over:
            await asyncio.sleep(0)
            turn = Turn()
    return Response(b"".join(made), headers=headers, media_type="application/json")


class _Long(Response):
    """A JSON body in parts: each is made when the client has taken those before it, and others have a turn in between."""

    media_type = "application/json"

    def __init__(self, body: Iterator[bytes], headers: Mapping[str, str] | None) -> None:
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._parts = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with contextlib.suppress(ClientGone):
            await while_connected(Request(scope, receive), self._send(send))

    async def _send(self, send: Send) -> None:
        waiting: list[bytes] = []
        size, turn = 0, Turn()
        for part in self._parts:
            waiting.append(part)
            size += len(part)
            if size >= PART_BYTES:
                await send({"type": "http.response.body", "body": b"".join(waiting), "more_body": True})
                waiting, size = [], 0
            elif not turn.over:
                continue
            await asyncio.sleep(0)
            turn = Turn()
        await send({"type": "http.response.body", "body": b"".join(waiting), "more_body": False})


# --- streamed ---


class Frame(Protocol):
    """What comes before, behind and instead of the events of one endpoint. It may be empty."""

    def opening(self) -> bytes | Iterator[bytes]:
        """What comes before the first delta; in parts where it may be long."""
        ...

    def closing(self) -> bytes:
        """What comes behind the last delta."""
        ...

    def error(self, error: ApiError) -> bytes: ...


class DeltaWriter(Frame, Protocol):
    def render(self, index: int, delta: Delta) -> bytes | Iterator[bytes]:
        """The events of a delta; in parts where they may be long."""
        ...


class SnapshotWriter(Frame, Protocol):
    def take(self, index: int, delta: Delta) -> None: ...

    def render(self, index: int) -> Iterator[bytes]:
        """An event with everything that one sequence has so far, in parts. More may be taken in between."""
        ...


def fail(context: Context, stream: EventStream, error: ApiError, event: bytes) -> None:
    """The last event of a stream tells of this error."""
    if stream.begun and (reason := rejection(context, error)) is not None:
        context.metrics.rejected(reason)  # before that, the error is an answer, and counted as such
    stream.fail(error, event)


class _Stream(ABC, Generic[W]):
    """An answer in events."""

    def __init__(self, start: Start, writer: W) -> None:
        """Start the requests. Raises ApiError."""
        self._context = start.context
        self._writer = writer
        self._stream = EventStream(writer.opening(), ignored(start.ignored))
        self._push = self._stream.push if len(start.requests) == 1 else self._stream.push_soon  # a step's choices leave in one write
        self._group: GenerationGroup | None = start.group(self)
        self._stream.on_close = self._close

    @abstractmethod
    def add(self, index: int, delta: Delta) -> None: ...

    def expire(self) -> None:
        if self._group is not None:
            self._group.expire()

    def _close(self) -> None:
        group, self._group = self._group, None  # it holds this stream: no cycle for the garbage collector
        if group is not None:
            group.close()

    async def response(self, http: Request) -> Response:
        assert self._group is not None
        return await self._stream.begin(http, patient=self._group.may_be_refused)

    def end(self, error: ApiError | None) -> None:
        if error is None:
            self._stream.end(self._writer.closing())
            return
        fail(self._context, self._stream, error, self._writer.error(error))


class Streamed(_Stream[DeltaWriter]):
    """Each event tells what is new."""

    def add(self, index: int, delta: Delta) -> None:
        self._push(self._writer.render(index, delta))


class Cumulative(_Stream[SnapshotWriter]):
    """Each event tells everything so far. While a client takes its time, the events it has not been sent become one."""

    def __init__(self, start: Start, writer: SnapshotWriter) -> None:
        """Start the requests. Raises ApiError."""
        self._news: dict[int, None] = {}  # sequences with something untold, in the order of it
        self._telling = False
        super().__init__(start, writer)

    def add(self, index: int, delta: Delta) -> None:
        self._writer.take(index, delta)
        self._news[index] = None
        if not self._telling:
            self._telling = True
            self._stream.push_soon(self._events())

    def _events(self) -> Iterator[bytes]:
        while self._news:
            index = next(iter(self._news))
            del self._news[index]
            yield from self._writer.render(index)
        self._telling = False
