"""What chat completions and completions have in common: checking, submitting, usage, and the frame of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from banyan_runtime.front.context import Context
from banyan_runtime.front.errors import ApiError, internal, invalid, unknown_model
from banyan_runtime.front.generation import Delta, Finished, GenerateRequest, Generation, GenerationGroup, log
from banyan_runtime.front.openai.schema import KNOWN_EXTRA, UNSUPPORTED, GenerationRequest
from banyan_runtime.front.parsing import ignored, refuse_unsupported
from banyan_runtime.front.transport import EventStream, while_connected

DONE: Final = b"data: [DONE]\n\n"
MAX_ID: Final = 128
_INT32: Final = 2**31 - 1
to_json: Final = msgspec.json.Encoder().encode


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request of either endpoint, its identity and its frame."""

    id: str
    created: int  # Unix seconds
    model: str  # as the client wrote it
    received: float = field(default_factory=time.monotonic)
    headers: Mapping[str, str]

    @staticmethod
    def begin(context: Context, request: GenerationRequest, prefix: str) -> Call:
        """Check what has nothing to do with the prompt. Raises ApiError."""
        names = context.config.names
        if request.model is not None and request.model != "default" and request.model not in names:
            raise unknown_model(request.model)
        refuse_unsupported(request, UNSUPPORTED)
        own = request.rid or request.request_id
        if own is not None:
            check_id(context, prefix + own, "rid" if request.rid else "request_id")
        return Call(
            id=prefix + (own or uuid.uuid4().hex),
            created=int(time.time()),
            model=request.model or names[0],
            headers=ignored(request, KNOWN_EXTRA),
        )


def check_id(context: Context, request_id: str, param: str) -> None:
    """Raises ApiError when a request id of a client's own cannot be used."""
    if len(request_id) > MAX_ID or not request_id.isprintable():
        raise invalid(param, f"{param} must be at most {MAX_ID} printable characters.")
    if request_id in context.live:
        raise invalid(param, f"A request with {param} '{request_id}' is already running.")


def priority_of(request: GenerationRequest) -> int:
    return max(-_INT32, min(_INT32, request.priority or 0))


@dataclass
class Outcome:
    """One finished choice."""

    finished: Finished
    content: str
    reasoning: str


async def collect(group: GenerationGroup) -> list[Outcome]:
    """Read all choices to their end."""
    contents: list[list[str]] = [[] for _ in group.generations]
    reasonings: list[list[str]] = [[] for _ in group.generations]
    ends: dict[int, Finished] = {}
    async for index, deltas in group:
        for delta in deltas:
            contents[index].append(delta.content)
            reasonings[index].append(delta.reasoning)
            if delta.finished is not None:
                ends[index] = delta.finished
    return [Outcome(ends[index], "".join(contents[index]), "".join(reasonings[index])) for index in range(len(group.generations))]


def usage(context: Context, generations: Sequence[Generation], ends: Iterable[Finished], choices_per_prompt: int) -> dict[str, Any]:
    """Tokens of a whole request: each prompt once, however many choices it has."""
    prompts = [generation.prompt_tokens for generation in generations[::choices_per_prompt]]
    completion = sum(generation.completion_tokens for generation in generations)
    details = None
    if context.config.enable_cache_report:
        # Of several choices the later ones find the prompt in the cache that the first one filled.
        cached = [end.cached_tokens for end in ends]
        firsts = [min(cached[start : start + choices_per_prompt]) for start in range(0, len(cached), choices_per_prompt)]
        details = {"cached_tokens": sum(firsts)}
    thought = [count for generation in generations if (count := generation.reasoning_tokens) is not None]
    return {
        "prompt_tokens": sum(prompts),
        "completion_tokens": completion,
        "total_tokens": sum(prompts) + completion,
        "prompt_tokens_details": details,
        "completion_tokens_details": {"reasoning_tokens": sum(thought)} if thought else None,
    }


def respond(body: Mapping[str, Any], call: Call) -> Response:
    return Response(to_json(body), headers=dict(call.headers), media_type="application/json")


Render = Callable[[int, Delta, bytes], list[bytes]]
"""The events of one delta: (choice, delta, JSON to put before the closing brace of each event) → events."""


@dataclass(frozen=True, kw_only=True)
class StreamFrame:
    """What surrounds the events of a stream."""

    prefix: bytes  # `{"id":…,"object":…,"created":…,"model":…,"choices":[` shared by all events
    include_usage: bool
    continuous_usage: bool
    choices_per_prompt: int


async def stream(
    context: Context,
    request: Request,
    call: Call,
    requests: Sequence[GenerateRequest],
    frame: StreamFrame,
    opening: Sequence[bytes],
    render: Render,
) -> Response:
    """Answer with events. The engine's first word is awaited before the status is sent, so a refusal is a proper error."""
    group = GenerationGroup(context, requests)
    try:
        await while_connected(request, group.admitted())
    except BaseException:
        group.close()
        raise
    return EventStream(_events(context, group, frame, opening, render), call.headers)


async def _events(
    context: Context, group: GenerationGroup, frame: StreamFrame, opening: Sequence[bytes], render: Render
) -> AsyncGenerator[bytes, None]:
    async with group:
        try:
            if opening:
                yield b"".join(opening)
            ends: dict[int, Finished] = {}
            async for index, deltas in group:
                events: list[bytes] = []
                for delta in deltas:
                    if delta.finished is not None:
                        ends[index] = delta.finished
                    events += render(index, delta, _running_usage(context, group, index, delta) if frame.continuous_usage else b"")
                if events:
                    yield b"".join(events)
            if frame.include_usage:
                ordered = [ends[index] for index in range(len(group.generations))]
                numbers = usage(context, group.generations, ordered, frame.choices_per_prompt)
                yield b"data: " + frame.prefix + b'],"usage":' + to_json(numbers) + b"}\n\n"
        except ApiError as error:
            yield b"data: " + to_json(error.body()) + b"\n\n"
        except Exception:
            log.exception("a stream failed")
            yield b"data: " + to_json(internal().body()) + b"\n\n"
        yield DONE


def _running_usage(context: Context, group: GenerationGroup, index: int, delta: Delta) -> bytes:
    prompt = group.generations[index].prompt_tokens
    numbers = {
        "prompt_tokens": prompt,
        "completion_tokens": delta.completion_tokens,
        "total_tokens": prompt + delta.completion_tokens,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
    return b',"usage":' + to_json(numbers)


async def whole(context: Context, request: Request, requests: Sequence[GenerateRequest]) -> tuple[GenerationGroup, list[Outcome]]:
    """Wait for all choices; a client that goes away ends them. Raises ApiError."""
    group = GenerationGroup(context, requests)
    async with group:
        return group, await while_connected(request, collect(group))
