"""Attention in Triton, on CUDA: our own kernels (`kernels/paged_attention.py`), which need no compiler but Triton's.

Prompts are cut into tiles of queries, each computed by one program for each KV head. Few queries would leave most of a GPU idle,
so a decode step also cuts the context, into stretches at fixed positions, and joins them: a query's sums do not depend on
how many others there are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

import numpy as np
import torch
from torch import Tensor

from banyan_runtime.model.device import tensor
from banyan_runtime.model.kernels import power_of_two
from banyan_runtime.model.pool import KvPool
from banyan_runtime.model.spec import ModelSpec
from banyan_runtime.model.table import DeviceTable, SlotTable
from banyan_runtime.step import Pulse, Step

TILE_ROWS: Final = 128  # queries times the heads that share a KV head, in a prompt's tile
FEWEST_ROWS: Final = 16  # of a tile: what tensor cores take
KEYS: Final = 64  # at a time
STRETCH: Final = 512  # keys that a program of a decode step meets
FEW_QUERIES: Final = 16  # of the longest sequence of a step: it is computed as decode steps are, however it calls itself


@dataclass(frozen=True, slots=True)
class _Planned:
    """A step's tiles on the device, int32 [tiles] each."""

    rows_of: Tensor  # of the slot table
    firsts: Tensor
    counts: Tensor
    positions: Tensor
    ends: Tensor  # [tokens] keys that each sees
    slots: Tensor  # int64 [tokens]
    rows: int  # of a tile
    stretches: int  # 0: the context is not cut


class TritonAttention:
    name = "triton"
    batch_invariant = False  # products around it are the vendor's

    def __init__(self, spec: ModelSpec, pool: KvPool, pulse: Pulse) -> None:
        from banyan_runtime.model.kernels import paged_attention

        self._kernels = paged_attention
        self._spec = spec
        self._pool = pool
        self._pulse = pulse
        self._width = max(16, power_of_two(spec.head_dim))
        self._scale = 1.0 / math.sqrt(spec.head_dim)
        self._table: DeviceTable | None = None  # of the slot table that steps are planned with
        self._planned: _Planned | None = None

    @staticmethod
    def refusal(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda":
            return "it computes on CUDA devices"
        if find_spec("triton") is None:
            return "the package triton is not installed"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs compute capability 8.0"
        return "heads wider than 256 do not fit its tiles" if spec.head_dim > 256 else None

    def plan(self, step: Step, table: SlotTable) -> None:
        group, device = self._spec.group, self._pool.device
        longest = int(step.query_lens.max())
        few = longest <= FEW_QUERIES
        rows = max(FEWEST_ROWS, power_of_two(group * longest)) if few else max(TILE_ROWS, power_of_two(group))
        rows = min(rows, max(TILE_ROWS, power_of_two(group)))
        most = rows // group  # queries of a tile
        tiles = -(-step.query_lens // most)
        sequences = np.repeat(np.arange(len(step.rows), dtype=np.int32), tiles)
        offsets = (np.arange(len(sequences), dtype=np.int32) - np.repeat(np.cumsum(tiles) - tiles, tiles).astype(np.int32)) * most
        begun = np.cumsum(step.query_lens) - step.query_lens
        counts = np.minimum(step.query_lens[sequences] - offsets, most)
        positions = (step.kv_lens - step.query_lens)[sequences] + offsets
        most_keys = int(step.kv_lens.max())
        if self._table is None:
            self._table = DeviceTable(table, device)
        assert self._table.of is table, "one table for all steps"
        self._table.follow(step)

        def on_device(column: np.ndarray[tuple[int, ...], np.dtype[np.signedinteger]]) -> Tensor:
            return tensor(column.astype(np.int32), device, torch.int32)

        self._planned = _Planned(
            rows_of=on_device(step.rows[sequences]),
            firsts=on_device(begun[sequences] + offsets),
            counts=on_device(counts),
            positions=on_device(positions),
            ends=on_device(step.positions + 1),
            slots=tensor(step.out_slots, device),
            rows=rows,
            stretches=-(-most_keys // STRETCH) if few else 0,
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._pulse()
        plan, table, spec = self._planned, self._table, self._spec
        assert plan is not None, "a step is planned first"
        assert table is not None
        self._pool.store(layer, plan.slots, k, v)
        keys, values = self._pool.slots(layer)
        q = q.contiguous()
        tokens, heads, dim = q.shape
        out = torch.empty_like(q)
        cut = plan.stretches > 1
        parts, highs, masses = out, out, out
        if cut:
            parts = torch.empty((plan.stretches, tokens, heads, dim), dtype=torch.float32, device=q.device)
            highs, masses = (torch.empty((plan.stretches, tokens, heads), dtype=torch.float32, device=q.device) for _ in range(2))
        self._kernels.attend[(len(plan.rows_of), spec.kv_heads, max(plan.stretches, 1))](
            q, keys, values, parts, highs, masses,
            plan.rows_of, plan.firsts, plan.counts, plan.positions, table.slots, table.slots.stride(0),
            keys.stride(0), tokens, self._scale,
            GROUP=spec.group, HEADS=heads, DIM=dim, WIDTH=self._width, ROWS=plan.rows, KEYS=KEYS,
            STRETCH=STRETCH if cut else 0, WINDOW=spec.windows[layer] or 0,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        )  # fmt: skip
        if cut:
            self._kernels.join[(tokens * heads,)](
                parts, highs, masses, plan.ends, out, tokens * heads, HEADS=heads, DIM=dim, WIDTH=self._width, STRETCH=STRETCH
            )
        return out
