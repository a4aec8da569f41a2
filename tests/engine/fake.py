"""A runner without a model whose tokens depend on every KV slot it reads.

Each slot holds a hash of the token written there, its position and all tokens before it. The next token of a row is a hash
over all of the row's slots, so one slot that was freed too early, shared wrongly or read by the wrong row changes the text;
`continuation` computes the same text without any cache. Every step is checked for being well formed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from banyan_runtime.step import RunnerInfo, Step, StepResult
from banyan_runtime.wire import Sampling

VOCAB = 50
MASK = (1 << 64) - 1
A, B, C, D = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93
NAN_SEED = 1 << 63
"""A seed with this bit: the row's logits are NaN wherever the hash is a multiple of 8."""


def _link(before: int, token: int, position: int) -> int:
    """What the slot of `token` at `position` holds, given what the slot before it holds."""
    return ((before ^ ((token + 1) * A)) * B + position + 1) & MASK


def _scramble(total: int) -> int:
    total = ((total ^ (total >> 31)) * C) & MASK
    return total ^ (total >> 29)


def _draw(total: int, seed: int, banned: Sequence[int] = (), history: int = 0) -> int:
    """The next token, or -1 for NaN."""
    drawn = _scramble((total + seed * D + history) & MASK)
    if seed & NAN_SEED and drawn % 8 == 0:
        return -1
    token = drawn % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def _history(tokens: Sequence[int], prompt_len: int) -> int:
    return (sum(tokens[:prompt_len]) * 31 + sum(tokens[prompt_len:]) * 7 + len(tokens)) * A


def penalised(sampling: Sampling) -> bool:
    return bool(sampling.frequency_penalty or sampling.presence_penalty or sampling.repetition_penalty != 1.0)


def continuation(prompt: Sequence[int], sampling: Sampling) -> Iterator[int]:
    """The tokens that the fake model generates after `prompt`, computed without a cache; -1, and the end, for NaN."""
    tokens = list(prompt)
    slot = total = 0
    for position, token in enumerate(tokens):
        slot = _link(slot, token, position)
        total += slot
    while True:
        outputs = len(tokens) - len(prompt)
        banned = sampling.stop_token_ids if outputs < sampling.min_new_tokens else ()
        history = _history(tokens, len(prompt)) if penalised(sampling) else 0
        token = _draw(total & MASK, sampling.seed, banned, history)
        yield token
        if token < 0:
            return
        slot = _link(slot, token, len(tokens))
        total += slot
        tokens.append(token)


@dataclass
class FakeHandle:
    runner: FakeRunner
    step: Step
    answer: StepResult | None = None

    def result(self) -> StepResult:
        self.runner.run_up_to(self)
        assert self.answer is not None
        return self.answer


@dataclass
class FakeRunner:
    """With `lazy`, a step reads the table only when its result is asked for, which is as late as a device may; otherwise
    at launch, which is as early as it may."""

    pool_tokens: int
    page_size: int = 1
    context_len: int = 4096
    lazy: bool = False
    check: bool = True  # off only where time is measured
    vocab_size: int = VOCAB
    steps: int = 0
    log: list[tuple[str, int, int]] = field(default_factory=list)  # (phase, sequences, tokens) of each step, if `logging`
    logging: bool = False

    def __post_init__(self) -> None:
        self._slots = np.zeros(self.pool_tokens + self.page_size, dtype=np.uint64)
        self._sampled: dict[int, int] = {}  # by row, of the step before
        self._pending: list[FakeHandle] = []

    @property
    def info(self) -> RunnerInfo:
        return RunnerInfo(
            architecture="Fake", model_type="fake", vocab_size=self.vocab_size, context_len=self.context_len,
            pool_tokens=self.pool_tokens, dtype="uint64", device="cpu", attention_backend="hash", weights_bytes=0,
            kv_bytes=8 * self.pool_tokens, available_bytes=0,
        )  # fmt: skip

    def launch(self, step: Step) -> FakeHandle:
        self.steps += 1
        if self.logging:
            self.log.append((step.mode, len(step.rows), len(step.token_ids)))
        if self.check:
            self._check(step)
        handle = FakeHandle(self, step)
        self._pending.append(handle)
        if not self.lazy:
            self.run_up_to(handle)
        return handle

    def run_up_to(self, handle: FakeHandle) -> None:
        while handle.answer is None:
            first = self._pending.pop(0)
            first.answer = self._run(first.step)

    def _check(self, step: Step) -> None:
        rows, lens = step.rows, step.query_lens
        assert sum(lens.tolist()) == len(step.token_ids) == len(step.positions) == len(step.out_slots)
        assert len(set(rows.tolist())) == len(rows), "a row twice in a step"
        slots = step.out_slots.tolist()
        assert len(set(slots)) == len(slots), "a slot written twice in a step"
        assert min(slots) >= self.page_size, "the padding page was given out"
        if step.mode == "decode":
            assert step.positions.tolist() == [length - 1 for length in step.kv_lens.tolist()]
            assert step.table[rows, step.positions].tolist() == slots
        else:
            assert bool((lens >= 1).all())
            where = np.repeat(rows, lens)
            assert bool((step.out_slots == step.table[where, step.positions]).all())
            ends = np.cumsum(lens)
            starts = ends - lens
            assert bool((step.positions[starts] == step.kv_lens - lens).all())
            assert bool((step.positions[ends - 1] == step.kv_lens - 1).all())
            assert int(step.token_ids.min()) >= 0, "a prompt is always known"

    def _run(self, step: Step) -> StepResult:
        slots, table = self._slots, step.table
        kv_lens, rows = step.kv_lens.tolist(), step.rows.tolist()
        token_ids = step.token_ids.tolist()
        widest = max(kv_lens)
        if step.mode == "prefill":
            offset = 0
            for row, end, count in zip(rows, kv_lens, step.query_lens.tolist(), strict=True):
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
        totals = read.sum(axis=1, dtype=np.uint64).tolist()
        drawn, self._sampled = [], {}
        sampling = step.sampling
        for index, (total, seed, samples) in enumerate(zip(totals, sampling.seed.tolist(), step.samples.tolist(), strict=True)):
            if not samples:
                drawn.append(-1)
                continue
            history = sampling.histories[index]
            banned = sampling.banned[index]
            mark = 0 if history is None else _history([*history.prompt.tolist(), *history.output.tolist()], len(history.prompt))
            token = _draw(total, seed, () if banned is None else banned.tolist(), mark)
            drawn.append(token)
            self._sampled[rows[index]] = max(token, 0)
        ids = np.array(drawn, dtype=np.int32)
        return StepResult(token_ids=ids, failed=(ids < 0) & step.samples)
