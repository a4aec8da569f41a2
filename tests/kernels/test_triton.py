"""Triton's kernels: their numbers, in its interpreter or, where there is one, on a GPU; and that they compile for one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from banyan_runtime.errors import ConfigError
from banyan_runtime.model import capture, fused, fused_products, graphs, kernels, torch_forward
from banyan_runtime.model.attention import Held, backends, triton_paged
from banyan_runtime.model.attention.torch_native import TorchAttention
from banyan_runtime.model.attention.triton_paged import TritonAttention, Way
from banyan_runtime.model.fused import FusedKernels
from banyan_runtime.model.graphs import Sizes
from banyan_runtime.model.kernels import FEWEST_ROWS, LARGE
from banyan_runtime.model.layers import Kernels, Layer, PlainKernels
from banyan_runtime.model.mail import Mail
from banyan_runtime.model.pool import Cells, KvPool
from banyan_runtime.model.rope import Ropes
from banyan_runtime.model.runner import ModelRunner
from banyan_runtime.model.torch_forward import TorchForward
from banyan_runtime.models.config import Activation, DecoderSpec, Mlp, Norm, NormKind
from banyan_runtime.step import PADDING_SLOT, Step
from tests.support.models.driver import Again, Driver, Request
from tests.support.models.interpreted import combined
from tests.support.models.replays import Replays
from tests.support.models.tiny import VOCAB, TinyModel
from tests.unit.model.test_attention import HEADS, KV_HEADS, NARROW, Room, spec

pytestmark = pytest.mark.matrix(gate=1)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter's products of bfloat16 are garbage (Triton 3.6 to 3.9).
DTYPES = {torch.float32: (1e-4, 2e-5), torch.float16: (1e-2, 1e-2)} | ({torch.bfloat16: (5e-2, 5e-2)} if DEVICE == "cuda" else {})


def room(lengths: list[int], *options: Any, **named: Any) -> Room:
    return Room(lengths, *options, kind=TritonAttention, device=DEVICE, **named)


@pytest.fixture(autouse=True)
def _short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context of several stretches is short then; and the interpreter takes milliseconds over each program of a product."""
    monkeypatch.setattr(fused_products, "_OUTPUTS", 128)
    monkeypatch.setattr(torch_forward, "_MANY", 4)
    monkeypatch.setattr(triton_paged, "KEYS", 16)
    monkeypatch.setattr(triton_paged, "STRETCH", 64)
    monkeypatch.setattr(triton_paged, "TOGETHER", 2)
    monkeypatch.setattr(triton_paged, "PROGRAMS", 32)


def some(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    rtol, atol = DTYPES[found.dtype]
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def made_by(kernels: Kernels, gated: bool, activation: Activation = "silu") -> Callable[[torch.Tensor, torch.Tensor | None], Layer]:
    """What makes a layer of its weight and bias."""
    return partial(kernels.activated, Mlp(0, activation)) if gated else kernels.linear


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    rtol, atol = DTYPES[found.dtype]
    torch.testing.assert_close(found.double().cpu(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("page_size", [16, 1])
@pytest.mark.parametrize("window", [37, None, 100])
@pytest.mark.parametrize(("dim", "dtype"), [(16, torch.float32), (24, torch.float32), *((64, dtype) for dtype in DTYPES)])
def test_prompts_equal_one_softmax_over_all_keys(window: int | None, page_size: int, dim: int, dtype: torch.dtype) -> None:
    texts = room([150, 3, 64], window, page_size, dtype, dim=dim)
    found = texts.attend([(row, 0, length) for row, length in enumerate(texts.lengths)])
    for row, values in enumerate(found):
        close(values, texts.expected(row))


@pytest.mark.parametrize("window", [37, None])
@pytest.mark.parametrize(("soft_cap", "scale"), [(3.0, 0.6), (3.0, 0.25), (None, 0.6)])
def test_scores_are_scaled_and_capped_as_the_model_says(soft_cap: float | None, scale: float, window: int | None) -> None:
    """Of prompts, and of few queries over a context in stretches."""
    texts = room([150, 20], window, soft_cap=soft_cap, scale=scale)
    for row, values in enumerate(texts.prefill()):
        close(values, texts.expected(row))
    work = [(0, 147, 150), (1, 19, 20)]
    for (row, start, end), values in zip(work, texts.attend(work), strict=True):
        close(values, texts.expected(row)[start:end])


def of_unlike_layers() -> DecoderSpec:
    """Narrow heads behind a window, then wider ones, fewer of which share a KV head; then one layer that reads the first one's keys."""
    narrow, wide = spec(37), spec(None, 48, 4, 1, scale=0.3)
    third = dataclasses.replace(narrow.layers[0], attention=dataclasses.replace(narrow.layers[0].attention, kv_layer=0))
    return dataclasses.replace(narrow, layers=(*narrow.layers, *wide.layers, third))


def test_each_layer_has_heads_of_its_own() -> None:
    """As in plain torch: prompts beside drafts, then decode steps, of which some are replayed."""
    shape, lengths, device, dtype = of_unlike_layers(), [90, 20, 41], torch.device(DEVICE), torch.float32
    texts = room(lengths)  # whose slots are those of both pools
    pools = [KvPool(shape, sum(lengths), 1, dtype, device) for _ in range(2)]
    plain, triton = TorchAttention(shape, pools[0], lambda: None), TritonAttention(shape, pools[1], lambda: None)
    table = triton.reserve(texts.shape)
    held = [Held.empty(size, device, sequences, triton.own) for size, sequences in ((4, None), (40, 5))]
    triton.hold(held)
    for work, replayed in (
        ([(0, 0, 85), (1, 0, 3), (2, 0, 30)], None), ([(0, 85, 88), (1, 3, 18), (2, 30, 40)], held[1]),
        ([(1, 18, 19), (0, 88, 89)], None), ([(2, 40, 41), (0, 89, 90), (1, 19, 20)], held[0]),
    ):  # fmt: skip
        step = texts.step(work)
        tokens = len(step.token_ids)
        texts.table.apply(step)
        plain.plan(step, texts.table)
        if replayed is None:
            triton.plan(step, texts.table)
        else:
            replayed.tell(step, triton.fill(step, texts.table, replayed), Mail().bring)
            triton.plan_held(replayed)
        for layer, (each, own) in enumerate((each.attention, each.attention.kv_layer is None) for each in shape.layers):
            q = some(triton.cells.slots.shape[0], each.heads, each.head_dim, dtype=dtype)
            if own:
                k, v = some(2, tokens, each.kv_heads, each.head_dim, dtype=dtype)
                for pool in pools:
                    pool.store(layer, torch.from_numpy(step.out_slots).long().to(device), k, v)
            assert_near(triton.attend(layer, q)[:tokens], plain.attend(layer, q[:tokens].contiguous()))
    assert table.slots.shape == texts.table.slots.shape


@pytest.mark.long
@pytest.mark.parametrize("page_size", [16, 1])
@pytest.mark.parametrize("window", [37, None, 100])
def test_few_queries_over_a_context_in_stretches(window: int | None, page_size: int) -> None:
    """Decode steps, drafts and ends of prompts whose beginning is cached."""
    lengths = [150, 3, 64, 65, 200]
    texts = room(lengths, window, page_size)
    texts.prefill()
    expected = [texts.expected(row) for row in range(len(lengths))]
    for queries in (1, 2, 7):
        work = [(row, max(length - queries, 0), length) for row, length in enumerate(lengths)]
        for (row, start, end), values in zip(work, texts.attend(work), strict=True):
            close(values, expected[row][start:end])


def test_a_prompt_in_chunks_beside_others() -> None:
    texts = room([180, 40])
    expected = [texts.expected(row) for row in range(2)]
    for start in range(0, 180, 60):
        work = [(0, start, start + 60), (1, start // 5, start // 5 + 12)]
        for (row, begin, end), values in zip(work, texts.attend(work), strict=True):
            close(values, expected[row][begin:end])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", NARROW[::-1])
def test_a_broken_key_of_eight_bits_breaks_those_who_see_it(kept: torch.dtype, dtype: torch.dtype) -> None:
    if DEVICE == "cpu" and kept == torch.float8_e4m3fn:
        pytest.skip("the interpreter's E4M3 has no NaN")
    texts = room([40], kept=kept, dtype=dtype)
    texts.v[0][20] = float("nan")
    broken = [not torch.isfinite(values).all() for values in texts.attend([(0, 0, 40)])[0]]
    assert broken == [False] * 20 + [True] * 20


@pytest.mark.parametrize("kept", NARROW)
def test_keys_and_values_in_eight_bits(kept: torch.dtype) -> None:
    """Of prompts, and of few queries."""
    texts = room([70, 20], kept=kept)
    for row, values in enumerate(texts.prefill()):
        close(values, texts.expected(row))
    close(texts.attend([(0, 69, 70)])[0], texts.expected(0)[69:])


@pytest.mark.long
def test_contexts_that_are_not_even_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are programs enough without: one that all others wait for is shared."""
    monkeypatch.setattr(triton_paged, "ENOUGH", 8)
    monkeypatch.setattr(triton_paged, "most_stretches", lambda programs: 4)
    texts = room([40, 300, 45, 50])
    texts.prefill()
    even, uneven = [(0, 39, 40), (2, 44, 45), (3, 49, 50), (1, 79, 80)], [(0, 39, 40), (2, 44, 45), (3, 49, 50), (1, 299, 300)]
    assert [triton_paged.stretch(texts.step(work).kv_lens, 8) for work in (even, uneven)] == [80, 80]
    assert [triton_paged.stretch(texts.step(work).kv_lens, 7) for work in (even, uneven)] == [64, 80]
    for values, (row, start, end) in zip(texts.attend(uneven), uneven, strict=True):
        assert_near(values, texts.expected(row)[start:end].to(values.device, values.dtype))


def test_a_decode_steps_bits_do_not_depend_on_company() -> None:
    texts = room([150, 90, 200, 20])
    texts.prefill()
    alone = [texts.attend([(row, length - 1, length)])[0] for row, length in enumerate(texts.lengths)]
    together = texts.attend([(row, length - 1, length) for row, length in enumerate(texts.lengths)])
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)


def test_a_broken_key_breaks_those_who_see_it_and_nobody_else() -> None:
    texts = room([40, 40])
    texts.v[0][20] = float("nan")
    found = texts.attend([(0, 0, 40), (1, 0, 40)])
    broken = [not torch.isfinite(values).all() for values in found[0]]
    assert broken == [False] * 20 + [True] * 20
    assert torch.isfinite(found[1]).all()


def test_tiles_without_queries_are_the_last_to_be_computed() -> None:
    """Programs take them from the last one on. A decode step's own stay where their rows are."""
    texts = room([40, 70, 9])
    assert isinstance(texts.attention, TritonAttention)
    texts.attention.reserve(texts.shape)
    own, (heads,) = texts.attention.own, texts.attention._heads
    prompts, rows = Held.empty(160, texts.pool.device, 8, own), Held.empty(8, texts.pool.device, own=own)
    for held, work in ((prompts, [(0, 0, 40), (1, 3, 70), (2, 0, 9)]), (rows, [(0, 39, 40), (1, 69, 70), (2, 8, 9)])):
        step = texts.step(work)
        counts = texts.attention.fill(step, texts.table, held)[3, : heads.tiles_held(held)]
        assert counts.sum() == len(step.token_ids)
        asked = counts > 0
        assert 0 < asked.sum() < len(asked)
        assert asked.tolist() == sorted(asked.tolist(), reverse=held is rows)


def test_a_gpu_alone_does_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(kept: torch.dtype = torch.bfloat16, head_dim: int = 64) -> str | None:
        return TritonAttention.refusal(spec(None, head_dim), torch.device("cuda"), torch.bfloat16, kept, False)

    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(kernels.shutil, "which", lambda name: name if name == "clang" else None)
    assert refusal() is None
    assert refusal(torch.float8_e5m2) is None
    assert refusal(head_dim=512) is None
    assert "512" in str(refusal(head_dim=514))
    assert "8.9" in str(refusal(torch.float8_e4m3fn))
    assert fused.supports(torch.device("cuda"), torch.bfloat16)
    assert not fused.supports(torch.device("cuda"), torch.float8_e4m3fn)
    monkeypatch.setattr(kernels.shutil, "which", lambda name: None)
    assert "gcc" in str(refusal())
    assert not fused.supports(torch.device("cuda"), torch.bfloat16)
    monkeypatch.setenv("CC", "/opt/cc")
    assert refusal() is None
    monkeypatch.setattr(kernels.sysconfig, "get_path", lambda name: f"/no/{name}")
    assert "/no/include" in str(refusal())


def test_every_way_of_decode_steps_is_compiled_at_the_start() -> None:
    """Of whatever number of KV heads: each number of rows goes a way that a start launches."""
    for kv_heads, width, dtype in itertools.product(range(1, 65), (16, 64, 128), (torch.bfloat16, torch.float32)):

        def way(tiles: int, kv_heads: int = kv_heads, width: int = width, dtype: torch.dtype = dtype) -> Way:
            return Way.of(width, dtype, FEWEST_ROWS, tiles * kv_heads, single=True, shared=LARGE)

        assert {way(tiles) for tiles in range(1, 513)} == {way(tiles) for tiles in triton_paged.compiled_tiles(kv_heads)}


def test_on_the_cpu_it_is_refused() -> None:
    """The interpreter is for tests."""
    with pytest.raises(ConfigError, match=r"--attention-backend=triton: .*CUDA"):
        backends.choose("triton", spec(None), torch.device("cpu"), torch.float32, torch.float32)
    assert backends.choose(None, spec(None), torch.device("cpu"), torch.float32, torch.float32).name == "torch_native"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "width"), [("rms_wide", 96), ("rms", 64), ("rms", 96), ("rms", 896), ("rms_wide", 896)])
def test_a_fused_norm_is_the_norm(kind: NormKind, width: int, dtype: torch.dtype) -> None:
    """Also of heads."""
    weight, x = some(width, dtype=torch.float32 if kind == "rms_wide" else dtype), some(6, 2 * width, dtype=dtype)
    rows, delta = x[:, :width], x[:, width:]  # beside others
    fused_norm, norm = (made.norm(Norm(kind, 1e-6), weight) for made in (FusedKernels(), PlainKernels()))
    assert_near(fused_norm(rows), norm(rows))
    assert_near(fused_norm(x.view(6, 2, width)), norm(x.view(6, 2, width)))
    (found_sum, found), (sums, expected) = fused_norm.added(rows, delta), norm.added(rows, delta)
    assert torch.equal(found_sum, sums)
    assert_near(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [16, 1100])
@pytest.mark.parametrize(("activation", "biased"), [("gelu_tanh", True), ("gelu_tanh", False), ("silu", True), ("silu", False)])
def test_a_fused_mlp_is_the_mlp(inner: int, activation: Activation, biased: bool, dtype: torch.dtype) -> None:
    weight, x = some(2 * inner, 40, dtype=dtype), some(3, 40, dtype=dtype)
    bias = some(2 * inner, dtype=dtype) if biased else None
    layer, plain = (made_by(made, True, activation)(weight, bias) for made in (FusedKernels(), PlainKernels()))
    for rows in (x, x[:1]):
        assert_near(layer(rows), plain(rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "outputs"), [(64, 5), (96, 40), (1500, 24)])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_products_of_few_rows_are_the_products(
    width: int, outputs: int, gated: bool, biased: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By themselves, behind a norm, and behind a sum and its norm."""
    monkeypatch.setattr(fused_products, "_OUTPUTS", 8)
    monkeypatch.setattr(fused_products, "_MANY", 32)
    scaled = some(outputs * (2 if gated else 1), width, dtype=dtype) / width**0.5
    bias = some(len(scaled), dtype=dtype) if biased else None
    x, weight = some(2 * fused_products.MOST_ROWS + 1, 2 * width, dtype=dtype), 1 + some(width, dtype=dtype) / 10
    few, many = x[: fused_products.MOST_ROWS, :width], x[:, width:]  # beside others
    found, expected = [], []
    for made, results in ((FusedKernels(), found), (PlainKernels(), expected)):
        layer = made_by(made, gated, "gelu_tanh" if biased else "silu")(scaled, bias)
        entry = made.entry(made.norm(Norm("rms", 1e-6), weight), layer)
        for rows in (few, few[:1], many, many[:0]):
            results += [layer(rows), *entry(rows, None), *entry(rows, rows.flip(1).contiguous())]
    for one, other in zip(found, expected, strict=True):
        assert_near(one, other)


def test_more_outputs_than_a_grid_has_programs_are_shared_among_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a vocabulary of 262,144 in 32 bits."""
    monkeypatch.setattr(fused_products, "_GRID", 4)
    x, weight = some(1, 32, dtype=torch.float32), some(100, 32, dtype=torch.float32)
    assert_near(FusedKernels().linear(weight, None)(x), x @ weight.T)


def assert_heads_are_the_heads(
    shape: DecoderSpec, norms: tuple[torch.Tensor | None, torch.Tensor | None], qkv: torch.Tensor, positions: list[int], kept: torch.dtype
) -> None:
    """Queries, and what the pool holds afterwards, of padding nothing."""
    device, dtype = torch.device(DEVICE), qkv.dtype
    ropes = Ropes(shape, 4096, dtype, device)
    ropes.reserve(4096)
    at = ropes.at(torch.tensor(positions, device=DEVICE))
    found = []
    for made in (FusedKernels(), PlainKernels()):
        pool = KvPool(shape, 32, 4, dtype, device, kept)
        cells = Cells(pool, torch.tensor([7, 30, 12, PADDING_SLOT], device=DEVICE))
        queries = made.heads(shape, 0, *norms)(0, qkv, at, cells)
        keys, values = (part.to(dtype) for part in pool.slots(0))
        found.append((queries, keys[:, 1:], values[:, 1:]))
        assert isinstance(made, FusedKernels) <= (not keys[:, PADDING_SLOT].any())
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=DTYPES[dtype][0], atol=DTYPES[dtype][1], equal_nan=True)


def qk_norms(dim: int, kind: NormKind | None, dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Weights of queries' and of keys', if there are such norms."""
    kept = torch.float32 if kind == "rms_wide" else dtype
    return (some(dim, dtype=kept), some(dim, dtype=kept) + 1) if kind else (None, None)


SIZES = [(16, 14, 2), (24, 4, 4), (128, 5, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "heads", "kv_heads"), SIZES)
@pytest.mark.parametrize("normed", ["rms", "rms_wide", None])
@pytest.mark.parametrize("few", [0, 64])
def test_fused_heads_are_the_heads(
    dim: int, heads: int, kv_heads: int, normed: NormKind | None, few: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tokens whose values are broken as well."""
    monkeypatch.setattr(fused, "_FEW", few)
    shape = dataclasses.replace(spec(None, dim, heads, kv_heads, qk_norm=normed and "head"), norm=Norm(normed or "rms", 1e-6))
    norms = qk_norms(dim, normed, dtype)
    qkv = some(4, (heads + 2 * kv_heads) * dim, dtype=dtype)
    qkv[1, -1], qkv[2, -2] = float("nan"), -float("inf")
    assert_heads_are_the_heads(shape, norms, qkv, [3, 0, 70, 4000], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kept", NARROW)
@pytest.mark.parametrize(("dim", "heads", "kv_heads"), SIZES)
def test_fused_heads_keep_eight_bits(dim: int, heads: int, kv_heads: int, kept: torch.dtype, dtype: torch.dtype) -> None:
    """Numbers that eight bits hold, turned by nothing: the interpreter rounds others wrongly (1.95 to 1), and E4M3 has no NaN there."""
    shape = spec(None, dim, heads, kv_heads)
    qkv = some(4, (heads + 2 * kv_heads) * dim, dtype=dtype).to(kept).to(dtype)
    qkv[0, -1], qkv[0, heads * dim] = 6e4, -6e4
    if DEVICE == "cuda" or kept == torch.float8_e5m2:
        qkv[1, -1], qkv[2, -2] = float("nan"), -float("inf")
    assert_heads_are_the_heads(shape, (None, None), qkv, [0, 0, 0, 0], kept)


@pytest.mark.long
@pytest.mark.parametrize(
    ("width", "window", "programs", "light"),
    combined([(16, None), (24, None), (128, None), (16, torch.float8_e5m2)], [None, 21], [64, 1], [0, 16]),
)
def test_turned_and_attended_in_one_launch(
    width: tuple[int, torch.dtype | None], window: int | None, programs: int, light: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one behind the other, of a decode step: the results, and what is kept. Contexts end at either side of a turn and a stretch; one
    row has nothing before it, another one's value is broken, and a third is padding, whose key nobody keeps. `width` is of heads, and what
    their keys are kept in; `light` so many programs, of which there are 16."""
    dim, kept = width
    monkeypatch.setattr(triton_paged, "PROGRAMS", programs)
    monkeypatch.setattr(triton_paged, "LIGHT", light)
    monkeypatch.setattr(triton_paged, "FEWEST", light)
    lengths, dtype = [1, 16, 17, 64, 65, 100, 9, 40], torch.float32
    normed: dict[int, NormKind] = {24: "rms", 128: "rms_wide"}
    named: dict[str, Any] = {"qk_norm": "head" if dim in normed else None, "soft_cap": 2.0 if dim == 128 else None}
    shape = dataclasses.replace(spec(window, dim, **named), norm=Norm(normed.get(dim, "rms"), 1e-6))
    ropes = Ropes(shape, 128, dtype, torch.device(DEVICE))
    ropes.reserve(128)
    at = ropes.at(torch.tensor(lengths, device=DEVICE) - 1)
    norms = qk_norms(dim, normed.get(dim), dtype)
    qkv = some(len(lengths), (HEADS + 2 * KV_HEADS) * dim, dtype=dtype)
    qkv[6, -1] = float("nan")
    found = []
    for turns in (False, True):
        texts = room(lengths, window, dim=dim, kept=kept, **named)
        assert isinstance(texts.attention, TritonAttention)
        texts.attention._norm = shape.norm
        texts.attention.reserve(texts.shape)
        for row in range(len(lengths)):
            if lengths[row] > 1:
                texts.attend([(row, 0, lengths[row] - 1)])
        step = texts.step([(row, length - 1, length) for row, length in enumerate(lengths)])
        step.out_slots[7] = PADDING_SLOT
        texts.table.apply(step)
        texts.attention.plan(step, texts.table)
        assert texts.attention.turns
        with monkeypatch.context() as patch:
            patch.setattr(TritonAttention, "turns", turns)
            out = FusedKernels().heads(shape, 0, *norms).attended(0, qkv, at, texts.attention)
        found.append((out[:7], *(part.to(dtype)[:, 1:] for part in texts.pool.slots(0))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5, equal_nan=True)
    assert torch.isfinite(found[1][0][:6]).all()
    assert not torch.isfinite(found[1][0][6]).all()


def fused_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "supports", lambda *_: True)
    monkeypatch.setattr(TritonAttention, "refusal", staticmethod(lambda *_: None))
    if DEVICE != "cuda":
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "none")


@pytest.mark.long
@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "qwen2-window", "gemma2", "gemma3", "gemma4", "gemma4-shared", "cohere2", "phi3", "olmo3"]
)
def test_a_model_of_all_of_them_says_what_transformers_says(
    tiny_model: Callable[[str], TinyModel], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused_on_any_device(monkeypatch)
    model = tiny_model(family)
    requests = [Request([(31 * row + 7 * i) % VOCAB for i in range(20 + row)], new_tokens=12, row=row, start=row) for row in range(3)]
    runner = model.load(device=DEVICE, runner="torch")
    assert runner.info.attention_backend == "triton"
    Driver(runner, rows=3, context=64).run(requests, chunk=13)
    for request in requests:
        assert request.output == model.choices(request.prompt, request.output)


def replaying(model: TinyModel, recorder: capture.Recorder, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    """With graphs for 1, 2 and 4 rows, and for 16 and 24 tokens of other steps."""
    fused_on_any_device(monkeypatch)
    runner = model.load(device=DEVICE, runner="torch", disable_cuda_graph=True)
    forward = runner.forward
    assert isinstance(forward, TorchForward)
    runner.forward = TorchForward(forward.decoder, forward.attention, forward._pool, recorder, Sizes.upto(4, 24))
    return runner


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma2"])
def test_steps_that_are_replayed_say_the_same(
    shallow_model: Callable[[str], TinyModel], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three texts of different lengths that come and go, the last one drawn: the graphs are for 1, 2 and 4 rows, and for 16 and 24 other
    tokens, so some steps are padded, and of some the likeliest tokens are replayed too. The longest prompt goes by them."""
    recorder = capture.CudaRecorder() if DEVICE == "cuda" else Again()
    model = shallow_model(family)
    runner = replaying(model, recorder, monkeypatch)

    def requests(*lengths: int) -> list[Request]:
        prompts = [[(31 * row + 7 * i) % VOCAB for i in range(9 + 30 * row)] for row in range(3)]
        return [
            Request(prompt, new_tokens=length, row=row, start=row, temperature=0.9 * (row == 2), seed=5)
            for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]

    replayed: list[bool] = []
    launch = runner.launch

    def noted(step: Step) -> Any:
        handle = launch(step)
        replayed.append(handle.result().replayed == (len(step.token_ids) <= 24))
        return handle

    monkeypatch.setattr(runner, "launch", noted)
    found = requests(12, 5, 6)
    Driver(runner, rows=4, context=128).run(found, chunk=20)
    assert all(replayed)
    assert isinstance(recorder, capture.CudaRecorder) or recorder.replays > 14
    for request in found[:2]:
        assert request.output == model.choices(request.prompt, request.output)
    eager = model.load(device=DEVICE, runner="torch", disable_cuda_graph=True)
    expected = requests(1, 1, 6)
    Driver(eager, rows=4, context=128).run(expected)
    assert found[2].output == expected[2].output


@pytest.mark.long
def test_drafts_are_replayed(tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one text all right, of the other wrong from the third on; behind them a step whose tokens nobody has looked at."""
    model = tiny_model("llama")
    prompts = [[5, 17, 40, 8, 99, 3], [1, 2, 3]]
    expected = [model.generate(prompt, 12) for prompt in prompts]
    driver = Driver(replaying(model, capture.CudaRecorder() if DEVICE == "cuda" else Again(), monkeypatch), rows=2, context=64)
    right, wrong = (Request(prompt, 12, row=row) for row, prompt in enumerate(prompts))
    driver.step([(right, 6), (wrong, 3)])
    right.drafts, wrong.drafts = expected[0][1:6], [*expected[1][1:3], (expected[1][3] + 1) % VOCAB, 7]
    drafted = driver.build([(right, 1), (wrong, 1)])
    handle, pending = driver.runner.launch(drafted), driver.advance([(right, 1), (wrong, 1)], drafted)
    result = handle.result()
    driver.settle(pending, result)
    assert result.replayed
    assert (right.output, wrong.output) == (expected[0][:7], expected[1][:4])
    step = driver.build([(right, 1), (wrong, 1)])
    result = driver.runner.launch(dataclasses.replace(step, token_ids=np.full(2, -1, np.int32))).result()
    assert result.replayed
    assert result.token_ids.tolist() == [expected[0][7], expected[1][4]]


@pytest.mark.parametrize("kept", [None, torch.float8_e5m2])
@pytest.mark.parametrize("window", [37, None])
def test_steps_that_are_replayed_follow_their_texts(window: int | None, kept: torch.dtype | None) -> None:
    """Decode steps, drafts, and pieces of prompts beside one another, each padded to a graph; over contexts in stretches."""
    lengths = [150, 20, 64]
    texts = room(lengths, window, kept=kept)
    expected = [texts.expected(row) for row in range(3)]
    replays = Replays(texts, rows=(4, 2), tokens=(12, 40))
    texts.prefill()
    for rows, counts, back in (
        ([2, 0, 1], (1, 1, 1), 9),
        ([1], (1,), 8),
        ([2, 0, 1], (2, 4, 2), 4),
        ([0, 2], (30, 9), 1),
        ([2, 0], (1, 22), 0),
    ):
        work = [(row, lengths[row] - back - count, lengths[row] - back) for row, count in zip(rows, counts, strict=True)]
        for (row, start, end), values in zip(work, replays.attend(work), strict=True):
            close(values, expected[row][start:end])


def test_the_ladder_ends_with_the_most_rows() -> None:
    assert graphs.ladder(0) == []
    assert graphs.prompt_ladder(0) == []
    assert graphs.prompt_ladder(64) == [16, 32, 48, 64]
    assert graphs.prompt_ladder(600)[-2:] == [512, 600]
    assert graphs.ladder(1) == [1]
    assert graphs.ladder(7) == [1, 2, 4, 7]
    assert graphs.ladder(24) == [1, 2, 4, 8, 12, 16, 24]
    assert len(graphs.ladder(256)) == 36
    assert len(graphs.ladder(512)) == 52
    assert graphs.ladder(600)[-2:] == [576, 600]
