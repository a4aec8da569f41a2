"""Prompts and those who run in one step: nobody can tell, but by the clock."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from banyan_runtime.engine import mixed
from banyan_runtime.step import (
    Histories,
    Pooling,
    PromptScores,
    Ragged,
    RowUpdates,
    SamplingColumns,
    Step,
    StepResult,
    TableShape,
    TokenBiases,
    TokenMask,
)
from tests.unit.engine.fake import VOCAB, FakeRunner
from tests.unit.engine.session import LOOPS, Session, limits

ROWS, POSITIONS, POOL = 12, 40, 600


def ragged(lists: list[list[int]]) -> Ragged:
    return Ragged(np.array([value for each in lists for value in each], np.int32), np.cumsum([0, *map(len, lists)], dtype=np.int32))


class Draw:
    """Random steps over `ROWS` rows; the first `running` of them run."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.running = self.rng.randint(1, 5)
        self.prompts = self.rng.randint(1, 5)
        self.slots = list(range(1, POOL))
        self.rng.shuffle(self.slots)
        self.penalised = {row for row in range(ROWS) if self.rng.random() < 0.3}
        self.lens = dict.fromkeys(range(ROWS), 0)
        self.tokens: dict[int, list[int]] = {}

    def maybe(self, value: Any) -> Any:
        return value if self.rng.random() < 0.6 else None

    def columns(self, rows: list[int]) -> SamplingColumns:
        zeros = np.zeros(len(rows), np.float32)
        return SamplingColumns(
            temperature=zeros,
            top_k=np.array([self.rng.randint(1, 9) for _ in rows], np.int32),
            top_p=zeros + 1,
            min_p=zeros,
            frequency_penalty=np.array([0.5 * (row in self.penalised) for row in rows], np.float32),
            presence_penalty=zeros,
            repetition_penalty=zeros + 1,
            seed=np.array([self.rng.getrandbits(60) for _ in rows], np.uint64),
        )

    def prefill(self, rows: list[int], *, plain: bool = False) -> Step:
        """Each from where it is; with `plain` they all draw a token, and nothing else is asked for."""
        counts = [self.rng.randint(1, 6) for _ in rows]
        draws = [1 if plain else self.rng.randint(0, 1) for _ in rows]
        starts = [self.lens[row] for row in rows]
        for row, count in zip(rows, counts, strict=True):
            self.tokens.setdefault(row, [])
            self.tokens[row] += [self.rng.randrange(VOCAB) for _ in range(count)]
            self.lens[row] += count
        beginning = [(row, count) for row, count, drawn in zip(rows, counts, draws, strict=True) if drawn and row in self.penalised]
        histories = Histories(
            np.array([row for row, _ in beginning], np.int32),
            ragged([self.tokens[row] for row, _ in beginning]),
            np.array([len(self.tokens[row]) for row, _ in beginning], np.int32),
        )
        scored = sorted(self.rng.sample(range(sum(counts)), self.rng.randint(1, sum(counts))))
        pooled = [0 if drawn else self.rng.choice((Pooling.NONE, Pooling.LAST)) for drawn in draws]
        step = Step(
            mode="prefill",
            token_ids=np.array([token for row, count in zip(rows, counts, strict=True) for token in self.tokens[row][-count:]], np.int32),
            positions=np.concatenate(
                [np.arange(start, start + count, dtype=np.int32) for start, count in zip(starts, counts, strict=True)]
            ),
            out_slots=np.array([self.slots.pop() for _ in range(sum(counts))], np.int32),
            rows=np.array(rows, np.int32),
            query_lens=np.array(counts, np.int32),
            kv_lens=np.array([self.lens[row] for row in rows], np.int32),
            samples=np.array(draws, np.int32),
            sampling=self.columns(rows),
            histories=histories if beginning else None,
        )
        if plain:
            return step
        return replace(
            step,
            prompt_scores=self.maybe(
                PromptScores(
                    np.array(scored, np.int32),
                    np.array([self.rng.randrange(VOCAB) for _ in scored], np.int32),
                    np.array([self.rng.randint(0, 4) for _ in scored], np.int32),
                )
            ),
            pooling=np.array(pooled, np.int8) if any(pooled) else None,
            **self.wishes(draws),
        )

    def wishes(self, draws: list[int]) -> dict[str, Any]:
        some = lambda: [[self.rng.randrange(VOCAB) for _ in range(self.rng.randint(0, 3))] for _ in draws]
        biased = some()
        masks = [self.rng.choice((-1, 0, 1)) for _ in draws]
        return {
            "banned": self.maybe(ragged(some())),
            "bias": self.maybe(
                TokenBiases(ragged(biased), np.array([self.rng.choice((-1.5, 2.0)) for each in biased for _ in each], np.float32))
            ),
            "mask": self.maybe(
                TokenMask(
                    np.array([[self.rng.getrandbits(32) | 1 for _ in range(2)] for _ in range(2)], np.uint32), np.array(masks, np.int32)
                )
            ),
            "top_logprobs": self.maybe(np.array([self.rng.randint(-1, 4) if drawn else -1 for drawn in draws], np.int32)),
            "named": self.maybe(
                np.array([[self.rng.randrange(VOCAB) for _ in range(3)] for _ in draws], np.int32)[:, self.rng.randint(0, 2) :]
            ),
        }

    def decode(self, rows: list[int]) -> Step:
        positions = np.array([self.lens[row] for row in rows], np.int32)
        known = [-1 if self.rng.random() < 0.5 else self.rng.randrange(VOCAB) for _ in rows]
        # a row is told anew where its beginning lies: in the slots of another one
        moved, source = self.rng.choice(rows), self.rng.choice(rows)
        updates = RowUpdates(np.array([moved], np.int32), np.array([0], np.int32), ragged([self.slots_of[source][:1]]))
        return Step(
            mode="decode",
            token_ids=np.array(known, np.int32),
            positions=positions,
            out_slots=np.array([self.slots.pop() for _ in rows], np.int32),
            rows=np.array(rows, np.int32),
            query_lens=np.ones(len(rows), np.int32),
            kv_lens=positions + 1,
            samples=np.ones(len(rows), np.int32),
            sampling=self.columns(rows),
            updates=self.maybe(updates),
            **self.wishes([1] * len(rows)),
        )

    def steps(self) -> tuple[Step, Step, Step]:
        """One to begin with, and two that go together."""
        run, come = list(range(self.running)), list(range(self.running, self.running + self.prompts))
        begin = self.prefill(run, plain=True)
        ends = np.cumsum(begin.query_lens).tolist()
        self.slots_of = {
            row: begin.out_slots[end - count : end].tolist() for row, end, count in zip(run, ends, begin.query_lens.tolist(), strict=True)
        }
        shared = {}
        for row in come:  # what is cached of a prompt
            source = self.rng.choice(run)
            if self.rng.random() < 0.5:
                shared[row] = self.slots_of[source][: self.rng.randint(1, len(self.slots_of[source]))]
                self.tokens[row] = self.tokens[source][: len(shared[row])]
                self.lens[row] = len(shared[row])
        prompts = self.prefill(come)
        if shared:
            updates = RowUpdates(np.array(list(shared), np.int32), np.zeros(len(shared), np.int32), ragged(list(shared.values())))
            prompts = replace(prompts, updates=updates)
        return begin, prompts, self.decode(run)


def same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if hasattr(one, "__dataclass_fields__"):
        return all(same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))  # type: ignore[arg-type]
    return one == other


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("late", [True, False])
def test_a_joined_step_gives_each_of_its_parts_what_it_would_have_given_alone(late: bool) -> None:
    seen = set[str]()
    for seed in range(600):
        begin, prompts, decode = Draw(seed).steps()
        runners = [FakeRunner(POOL, lazy=late) for _ in range(2)]
        for runner in runners:
            runner.prepare(TableShape(ROWS, POSITIONS))
            runner.launch(begin).result()
        runners[0].check = False  # the rows of one step after the other, without what an engine takes care of
        apart = [runners[0].launch(decode).result(), runners[0].launch(prompts).result()]
        whole = mixed.joined(prompts, decode)
        mask = whole.mask
        if late and int(decode.token_ids.min()) < 0:
            whole = mixed.joined(prompts, replace(decode, mask=None, mask_later=True))
            assert whole.mask is None
        handle = runners[1].launch(whole)
        if whole.mask_later:
            handle.draw(mask)
        first, second = mixed.parted(handle.result(), prompts, decode)
        assert same(first, apart[1]), seed
        assert same(second, apart[0]), seed
        assert np.array_equal(runners[0]._slots, runners[1]._slots)
        for step in (prompts, decode):
            seen |= {f"{step.mode} {field.name}" for field in fields(step) if getattr(step, field.name) is not None}
    names = {f"{mode} {name}" for mode in ("prefill", "decode") for name in ("banned", "bias", "mask", "top_logprobs", "named", "updates")}
    assert names | {"prefill prompt_scores", "prefill pooling", "prefill histories"} <= seen


def test_no_field_of_a_step_or_a_result_is_forgotten() -> None:
    """Whoever adds one says here that two of them can be joined and told apart."""
    assert {field.name for field in fields(Step)} == {
        "mode", "token_ids", "positions", "out_slots", "rows", "query_lens", "kv_lens", "samples", "sampling", "updates", "histories",
        "banned", "bias", "mask", "mask_later", "top_logprobs", "prompt_scores", "named", "pooling", "embeddings", "adapters",
        "page_size",
    }  # fmt: skip
    assert {field.name for field in fields(StepResult)} == {
        "token_ids", "failed", "accepted", "logprobs", "prompt_logprobs", "vectors", "replayed",
    }  # fmt: skip


@LOOPS
def test_who_runs_gets_a_token_in_each_step_of_prompts(overlap: bool) -> None:
    session = Session(limits(overlap=overlap, mixed=True, pool_tokens=2000))
    session.submit([1, 2, 3], 60)
    session.turn()
    for number in range(8):
        session.submit([10 + number, 7, number], 30)
        session.turn()
    session.drain()
    kinds = "".join(phase[0] for phase, _, _ in session.runner.log)
    assert kinds.startswith("p" + "m" * 8 + "d")
    assert [(sequences, tokens) for _, sequences, tokens in session.runner.log[1:9]] == [(count + 1, count + 3) for count in range(1, 9)]
    session.check_texts()


def test_a_long_prompt_is_computed_beside_who_runs_in_pieces_that_leave_room_for_them() -> None:
    session = Session(limits(mixed=True, chunk=16, pool_tokens=2000))
    for number in range(3):
        session.submit([number, 1], 60)
    session.turn()
    session.submit([5] * 40, 4)
    for _ in range(4):
        session.turn()
    assert session.runner.log[1:5] == [("mixed", 4, 16), ("mixed", 4, 16), ("mixed", 4, 16), ("mixed", 4, 4)]
    assert max(tokens for _, _, tokens in session.runner.log) == 16
    session.drain()
    session.check_texts()


def test_prompts_go_alone_where_there_is_no_room_for_the_next_tokens_of_who_runs() -> None:
    session = Session(limits(mixed=True, pool_tokens=48, page_size=16, radix=False))
    session.submit([1] * 16, 16)
    session.turn()
    session.engine.scheduler.ratio.value = 0.0  # nothing is kept free for who runs
    session.submit([2] * 30, 1)
    for _ in range(3):
        session.turn()
    assert session.runner.log[:3] == [("prefill", 1, 16), ("prefill", 1, 30), ("decode", 1, 1)]
    session.drain()
    session.check_texts()


def test_background_prompts_are_computed_beside_nobody() -> None:
    session = Session(limits(mixed=True, pool_tokens=2000))
    session.submit([1, 2, 3], 600)
    session.submit([4, 5], 30, priority=-5)
    session.drain()
    assert "mixed" not in {phase for phase, _, _ in session.runner.log}
    session.submit([1, 2, 3], 60, priority=-5)
    session.turn()
    session.submit([8, 9], 3)
    session.turn()
    assert session.runner.log[-1] == ("prefill", 1, 2), "online prompts wait for nothing of background's"


def test_background_alone_gets_a_token_after_each_step_of_prompts_as_without() -> None:
    kinds = []
    for together in (False, True):
        session = Session(limits(mixed=together, pool_tokens=2000))
        session.submit([9], 60, priority=-5)
        session.turn()
        session.turn()
        for number in range(8):
            session.submit([10 + number] * 3, 60, priority=-5)
            session.turn()
        session.drain()
        kinds.append("".join(phase[0] for phase, _, _ in session.runner.log))
    assert kinds[0] == kinds[1]
    assert kinds[1].startswith("pdpdpdpd")


def test_where_more_run_than_half_a_step_has_tokens_prompts_and_they_take_turns() -> None:
    session = Session(limits(mixed=True, chunk=16, pool_tokens=2000))
    for number in range(12):
        session.submit([10 + number], 60)
    session.turn()
    session.submit([5] * 60, 4)
    session.drain()
    steps = session.runner.log[1:9]
    assert [phase for phase, _, _ in steps] == ["prefill", "decode"] * 4
    assert [tokens for phase, _, tokens in steps if phase == "prefill"] == [16, 16, 16, 12]
    session.check_texts()


def test_tokens_of_mixed_steps_count_as_generated_and_their_seconds_as_those_of_prompts() -> None:
    session = Session(limits(mixed=True, pool_tokens=2000, decode_log_interval=1))
    session.submit([1], 20)
    session.turn(1.0)
    session.submit([2], 20)
    session.turn(1.0)
    stats = session.engine.stats(session.now)
    assert (stats.prefill.steps, stats.decode.steps, stats.generation_tokens) == (2, 0, 3)
    session.turn(1.0)
    assert "gen throughput (token/s): 1.00" in session.lines[-1], "three tokens of who ran, in three seconds"
