"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from starlette.requests import Request
from starlette.responses import Response

from banyan_runtime.front.answers import Answer, Arrival, Outcome, Start, Streamed, Whole, answer, given, to_json
from banyan_runtime.front.anthropic.errors import error_body
from banyan_runtime.front.chat.events import Content, Reasoning, ToolArgs, ToolEvent, ToolStart
from banyan_runtime.front.chat.messages import object_of
from banyan_runtime.front.context import Context
from banyan_runtime.front.current import current
from banyan_runtime.front.deltas import Delta, Finished, in_order
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.event_stream import named
from banyan_runtime.front.generation import Call
from banyan_runtime.front.openai.calls import Calls, NameCall, call_names
from banyan_runtime.front.plan import AnswerPlan, ChatPlan

Json = dict[str, Any]
_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "abort": "end_turn"}


async def messages(context: Context, http: Request) -> Response:
    return await answer(context, http, "messages", ChatPlan, _start)


async def count_tokens(context: Context, http: Request) -> Response:
    return await answer(context, http, "count_tokens", AnswerPlan, given)


def _start(context: Context, arrival: Arrival, plan: ChatPlan) -> Answer:
    message_id = f"msg_{uuid.uuid4().hex[:24]}"
    call = Call(endpoint="messages", streaming=plan.envelope.stream, received=arrival.received, key=arrival.key)
    start = Start(context, call, plan.requests, [message_id], plan.envelope.ignored)
    head = _Head(message_id, plan.envelope.model, plan.requests[0].prompt_tokens)
    name_call = call_names(plan.requests[0].tools)
    if plan.envelope.stream:
        return Streamed(start, _Writer(head, name_call))

    def body(outcomes: list[Outcome]) -> Iterator[bytes]:
        (outcome,) = outcomes
        calls = Calls(name_call)
        calls.add(outcome.tools)
        yield to_json(head.message(_blocks(outcome, calls), _stop(outcome.end, calls), outcome.end, len(outcome.token_ids)))

    return Whole(start, body)


@dataclass(frozen=True, slots=True)
class _Head:
    """What is known of a message before it is there."""

    id: str
    model: str
    prompt_tokens: int

    def message(self, content: list[Json], stop: Json, end: Finished | None, output_tokens: int) -> Json:
        cached = 0 if end is None else min(end.cached_tokens, self.prompt_tokens)
        usage: Json = {
            "input_tokens": self.prompt_tokens - cached,
            "output_tokens": output_tokens,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
        }
        if end is not None and end.reasoning_tokens is not None:
            usage["output_tokens_details"] = {"thinking_tokens": end.reasoning_tokens}
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content, **stop, "usage": usage}


def _stop(end: Finished, calls: Calls) -> Json:
    if calls.fit and end.reason == "stop":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(end.matched, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": end.matched}
    return {"stop_reason": _REASONS[end.reason], "stop_sequence": None}


def _blocks(outcome: Outcome, calls: Calls) -> list[Json]:
    """The content, which is never empty."""
    blocks: list[Json] = []
    if outcome.reasoning:
        blocks.append({"type": "thinking", "thinking": outcome.reasoning, "signature": ""})
    if outcome.content:
        blocks.append({"type": "text", "text": outcome.content})
    blocks += [{"type": "tool_use", "id": call.id, "name": call.name, "input": object_of(call.arguments) or {}} for call in calls.calls]
    return blocks or [{"type": "text", "text": ""}]


Kind = Literal["thinking", "text", "tool_use"]
_EMPTY: Final[dict[str, Json]] = {"thinking": {"type": "thinking", "thinking": "", "signature": ""}, "text": {"type": "text", "text": ""}}


class _Writer:
    """The events of a stream: blocks one after another, each begun, filled and ended."""

    def __init__(self, head: _Head, name_call: NameCall) -> None:
        self._head = head
        self._request_id = current().id
        self._calls = Calls(name_call)
        self._index = -1
        self._open: Kind | None = None
        self._end: Finished | None = None
        self._tokens = 0

    def opening(self) -> bytes:
        nothing = {"stop_reason": None, "stop_sequence": None}
        return _event("message_start", message=self._head.message([], nothing, None, 0))

    def render(self, index: int, delta: Delta) -> bytes:
        events: list[bytes] = []
        for one in in_order(delta):
            if isinstance(one, Reasoning):
                events += self._text("thinking", {"type": "thinking_delta", "thinking": one.text})
            elif isinstance(one, Content):
                events += self._text("text", {"type": "text_delta", "text": one.text})
            else:
                events += self._call(one)
        if delta.finished is not None:
            self._end, self._tokens = delta.finished, delta.completion_tokens
        return b"".join(events)

    def closing(self) -> bytes:
        assert self._end is not None
        events = [] if self._index >= 0 else self._begin("text", _EMPTY["text"])
        events += self._close()
        message = self._head.message([], {}, self._end, self._tokens)
        events.append(_event("message_delta", delta=_stop(self._end, self._calls), usage=message["usage"]))
        events.append(_event("message_stop"))
        return b"".join(events)

    def error(self, error: ApiError) -> bytes:
        return b"".join(self._close()) + named("error", error_body(error, self._request_id))

    def _text(self, kind: Kind, delta: Json) -> Sequence[bytes]:
        begun = [] if self._open == kind else [*self._close(), *self._begin(kind, _EMPTY[kind])]
        return [*begun, _event("content_block_delta", index=self._index, delta=delta)]

    def _call(self, one: ToolEvent) -> Sequence[bytes]:
        self._calls.add([one])
        if isinstance(one, ToolStart):
            call = self._calls.calls[-1]
            return [*self._close(), *self._begin("tool_use", {"type": "tool_use", "id": call.id, "name": call.name, "input": {}})]
        if isinstance(one, ToolArgs):
            delta = {"type": "input_json_delta", "partial_json": one.fragment}
            return [_event("content_block_delta", index=self._index, delta=delta)]
        return self._close()

    def _begin(self, kind: Kind, block: Json) -> list[bytes]:
        self._open = kind
        self._index += 1
        return [_event("content_block_start", index=self._index, content_block=block)]

    def _close(self) -> list[bytes]:
        kind, self._open = self._open, None
        if kind is None:
            return []
        signed = {"type": "signature_delta", "signature": ""}
        signature = [_event("content_block_delta", index=self._index, delta=signed)] if kind == "thinking" else []
        return [*signature, _event("content_block_stop", index=self._index)]


def _event(kind: str, **fields: Any) -> bytes:
    return named(kind, to_json({"type": kind, **fields}))
