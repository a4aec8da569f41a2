"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from banyan_runtime.front.chat.events import OutputParser
from banyan_runtime.front.chat.prompt import ChatOptions, ChatPrompt, render
from banyan_runtime.front.context import Context
from banyan_runtime.front.errors import invalid
from banyan_runtime.front.generation import Delta, GenerateRequest
from banyan_runtime.front.limits import admit, fit, read_json
from banyan_runtime.front.openai.schema import ChatRequest
from banyan_runtime.front.openai.serving import Call, Outcome, StreamFrame, priority_of, respond, stream, to_json, usage, whole
from banyan_runtime.front.parsing import parse
from banyan_runtime.front.sampling import SamplingParams, resolve
from banyan_runtime.front.text.text import THREAD_ABOVE, Text

_OPEN_END: Final = b',"logprobs":null,"finish_reason":null,"matched_stop":null}]'
_CLOSE: Final = b"}\n\n"


async def chat_completions(context: Context, request: Request) -> Response:
    body = await read_json(request)
    asked = parse(ChatRequest, body)
    admit(context)
    assert context.text is not None
    text = context.text
    call = Call.begin(context, asked, "chatcmpl-")
    params = _params(context, text, asked)
    prompt, ids = await _prompt(text, asked)
    ids, max_new = fit(ids, params.max_tokens, None, context.config, context.client.info, "messages")
    markers = frozenset() if text.reasoning is None else text.reasoning.marker_ids
    eos_ids = text.defaults.eos_ids | text.turn_end_ids
    requests = [
        GenerateRequest(
            token_ids=ids,
            sampling=params.sampling(max_new, call.id, context.config.random_seed, index),
            detokenizer=text.needed_tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens, keep=markers),
            stops=params.stops,
            include_stop=params.include_stop,
            parser=_parser(text, asked, prompt),
            group=context.config.stream_interval if asked.stream else 0,
            priority=priority_of(asked),
            salt=asked.cache_salt or "",
            endpoint="chat",
            streaming=asked.stream,
            param="messages",
            request_id=call.id,
            received=call.received,
        )
        for index in range(params.n)
    ]
    if asked.stream:
        writer = _ChunkWriter(call, params.n, eos_ids, asked.include_reasoning)
        frame = StreamFrame(
            prefix=writer.prefix,
            include_usage=asked.stream_options.include_usage,
            continuous_usage=asked.stream_options.continuous_usage_stats,
            choices_per_prompt=params.n,
        )
        return await stream(context, request, call, requests, frame, writer.opening(), writer.render)
    group, outcomes = await whole(context, request, requests)
    return respond(
        {
            "id": call.id,
            "object": "chat.completion",
            "created": call.created,
            "model": call.model,
            "choices": [_choice(index, outcome, eos_ids, asked.include_reasoning) for index, outcome in enumerate(outcomes)],
            "usage": usage(context, group.generations, [outcome.finished for outcome in outcomes], params.n),
            "service_tier": None,
            "system_fingerprint": None,
        },
        call,
    )


def _choice(index: int, outcome: Outcome, eos_ids: frozenset[int], include_reasoning: bool) -> dict[str, Any]:
    reasoning = (outcome.reasoning or None) if include_reasoning else None
    return {
        "index": index,
        "message": {
            "role": "assistant",
            "content": outcome.content,
            "refusal": None,
            "reasoning_content": reasoning,
            "reasoning": reasoning,
            "tool_calls": None,
        },
        "logprobs": None,
        "finish_reason": outcome.finished.reason,
        "matched_stop": outcome.finished.matched,
        "stop_reason": stop_reason(outcome.finished.matched, eos_ids),
    }


def _params(context: Context, text: Text, asked: ChatRequest) -> SamplingParams:
    limit = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
    names = {"max_tokens": "max_completion_tokens"} if asked.max_completion_tokens is not None else {}
    fields = asked.sampling_fields(max_tokens=limit, names=names, min_max_tokens=1)
    return resolve(fields, text.defaults.openai, text.defaults.eos_ids | text.turn_end_ids, context.client.info.vocab_size)


async def _prompt(text: Text, asked: ChatRequest) -> tuple[ChatPrompt, list[int]]:
    """Render and tokenize. Raises ApiError."""
    if asked.continue_final_message and asked.add_generation_prompt:
        raise invalid("continue_final_message", "continue_final_message and add_generation_prompt exclude each other.")
    options = ChatOptions(
        add_generation_prompt=asked.add_generation_prompt is not False,
        continue_final_message=asked.continue_final_message,
        variables=asked.template_variables(),
    )
    text.needed_tokenizer  # noqa: B018 (raises: the clearer error comes first)
    length = sum(len(message.content) for message in asked.messages if isinstance(message.content, str))
    if length > THREAD_ABOVE or any(isinstance(message.content, list) for message in asked.messages):
        prompt = await asyncio.to_thread(render, text.template, asked.messages, options)
    else:
        prompt = render(text.template, asked.messages, options)
    # The template writes BOS itself, so the tokenizer must not add a second one.
    return prompt, await text.tokenize(prompt.text, add_special_tokens=asked.add_special_tokens)


def _parser(text: Text, asked: ChatRequest, prompt: ChatPrompt) -> OutputParser | None:
    """A fresh parser for one choice, or None where the text is passed on as it is."""
    reader = text.reasoning
    if reader is None or not asked.separate_reasoning:
        return None
    return reader.parser(reader.form.start_state(prompt.opening), stream=asked.stream_reasoning)


def stop_reason(matched: int | str | None, eos_ids: frozenset[int]) -> int | str | None:
    """vLLM's field: as `matched_stop`, but null for the end of the text."""
    return None if isinstance(matched, int) and matched in eos_ids else matched


class _ChunkWriter:
    """The events of one stream, joined from bytes that are prepared once: five times cheaper than a model per chunk."""

    def __init__(self, call: Call, choices: int, eos_ids: frozenset[int], include_reasoning: bool) -> None:
        head = {"id": call.id, "object": "chat.completion.chunk", "created": call.created, "model": call.model}
        self.prefix = to_json(head)[:-1] + b',"choices":['
        self._starts = [b"data: " + self.prefix + b'{"index":%d,"delta":' % index for index in range(choices)]
        self._eos_ids = eos_ids
        self._include_reasoning = include_reasoning

    def opening(self) -> list[bytes]:
        """The role, once for each choice."""
        delta = b'{"role":"assistant","content":"","reasoning_content":null}'
        return [start + delta + _OPEN_END + _CLOSE for start in self._starts]

    def render(self, index: int, delta: Delta, running_usage: bytes) -> list[bytes]:
        start, end = self._starts[index], _OPEN_END + running_usage + _CLOSE
        events: list[bytes] = []
        if delta.reasoning and self._include_reasoning:
            text = to_json(delta.reasoning)
            events.append(start + b'{"reasoning_content":' + text + b',"reasoning":' + text + b"}" + end)
        if delta.content:
            events.append(start + b'{"content":' + to_json(delta.content) + b',"reasoning_content":null}' + end)
        if delta.finished is not None:
            matched = delta.finished.matched
            ending = b'{"reasoning_content":null},"logprobs":null,"finish_reason":"%b","matched_stop":%b,"stop_reason":%b}]' % (
                delta.finished.reason.encode(),
                to_json(matched),
                to_json(stop_reason(matched, self._eos_ids)),
            )
            events.append(start + ending + running_usage + _CLOSE)
        return events
