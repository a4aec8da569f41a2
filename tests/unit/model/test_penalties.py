"""Penalties: what they count, in which order they apply, and that a row's numbers depend on nothing but the row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from banyan_runtime.model import sampler
from banyan_runtime.model.penalties import _TOGETHER, LARGEST, Penalties
from banyan_runtime.step import Histories, TableShape
from tests.support.models.driver import ragged
from tests.support.models.tiny import resident_bytes
from tests.unit.model.test_sampler import columns

V, ROWS = 40, 12
CPU = torch.device("cpu")


def penalties(vocab_size: int = V) -> Penalties:
    return Penalties(TableShape(rows=ROWS, positions=64), vocab_size, CPU)


def told(rows: list[int], tokens: list[list[int]], prompt_lens: list[int]) -> Histories:
    return Histories(np.array(rows, np.int32), ragged(tokens), np.array(prompt_lens, np.int32))


def by_the_book(
    logits: np.ndarray, prompt: list[int], output: list[int], repetition: float, frequency: float, presence: float
) -> np.ndarray:
    """vLLM's order, one token id after another."""
    expected = logits.astype(np.float64).copy()
    for token in range(len(expected)):
        if token in prompt or token in output:
            expected[token] = expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
        expected[token] -= frequency * output.count(token)
        expected[token] -= presence * (token in output)
    return np.clip(expected, -LARGEST, LARGEST)


def test_penalties_count_repetition_first_and_over_the_prompt_too() -> None:
    logits = torch.zeros(1, V)
    logits[0, :5] = torch.tensor([4.0, 4.0, -4.0, 4.0, 4.0])
    state = penalties()
    state.begin(told([3], [[0, 2, 2, 1, 1, 1, 2]], [3]))
    state.apply(logits, np.array([3], np.int32), columns(1, repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5))
    expected = [4.0 / 2, 4.0 / 2 - 3 * 0.25 - 0.5, -4.0 * 2 - 0.25 - 0.5, 4.0, 4.0]
    assert logits[0, :5].tolist() == pytest.approx(expected)
    assert not logits[0, 5:].any()


@dataclass
class Life:
    """What one row has said."""

    prompt: list[int]
    settings: dict[str, float]
    output: list[int] = field(default_factory=list)


@given(seed=st.integers(0, 2**32 - 1))
def test_rows_that_come_and_go_are_counted_as_by_the_book(seed: int) -> None:
    random = np.random.default_rng(seed)
    state, lives = penalties(), dict[int, Life]()
    for _ in range(30):
        new = []
        for row in range(ROWS):
            if row not in lives or random.random() < 0.1:
                lives[row] = Life(random.integers(0, V, random.integers(1, 9)).tolist(), some_settings(random))
                lives[row].output = random.integers(0, V, random.integers(0, 4)).tolist()  # comes back from a retraction
                new.append(row)
        rows = random.permutation(ROWS)[: random.integers(1, ROWS + 1)]
        tell = [row for row in new if any(lives[row].settings.values())]
        if tell:
            state.begin(told(tell, [lives[r].prompt + lives[r].output for r in tell], [len(lives[r].prompt) for r in tell]))
        names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
        cols = columns(len(rows), **{name: [lives[r].settings.get(name, float(name[0] == "r")) for r in rows] for name in names})
        logits = torch.randn(len(rows), V, generator=torch.Generator().manual_seed(int(random.integers(1 << 30)))) * 5
        expected = [
            by_the_book(row_logits.numpy(), lives[r].prompt, lives[r].output, *(float(getattr(cols, name)[i]) for name in names))
            for i, (r, row_logits) in enumerate(zip(rows, logits, strict=True))
        ]
        state.apply(logits, rows.astype(np.int32), cols)
        np.testing.assert_allclose(logits.numpy(), np.array(expected), rtol=1e-5, atol=1e-5)
        drawn = random.integers(0, V, len(rows))
        state.count(rows.astype(np.int32), torch.from_numpy(drawn))
        for row, token in zip(rows.tolist(), drawn.tolist(), strict=True):
            lives[row].output.append(token)
            if len(lives[row].prompt) + len(lives[row].output) > 60:
                del lives[row]


def some_settings(random: np.random.Generator) -> dict[str, float]:
    kinds: list[dict[str, Any]] = [
        {}, {"repetition_penalty": 1.3}, {"frequency_penalty": 0.5}, {"presence_penalty": -0.75},
        {"repetition_penalty": 0.8, "frequency_penalty": -0.25, "presence_penalty": 1.5},
    ]  # fmt: skip
    return kinds[int(random.integers(len(kinds)))]


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 0.5, 2.0])
@pytest.mark.parametrize("repetition", [1e-38, 1e-45])
def test_a_tiny_repetition_penalty_leaves_numbers_that_can_be_sampled(repetition: float, temperature: float) -> None:
    logits = torch.randn(2, V, generator=torch.Generator().manual_seed(1))
    expected = logits[1].clone()
    state = penalties()
    state.begin(told([0], [list(range(0, V, 3))], [V]))
    cols = columns(2, repetition_penalty=[repetition, 1.0], temperature=temperature)
    state.apply(logits, np.array([0, 1], np.int32), cols)
    assert torch.isfinite(logits).all()
    assert torch.equal(logits[1], expected)
    tokens, failed = sampler.sample(logits, cols, np.array([5, 5], np.int32))
    assert not failed.any()
    assert tokens[0] % 3 == 0


def test_nan_stays_nan_so_that_its_row_fails() -> None:
    logits = torch.full((1, V), float("nan"))
    state = penalties()
    state.begin(told([0], [[1, 2]], [1]))
    cols = columns(1, repetition_penalty=2.0, presence_penalty=1.0)
    state.apply(logits, np.array([0], np.int32), cols)
    assert sampler.sample(logits, cols, np.array([5], np.int32))[1].tolist() == [True]


def test_all_memory_is_taken_at_the_start_and_costs_nothing_until_it_is_written() -> None:
    n, vocab_size = 256, 151_936
    cols = columns(n, presence_penalty=1.0, repetition_penalty=1.5)
    logits, rows = torch.zeros(n, vocab_size), np.arange(n, dtype=np.int32)
    logits += 1.0
    before = resident_bytes()
    state = Penalties(TableShape(2048, 131_072), vocab_size, CPU)
    assert resident_bytes() - before < 8 << 20
    state.begin(told(rows.tolist(), [list(range(20))] * n, [10] * n))
    state.apply(logits, rows, cols)
    state.count(rows, torch.arange(n))
    assert resident_bytes() - before < 64 << 20, "counts of all rows would be 155 MB, whole rows of tokens 134 MB"


def test_rows_beyond_those_counted_together_are_counted_alike() -> None:
    n = 2 * _TOGETHER + 1
    state, cols = Penalties(TableShape(n, 64), V, CPU), columns(n, frequency_penalty=0.5, repetition_penalty=1.25)
    state.begin(told(list(range(n)), [[1, 2, 2, 3, 3, 3]] * n, [1] * n))
    logits, rows = torch.full((n, V), 4.0), np.arange(n, dtype=np.int32)
    state.apply(logits, rows, cols)
    assert torch.equal(logits, logits[:1].expand_as(logits))
    assert logits[0, :5].tolist() == pytest.approx([4.0, 3.2, 2.2, 1.7, 4.0])


def test_a_long_history_is_looked_at_in_parts_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, cols = np.arange(ROWS, dtype=np.int32), columns(ROWS, repetition_penalty=1.7, frequency_penalty=0.3)
    results = []
    for most in (1 << 20, 64):
        monkeypatch.setattr("banyan_runtime.model.penalties._MOST", most)
        state, logits = penalties(), torch.randn(ROWS, V, generator=torch.Generator().manual_seed(2))
        state.begin(told(rows.tolist(), [[(7 * i + r) % V for i in range(3 + 5 * r)] for r in range(ROWS)], [2] * ROWS))
        state.apply(logits, rows, cols)
        results.append(logits)
    assert torch.equal(*results)


def test_nothing_is_left_of_a_step_that_ended_while_it_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """For want of memory, say."""
    state, rows = penalties(), np.array([3], np.int32)
    state.begin(told([3], [[0, 2, 2, 1, 1]], [1]))
    wanted = columns(1, frequency_penalty=0.25)
    take, calls = torch.take, list[int]()

    def broken(given: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:  # the last: what was counted
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return take(given, index)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "take", broken)
        with pytest.raises(torch.OutOfMemoryError):
            state.apply(torch.zeros(1, V), rows, wanted)
    logits = torch.zeros(1, V)
    state.apply(logits, rows, wanted)
    assert logits[0, :3].tolist() == [0.0, -0.5, -0.5]
