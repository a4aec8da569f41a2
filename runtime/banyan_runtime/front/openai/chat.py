"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from banyan_runtime.front.answers import Answer, Arrival, Outcome, Start, Streamed, Whole, answer, to_json
from banyan_runtime.front.context import Context
from banyan_runtime.front.deltas import Delta
from banyan_runtime.front.generation import Call
from banyan_runtime.front.logprobs import Row, chat_content
from banyan_runtime.front.openai.calls import Calls, NameCall, call_names
from banyan_runtime.front.openai.serving import OPEN_END, ChunkWriter, Identity, Usage, end_fields
from banyan_runtime.front.plan import ChatPlan
from banyan_runtime.front.text.tokenizer import Tokenizer

_PLAIN_END: Final = b',"reasoning_content":null},"logprobs":null,' + OPEN_END


async def chat_completions(context: Context, http: Request) -> Response:
    return await answer(context, http, "chat", ChatPlan, _start)


def _start(context: Context, arrival: Arrival, plan: ChatPlan) -> Answer:
    assert context.text is not None
    text = context.text
    envelope = plan.envelope
    identity = Identity.of(context, arrival, envelope, "chatcmpl-")
    call = Call(endpoint="chat", streaming=envelope.stream, received=arrival.received, key=arrival.key)
    start = Start(context, call, plan.requests, [identity.id] * len(plan.requests), envelope.ignored)
    usage, logprobs = Usage(plan), _Logprobs(text.needed_tokenizer, plan)
    eos_ids = text.defaults.eos_ids.union(plan.turn_end)
    tools = plan.requests[0].tools
    name_call, calls_only = call_names(tools), tools is not None and tools.required
    if envelope.stream:
        return Streamed(start, _Writer(identity, plan, usage, eos_ids, logprobs, name_call))
    include_reasoning = plan.include_reasoning

    def body(outcomes: list[Outcome]) -> Iterator[bytes]:
        yield to_json(identity.head("chat.completion"))[:-1] + b',"choices":['
        for index, outcome in enumerate(outcomes):
            if index:
                yield b","
            yield from _choice(index, outcome, eos_ids, include_reasoning, logprobs, Calls(name_call), calls_only)
        numbers = usage.of([(outcome.end, len(outcome.token_ids)) for outcome in outcomes])
        yield b'],"usage":%b,"service_tier":%b,"system_fingerprint":null}' % (to_json(numbers), to_json(envelope.tier))

    return Whole(start, body)


class _Logprobs:
    """`choices[].logprobs` as this request wants it."""

    def __init__(self, tokenizer: Tokenizer, plan: ChatPlan) -> None:
        self._tokenizer = tokenizer
        self._top = plan.top_logprobs
        self._as_ids = plan.tokens_as_ids

    def of(self, rows: list[Row]) -> Iterator[bytes]:
        """The object, in parts."""
        if self._top < 0:
            yield b"null"
            return
        yield b'{"content":'
        yield from chat_content(self._tokenizer, rows, self._top, as_ids=self._as_ids)
        yield b',"refusal":null}'


def _choice(
    index: int,
    outcome: Outcome,
    eos_ids: frozenset[int],
    include_reasoning: bool,
    logprobs: _Logprobs,
    calls: Calls,
    calls_only: bool,
) -> Iterator[bytes]:
    calls.add(outcome.tools)
    reasoning = (outcome.reasoning or None) if include_reasoning else None
    message = {
        "role": "assistant",
        "content": outcome.content or (None if calls.calls or calls_only else ""),
        "refusal": None,
        "reasoning_content": reasoning,
        "reasoning": reasoning,
        "tool_calls": calls.message() or None,
    }
    yield b'{"index":%d,"message":%b,"logprobs":' % (index, to_json(message))
    yield from logprobs.of(outcome.logprobs)
    yield b",%b}" % end_fields(outcome.end, eos_ids, calls=calls.fit)


class _Writer(ChunkWriter):
    """A token's log probability goes with the first chunk that follows it: its text may be held back, or not shown at all."""

    def __init__(
        self,
        identity: Identity,
        plan: ChatPlan,
        usage: Usage,
        eos_ids: frozenset[int],
        logprobs: _Logprobs,
        name_call: NameCall,
    ) -> None:
        super().__init__(identity, "chat.completion.chunk", plan, usage, eos_ids)
        self._calls = [Calls(name_call) for _ in plan.requests]
        self._include_reasoning = plan.include_reasoning
        self._logprobs = logprobs
        self._untold: list[list[Row]] = [[] for _ in plan.requests]
        # The frequent case is a chunk of content and nothing else.
        self._plain = plan.top_logprobs < 0 and not plan.envelope.continuous_usage
        self._contents = [start + b'"delta":{"content":' for start in self._starts]

    def opening(self) -> bytes:
        """The role, once for each choice."""
        delta = b'"delta":{"role":"assistant","content":"","reasoning_content":null},"logprobs":null,'
        return b"".join(start + delta + OPEN_END + self.tail(index, 0) for index, start in enumerate(self._starts))

    def render(self, index: int, delta: Delta) -> bytes:
        if self._plain and not delta.reasoning and not delta.tools and delta.finished is None:
            return b"%b%b%b%b" % (self._contents[index], to_json(delta.content), _PLAIN_END, self._close) if delta.content else b""
        self._untold[index] += delta.logprobs
        chunks: list[bytes] = []
        if delta.reasoning and self._include_reasoning:
            text = to_json(delta.reasoning)
            chunks += self._chunk(index, delta, b'"reasoning_content":' + text + b',"reasoning":' + text, OPEN_END)
        if delta.content:
            chunks += self._chunk(index, delta, b'"content":' + to_json(delta.content) + b',"reasoning_content":null', OPEN_END)
        if delta.tools:
            calls = self._calls[index]
            calls.add(delta.tools)
            for told in calls.deltas(delta.tools):
                chunks += self._chunk(index, delta, b'"tool_calls":[%b]' % to_json(told), OPEN_END)
        if delta.finished is not None:
            chunks += self._chunk(index, delta, b'"reasoning_content":null', self.end_of(index, delta, calls=self._calls[index].fit))
        return b"".join(chunks)

    def _chunk(self, index: int, delta: Delta, text: bytes, end: bytes) -> tuple[bytes, ...]:
        untold, self._untold[index] = self._untold[index], []
        logprobs = b"".join(self._logprobs.of(untold)) if untold else b"null"
        return (self._starts[index], b'"delta":{', text, b'},"logprobs":', logprobs, b",", end, self.tail(index, delta.completion_tokens))
