"""What attention takes for steps that see far more keys than the pool holds, since they share them; on a GPU that is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from banyan_runtime.model.attention import Held, Replayed, torch_native
from banyan_runtime.model.attention.flashinfer_paged import FlashInferAttention
from banyan_runtime.model.attention.torch_native import TorchAttention
from banyan_runtime.model.memory_profiling import MIB
from banyan_runtime.model.pool import KvPool
from banyan_runtime.model.table import SlotTable
from banyan_runtime.step import PADDING_SLOT, Step, TableShape
from tests.kernels.test_pretended import library
from tests.support.models import flashinfer_double
from tests.support.models.driver import columns
from tests.support.models.pretended import DEVICE, PretendedGpu, pretended
from tests.unit.model.test_attention import BLOCK, DIM, HEADS, spec

pytestmark = [pytest.mark.matrix(gate=1), pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")]

MOST = 72 * MIB
"""Beside what is counted: 64 MiB, an eighth of what a start leaves alone, and the columns of a step of many tokens."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[PretendedGpu]:
    monkeypatch.setattr(torch_native, "BLOCK", BLOCK)
    with pretended(monkeypatch, tmp_path) as found:
        yield found


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, gpu: PretendedGpu) -> None:
    flashinfer_double.install(monkeypatch, lambda kind: library(gpu, kind))


def pool(dtype: torch.dtype, dim: int = DIM) -> KvPool:
    """That all rows share."""
    return KvPool(spec(None, dim), 8192, 1, dtype, DEVICE)


def shared(rows: int, queries: int, keys: int) -> tuple[Step, SlotTable]:
    """A step of so many rows, whose keys lie in the same slots."""
    ones, positions = np.ones(rows, np.int32), np.arange(keys - queries, keys, dtype=np.int32)
    step = Step(
        mode="prefill",
        token_ids=np.zeros(rows * queries, np.int32),
        positions=np.tile(positions, rows),
        out_slots=np.full(rows * queries, PADDING_SLOT, np.int32),
        rows=np.arange(rows, dtype=np.int32),
        query_lens=queries * ones,
        kv_lens=keys * ones,
        samples=0 * ones,
        sampling=columns([]),
    )
    table = SlotTable(TableShape(rows, keys))
    table.slots[:] = 1 + np.arange(keys, dtype=np.int32)
    table.apply(step)
    return step, table


def taken(gpu: PretendedGpu, work: Callable[[], object]) -> int:
    """Bytes of the most that was there at once, beside what was there before. The host waits for nothing."""
    gpu.waits.clear()
    gpu.memory.reset_peaks()
    before = gpu.memory.allocated
    work()
    assert gpu.waits == []
    return gpu.memory.most_allocated - before


@pytest.mark.long
@pytest.mark.parametrize(("replayed", "queries"), [(True, 1), (False, 1), (False, 17)])
@pytest.mark.usefixtures("package")
@torch.inference_mode()
def test_keys_of_flashinfer_are_looked_up_in_bounded_memory(gpu: PretendedGpu, replayed: bool, queries: int) -> None:
    """Four million of them: 16 MiB of slots, for which there is room, and 100 MiB if all were looked up at once."""
    attention: Replayed = FlashInferAttention(spec(None, 64), pool(torch.bfloat16, 64), lambda: None)
    step, table = shared(512, queries, 8192)
    device_table = attention.reserve(TableShape(*table.slots.shape))
    device_table.slots.copy_(torch.from_numpy(table.slots))
    held = Held.empty(512, DEVICE)
    attention.hold([held])
    attention.plan_held(held)
    assert taken(gpu, lambda: attention.fill(step, table, held) if replayed else attention.plan(step, table)) < MOST


@torch.inference_mode()
def test_memory_of_plain_attention_does_not_grow_with_what_many_rows_see(gpu: PretendedGpu) -> None:
    keys, q, most = pool(torch.float32), torch.zeros((40, HEADS, DIM), device=DEVICE), {}
    for blocks in (4, 16):
        step, table = shared(40, 1, blocks * BLOCK)
        attention = TorchAttention(spec(None), keys, lambda: None)

        def compute(attention: TorchAttention = attention, step: Step = step, table: SlotTable = table) -> None:
            attention.plan(step, table)
            attention.attend(0, q)

        most[blocks] = taken(gpu, compute)
    assert most[16] - most[4] == 40 * 12 * BLOCK * 4, "the page of each key, once for all layers"
