"""POST|PUT /generate: SGLang's own generation call, with cumulative streams and lists in, lists out."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from banyan_runtime.front.answers import Answer, Arrival, Outcome, Streamed, Whole, answer, check_free, to_json
from banyan_runtime.front.context import Context
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.generation import Call, Delta, Finished
from banyan_runtime.front.logprobs import PromptTokens, native_rows, native_tops
from banyan_runtime.front.plan import NativePlan
from banyan_runtime.front.text.tokenizer import Tokenizer


async def generate(context: Context, http: Request) -> Response:
    return await answer(context, http, "generate", NativePlan, _start)


def _start(context: Context, arrival: Arrival, plan: NativePlan) -> Answer:
    assert context.text is not None
    for rid in filter(None, plan.rids):
        check_free(context, rid, rid, "rid")
    ids = [rid or (f"{arrival.id}_{index}" if index else arrival.id) for index, rid in enumerate(plan.rids)]
    call = Call(endpoint="other", streaming=plan.stream, received=arrival.received)
    answers = [_Sequence(context.text.tokenizer, call, ids[index], plan, index) for index in range(len(plan.requests))]
    if plan.stream:
        return Streamed(context, call, plan.requests, ids, _Writer(answers, plan.listed))
    listed = plan.listed

    def body(outcomes: list[Outcome]) -> Any:
        bodies = [sequence.body(outcome) for sequence, outcome in zip(answers, outcomes, strict=True)]
        return bodies if listed else bodies[0]

    return Whole(context, call, plan.requests, ids, body)


class _Sequence:
    """What is told of one sequence, finished or under way."""

    def __init__(self, tokenizer: Tokenizer | None, call: Call, request_id: str, plan: NativePlan, index: int) -> None:
        request, first = plan.requests[index], plan.logprobs_from[index]
        self._call = call
        self._id = request_id
        self._prompt_tokens = request.prompt_tokens
        self._top = plan.top_logprobs[index]
        self._tokenizer = tokenizer if plan.text_in_logprobs else None
        self._prompt = PromptTokens(request.token_ids, first) if self._top >= 0 and first >= 0 else None

    def body(self, outcome: Outcome) -> dict[str, Any]:
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
        if self._top >= 0:
            meta |= self._logprobs(outcome)
        if end is not None:
            meta["e2e_latency"] = time.monotonic() - self._call.received
        return {"text": outcome.content, "output_ids": outcome.token_ids, "meta_info": meta}

    def _logprobs(self, outcome: Outcome) -> dict[str, Any]:
        tokenizer, top = self._tokenizer, self._top
        prompt = [] if self._prompt is None else self._prompt.scored(outcome.prompt_logprobs)
        told: dict[str, Any] = {
            "input_token_logprobs": native_rows(tokenizer, prompt),
            "output_token_logprobs": native_rows(tokenizer, outcome.logprobs),
            "output_token_logprobs_length": len(outcome.logprobs),
        }
        if top > 0:
            told["input_top_logprobs"] = native_tops(tokenizer, prompt, top)
            told["output_top_logprobs"] = native_tops(tokenizer, outcome.logprobs, top)
        return told


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

    def render(self, index: int, delta: Delta) -> bytes:
        self._outcomes[index].add(delta)
        body = self._sequences[index].body(self._outcomes[index])
        return b"data: " + to_json({**body, "index": index} if self._listed else body) + b"\n\n"

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
