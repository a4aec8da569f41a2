"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from banyan_runtime.front.context import Context
from banyan_runtime.front.errors import ApiError, invalid, invalid_type, unsupported
from banyan_runtime.front.generation import Delta, GenerateRequest
from banyan_runtime.front.limits import MAX_PROMPTS, admit, as_ids, check_ids, fit, read_json
from banyan_runtime.front.openai.chat import stop_reason
from banyan_runtime.front.openai.schema import CompletionRequest
from banyan_runtime.front.openai.serving import Call, Outcome, StreamFrame, priority_of, respond, stream, to_json, usage, whole
from banyan_runtime.front.parsing import parse
from banyan_runtime.front.sampling import resolve
from banyan_runtime.front.text.text import Text

DEFAULT_MAX_TOKENS: Final = 16


async def completions(context: Context, request: Request) -> Response:
    body = await read_json(request)
    asked = parse(CompletionRequest, body)
    admit(context)
    assert context.text is not None
    text, info, config = context.text, context.client.info, context.config
    call = Call.begin(context, asked, "cmpl-")
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise unsupported("best_of", "only best_of equal to n is served")
    params = resolve(
        asked.sampling_fields(max_tokens=asked.max_tokens, names={}, min_max_tokens=0),
        text.defaults.openai,
        text.defaults.eos_ids,
        info.vocab_size,
    )
    prompts = _prompts(asked.prompt)
    echoes: list[str] = []
    requests: list[GenerateRequest] = []
    for prompt in prompts:
        ids = await text.tokenize(prompt, add_special_tokens=asked.add_special_tokens) if isinstance(prompt, str) else prompt
        if not ids:
            raise _empty()
        check_ids(ids, info, "prompt")
        fitting, max_new = fit(ids, params.max_tokens, DEFAULT_MAX_TOKENS, config, info, "prompt")
        shown = _shown(text, prompt) if asked.echo else ""
        for _ in range(params.n):
            index = len(requests)
            echoes.append(shown)
            requests.append(
                GenerateRequest(
                    token_ids=fitting,
                    sampling=params.sampling(max_new, call.id, config.random_seed, index if params.seed is None else index % params.n),
                    detokenizer=text.needed_tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens),
                    stops=params.stops,
                    include_stop=params.include_stop,
                    group=config.stream_interval if asked.stream else 0,
                    priority=priority_of(asked),
                    salt=asked.cache_salt or "",
                    endpoint="completions",
                    streaming=asked.stream,
                    param="prompt",
                    request_id=call.id,
                    received=call.received,
                )
            )
    eos_ids = text.defaults.eos_ids
    if asked.stream:
        writer = _ChunkWriter(call, echoes, eos_ids)
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
            "object": "text_completion",
            "created": call.created,
            "model": call.model,
            "choices": [_choice(index, echoes[index], outcome, eos_ids) for index, outcome in enumerate(outcomes)],
            "usage": usage(context, group.generations, [outcome.finished for outcome in outcomes], params.n),
            "system_fingerprint": None,
        },
        call,
    )


def _prompts(given: str | list[Any]) -> Sequence[str | list[int]]:
    """One or many prompts, each text or token ids. Raises ApiError."""
    if isinstance(given, str):
        if not given:
            raise _empty()
        return [given]
    if not given:
        raise _empty()
    if all(type(item) is int for item in given):
        return [given]
    if len(given) > MAX_PROMPTS:
        raise invalid("prompt", f"at most {MAX_PROMPTS} prompts are allowed, got {len(given)}", "array_above_max_length")
    if all(isinstance(item, str) for item in given):
        return given
    if all(isinstance(item, list) for item in given):
        return [as_ids(item, f"prompt[{position}]") for position, item in enumerate(given)]
    raise invalid_type("prompt", "expected a string, an array of strings, an array of token ids, or an array of such arrays.")


def _shown(text: Text, prompt: str | list[int]) -> str:
    """A prompt as echo repeats it."""
    return prompt if isinstance(prompt, str) else text.needed_tokenizer.decode(prompt, skip_special_tokens=False)


def _empty() -> ApiError:
    return invalid("prompt", "Prompt cannot be empty", "empty_array")


def _choice(index: int, echo: str, outcome: Outcome, eos_ids: frozenset[int]) -> dict[str, Any]:
    return {
        "index": index,
        "text": echo + outcome.content,
        "logprobs": None,
        "finish_reason": outcome.finished.reason,
        "matched_stop": outcome.finished.matched,
        "stop_reason": stop_reason(outcome.finished.matched, eos_ids),
    }


class _ChunkWriter:
    """The events of one stream, joined from bytes that are prepared once."""

    def __init__(self, call: Call, echoes: list[str], eos_ids: frozenset[int]) -> None:
        head = {"id": call.id, "object": "text_completion", "created": call.created, "model": call.model}
        self.prefix = to_json(head)[:-1] + b',"choices":['
        self._starts = [b"data: " + self.prefix + b'{"index":%d,"text":' % index for index in range(len(echoes))]
        self._echoes = echoes
        self._eos_ids = eos_ids

    def opening(self) -> list[bytes]:
        """With echo the first chunk of each choice is its prompt."""
        return [start + to_json(echo) + _OPEN_END + _CLOSE for start, echo in zip(self._starts, self._echoes, strict=True) if echo]

    def render(self, index: int, delta: Delta, running_usage: bytes) -> list[bytes]:
        start, text = self._starts[index], to_json(delta.content)
        if delta.finished is not None:
            matched = delta.finished.matched
            ending = b',"logprobs":null,"finish_reason":"%b","matched_stop":%b,"stop_reason":%b}]' % (
                delta.finished.reason.encode(),
                to_json(matched),
                to_json(stop_reason(matched, self._eos_ids)),
            )
            return [start + text + ending + running_usage + _CLOSE]
        return [start + text + _OPEN_END + running_usage + _CLOSE] if delta.content else []


_OPEN_END: Final = b',"logprobs":null,"finish_reason":null,"matched_stop":null}]'
_CLOSE: Final = b"}\n\n"
