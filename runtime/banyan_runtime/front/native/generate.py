"""POST|PUT /generate: SGLang's own generation call, with cumulative streams and lists in, lists out."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from banyan_runtime import wire
from banyan_runtime.front.answers import DONE, Answer, Arrival, Cumulative, Outcome, Start, Whole, answer, claim, to_json
from banyan_runtime.front.context import Context
from banyan_runtime.front.deltas import Delta, Finished
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.generation import Call
from banyan_runtime.front.logprobs import Cells, NativeLogprobs, PromptTokens, Row, cells_of, json_list
from banyan_runtime.front.plan import NativePlan
from banyan_runtime.front.text.tokenizer import Tokenizer

_PART_BYTES: Final = 16 << 10


async def generate(context: Context, http: Request) -> Response:
    return await answer(context, http, "generate", NativePlan, _start)


def _start(context: Context, arrival: Arrival, plan: NativePlan) -> Answer:
    assert context.text is not None
    for rid in dict.fromkeys(filter(None, (*plan.rids, plan.group_rid))):  # choices share theirs
        claim(context, rid, rid, "rid")
    ids = [rid or (f"{arrival.id}_{index}" if index else arrival.id) for index, rid in enumerate(plan.rids)]
    call = Call(endpoint="other", streaming=plan.stream, received=arrival.received, key=arrival.key, group_id=plan.group_rid)
    start = Start(context, call, plan.requests, ids, plan.ignored)
    listed, tokenizer = plan.listed, context.text.tokenizer
    kind = _Repeated if plan.stream else _Once
    answers = [_Sequence(call, ids[index], plan, index, kind(tokenizer, plan, index)) for index in range(len(plan.requests))]
    if plan.stream:
        return Cumulative(start, _Writer(answers, listed))

    def body(outcomes: list[Outcome]) -> Iterator[bytes]:
        yield b"[" if listed else b""
        for index, (sequence, outcome) in enumerate(zip(answers, outcomes, strict=True)):
            if index:
                yield b","
            yield from sequence.parts(outcome)
            yield b"}"
        yield b"]" if listed else b""

    return Whole(start, body)


class _Sequence:
    """What is told of one sequence, finished or under way."""

    def __init__(self, call: Call, request_id: str, plan: NativePlan, index: int, logprobs: _Logprobs) -> None:
        self._call = call
        self._id = request_id
        self._prompt_tokens = plan.requests[index].prompt_tokens
        self._logprobs = logprobs if plan.top_logprobs[index] >= 0 else None

    def parts(self, outcome: Outcome) -> Iterator[bytes]:
        """The object without its last brace, in parts. The log probabilities are taken out of the outcome."""
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
        if self._logprobs is None:
            yield head + latency + b"}"
            return
        rows, outcome.logprobs = outcome.logprobs, []
        parts, outcome.prompt_logprobs = outcome.prompt_logprobs, []
        yield from self._logprobs.parts(head, rows, parts)
        yield latency + b"}"


class _Logprobs(ABC):
    """The log probabilities of one sequence, in JSON."""

    def __init__(self, tokenizer: Tokenizer | None, plan: NativePlan, index: int) -> None:
        self._top, self._named, first = plan.top_logprobs[index], plan.named[index], plan.logprobs_from[index]
        self._prompt = PromptTokens(plan.requests[index].token_ids, first) if self._top >= 0 and first >= 0 else None
        self._form = NativeLogprobs(tokenizer if plan.text_in_logprobs else None)

    @abstractmethod
    def parts(self, head: bytes, rows: list[Row], prompt: Sequence[wire.PromptLogprobs]) -> Iterator[bytes]:
        """`head` and the fields of them all, in parts; `rows` and `prompt` are what is new."""
        ...

    def _fields(self, head: bytes, own: _Told, tops: _Told, named: _Told, scored: int) -> Iterator[bytes]:
        yield head + b',"input_token_logprobs":'
        yield from json_list(own[0])
        yield b',"output_token_logprobs":'
        yield from json_list(own[1])
        yield b',"output_token_logprobs_length":%d' % scored
        if self._top > 0:
            yield b',"input_top_logprobs":'
            yield from json_list(tops[0])
            yield b',"output_top_logprobs":'
            yield from json_list(tops[1])
        if self._named:
            yield b',"input_token_ids_logprobs":'
            yield from json_list(named[0])
            yield b',"output_token_ids_logprobs":'
            yield from json_list(named[1])


class _Once(_Logprobs):
    """They are told once, and written while they are sent."""

    def parts(self, head: bytes, rows: list[Row], prompt: Sequence[wire.PromptLogprobs]) -> Iterator[bytes]:
        asked, form, top = self._prompt, self._form, self._top

        def told(write: Callable[[Cells], bytes], named: int = 0) -> _Told:
            cells = iter(()) if asked is None else asked.cells(prompt, top, named=named)
            return map(write, cells), map(write, cells_of(rows, top, named=named))

        return self._fields(head, told(form.own), told(form.tops), told(form.tops, self._named), len(rows))


class _Repeated(_Logprobs):
    """They are told again and again, but written once."""

    def __init__(self, tokenizer: Tokenizer | None, plan: NativePlan, index: int) -> None:
        super().__init__(tokenizer, plan, index)
        self._input, self._output = _Written(self._form), _Written(self._form)
        self._scored = 0  # tokens of the output so far

    def parts(self, head: bytes, rows: list[Row], prompt: Sequence[wire.PromptLogprobs]) -> Iterator[bytes]:
        asked, self._prompt = self._prompt, None
        self._scored += len(rows)
        scored = self._scored
        if asked is not None:
            yield from self._input.take(asked.cells(prompt, self._top))
            if self._named:
                yield from self._input.take_named(asked.cells(prompt, self._top, named=self._named))
        yield from self._output.take(cells_of(rows, self._top))
        if self._named:
            yield from self._output.take_named(cells_of(rows, self._top, named=self._named))
        one, two = self._input, self._output
        yield from self._fields(head, (one.own, two.own), (one.tops, two.tops), (one.named, two.named), scored)


_Told = tuple[Iterable[bytes], Iterable[bytes]]  # of the prompt and of the output: items of a list, in parts


class _Written:
    """Log probabilities in JSON, kept."""

    def __init__(self, form: NativeLogprobs) -> None:
        self._form = form
        self.own: list[bytes] = []  # items of a list, in parts
        self.tops: list[bytes] = []
        self.named: list[bytes] = []

    def take(self, cells: Iterator[Cells]) -> Iterator[bytes]:
        """Write more of them; the parts are empty, and others may have a turn at each."""
        for each in cells:
            _append(self.own, self._form.own(each))
            _append(self.tops, self._form.tops(each))
            yield b""

    def take_named(self, cells: Iterator[Cells]) -> Iterator[bytes]:
        """As `take`, of the same tokens with those beside them that the request named."""
        for each in cells:
            _append(self.named, self._form.tops(each))
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
        parts = self._sequences[index].parts(self._outcomes[index])
        yield b"data: " + next(parts)  # at once: what is taken before it would be in this event, and told once more in the next
        yield from parts
        yield (b',"index":%d' % index if self._listed else b"") + b"}\n\n"

    def closing(self) -> bytes:
        return DONE

    def error(self, error: ApiError) -> bytes:
        told = {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.status,
            "retryable": error.status >= 500,
        }
        return b"data: " + to_json({"error": told}) + b"\n\n" + DONE
