"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from banyan_runtime import wire
from banyan_runtime.front.answers import Answer, Arrival, Outcome, Streamed, Whole, answer, to_json
from banyan_runtime.front.context import Context
from banyan_runtime.front.generation import Call, Delta
from banyan_runtime.front.logprobs import PromptTokens, TokenLogprob, completion_columns
from banyan_runtime.front.openai.serving import CLOSE, OPEN_END, ChunkWriter, Identity, Usage, ignored, stop_reason
from banyan_runtime.front.plan import CompletionPlan
from banyan_runtime.front.text.tokenizer import Tokenizer


async def completions(context: Context, http: Request) -> Response:
    return await answer(context, http, "completions", CompletionPlan, _start)


def _start(context: Context, arrival: Arrival, plan: CompletionPlan) -> Answer:
    assert context.text is not None
    text = context.text
    identity = Identity.of(context, arrival, plan, "cmpl-")
    call = Call(endpoint="completions", streaming=plan.stream, received=arrival.received)
    ids = [identity.id] * len(plan.requests)
    usage, eos_ids = Usage(context, plan), text.defaults.eos_ids
    echoes = plan.echoes
    columns = [_Columns(text.needed_tokenizer, plan, index) for index in range(len(plan.requests))]
    if plan.stream:
        return Streamed(context, call, plan.requests, ids, _Writer(identity, plan, usage, eos_ids, columns), ignored(plan))

    def body(outcomes: list[Outcome]) -> dict[str, Any]:
        return {
            **identity.head("text_completion"),
            "choices": [_choice(index, echoes[index], outcome, eos_ids, columns[index]) for index, outcome in enumerate(outcomes)],
            "usage": usage.of([(outcome.end, len(outcome.token_ids)) for outcome in outcomes]),
            "system_fingerprint": None,
        }

    return Whole(context, call, plan.requests, ids, body, ignored(plan))


class _Columns:
    """`logprobs` of one choice, whose offsets go on from chunk to chunk."""

    def __init__(self, tokenizer: Tokenizer, plan: CompletionPlan, index: int) -> None:
        self._tokenizer = tokenizer
        self._top = plan.top_logprobs
        self._offset = 0
        self._prompt = PromptTokens(plan.requests[index].token_ids, 0) if plan.echo_logprobs else None

    @property
    def of_prompt(self) -> bool:
        """Whether those of the prompt are wanted and not told yet."""
        return self._prompt is not None

    def prompt(self, parts: list[wire.PromptLogprobs]) -> list[TokenLogprob]:
        """The prompt's tokens, once; afterwards and where they are not wanted none."""
        prompt, self._prompt = self._prompt, None
        return [] if prompt is None else prompt.scored(parts)

    def of(self, logprobs: list[TokenLogprob]) -> dict[str, Any] | None:
        if self._top < 0:
            return None
        told, self._offset = completion_columns(self._tokenizer, logprobs, self._top, self._offset)
        return told


def _choice(index: int, echo: str, outcome: Outcome, eos_ids: frozenset[int], columns: _Columns) -> dict[str, Any]:
    return {
        "index": index,
        "text": echo + outcome.content,
        "logprobs": columns.of(columns.prompt(outcome.prompt_logprobs) + outcome.logprobs),
        "finish_reason": outcome.end.reason,
        "matched_stop": outcome.end.matched,
        "stop_reason": stop_reason(outcome.end.matched, eos_ids),
    }


class _Writer(ChunkWriter):
    """A token's log probability goes with the first chunk that follows it: its text may be held back."""

    def __init__(self, identity: Identity, plan: CompletionPlan, usage: Usage, eos_ids: frozenset[int], columns: list[_Columns]) -> None:
        super().__init__(identity, "text_completion", plan, usage, eos_ids)
        self._echoes = plan.echoes
        self._columns = columns
        self._untold: list[list[TokenLogprob]] = [[] for _ in plan.requests]

    def opening(self) -> bytes:
        """With echo the first chunk of each choice is its prompt; with its log probabilities it waits for the engine."""
        return b"".join(
            self._chunk(index, to_json(echo), b"null", OPEN_END, CLOSE)
            for index, echo in enumerate(self._echoes)
            if echo and not self._columns[index].of_prompt
        )

    def render(self, index: int, delta: Delta) -> bytes:
        columns, tail = self._columns[index], self.tail(index, delta)
        prompt = b""
        if columns.of_prompt:
            told = to_json(columns.of(columns.prompt(list(delta.prompt_logprobs))))
            prompt = self._chunk(index, to_json(self._echoes[index]), told, OPEN_END, tail)
        self._untold[index] += delta.logprobs
        if not delta.content and delta.finished is None:
            return prompt
        untold, self._untold[index] = self._untold[index], []
        logprobs = to_json(columns.of(untold)) if untold else b"null"
        end = OPEN_END if delta.finished is None else self.end_of(index, delta)
        return prompt + self._chunk(index, to_json(delta.content), logprobs, end, tail)

    def _chunk(self, index: int, text: bytes, logprobs: bytes, end: bytes, tail: bytes) -> bytes:
        return b'%b"text":%b,"logprobs":%b,%b%b' % (self._starts[index], text, logprobs, end, tail)
