"""POST|PUT /generate: SGLang's own generation call, with cumulative streams and lists in, lists out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from banyan_runtime.front.answers import Answer, Arrival, Cumulative, Outcome, Whole, answer, check_free, ignored, to_json
from banyan_runtime.front.context import Context
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.generation import Call, Delta, Finished
from banyan_runtime.front.logprobs import SLICE, Cells, NativeLogprobs, PromptTokens, cells_of, json_list
from banyan_runtime.front.plan import NativePlan
from banyan_runtime.front.text.tokenizer import Tokenizer

_PART_BYTES: Final = 16 << 10


async def generate(context: Context, http: Request) -> Response:
    return await answer(context, http, "generate", NativePlan, _start)


def _start(context: Context, arrival: Arrival, plan: NativePlan) -> Answer:
    assert context.text is not None
    for rid in filter(None, (*plan.rids, plan.group_rid)):
        check_free(context, rid, rid, "rid")
    ids = [rid or (f"{arrival.id}_{index}" if index else arrival.id) for index, rid in enumerate(plan.rids)]
    call = Call(endpoint="other", streaming=plan.stream, received=arrival.received, group_id=plan.group_rid)
    answers = [_Sequence(context.text.tokenizer, call, ids[index], plan, index) for index in range(len(plan.requests))]
    headers = ignored(plan.ignored)
    if plan.stream:
        return Cumulative(context, call, plan.requests, ids, _Writer(answers, plan.listed), headers)
    listed = plan.listed

    def body(outcomes: list[Outcome]) -> Iterator[bytes]:
        yield b"[" if listed else b""
        for index, (sequence, outcome) in enumerate(zip(answers, outcomes, strict=True)):
            if index:
                yield b","
            yield from sequence.parts(outcome)
            yield b"}"
        yield b"]" if listed else b""

    return Whole(context, call, plan.requests, ids, body, headers)


class _Sequence:
    """What is told of one sequence, finished or under way."""

    def __init__(self, tokenizer: Tokenizer | None, call: Call, request_id: str, plan: NativePlan, index: int) -> None:
        request, first = plan.requests[index], plan.logprobs_from[index]
        self._call = call
        self._id = request_id
        self._prompt_tokens = request.prompt_tokens
        self._top = plan.top_logprobs[index]
        self._prompt = PromptTokens(request.token_ids, first) if self._top >= 0 and first >= 0 else None
        form = NativeLogprobs(tokenizer if plan.text_in_logprobs else None)
        self._input, self._output = _Written(form), _Written(form)
        self._scored = 0  # tokens of the output that have log probabilities

    def parts(self, outcome: Outcome) -> Iterator[bytes]:
        """The object without its last brace, in parts. Takes the log probabilities out of the outcome: what is written is kept here."""
        end, length = outcome.finished, len(outcome.token_ids)
        meta: dict[str, Any] = {
            "id": self._id,
            "finish_reason": None if end is None else _finish_reason(end, length),
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": length,
            "cached_tokens": 0 if end is None else end.cached_tokens,
            "reasoning_tokens": 0,
            "weight_version": "default",
            "num_retractions": 0 if end is None else end.retractions,
        }
        latency = b"" if end is None else b',"e2e_latency":%b' % to_json(time.monotonic() - self._call.received)
        text, ids = to_json(outcome.content), to_json(outcome.token_ids)
        head = b'{"text":%b,"output_ids":%b,"meta_info":%b' % (text, ids, to_json(meta)[:-1])
        if self._top < 0:
            yield head + latency + b"}"
            return
        rows, outcome.logprobs = outcome.logprobs, []
        prompt, self._prompt = self._prompt, None
        parts, outcome.prompt_logprobs = outcome.prompt_logprobs, []
        self._scored += len(rows)
        scored = self._scored
        if prompt is not None:
            yield from self._input.take(prompt.cells(parts, self._top))
        yield from self._output.take(cells_of(rows, self._top))
        yield head + b',"input_token_logprobs":'
        yield from json_list(self._input.own)
        yield b',"output_token_logprobs":'
        yield from json_list(self._output.own)
        yield b',"output_token_logprobs_length":%d' % scored
        if self._top > 0:
            yield b',"input_top_logprobs":'
            yield from json_list(self._input.tops)
            yield b',"output_top_logprobs":'
            yield from json_list(self._output.tops)
        yield latency + b"}"


class _Written:
    """Log probabilities in JSON, each written once, however often it is sent."""

    def __init__(self, form: NativeLogprobs) -> None:
        self._form = form
        self.own: list[bytes] = []  # items of a list, in parts
        self.tops: list[bytes] = []

    def take(self, cells: Iterator[Cells]) -> Iterator[bytes]:
        """Write more of them; yields nothing where others should have a turn."""
        for each in cells:
            _append(self.own, self._form.own(each))
            _append(self.tops, self._form.tops(each))
            if each.ids.size >= SLICE // 2:
                yield b""


def _append(parts: list[bytes], items: bytes) -> None:
    """Not a part for each token."""
    if parts and len(parts[-1]) < _PART_BYTES:
        parts[-1] += b"," + items
    else:
        parts.append(items)


def _finish_reason(end: Finished, length: int) -> dict[str, Any]:
    if end.reason == "stop":
        return {"type": "stop", "matched": end.matched}
    if end.reason == "length":
        return {"type": "length", "length": length}
    return {"type": "abort", "message": "Aborted", "status_code": 499, "err_type": None}


class _Writer:
    """Each event tells everything so far."""

    def __init__(self, sequences: list[_Sequence], listed: bool) -> None:
        self._sequences = sequences
        self._outcomes = [Outcome() for _ in sequences]
        self._listed = listed

    def opening(self) -> bytes:
        return b""

    def take(self, index: int, delta: Delta) -> None:
        self._outcomes[index].add(delta)

    def render(self, index: int) -> Iterator[bytes]:
        yield b"data: "
        yield from self._sequences[index].parts(self._outcomes[index])
        yield (b',"index":%d' % index if self._listed else b"") + b"}\n\n"

    def closing(self) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        told = {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.status,
            "retryable": error.status >= 500,
        }
        return b"data: " + to_json({"error": told}) + b"\n\n"
