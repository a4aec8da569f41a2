"""The draw on CUDA says what the reference says, in Triton's interpreter or, where there is one, on a GPU; and that it compiles for one."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from banyan_runtime.model import edits, fused_sampler, noise, sampler
from banyan_runtime.model.fused_sampler import FusedSampler
from banyan_runtime.model.kernels import draw
from banyan_runtime.model.sampler import PlainSampler, Sampler
from banyan_runtime.step import SamplingColumns, TokenMask
from tests.support.models import compiled
from tests.unit.model.test_sampler import columns, reference_probabilities

pytestmark = pytest.mark.matrix(gate=1)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
V = 300
PART = 128  # three parts, of which the last is short
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 20},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"top_k": 30, "top_p": 0.9},
    {"top_k": 60, "top_p": 0.95, "min_p": 0.02},
]


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fused_sampler, "_PART", PART)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, about log(0) in the interpreter
        yield


def some(n: int, vocabulary: int = V, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(n, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def agree(logits: torch.Tensor, cols: SamplingColumns, positions: Any = 5) -> list[int]:
    """The tokens, which are the reference's."""
    at = np.broadcast_to(np.asarray(positions, np.int32), len(logits)).copy()
    given = logits.to(DEVICE, copy=True)
    tokens, failed = FusedSampler()(given, cols, at)
    expected, expected_failed = sampler.sample(logits.clone(), cols, at)
    assert (tokens.dtype, failed.dtype) == (torch.int64, torch.bool)
    assert torch.equal(given.cpu().view(torch.int32), logits.view(torch.int32)), "logits stay as they are"
    assert failed.tolist() == expected_failed.tolist()
    assert tokens.cpu()[~expected_failed].tolist() == expected[~expected_failed].tolist()
    assert not tokens.cpu()[expected_failed].any()
    return tokens.tolist()


@pytest.mark.matrix(gate=len(FILTERS))
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("rounding", ["bf16", "fp32", "whole"])
def test_every_filter_draws_the_references_tokens(filters: dict[str, Any], rounding: str) -> None:
    """Logits of bf16 have many ties, whole numbers hardly anything else."""
    n, seed = 4, 10 * len(rounding) + len(filters)
    logits = some(n, seed=seed)
    logits = {"fp32": logits, "bf16": logits.bfloat16().float(), "whole": logits.round()}[rounding]
    seeds = np.random.default_rng(seed).integers(0, 2**64, n, np.uint64)
    tokens = agree(logits, columns(n, temperature=[0.7, 1.0, 1.4, 2.0], seed=seeds, **filters), np.arange(n) * 1001)
    assert len(set(tokens)) > 1


def test_rows_of_all_kinds_share_a_batch() -> None:
    n = 24
    drawn = np.random.default_rng(3)
    agree(
        some(n, seed=3, spread=1.5).bfloat16().float(),
        columns(
            n,
            temperature=drawn.choice([0.0, 0.3, 0.7, 1.0, 2.0], n),
            top_k=drawn.choice([-1, 0, 1, 2, 40, 5 * V], n),
            top_p=drawn.choice([1.0, 0.999, 0.9, 0.3, 1e-4], n),
            min_p=drawn.choice([0.0, 0.0, 1e-4, 0.1, 1.0], n),
            seed=drawn.integers(0, 2**64, n, np.uint64),
        ),
        drawn.integers(0, 2**31, n),
    )


def test_greedy_takes_the_first_of_the_largest_over_all_parts() -> None:
    logits = torch.zeros(4, V)
    logits[:, [290, 200, 131]] = 3.0
    logits[1, 299] = 4.0
    tokens = agree(logits, columns(4, temperature=[0.0, 9e-7, 1.0, 0.0], top_k=[5, -1, 1, -1], top_p=0.01, seed=[1, 2, 3, 4]))
    assert tokens == [131, 299, 131, 131]


@pytest.mark.parametrize("kept", [torch.float32, torch.float16, torch.bfloat16])
def test_the_likeliest_are_the_references_in_every_type(kept: torch.dtype) -> None:
    """Equal logits within a part and over several, zeros of both signs, and rows that are no numbers, some of which hold large ones."""
    logits = some(10, seed=8).round()
    logits[1] = 0.0
    logits[1, :100] = -0.0
    logits[2, [290, 131]] = 60.0
    logits[3, 140], logits[3, 7] = math.nan, 60.0
    logits[4, 299] = math.inf
    logits[5] = -math.inf
    logits[6], logits[6, 250] = -math.inf, -50.0
    logits[7] = math.nan
    logits[8, :200] = -math.inf
    given = logits.to(DEVICE, kept)

    def likeliest(sampler: Sampler) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, failed = (torch.full((12,), 7, device=DEVICE).to(dtype) for dtype in (torch.int64, torch.bool))
        sampler.pick(given, None, tokens[:10], failed[:10])
        return tokens, failed

    found, expected = likeliest(FusedSampler()), likeliest(PlainSampler())
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert found[0].tolist()[1:8] == [0, 131, 0, 0, 0, 250, 0]
    assert found[0].tolist()[10:] == [7, 7], "what is behind them stays"
    assert found[1].tolist()[:10] == [False, False, False, True, True, True, False, True, False, False]


@pytest.mark.parametrize("vocabulary", [129, 1, 127, 128, 900])
def test_a_vocabulary_may_have_any_size(vocabulary: int) -> None:
    logits = some(4, vocabulary, seed=vocabulary)
    agree(logits, columns(4, temperature=[0.0, 1.0, 1.0, 1.0], top_k=[-1, -1, 9, -1], top_p=[1.0, 1.0, 1.0, 0.7], seed=vocabulary))


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.00999}])
def test_equal_logits_are_ordered_by_id_whatever_is_refused(filters: dict[str, Any]) -> None:
    """Three of 300 tokens stay: most draws need several rounds."""
    n = 9
    assert set(agree(torch.zeros(n, V), columns(n, **filters), np.arange(n))) == {0, 1, 2}


def test_flat_rows_are_drawn_from_everywhere() -> None:
    n = 12
    tokens = agree(some(n, seed=4, spread=1e-3), columns(n, temperature=2.0), np.arange(n))
    assert len({token // PART for token in tokens}) == 3


@pytest.mark.parametrize("filters", [FILTERS[-1], {}])
def test_banned_tokens_are_never_drawn(filters: dict[str, Any]) -> None:
    """Whole parts of some rows are banned, and all tokens but one of another."""
    logits = some(5, seed=6)
    logits[0, ::2] = -math.inf
    logits[1, :200] = -math.inf
    logits[2, 120:] = -math.inf
    logits[3] = -math.inf
    logits[3, 290] = -50.0
    for row, token in enumerate(agree(logits, columns(5, temperature=2.0, seed=range(5), **filters))):
        assert math.isfinite(logits[row, token])


@pytest.mark.parametrize("filters", [{"top_k": 9, "top_p": 0.5}, {}, {"temperature": 0.0}])
def test_a_row_that_is_no_number_fails_alone(filters: dict[str, Any]) -> None:
    logits = some(7)
    logits[0, 77] = math.nan
    logits[1, 299] = math.inf
    logits[2] = -math.inf
    logits[3] = math.nan
    logits[4, [3, 200]] = torch.tensor([math.inf, math.nan])
    logits[5, 5] = -math.inf
    cols, positions = columns(7, seed=range(7), **filters), np.full(7, 5, np.int32)
    agree(logits, cols)
    assert FusedSampler()(logits.to(DEVICE), cols, positions)[1].tolist() == [True] * 5 + [False] * 2


@pytest.mark.parametrize("huge", [1e33, 3e38])
@pytest.mark.parametrize("filters", [FILTERS[-1], {}])
def test_huge_logits_over_a_small_temperature_are_drawn_from_like_others(huge: float, filters: dict[str, Any]) -> None:
    logits = some(4)
    logits[0, 3] = huge
    logits[1, [3, 207]] = torch.tensor([huge, huge / 2])
    logits[2] = -huge
    logits[2, 205] = huge
    logits[3] = huge
    assert agree(logits, columns(4, temperature=2e-6, **filters))[:3] == [3, 3, 205]


def test_draws_follow_the_distribution_that_the_filters_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_sampler, "_PART", 8)
    n = 20_000 if DEVICE == "cuda" else 80
    logits = torch.tensor([0.1, 0.4, 0.05, 0.15, 0.25, 0.05]).log()
    counts = np.bincount(agree(logits.expand(n, 6).contiguous(), columns(n, top_p=0.7, seed=9), np.arange(n)), minlength=6)
    expected = reference_probabilities(logits, top_p=0.7)
    kept = expected > 0
    assert kept.tolist() == [False, True, False, True, True, False]
    assert (counts[~kept] == 0).all()
    assert (np.square(counts[kept] - n * expected[kept]) / (n * expected[kept])).sum() < 13.8  # 0.1 % at two degrees of freedom


@pytest.mark.skipif(DEVICE == "cuda", reason="a compiled kernel's constants are fixed")
def test_what_fp32_leaves_open_is_decided_in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a wide slack many cells are computed again; the token is the same."""
    monkeypatch.setattr(draw, "SLACK", tl.constexpr(3.0))
    agree(some(4, seed=12), columns(4, top_p=[1.0, 0.6] * 2, seed=range(4)))


@triton.jit
def measure(starts, ids, bits, hashes, exact, rough, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(hashes + at, draw._hash(tl.load(starts + at), tl.load(ids + at)).to(tl.int32, bitcast=True))
    given = tl.load(bits + at).to(tl.uint32, bitcast=True)
    tl.store(exact + at, draw._gumbel(given))
    tl.store(rough + at, draw._rough_gumbel(given))


def test_the_noise_is_the_cpus() -> None:
    count = 8192
    drawn = np.random.default_rng(1)
    seeds, positions = drawn.integers(0, 2**64, count, np.uint64), drawn.integers(0, 2**31, count).astype(np.int32)
    ids = torch.from_numpy(drawn.integers(0, 2**18, count).astype(np.int32))
    edges = [0, 1, 2, *(2**32 - 1 - np.arange(2000)), *(2**32 - 2**28 + np.arange(-500, 500)), *(2 ** np.arange(32))]
    words = np.concatenate([np.array(edges, np.uint64), drawn.integers(0, 2**32, count - len(edges), np.uint64)]).astype(np.uint32)
    bits = torch.from_numpy(words.view(np.int32))
    starts = torch.from_numpy(noise.starts(seeds, positions).view(np.int32))
    hashes, exact, rough = (torch.empty(count, dtype=dtype, device=DEVICE) for dtype in (torch.int32, torch.float64, torch.float32))
    measure[(1,)](starts.to(DEVICE), ids.to(DEVICE), bits.to(DEVICE), hashes, exact, rough, COUNT=count)
    assert torch.equal(hashes.cpu(), noise.hashes(seeds, positions, ids.unsqueeze(1)).squeeze(1))
    torch.testing.assert_close(exact.cpu(), noise.gumbel(bits), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(rough.cpu().double(), noise.gumbel(bits), rtol=0, atol=2e-5)


def test_a_rows_hash_starts_with_both_words_of_its_seed_and_its_position() -> None:
    def start(*words: int) -> int:
        bits = 0
        for word in words:
            word = word * noise.C1 & noise.WORD
            word = (word << 15 | word >> 17) & noise.WORD
            bits ^= word * noise.C2 & noise.WORD
            bits = (bits << 13 | bits >> 19) & noise.WORD
            bits = bits * 5 + noise.ADD & noise.WORD
        return bits

    seeds = [0, 42, 2**32 - 1, 2**32, 2**63 + 12345, 2**64 - 1]
    positions = [0, 1, 2**31 - 1, 7, 65536, 3]
    expected = [start(seed & noise.WORD, seed >> 32, position) for seed, position in zip(seeds, positions, strict=True)]
    assert noise.starts(np.array(seeds, np.uint64), np.array(positions, np.int32)).tolist() == expected


def test_no_rows_are_no_work() -> None:
    tokens, failed = FusedSampler()(torch.empty(0, V, device=DEVICE), columns(0), np.empty(0, np.int32))
    assert (tokens.tolist(), failed.tolist()) == ([], [])
    FusedSampler().pick(torch.empty(0, V, device=DEVICE), None, tokens, failed)


@pytest.mark.parametrize("vocabulary", [300, 1, 31, 32, 33, 128, 900])
def test_masks_forbid_what_the_references_forbid(vocabulary: int) -> None:
    """Of rows in any order, some of them without a mask and some with the same one; NaN and infinity among the logits."""
    random = np.random.default_rng(vocabulary)
    logits = some(6, vocabulary, seed=vocabulary)
    logits[2, 0], logits[3, -1], logits[4, 0] = math.nan, math.inf, -math.inf
    words = random.integers(0, 1 << 32, (3, -(-vocabulary // 32)), np.uint32)
    words[2] = 0
    mask, picked = TokenMask(words, np.array([-1, 0, 2, 1, 0], np.int32)), np.array([4, 3, 0, 1, 2, 2])
    given, expected = logits.to(DEVICE, copy=True), logits.clone()
    FusedSampler().allow(given, mask, picked)
    edits.allow(expected, mask, picked)
    assert torch.equal(given.cpu().view(torch.int32), expected.view(torch.int32))
    assert torch.equal(expected[2].view(torch.int32), logits[2].view(torch.int32))
    assert expected[4:].isneginf().all()
    assert expected[0].isneginf().sum() < vocabulary or vocabulary < 9


class Launches:
    """Kernels that do nothing, in place of those that read."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getattr__(self, name: str) -> Launches:
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return lambda *_, **__: None


def test_nothing_is_read_on_the_host() -> None:
    """Tensors without data raise at whatever would have to wait for it."""
    fused, launches = FusedSampler(), Launches()
    fused._kernels = fused._masks = launches
    mixed = columns(3, temperature=[0.0, 1.0, 1.0], top_k=[-1, 5, -1], top_p=[1.0, 1.0, 0.9])
    tokens, failed = fused(torch.empty(3, V, device="meta"), mixed, np.arange(3, dtype=np.int32))
    assert (tokens.device.type, failed.device.type) == ("meta", "meta")
    assert launches.grids == [(3, 3), (3,)]
    fused.allow(torch.empty(3, V, device="meta"), TokenMask(np.zeros((1, 10), np.uint32), np.array([0, -1], np.int32)), np.array([1, 0, 0]))
    assert launches.grids[2:] == [(2, 3)]


@pytest.mark.gpu
@pytest.mark.long
def test_the_host_does_not_wait_for_the_gpu() -> None:
    mixed = columns(3, temperature=[0.0, 1.0, 1.0], top_k=[-1, 5, -1], top_p=[1.0, 1.0, 0.9])
    logits, positions, fused = some(3).to(DEVICE), np.arange(3, dtype=np.int32), FusedSampler()
    fused(logits, mixed, positions)  # which compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        fused(logits, mixed, positions)
    finally:
        torch.cuda.set_sync_debug_mode("default")


COMPILE = """
from banyan_runtime.model.kernels import draw, masks, power_of_two

TYPES = {"logits": "*fp32", "settings": "*i32", "numbers": "*fp64", "ids": "*i32", "tokens": "*i64", "failed": "*i1"}
parts = -(-151936 // 4096)
for drawn in (True,) if FEW else (False, True):
    for kind in ("*bf16",) if FEW else ("*fp32", "*bf16"):
        constants = {"VOCABULARY": 151936, "PART": 4096, "DRAWN": drawn, "DEPENDENT": True}
        made(draw.survey, TYPES | {"logits": kind}, constants, num_warps=8)
        made(draw.choose, TYPES | {"logits": kind}, constants | {"PARTS": parts, "WIDTH": power_of_two(parts)}, num_warps=8)
TYPES = {"logits": "*fp32", "words": "*i32", "rows": "*i32"}
made(masks.allow, TYPES, {"VOCABULARY": 151936, "WORDS": 4748, "PART": 4096}, num_warps=8)
"""


@pytest.mark.long
def test_every_kernel_compiles_for_a_gpu(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """No GPU is needed. The gate compiles one variant of each kernel."""
    compiled.run(f"FEW = {pytestconfig.getoption('--gate')}\n{COMPILE}", tmp_path)
