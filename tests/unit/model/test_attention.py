"""Attention by itself, over contexts of several blocks: its numbers, and its memory."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from banyan_runtime.model.attention import AttentionKind, torch_native
from banyan_runtime.model.attention.torch_native import TILE, TorchAttention
from banyan_runtime.model.pool import KvPool
from banyan_runtime.model.table import SlotTable
from banyan_runtime.models.config import DecoderSpec
from banyan_runtime.models.registry import parse
from banyan_runtime.step import Step, TableShape
from tests.support.models.driver import columns
from tests.unit.models.test_registry import BASE

HEADS, KV_HEADS, DIM = 6, 2, 16
BLOCK = 384
LONG = 2 * BLOCK + 145


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context of several blocks is short then."""
    monkeypatch.setattr(torch_native, "BLOCK", BLOCK)


def spec(window: int | None, head_dim: int = DIM, heads: int = HEADS, kv_heads: int = KV_HEADS, **attention: Any) -> DecoderSpec:
    """Of one layer, whose attention has such fields."""
    sizes = {"hidden_size": 96, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": 1, "head_dim": head_dim}
    found = parse(BASE | sizes)
    layer = found.layers[0]
    return dataclasses.replace(
        found, layers=(dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, window=window, **attention)),)
    )


class Room:
    """A pool, and sequences whose queries, keys and values are known from the start."""

    def __init__(
        self,
        lengths: list[int],
        window: int | None = None,
        page_size: int = 1,
        dtype: torch.dtype = torch.float32,
        *,
        kind: AttentionKind = TorchAttention,
        dim: int = DIM,
        device: str = "cpu",
        kept: torch.dtype | None = None,
        value_dim: int | None = None,
    ) -> None:
        self.lengths, self.window, self.page_size, self.dim = lengths, window, page_size, dim
        self.spec = spec(window, dim, value_dim=value_dim)
        pages = [-(-length // page_size) for length in lengths]
        self.pool = KvPool(self.spec, sum(pages) * page_size, page_size, dtype, torch.device(device), kept)
        self.pulses = 0
        self.attention = kind(self.spec, self.pool, self._pulse)
        self.shape = TableShape(len(lengths), max(pages) * page_size)
        self.table = SlotTable(self.shape)
        random = np.random.default_rng(1)
        numbers = np.split(random.permutation(sum(pages)) + 1, np.cumsum(pages)[:-1])
        self.slots = [(own[:, None] * page_size + np.arange(page_size)).reshape(-1).astype(np.int32) for own in numbers]
        generator = torch.Generator().manual_seed(2)

        def some(heads: int, dim: int = dim) -> list[torch.Tensor]:
            return [(torch.randn(length, heads, dim, generator=generator) * 2).to(device, dtype) for length in lengths]

        self.q, self.k, self.v = some(HEADS), some(KV_HEADS), some(KV_HEADS, value_dim or dim)

    def _pulse(self) -> None:
        self.pulses += 1

    def step(self, work: list[tuple[int, int, int]]) -> Step:
        """Of row, start and end of each sequence."""
        return Step(
            mode="prefill",
            token_ids=np.zeros(sum(end - start for _, start, end in work), np.int32),
            positions=np.concatenate([np.arange(start, end, dtype=np.int32) for _, start, end in work]),
            out_slots=np.concatenate([self.slots[row][start:end] for row, start, end in work]),
            rows=np.array([row for row, *_ in work], np.int32),
            query_lens=np.array([end - start for _, start, end in work], np.int32),
            kv_lens=np.array([end for *_, end in work], np.int32),
            samples=np.zeros(len(work), np.int32),
            sampling=columns([]),
            page_size=self.page_size,
        )

    def of(self, work: list[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Their queries, keys and values."""
        q, k, v = (torch.cat([part[row][start:end] for row, start, end in work]) for part in (self.q, self.k, self.v))
        return q, k, v

    @torch.inference_mode()
    def attend(self, work: list[tuple[int, int, int]], sinks: torch.Tensor | None = None) -> list[torch.Tensor]:
        """(row, start, end) of each sequence of a step → what attention gives."""
        step = self.step(work)
        self.table.apply(step)
        self.attention.plan(step, self.table)
        q, k, v = self.of(work)
        self.attention.cells.store(0, k, v)
        return list(self.attention.attend(0, q, sinks).split([end - start for _, start, end in work]))

    def prefill(self) -> list[torch.Tensor]:
        return [self.attend([(row, 0, length)])[0] for row, length in enumerate(self.lengths)]

    def expected(self, row: int, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """In double precision, with all scores at once; of keys and values as the pool keeps them."""
        q, k, v = (part[row] for part in (self.q, self.k, self.v))
        if self.pool.narrow:
            k, v = (part.clamp(-self.pool.largest, self.pool.largest).to(self.pool.kept).to(part.dtype) for part in (k, v))
        q, k, v = (part.double().cpu() for part in (q, k, v))
        group = HEADS // KV_HEADS
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) / math.sqrt(self.dim)
        position = torch.arange(len(q))
        hidden = position[None] > position[:, None]
        if self.window is not None:
            hidden |= position[None] <= position[:, None] - self.window
        scores = scores.masked_fill(hidden, -math.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), -1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v.repeat_interleave(group, 1))


NARROW = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("kept", NARROW)
def test_keys_and_values_are_kept_in_eight_bits(kept: torch.dtype) -> None:
    """What is too large for them becomes the largest; a broken key stays one."""
    texts = Room([BLOCK + 20, 30], kept=kept)
    texts.v[1][3, 0, 0], texts.k[1][4, 1, 1] = 1e6, -1e6
    texts.v[1][25, 0, 0] = float("inf")
    found = texts.prefill()
    assert texts.pool.bytes == 2 * texts.pool.slots(0)[0].nbytes == 2 * KV_HEADS * DIM * (BLOCK + 20 + 30 + 1)
    torch.testing.assert_close(found[0].double(), texts.expected(0), rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(found[1][:25].double(), texts.expected(1)[:25], rtol=1e-4, atol=1e-3)
    assert not torch.isfinite(found[1][25:, :2]).any()


WINDOWS = [None, 37, BLOCK, BLOCK + 100]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window", WINDOWS)
def test_attention_over_several_blocks_equals_one_softmax_over_all_keys(window: int | None, page_size: int) -> None:
    room = Room([LONG, 3], window, page_size)
    for row, found in enumerate(room.prefill()):
        torch.testing.assert_close(found.double(), room.expected(row), rtol=1e-4, atol=2e-5)


def test_a_sink_takes_its_share_of_the_weights() -> None:
    room, sinks = Room([LONG, 3], page_size=16), torch.linspace(-4, 12, HEADS)
    found = room.attend([(0, 0, LONG), (1, 0, 3)], sinks)
    for row, values in enumerate(found):
        torch.testing.assert_close(values.double(), room.expected(row, sinks), rtol=1e-4, atol=2e-5)


def test_values_may_be_narrower_than_keys() -> None:
    """A value that is not finite marks its key all the same."""
    room = Room([LONG, 30], page_size=16, value_dim=DIM // 2)
    room.v[1][20, 0, 3] = float("nan")
    found = room.prefill()
    torch.testing.assert_close(found[0].double(), room.expected(0), rtol=1e-4, atol=2e-5)
    assert torch.isfinite(found[1][:20]).all()
    assert not torch.isfinite(found[1][20:, : HEADS // KV_HEADS]).any()


@pytest.mark.parametrize(("window", "page_size"), [(None, 16), (BLOCK + 100, 1)])
def test_several_sequences_are_computed_together(window: int | None, page_size: int) -> None:
    """Also those that are shorter than others, chunks of prompts, and decode steps."""
    lengths = [LONG, 5, BLOCK + 1, 300, BLOCK, LONG - 129]
    room = Room(lengths, window, page_size)
    expected = room.prefill()

    starts = [length - 3 for length in lengths]
    for offset in range(3):  # the last three tokens of all, as a decode step
        found = room.attend([(row, start + offset, start + offset + 1) for row, start in enumerate(starts)])
        for row, values in enumerate(found):
            torch.testing.assert_close(values[0], expected[row][starts[row] + offset])

    for start in range(0, LONG, 211):  # chunks of one sequence beside a decode of all others
        others = [(row, length - 1, length) for row, length in enumerate(lengths) if row]
        found = room.attend([(0, start, min(start + 211, LONG)), *others])
        torch.testing.assert_close(found[0], expected[0][start : start + 211])
        for (row, *_), values in zip(others, found[1:], strict=True):
            torch.testing.assert_close(values[0], expected[row][-1])


class Largest(TorchDispatchMode):
    """The largest tensor made while it is on, in numbers; views do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else (out,):
            if isinstance(made, torch.Tensor) and not made._is_view() and made.untyped_storage().nbytes() == made.nbytes:
                self.numbers = max(self.numbers, made.numel())
        return out


def test_memory_does_not_grow_with_the_context() -> None:
    room, largest = Room([8 * BLOCK]), {}
    for blocks in (2, 8):
        with Largest() as seen:
            room.attend([(0, blocks * BLOCK - TILE, blocks * BLOCK)])
        largest[blocks] = seen.numbers
    assert largest[8] == largest[2] <= TILE * HEADS * BLOCK


def test_a_window_gathers_no_keys_that_no_query_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    room, gathered = Room([4 * BLOCK], window=100), list[int]()
    real = room.pool.keys
    monkeypatch.setattr(room.pool, "keys", lambda layer, pages: gathered.append(len(pages)) or real(layer, pages))
    room.attend([(0, 4 * BLOCK - 10, 4 * BLOCK)])
    assert sum(gathered) == 100 + 9


def test_a_long_step_gives_a_pulse_for_every_block() -> None:
    room = Room([4 * BLOCK])
    room.attend([(0, 4 * BLOCK - 1, 4 * BLOCK)])
    assert room.pulses == 4
