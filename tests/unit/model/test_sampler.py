"""Sampling: what is kept, what is drawn, and that a row's token depends on nothing but the row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from banyan_runtime.model import edits, noise, sampler
from banyan_runtime.step import SamplingColumns, TokenBiases, TokenMask
from tests.support.models.driver import ragged

V = 1000


def columns(n: int, **changes: Any) -> SamplingColumns:
    values: dict[str, Any] = {
        "temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
        "repetition_penalty": 1.0, "seed": 0,
    } | changes  # fmt: skip
    types = {"top_k": np.int32, "seed": np.uint64}
    made = {name: np.broadcast_to(np.asarray(value, types.get(name, np.float32)), n).copy() for name, value in values.items()}
    return SamplingColumns(**made)


def draw(logits: torch.Tensor, cols: SamplingColumns, positions: Any = 5) -> list[int]:
    tokens, failed = sampler.sample(logits.clone(), cols, np.broadcast_to(np.asarray(positions, np.int32), len(logits)).copy())
    assert not failed.any()
    return tokens.tolist()


def flat_logits(n: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(n, V, generator=torch.Generator().manual_seed(seed)) * spread


def test_the_noise_is_the_published_hash() -> None:
    bits = noise.hashes(np.array([42], np.uint64), np.array([0], np.int32), torch.arange(4))
    assert (bits.long() & 0xFFFFFFFF).tolist() == [[1868632036, 1791484015, 3421513393, 3383564462]]


def test_the_noise_depends_on_both_words_of_the_seed_and_on_the_position() -> None:
    seeds, positions = np.array([7, 7 + (1 << 40), 7], np.uint64), np.array([3, 3, 4], np.int32)
    rows = noise.hashes(seeds, positions, torch.arange(100)).tolist()
    assert len({tuple(row) for row in rows}) == 3


def test_greedy_takes_the_first_of_the_largest_and_ignores_filters_and_seed() -> None:
    logits = torch.zeros(3, V)
    logits[:, [400, 17]] = 3.0
    assert draw(logits, columns(3, temperature=[0.0, 9e-7, 1.0], top_k=[5, -1, 1], top_p=0.01, seed=[1, 2, 3])) == [17, 17, 17]


@pytest.mark.matrix(gate=2)
@pytest.mark.parametrize("filters", [{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.02}, {"top_k": 30, "top_p": 0.9, "min_p": 0.01}])
def test_draws_follow_the_distribution_that_the_filters_leave(filters: dict[str, float]) -> None:
    n, logits = 20_000, flat_logits(1, seed=3)
    tokens = draw(logits.expand(n, V), columns(n, temperature=0.7, **filters), np.arange(n))
    expected = reference_probabilities(logits[0] / 0.7, **filters)
    counts = np.bincount(tokens, minlength=V)
    assert (counts[expected == 0] == 0).all()
    likely = expected * n >= 20
    deviations = (counts[likely] - n * expected[likely]) / np.sqrt(n * expected[likely] * (1 - expected[likely]) + 1e-9)
    assert np.abs(deviations).max() < 5
    assert np.square(deviations).mean() < 1.6


def reference_probabilities(logits: torch.Tensor, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """Filters by the book: sort everything; equal probabilities by token id."""
    p = torch.softmax(logits, -1).double().numpy()
    order = np.lexsort((np.arange(len(p)), -p))
    before = np.concatenate(([0.0], np.cumsum(p[order])[:-1]))
    rank = np.arange(len(p))
    keep = (before <= top_p) | (rank == 0) if top_p < 1 else np.full(len(p), True)
    keep &= rank < (top_k if top_k > 0 else len(p))
    keep &= p[order].astype(np.float32) >= np.float32(min_p) * np.float32(p[order][0])
    kept = np.zeros(len(p))
    kept[order[keep]] = p[order[keep]]
    return kept / kept.sum()


def reference_draw(logits: torch.Tensor, seed: int, position: int, **filters: Any) -> int:
    p = reference_probabilities(logits, **filters)
    bits = noise.hashes(np.array([seed], np.uint64), np.array([position], np.int32), torch.arange(len(p)))
    with np.errstate(divide="ignore"):
        return int(np.argmax(np.log(p) + noise.gumbel(bits)[0].numpy()))


@given(
    top_k=st.sampled_from([-1, 0, 2, 7, 300, V, 5 * V]),
    top_p=st.sampled_from([1.0, 0.999, 0.95, 0.5, 1e-4]),
    min_p=st.sampled_from([0.0, 1e-4, 0.1, 1.0]),
    spread=st.sampled_from([0.0, 1e-3, 1.0, 6.0, 40.0]),
    ties=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31 - 1),
)
def test_every_filter_draws_what_a_full_sort_would(
    top_k: int, top_p: float, min_p: float, spread: float, ties: bool, seed: int, position: int
) -> None:
    logits = flat_logits(4, seed=seed % 1000, spread=spread)
    if ties:
        logits = logits.round()
    tokens = draw(logits, columns(4, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed), position)
    filters = {"top_k": 1 if top_k == 1 else top_k, "top_p": float(np.float32(top_p)), "min_p": min_p}
    assert tokens == [reference_draw(row, seed, position, **filters) for row in logits]


@pytest.mark.parametrize("huge", [1e33, 3e38])
@pytest.mark.parametrize("filters", [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_huge_logits_over_a_small_temperature_are_drawn_from_like_others(huge: float, filters: dict[str, float]) -> None:
    logits = flat_logits(3)
    logits[0, 3] = huge
    logits[1, [3, 7]] = torch.tensor([huge, huge / 2])
    logits[2] = -huge
    logits[2, 5] = huge
    assert draw(logits, columns(3, temperature=2e-6, **filters)) == [3, 3, 5]


def test_a_token_outside_the_vocabulary_fails_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_draw", lambda probabilities, cells: torch.tensor([V, 17, -1]))
    tokens, failed = sampler.sample(flat_logits(3), columns(3), np.arange(3, dtype=np.int32))
    assert failed.tolist() == [True, False, True]
    assert tokens.tolist() == [0, 17, 0]


def test_joint_filters_judge_one_softmax() -> None:
    """p = .4 .3 .2 .1 with top_k 2 and top_p .5: two tokens stay, where filtering in turn would leave one (.57 > .5)."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert {draw(logits, columns(1, top_k=2, top_p=0.5), position)[0] for position in range(60)} == {0, 1}


def test_a_row_draws_the_same_token_alone_and_in_any_batch() -> None:
    n = 24
    logits = flat_logits(n, seed=5)
    mixed: dict[str, Any] = {
        "temperature": [0.0, 0.6, 1.0, 1.7] * 6, "top_k": [-1, 40, 1, 500, 0, 3] * 4, "top_p": [1.0, 0.9, 0.3] * 8,
        "min_p": [0.0, 0.05] * 12, "seed": list(range(100, 124)),
    }  # fmt: skip
    positions = np.arange(n) * 3
    together = draw(logits, columns(n, **mixed), positions)
    alone = [
        draw(logits[i : i + 1], columns(1, **{name: values[i] for name, values in mixed.items()}), positions[i : i + 1])[0]
        for i in range(n)
    ]
    assert together == alone
    assert len(set(together)) > 15


def test_nearly_equal_probabilities_are_drawn_from_the_whole_vocabulary() -> None:
    n = 3000
    tokens = draw(torch.zeros(n, V), columns(n, top_p=0.5), np.arange(n))
    assert len(set(tokens)) > 480
    assert max(tokens) <= 500, "of equal probabilities the lower ids come first"
    assert len(set(draw(torch.zeros(n, V), columns(n), np.arange(n)))) > 900


def test_banned_ids_are_never_drawn_and_a_row_without_any_other_fails_alone() -> None:
    logits = torch.zeros(3, 4)
    edits.forbid(logits, ragged([(0, 1, 3), (9,), (0,), range(4)]), np.array([0, 2, 3]))
    tokens, failed = sampler.sample(logits, columns(3, temperature=[1.0, 0.0, 1.0]), np.array([1, 1, 1], np.int32))
    assert failed.tolist() == [False, False, True]
    assert tokens[:2].tolist() == [2, 1]


def test_biases_are_added_to_the_picked_rows_only() -> None:
    logits = torch.zeros(2, 4)
    biases = TokenBiases(ragged([(0, 3), (1,), (2, 2, 77)]), np.array([1.5, -2.0, 9.0, 0.25, 0.5, 1.0], np.float32))
    edits.add_biases(logits, biases, np.array([0, 2]))
    assert logits.tolist() == [[1.5, 0.0, 0.0, -2.0], [0.0, 0.0, 0.75, 0.0]]


def test_a_mask_leaves_only_the_ids_whose_bits_are_set() -> None:
    allowed = [3, 31, 32, 63, 64, 99]
    words = np.zeros((2, 4), np.uint32)
    for token in allowed:
        words[1, token // 32] |= np.uint32(1 << token % 32)
    logits = torch.zeros(3, 100)
    edits.allow(logits, TokenMask(words, np.array([1, 0, -1, 1], np.int32)), np.array([0, 2, 3]))
    assert [torch.isfinite(row).nonzero().flatten().tolist() for row in logits] == [allowed, list(range(100)), allowed]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("filters", [{}, {"top_k": 9}, {"temperature": 0.0}])
def test_a_row_that_is_no_number_fails_alone(poison: float, filters: dict[str, float]) -> None:
    logits = flat_logits(3)
    expected = draw(logits, columns(3, seed=[1, 2, 3], **filters))
    logits[1, 77] = poison
    tokens, failed = sampler.sample(logits, columns(3, seed=[1, 2, 3], **filters), np.full(3, 5, np.int32))
    assert failed.tolist() == [False, True, False]
    assert [tokens[0].item(), tokens[2].item()] == [expected[0], expected[2]]


def test_a_row_whose_best_token_lies_below_the_sure_bound_is_computed_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    n, logits = 200, flat_logits(1, seed=9)
    expected = draw(logits.expand(n, V), columns(n), np.arange(n))
    monkeypatch.setattr(sampler, "_SURE", -1.0)
    assert draw(logits.expand(n, V), columns(n), np.arange(n)) == expected
