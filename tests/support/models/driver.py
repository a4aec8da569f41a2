"""A small hand-written scheduler for parity tests: it cuts prompts into chunks, mixes rows, and shares prefixes, as told.

The real engine has its own parity test; this one exists so that the model is held to transformers without it, in schedules
that the engine would rarely choose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from banyan_runtime.step import (
    Histories,
    PromptScores,
    Ragged,
    RowUpdates,
    Runner,
    SamplingColumns,
    Step,
    StepResult,
    TableShape,
    TokenBiases,
    TokenLogprobs,
    TokenMask,
)


@dataclass(eq=False)
class Request:
    prompt: list[int]
    new_tokens: int
    row: int
    start: int = 0  # turn in which it arrives
    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    banned: tuple[int, ...] = ()
    bias: dict[int, float] = field(default_factory=dict)
    allowed: tuple[int, ...] = ()  # a mask; empty: none
    top_logprobs: int = -1
    named: tuple[int, ...] = ()  # further tokens beside each
    score_prompt: bool = False  # all positions from 1 on
    output: list[int] = field(default_factory=list)
    computed: int = 0  # tokens in the cache
    told: bool = False  # the runner knows what penalties count
    drafts: list[int] = field(default_factory=list)  # guesses of what follows, for the next step that draws
    accepted: int = 0  # drafts that were right
    refused: int = 0
    scored: int = 0  # prompt positions before this have been scored
    failed: bool = False
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each drawn token
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each chunk

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def done(self) -> bool:
        return len(self.output) >= self.new_tokens

    @property
    def penalized(self) -> bool:
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0)


@dataclass(frozen=True)
class Pending:
    """What a launched step will tell about one of its sequences."""

    request: Request
    drawn: int | None  # which of the request's output tokens
    scored: int  # positions of the prompt
    samples: int  # tokens drawn; beyond the first with as many drafts


class Driver:
    """Rows, slots and steps for a fixed set of requests; slots are handed out in a shuffled order, page by page."""

    def __init__(self, runner: Runner, rows: int, context: int, page_size: int = 1, shuffle: int = 0) -> None:
        self.runner = runner
        self.page_size = page_size
        width = -(-context // page_size) * page_size
        # What no request owns yet is garbage on purpose: only the first kv_lens cells of a row mean anything.
        self.table = np.full((rows, width), 1, dtype=np.int32)
        self.updates: list[tuple[int, int, np.ndarray]] = []
        runner.prepare(TableShape(rows=rows, positions=width))
        pages = np.arange(1, runner.info.pool_tokens // page_size + 1)
        np.random.default_rng(shuffle).shuffle(pages)
        self.free = pages.tolist()

    def hold(self, request: Request, length: int) -> None:
        """Give the row slots for its first `length` positions."""
        size = self.page_size
        have = -(-request.computed // size)
        for page in range(have, -(-length // size)):
            self.table[request.row, page * size : (page + 1) * size] = self.free.pop() * size + np.arange(size)

    def share(self, source: Request, target: Request, length: int) -> None:
        """Let a row start behind another's prefix; whole pages only."""
        length = length // self.page_size * self.page_size
        assert source.tokens[:length] == target.tokens[:length]
        assert length <= source.computed
        self.table[target.row, :length] = self.table[source.row, :length]
        self.updates.append((target.row, 0, self.table[target.row, :length].copy()))
        target.computed = length

    def build(self, work: list[tuple[Request, int]]) -> Step:
        """The step that computes the next `count` tokens of each request; it samples where nothing of the text is left, and there
        the request's drafts are computed too."""
        drafts = [request.drafts if request.computed + count == len(request.tokens) else [] for request, count in work]
        starts = [request.computed for request, _ in work]
        requests = [request for request, _ in work]
        ends = [request.computed + count + len(guesses) for (request, count), guesses in zip(work, drafts, strict=True)]
        for request, end in zip(requests, ends, strict=True):
            self.hold(request, end)
        texts = [np.array((r.tokens + d)[s:e], np.int32) for r, d, s, e in zip(requests, drafts, starts, ends, strict=True)]
        samples = [1 + len(d) if e >= len(r.tokens) else 0 for r, d, e in zip(requests, drafts, ends, strict=True)]
        return Step(
            mode="decode" if all(count == 1 for _, count in work) else "prefill",
            token_ids=np.concatenate(texts),
            positions=np.concatenate([np.arange(s, e, dtype=np.int32) for s, e in zip(starts, ends, strict=True)]),
            out_slots=np.concatenate([self.table[r.row, s:e] for r, s, e in zip(requests, starts, ends, strict=True)]),
            rows=np.array([r.row for r in requests], np.int32),
            query_lens=np.array([len(text) for text in texts], np.int32),
            kv_lens=np.array(ends, np.int32),
            samples=np.array(samples, np.int32),
            sampling=columns(requests),
            updates=self._updates(),
            histories=_histories([request for request, sampled in zip(requests, samples, strict=True) if sampled]),
            banned=ragged([r.banned for r in requests]) if any(r.banned for r in requests) else None,
            top_logprobs=np.array([r.top_logprobs for r in requests], np.int32) if any(r.top_logprobs >= 0 for r in requests) else None,
            prompt_scores=_prompt_scores(work, [len(text) for text in texts]),
            named=_named(requests) if any(r.named for r in requests) else None,
            bias=_biases(requests) if any(r.bias for r in requests) else None,
            mask=_masks(requests, self.runner.info.vocab_size) if any(r.allowed for r in requests) else None,
            page_size=self.page_size,
        )

    def _updates(self) -> RowUpdates | None:
        updates, self.updates = self.updates, []
        if not updates:
            return None
        rows, starts, slots = zip(*updates, strict=True)
        return RowUpdates(np.array(rows, np.int32), np.array(starts, np.int32), ragged(slots))

    def step(self, work: list[tuple[Request, int]]) -> None:
        step = self.build(work)
        handle, pending = self.runner.launch(step), self.advance(work, step)
        self.settle(pending, handle.result())

    def advance(self, work: list[tuple[Request, int]], step: Step) -> list[Pending]:
        """Note what a launched step computes; the tokens that it samples are -1 until it is settled. With drafts
        they are one for now, and nothing of the request can be launched before that."""
        pending = []
        for (request, count), samples in zip(work, step.samples.tolist(), strict=True):
            drawn = len(request.output) if samples else None
            pending.append(Pending(request, drawn, len(_scored(request, count)), samples))
            request.scored = max(request.scored, request.computed + count) if request.score_prompt else 0
            request.computed += count
            request.output += [-1] * min(samples, 1)
        return pending

    def settle(self, pending: list[Pending], result: StepResult) -> None:
        """Note what a step gave."""
        tokens, drawn, prompts = result.token_ids.tolist(), 0, 0
        assert len(tokens) == sum(one.samples for one in pending)
        assert result.accepted is not None or all(one.samples <= 1 for one in pending)
        position = 0
        for index, one in enumerate(pending):
            request = one.request
            if one.scored:
                assert result.prompt_logprobs is not None
                request.prompt_logprobs.append(cut(result.prompt_logprobs, prompts, prompts + one.scored))
                prompts += one.scored
            count = one.samples if result.accepted is None else int(result.accepted[index])
            assert (count > 0) == (one.samples > 0)
            assert count <= one.samples
            if one.drawn is None:
                assert not result.failed[index]
                continue
            request.output[one.drawn : one.drawn + 1] = tokens[position : position + count]
            request.failed |= bool(result.failed[index])
            position += one.samples
            if request.top_logprobs >= 0:
                assert result.logprobs is not None
                request.logprobs += [cut(result.logprobs, drawn + place, drawn + place + 1) for place in range(count)]
                drawn += one.samples
            if one.samples > 1:
                request.computed += count - 1
                request.accepted += count - 1
                request.refused += one.samples - count
            request.drafts = [] if one.samples > 1 else request.drafts
        assert result.logprobs is None or len(result.logprobs.values) == drawn

    def run(self, requests: list[Request], chunk: int = 1 << 30) -> None:
        """Until all are done: prompts first, at most `chunk` tokens of one prompt a turn; then one decode of all others."""
        turn = 0
        while not all(request.done for request in requests):
            here = [r for r in requests if r.start <= turn and not r.done]
            prompts = [(r, min(chunk, len(r.tokens) - r.computed)) for r in here if not r.output]
            decodes = [(r, 1) for r in here if r.output]
            if prompts:
                self.step(prompts)
            if decodes:
                self.step(decodes)
            assert not any(request.failed for request in here)
            turn += 1


class Again:
    """What stands for a graph where there is no GPU: the body runs again."""

    def __init__(self) -> None:
        self.replays = 0

    def record(self, body: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            self.replays += 1
            body()

        body()
        return replay

    def seconds(self, body: Callable[[], None]) -> float:
        """No way is faster than another."""
        body()
        return 1.0


def columns(requests: list[Request]) -> SamplingColumns:
    def floats(name: str) -> np.ndarray:
        return np.array([getattr(r, name) for r in requests], np.float32)

    return SamplingColumns(
        temperature=floats("temperature"),
        top_k=np.array([r.top_k for r in requests], np.int32),
        top_p=floats("top_p"),
        min_p=floats("min_p"),
        frequency_penalty=floats("frequency_penalty"),
        presence_penalty=floats("presence_penalty"),
        repetition_penalty=floats("repetition_penalty"),
        seed=np.array([r.seed for r in requests], np.uint64),
    )


def ragged(lists: Sequence[Sequence[int] | np.ndarray]) -> Ragged:
    offsets = np.cumsum([0, *(len(values) for values in lists)], dtype=np.int32)
    return Ragged(np.array([value for values in lists for value in values], np.int32), offsets)


def _biases(requests: list[Request]) -> TokenBiases:
    values = [value for request in requests for value in request.bias.values()]
    return TokenBiases(ragged([list(request.bias) for request in requests]), np.array(values, np.float32))


def _named(requests: list[Request]) -> np.ndarray:
    width = max(len(request.named) for request in requests)
    return np.array([(0,) * (width - len(request.named)) + request.named for request in requests], np.int32)


def _masks(requests: list[Request], vocab_size: int) -> TokenMask:
    masked = [request for request in requests if request.allowed]
    words = np.zeros((len(masked), -(-vocab_size // 32)), np.uint32)
    for row, request in zip(words, masked, strict=True):
        for token in request.allowed:
            row[token // 32] |= np.uint32(1 << token % 32)
    where = np.cumsum([bool(request.allowed) for request in requests]) - 1
    return TokenMask(words, np.where([bool(request.allowed) for request in requests], where, -1).astype(np.int32))


def cut(scores: TokenLogprobs, start: int, end: int) -> TokenLogprobs:
    return TokenLogprobs(scores.values[start:end], scores.top_ids[start:end], scores.top_values[start:end])


def _histories(sampled: list[Request]) -> Histories | None:
    new = [request for request in sampled if request.penalized and not request.told]
    for request in new:
        request.told = True
    if not new:
        return None
    return Histories(
        np.array([r.row for r in new], np.int32), ragged([r.tokens for r in new]), np.array([len(r.prompt) for r in new], np.int32)
    )


def _scored(request: Request, count: int) -> range:
    """Positions of a step whose next token is one of the prompt's, and that were not scored before."""
    end = min(request.computed + count, len(request.prompt) - 1) if request.score_prompt else 0
    return range(max(request.computed, request.scored), end)


def _prompt_scores(work: list[tuple[Request, int]], lens: list[int]) -> PromptScores | None:
    at, targets, top, token = list[int](), list[int](), list[int](), 0
    for (request, count), length in zip(work, lens, strict=True):
        for position in _scored(request, count):
            at.append(token + position - request.computed)
            targets.append(request.prompt[position + 1])
            top.append(max(request.top_logprobs, 0))
        token += length
    return PromptScores(np.array(at, np.int32), np.array(targets, np.int32), np.array(top, np.int32)) if at else None
