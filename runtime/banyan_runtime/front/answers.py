"""From a body to an answer: what chat completions, completions and /generate have in common.

Each endpoint gives a function that starts a plan and says what its answer is made of; here is the way there. A plan, which
holds the token ids of its prompts, is not kept beyond that function: thousands of long prompts may be waiting.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from banyan_runtime import wire
from banyan_runtime.front.admission import admit
from banyan_runtime.front.body import read_body
from banyan_runtime.front.context import Context
from banyan_runtime.front.errors import ApiError, invalid
from banyan_runtime.front.event_stream import EventStream
from banyan_runtime.front.generation import Call, Delta, Finished, GenerationGroup
from banyan_runtime.front.logprobs import TokenLogprob
from banyan_runtime.front.plan import Endpoint, GenerateRequest
from banyan_runtime.front.transport import while_connected

DONE: Final = b"data: [DONE]\n\n"
_REJECTIONS: Final = {"queue_full": "queue_full", "context_length_exceeded": "too_long"}
to_json: Final = msgspec.json.Encoder().encode
P = TypeVar("P")


def check_free(context: Context, request_id: str, own_id: str, param: str) -> None:
    """Raises ApiError when a request with the id that the client chose is running."""
    if request_id in context.live:
        raise invalid(param, f"A request with {param} '{own_id}' is already running.")


def json_response(body: Any, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(body), headers=None if headers is None else dict(headers), media_type="application/json")


def rejection(context: Context, error: ApiError) -> str | None:
    """The label under which a refused request is counted; None for what is no refusal."""
    if error.code in _REJECTIONS:
        return _REJECTIONS[error.code]
    if error.code == "unavailable":
        return "draining" if context.state.draining else "loading"
    return "invalid" if 400 <= error.status < 500 else None


# --- the way to an answer ---


class Answer(Protocol):
    """An answer that is under way. Its `response` owns the generations: however it ends, they are closed."""

    async def response(self, http: Request) -> Response:
        """Raises ApiError, and ClientGone when nobody waits any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """When a request came, and the id it has unless it brings its own."""

    received: float = field(default_factory=time.monotonic)  # monotonic seconds
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


async def answer(
    context: Context, http: Request, endpoint: Endpoint, kind: type[P], start: Callable[[Context, Arrival, P], Answer]
) -> Response:
    """Read the body, have it planned, start the plan, and wait for the answer. Raises ApiError, ClientGone."""
    arrival = Arrival()
    # Body and plan get no names in this frame, which lives as long as the request.
    under_way = start(context, arrival, await _planned(context, http, endpoint, kind, arrival))
    return await under_way.response(http)


async def _planned(context: Context, http: Request, endpoint: Endpoint, kind: type[P], arrival: Arrival) -> P:
    body = await read_body(http)
    admit(context)
    assert context.preparer is not None, "admitted before it was ready"
    plan = await while_connected(http, context.preparer.plan(endpoint, body, arrival.id))
    assert isinstance(plan, kind)
    return plan


# --- whole ---


@dataclass(slots=True)
class Outcome:
    """One sequence, as far as it is known."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[wire.PromptLogprobs] = field(default_factory=list)
    finished: Finished | None = None
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self._content.append(delta.content)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.finished = delta.finished

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
        self.complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def add(self, index: int, delta: Delta) -> None:
        self.outcomes[index].add(delta)

    def end(self, error: ApiError | None) -> None:
        if self.complete.done():
            return
        if error is None:
            self.complete.set_result(None)
        else:
            self.complete.set_exception(error)


class Whole:
    """An answer in one piece; a client that goes away ends it."""

    def __init__(
        self,
        context: Context,
        call: Call,
        requests: Sequence[GenerateRequest],
        ids: Sequence[str],
        body: Callable[[list[Outcome]], Any],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Start the requests; `body` makes the JSON of all outcomes. Raises ApiError."""
        self._collector = Collector(len(requests))
        self._group = GenerationGroup(context, call, requests, ids, self._collector)
        self._body = body
        self._headers = headers

    async def response(self, http: Request) -> Response:
        try:
            await while_connected(http, self._complete())
        finally:
            self._group.close()
        return json_response(self._body(self._collector.outcomes), self._headers)

    async def _complete(self) -> None:
        await self._collector.complete


# --- streamed ---


class EventWriter(Protocol):
    """Makes the events of one endpoint. What it returns may be empty."""

    def opening(self) -> bytes:
        """What comes before the first delta."""
        ...

    def render(self, index: int, delta: Delta) -> bytes: ...

    def closing(self) -> bytes:
        """What comes behind the last delta."""
        ...

    def error(self, error: ApiError) -> bytes: ...


class Streamed:
    """An answer in events: the consumer that renders them and pushes them into the stream."""

    def __init__(
        self,
        context: Context,
        call: Call,
        requests: Sequence[GenerateRequest],
        ids: Sequence[str],
        writer: EventWriter,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Start the requests. Raises ApiError."""
        self._context = context
        self._writer = writer
        self._stream = EventStream(writer.opening(), headers)
        self._push = self._stream.push if len(requests) == 1 else self._stream.push_soon  # a step's choices leave in one write
        self._stream.on_close = GenerationGroup(context, call, requests, ids, self).close

    async def response(self, http: Request) -> Response:
        return await self._stream.begin(http)

    def add(self, index: int, delta: Delta) -> None:
        self._push(self._writer.render(index, delta))

    def end(self, error: ApiError | None) -> None:
        if error is None:
            self._stream.end(self._writer.closing() + DONE)
            return
        if self._stream.begun and (reason := rejection(self._context, error)) is not None:
            self._context.metrics.rejected(reason)  # before that, the error is an answer, and counted as such
        self._stream.fail(error, self._writer.error(error) + DONE)
