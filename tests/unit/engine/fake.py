"""A runner without a model whose tokens depend on every KV slot it reads.

Each slot holds a hash of the token written there, its position and all tokens before it. The next token of a row is a hash
over all of the row's slots, so one slot that was freed too early, shared wrongly or read by the wrong row changes the text;
`continuation` computes the same text without any cache. All that the runner knows of rows it has from the steps: a mirror of
the slot table and the tokens that penalties count. Every step is checked for being well formed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import numpy as np

from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.step import (
    F32,
    I32,
    U64,
    OutOfMemory,
    RunnerInfo,
    SamplingColumns,
    Step,
    StepResult,
    TableShape,
    TokenBiases,
    TokenLogprobs,
    TokenMask,
)
from banyan_runtime.wire import Sampling
from tests.unit.engine.grammars import Rule

VOCAB = 50
MASK = (1 << 64) - 1
A, B, C, D = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93
NAN_SEED = 1 << 63
"""A seed with this bit: the row's logits are NaN wherever the hash is a multiple of 8."""
DULL_SEED = 1 << 62
"""A seed with this bit: seven tokens of eight are the same, so what comes next is easily guessed."""


def _link(before: int, token: int, position: int) -> int:
    """What the slot of `token` at `position` holds, given what the slot before it holds."""
    return ((before ^ ((token + 1) * A)) * B + position + 1) & MASK


def _biased(bias: TokenBiases | None, index: int) -> int:
    """What the biases of a sequence do to the hash that its token is drawn from."""
    if bias is None:
        return 0
    start, end = int(bias.ids.offsets[index]), int(bias.ids.offsets[index + 1])
    pairs = zip(bias.ids.values[start:end].tolist(), bias.values[start:end].tolist(), strict=True)
    return sum((token + 1) * int(value * 8) * A for token, value in pairs)


def _scramble(total: int) -> int:
    total = ((total ^ (total >> 31)) * C) & MASK
    return total ^ (total >> 29)


def _draw(total: int, seed: int, banned: Container[int] = (), mark: int = 0) -> int:
    """The next token, or -1 for NaN."""
    drawn = _scramble((total + seed * D + mark) & MASK)
    if seed & NAN_SEED and drawn % 8 == 0:
        return -1
    token = seed % VOCAB if seed & DULL_SEED and drawn // VOCAB % 8 else drawn % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


@dataclass
class Counted:
    """What penalties count: tokens of the prompt and of the output."""

    prompt: int
    output: int
    tokens: int

    @staticmethod
    def of(tokens: Sequence[int], prompt_len: int) -> Counted:
        return Counted(sum(tokens[:prompt_len]), sum(tokens[prompt_len:]), len(tokens))

    def add(self, token: int) -> None:
        self.output += token
        self.tokens += 1

    @property
    def mark(self) -> int:
        return (self.prompt * 31 + self.output * 7 + self.tokens) * A


def penalised(sampling: Sampling) -> bool:
    return bool(sampling.frequency_penalty or sampling.presence_penalty or sampling.repetition_penalty != 1.0)


def totals(tokens: Sequence[int]) -> Iterator[int]:
    """For each position the hash over the slots up to it."""
    slot = total = 0
    for position, token in enumerate(tokens):
        slot = _link(slot, token, position)
        total += slot
        yield total & MASK


def continuation(prompt: Sequence[int], sampling: Sampling, rule: Rule | None = None) -> Iterator[int]:
    """The tokens that the fake model generates after `prompt`, computed without a cache; -1, and the end, for NaN. They obey the `rule`,
    which follows them; where it fails is the end."""
    tokens = list(prompt)
    slot = total = 0
    for position, token in enumerate(tokens):
        slot = _link(slot, token, position)
        total += slot
    counted = Counted.of(tokens, len(tokens)) if penalised(sampling) else None
    while True:
        banned: Container[int] = sampling.stop_token_ids if len(tokens) - len(prompt) < sampling.min_new_tokens else ()
        if rule is not None:
            admitted = rule.next_ids(sampling.stop_token_ids if banned else ())
            banned = set(range(VOCAB)) - admitted
            if not admitted:
                yield -1
                return
        token = _draw(total & MASK, sampling.seed, banned, counted.mark if counted else 0)
        if token >= 0 and rule is not None and token not in sampling.stop_token_ids:
            try:
                rule.accept(token)
            except GrammarError:
                token = -1
        yield token
        if token < 0:
            return
        slot = _link(slot, token, len(tokens))
        total += slot
        tokens.append(token)
        if counted:
            counted.add(token)


def logprob(total: int, token: int) -> float:
    """The log probability of `token` where the hash over all slots before it is `total`; exact in float32."""
    return -(_scramble(total ^ (token * D & MASK)) % 4096) / 64


def likeliest(total: int, count: int) -> list[int]:
    return [(_scramble(total) + index) % VOCAB for index in range(count)]


def _logprobs(asked: Sequence[tuple[int, int, int]], named: I32 | None) -> TokenLogprobs:
    """Of (total, token, likeliest tokens wanted); `named`: further tokens of each."""
    top = max((top for _, _, top in asked), default=0)
    further = [[] for _ in asked] if named is None else named.tolist()
    ids = [likeliest(total, top) + more for (total, _, _), more in zip(asked, further, strict=True)]
    width = top + (0 if named is None else named.shape[1])
    return TokenLogprobs(
        np.array([logprob(total, token) for total, token, _ in asked], dtype=np.float32),
        np.array(ids, dtype=np.int32).reshape(len(asked), width),
        np.array(
            [[logprob(total, token) for token in row] for (total, _, _), row in zip(asked, ids, strict=True)], dtype=np.float32
        ).reshape(len(asked), width),
    )


class Mirror:
    """The slot table and the counted tokens as the steps tell them."""

    def __init__(self, shape: TableShape) -> None:
        self.table: I32 = np.full((shape.rows, shape.positions), -1, dtype=np.int32)
        self.counted: dict[int, Counted] = {}

    def follow(self, step: Step) -> None:
        if step.updates is not None:
            rows, starts = step.updates.rows.tolist(), step.updates.starts.tolist()
            assert len(rows) == len(starts) == len(step.updates.slots) > 0
            for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
                slots = step.updates.slots[index]
                assert len(slots), "an update of nothing"
                self.table[row, start : start + len(slots)] = slots
        self.table[np.repeat(step.rows, step.query_lens), step.positions] = step.out_slots
        if step.histories is not None:
            for index, (row, prompt_len) in enumerate(zip(step.histories.rows.tolist(), step.histories.prompt_lens.tolist(), strict=True)):
                self.counted[row] = Counted.of(step.histories.tokens[index].tolist(), prompt_len)


@dataclass
class FakeHandle:
    runner: FakeRunner
    step: Step
    answer: StepResult | None = None
    missed: bool = False  # there was no memory for it

    def draw(self, mask: TokenMask | None) -> None:
        assert self.step.mask_later, "its mask is known"
        assert self.runner.waiting is self
        self.runner.waiting = None
        if self.runner.misses(self.step):
            self.runner.do_without(self)
        self.step = replace(self.step, mask=mask, mask_later=False)
        if not self.runner.lazy:
            self.runner.run_up_to(self)

    def result(self) -> StepResult:
        self.runner.run_up_to(self)
        assert self.answer is not None
        return self.answer


@dataclass
class FakeRunner:
    """With `lazy`, a step is read only when its result is asked for, which is as late as a device may; otherwise at launch,
    which is as early as it may."""

    pool_tokens: int
    page_size: int = 1
    context_len: int = 4096
    lazy: bool = False
    check: bool = True  # off only where time is measured
    vocab_size: int = VOCAB
    steps: int = 0
    log: list[tuple[str, int, int]] = field(default_factory=list)  # (phase, sequences, tokens) of each step, if `logging`
    logging: bool = False
    watch: Callable[[Step], None] = lambda step: None  # called with each step, when `launched` holds what it says
    misses: Callable[[Step], bool] = lambda step: False  # memory: asked when a step is launched, and when its mask is told later

    def __post_init__(self) -> None:
        self._slots: U64 = np.zeros(self.pool_tokens + self.page_size, dtype=np.uint64)
        self._sampled: dict[int, int] = {}  # by row, of the step before
        self._pending: list[FakeHandle] = []
        self.waiting: FakeHandle | None = None  # for its mask
        self._columns: tuple[list[int], SamplingColumns] | None = None

    @property
    def info(self) -> RunnerInfo:
        return RunnerInfo(
            architecture="Fake", model_type="fake", vocab_size=self.vocab_size, context_len=self.context_len,
            pool_tokens=self.pool_tokens, dtype="uint64", device="cpu", attention_backend="hash", weights_bytes=0,
            kv_bytes=8 * self.pool_tokens, available_bytes=0, features=frozenset({"bias", "mask", "pooling", "drafts"}),
        )  # fmt: skip

    def prepare(self, shape: TableShape) -> None:
        assert not self.steps
        self._read = Mirror(shape)
        self.launched = Mirror(shape) if self.lazy else self._read

    def launch(self, step: Step) -> FakeHandle:
        assert self.waiting is None, "the step before waits for its mask"
        self.steps += 1
        if self.logging:
            self.log.append((step.mode, len(step.rows), len(step.token_ids)))
        if self.check:
            self._check(step)
        handle = FakeHandle(self, step)
        self._pending.append(handle)
        if step.mask_later:
            self.waiting = handle
        self.launched.follow(step)
        if self.misses(step):
            self.waiting = None
            self.watch(step)
            self.do_without(handle)
        if not self.lazy and not step.mask_later:
            self.run_up_to(handle)
        self.watch(step)
        return handle

    def do_without(self, handle: FakeHandle) -> NoReturn:
        """It is read as late as others are; what its sequences have of it is anything."""
        handle.missed = True
        if not self.lazy:
            self._pending.remove(handle)
            self._spoil(handle.step)
        raise OutOfMemory("64 KiB")

    def run_up_to(self, handle: FakeHandle) -> None:
        assert not handle.step.mask_later, "its tokens are drawn when its mask is told"
        assert not handle.missed, "it has no result"
        while handle.answer is None:
            first = self._pending.pop(0)
            if first.missed:
                self._read.follow(first.step)
                self._spoil(first.step)
            else:
                first.answer = self._run(first.step)

    def _spoil(self, step: Step) -> None:
        self._slots[step.out_slots] = MASK
        for row in step.rows.tolist():
            self._sampled.pop(row, None)
            self._read.counted.pop(row, None)

    def _check(self, step: Step) -> None:
        rows, lens = step.rows, step.query_lens
        assert sum(lens.tolist()) == len(step.token_ids) == len(step.positions) == len(step.out_slots)
        assert len(set(rows.tolist())) == len(rows), "a row twice in a step"
        slots = step.out_slots.tolist()
        assert len(set(slots)) == len(slots), "a slot written twice in a step"
        assert min(slots) >= self.page_size, "the padding page was given out"
        assert bool((lens >= 1).all())
        ends = np.cumsum(lens)
        starts = ends - lens
        places = np.arange(len(step.token_ids)) - np.repeat(starts, lens)
        assert bool((step.positions == np.repeat(step.kv_lens - lens, lens) + places).all())
        if step.mask_later:
            assert step.mode != "prefill"
            assert step.mask is None
            assert int(step.token_ids.min()) < 0, "every token is known"
        if step.mode == "decode":
            assert step.samples.tolist() == lens.tolist()
            assert int(step.token_ids.min()) >= 0 or len(step.token_ids) == len(rows), "drafts stand behind known tokens"
            assert step.histories is None
            assert step.prompt_scores is None
        else:
            assert int(step.samples.max()) <= 1
            unknown = np.repeat(lens, lens)[step.token_ids < 0]
            assert not len(unknown) if step.mode == "prefill" else bool((unknown == 1).all()), "a prompt is always known"
        if step.banned is not None:
            assert len(step.banned) == len(rows)
        if step.histories is not None:
            lengths = dict(zip(rows.tolist(), step.kv_lens.tolist(), strict=True))
            for index, row in enumerate(step.histories.rows.tolist()):
                assert len(step.histories.tokens[index]) == lengths[row], "a history is that of all tokens so far"
        if self._columns is not None and self._columns[0] == rows.tolist() and self._columns[1] is not step.sampling:
            assert step.mode != "decode", "the same rows, and columns made anew"
        self._columns = rows.tolist(), step.sampling

    def _run(self, step: Step) -> StepResult:
        if self.lazy:
            self._read.follow(step)
        slots, table = self._slots, self._read.table
        kv_lens, rows = step.kv_lens.tolist(), step.rows.tolist()
        token_ids = step.token_ids.tolist()
        widest = max(kv_lens)
        if len(token_ids) > len(rows) or step.mode != "decode":
            offset = 0
            for row, end, count in zip(rows, kv_lens, step.query_lens.tolist(), strict=True):
                if token_ids[offset] < 0:
                    token_ids[offset] = self._sampled[row]
                start = end - count
                value = int(slots[table[row, start - 1]]) if start else 0
                chain = []
                for position in range(start, end):
                    value = _link(value, token_ids[offset], position)
                    chain.append(value)
                    offset += 1
                slots[step.out_slots[offset - count : offset]] = chain
        else:
            befores = slots[table[step.rows, step.positions - 1]].tolist()
            values = [
                _link(before, token if token >= 0 else self._sampled[row], end - 1)
                for before, token, row, end in zip(befores, token_ids, rows, kv_lens, strict=True)
            ]
            slots[step.out_slots] = values
        read = slots[table[step.rows, :widest]]
        read[np.arange(widest) >= step.kv_lens[:, None]] = 0
        sums = read.sum(axis=1, dtype=np.uint64).tolist()
        drawing = np.repeat(np.arange(len(rows)), step.samples).tolist()
        seen = [sums[index] for index in drawing] if step.samples.max() <= 1 else self._sums(step, drawing, read)
        drawn, failed, accepted = self._sample(step, rows, drawing, seen)
        logprobs = None
        if step.top_logprobs is not None:
            tops = step.top_logprobs.tolist()
            asked = [(index, total, token) for index, total, token in zip(drawing, seen, drawn, strict=True) if tops[index] >= 0]
            named = None if step.named is None else step.named[[index for index, _, _ in asked]]
            logprobs = _logprobs([(total, token, tops[index]) for index, total, token in asked], named)
        return StepResult(
            token_ids=np.array(drawn, dtype=np.int32),
            failed=np.array(failed, dtype=np.bool_),
            accepted=None if step.samples.max() <= 1 else np.array(accepted, dtype=np.int32),
            logprobs=logprobs,
            prompt_logprobs=self._score(step, rows),
            vectors=None if step.pooling is None else self._vectors(step, sums),
        )

    def _vectors(self, step: Step, sums: list[int]) -> F32:
        """For each sequence that wants one: how it is pooled, its length and a hash over all its tokens."""
        assert step.pooling is not None
        rows = [(step.pooling[index], step.kv_lens[index], sums[index] % 4096) for index in np.flatnonzero(step.pooling).tolist()]
        return np.array(rows, dtype=np.float32)

    def _sums(self, step: Step, drawing: list[int], read: U64) -> list[int]:
        """The hash over the slots up to each position that a token is drawn at."""
        behind = (np.cumsum(step.samples)[drawing] - np.arange(len(drawing)) - 1).tolist()
        running = read.cumsum(axis=1, dtype=np.uint64)
        return [int(running[index, step.kv_lens[index] - more - 1]) for index, more in zip(drawing, behind, strict=True)]

    def _sample(self, step: Step, rows: list[int], drawing: list[int], sums: list[int]) -> tuple[list[int], list[bool], list[int]]:
        """Tokens of the sequences `drawing`, who failed, and how many tokens of each sequence count."""
        sampling, counted = step.sampling, self._read.counted
        counting = (sampling.frequency_penalty != 0) | (sampling.presence_penalty != 0) | (sampling.repetition_penalty != 1)
        seeds, ends, samples = sampling.seed.tolist(), np.cumsum(step.query_lens).tolist(), step.samples.tolist()
        drawn, failed, accepted = list[int](), [False] * len(rows), [0] * len(rows)
        self._sampled = {}
        for place, (index, total) in enumerate(zip(drawing, sums, strict=True)):
            first = place == 0 or drawing[place - 1] != index
            banned = set[int]() if step.banned is None else set(step.banned[index].tolist())
            if step.mask is not None and (mask := int(step.mask.masks[index])) >= 0:
                assert samples[index] == 1, "a mask is that of one position"
                banned |= {id for id in range(VOCAB) if not step.mask.words[mask, id // 32] >> (id % 32) & 1}
            row = rows[index]
            mark = (counted[row].mark if counting[index] else 0) + _biased(step.bias, index)
            token = _draw(total, seeds[index], banned, mark) if len(banned) < VOCAB else -1
            drawn.append(token)
            if counting[index]:
                assert samples[index] == 1, "what penalties count depends on what was drawn"
                counted[row].add(max(token, 0))
            if first:
                failed[index], accepted[index] = token < 0, 1
                self._sampled[row], done = max(token, 0), 1
            else:
                draft = int(step.token_ids[ends[index] - samples[index] + done])
                if accepted[index] == done and draft == drawn[-2] and token >= 0:
                    accepted[index] += 1
                    self._sampled[row] = token
                done += 1
        return drawn, failed, accepted

    def _score(self, step: Step, rows: list[int]) -> TokenLogprobs | None:
        asked = step.prompt_scores
        if asked is None:
            return None
        sequences = np.repeat(np.arange(len(step.rows)), step.query_lens)
        wanted = []
        for at, target, top in zip(asked.at.tolist(), asked.targets.tolist(), asked.top.tolist(), strict=True):
            seen = self._read.table[step.rows[sequences[at]], : int(step.positions[at]) + 1]
            wanted.append((int(self._slots[seen].sum(dtype=np.uint64)), target, top))
        return _logprobs(wanted, None if step.named is None else step.named[sequences[asked.at]])
