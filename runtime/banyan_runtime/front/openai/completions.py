"""POST /v1/completions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from starlette.requests import Request
from starlette.responses import Response

from banyan_runtime import wire
from banyan_runtime.front.answers import Answer, Arrival, Outcome, Start, Streamed, Whole, answer, to_json
from banyan_runtime.front.context import Context
from banyan_runtime.front.deltas import Delta
from banyan_runtime.front.generation import Call
from banyan_runtime.front.logprobs import CompletionLogprobs, PromptTokens, Row, cells_of, mean_of
from banyan_runtime.front.openai.serving import OPEN_END, ChunkWriter, Identity, Usage, end_fields
from banyan_runtime.front.plan import CompletionPlan
from banyan_runtime.front.text.tokenizer import Tokenizer


async def completions(context: Context, http: Request) -> Response:
    return await answer(context, http, "completions", CompletionPlan, _start)


def _start(context: Context, arrival: Arrival, plan: CompletionPlan) -> Answer:
    assert context.text is not None
    text = context.text
    envelope = plan.envelope
    identity = Identity.of(context, arrival, envelope, "cmpl-")
    call = Call(endpoint="completions", streaming=envelope.stream, received=arrival.received, key=arrival.key)
    start = Start(context, call, plan.requests, [identity.id] * len(plan.requests), envelope.ignored)
    usage, eos_ids = Usage(plan), text.defaults.eos_ids
    echoes = plan.echoes
    columns = [_Columns(text.needed_tokenizer, plan, index) for index in range(len(plan.requests))]
    each, kept = plan.choices_per_prompt, plan.kept or plan.choices_per_prompt
    if envelope.stream:
        return Streamed(start, _Writer(identity, plan, usage, eos_ids, columns))

    def body(outcomes: list[Outcome]) -> Iterator[bytes]:
        yield to_json(identity.head("text_completion"))[:-1] + b',"choices":['
        for index, place in enumerate(_kept(outcomes, each, kept)):
            if index:
                yield b","
            yield from _choice(index, echoes[place], outcomes[place], eos_ids, columns[place])
        numbers = usage.of([(outcome.end, len(outcome.token_ids)) for outcome in outcomes])
        yield b'],"usage":%b,"system_fingerprint":null}' % to_json(numbers)

    return Whole(start, body)


def _kept(outcomes: list[Outcome], each: int, kept: int) -> list[int]:
    """Which of them the answer has: of each prompt's `each`, those whose tokens are likeliest on average."""
    places = list(range(len(outcomes)))
    if kept == each:
        return places
    best: list[int] = []
    for start in range(0, len(outcomes), each):
        best += sorted(places[start : start + each], key=lambda place: -mean_of(outcomes[place].logprobs))[:kept]
    return best


class _Columns:
    """`logprobs` of one choice."""

    def __init__(self, tokenizer: Tokenizer, plan: CompletionPlan, index: int) -> None:
        request = plan.requests[index]
        self._told = CompletionLogprobs(
            tokenizer, as_ids=plan.tokens_as_ids, echo=plan.echoes[index], skip_special_tokens=request.skip_special_tokens
        )
        self._top = plan.top_logprobs
        self._prompt = PromptTokens(request.token_ids, 0) if plan.echo_logprobs else None

    @property
    def none(self) -> bool:
        return self._top < 0

    @property
    def of_prompt(self) -> bool:
        """Whether those of the prompt are wanted and not told yet."""
        return self._prompt is not None

    def of(self, rows: list[Row], parts: Iterable[wire.PromptLogprobs] = ()) -> Iterator[bytes]:
        """The object, in parts: the prompt's tokens, once where they are wanted, and then these."""
        if self._top < 0:
            return iter((b"null",))
        prompt, self._prompt, top = self._prompt, None, self._top
        if prompt is None:
            return self._told.parts(lambda: cells_of(rows, top))
        return self._told.parts(lambda: cells_of(rows, top), lambda: prompt.cells(parts, top))


def _choice(index: int, echo: str, outcome: Outcome, eos_ids: frozenset[int], columns: _Columns) -> Iterator[bytes]:
    yield b'{"index":%d,"text":%b,"logprobs":' % (index, to_json(echo + outcome.content))
    yield from columns.of(outcome.logprobs, outcome.prompt_logprobs)
    yield b",%b}" % end_fields(outcome.end, eos_ids)


class _Writer(ChunkWriter):
    """A token's log probability goes with the first chunk that follows it: its text may be held back."""

    def __init__(self, identity: Identity, plan: CompletionPlan, usage: Usage, eos_ids: frozenset[int], columns: list[_Columns]) -> None:
        super().__init__(identity, "text_completion", plan, usage, eos_ids)
        self._echoes = plan.echoes
        self._columns = columns
        self._telling: set[int] = set()  # choices whose prompt is being written
        self._untold: list[list[Row]] = [[] for _ in plan.requests]

    def opening(self) -> bytes | Iterator[bytes]:
        """With echo the first chunk of each choice is its prompt; with its log probabilities it waits for the engine."""
        plain = [index for index, echo in enumerate(self._echoes) if echo and not self._columns[index].of_prompt]
        return itertools.chain.from_iterable(map(self._echo, plain)) if plain else b""

    def _echo(self, index: int) -> Iterator[bytes]:
        return self._parts(index, to_json(self._echoes[index]), iter((b"null",)), OPEN_END, self.tail(index, 0))

    def render(self, index: int, delta: Delta) -> bytes | Iterator[bytes]:
        columns, tail = self._columns[index], self.tail(index, delta.completion_tokens)
        if columns.none and delta.finished is None:  # the frequent case
            if not delta.content:
                return b""
            return b'%b"text":%b,"logprobs":null,%b%b' % (self._starts[index], to_json(delta.content), OPEN_END, tail)
        prompt: Iterator[bytes] | None = None
        if columns.of_prompt:
            told = columns.of([], delta.prompt_logprobs)
            prompt = self._parts(index, to_json(self._echoes[index]), told, OPEN_END, tail)
            self._telling.add(index)
        self._untold[index] += delta.logprobs
        if not delta.content and delta.finished is None:
            return b"" if prompt is None else self._behind(index, prompt)
        untold, self._untold[index] = self._untold[index], []
        logprobs = columns.of(untold) if untold else iter((b"null",))
        end = OPEN_END if delta.finished is None else self.end_of(index, delta)
        chunk = self._parts(index, to_json(delta.content), logprobs, end, tail)
        if prompt is not None:
            return itertools.chain(self._behind(index, prompt), chunk)
        # The offsets go on from the prompt's, so what comes behind a prompt that is not written yet is not written either.
        return chunk if index in self._telling else b"".join(chunk)

    def _behind(self, index: int, prompt: Iterator[bytes]) -> Iterator[bytes]:
        yield from prompt
        self._telling.discard(index)

    def _parts(self, index: int, text: bytes, logprobs: Iterator[bytes], end: bytes, tail: bytes) -> Iterator[bytes]:
        yield b'%b"text":%b,"logprobs":' % (self._starts[index], text)
        yield from logprobs
        yield b",%b%b" % (end, tail)
