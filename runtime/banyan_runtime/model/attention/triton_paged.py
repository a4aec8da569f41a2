"""Attention in Triton, on CUDA: our own kernels (`kernels/paged_attention.py`), which need no compiler but Triton's.

Prompts are cut into tiles of queries, each computed by one program for each KV head. Few queries would leave most of a GPU idle,
so steps of few queries also cut the context into stretches, and join them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from banyan_runtime.model import kernels
from banyan_runtime.model.attention import Held
from banyan_runtime.model.device import tensor
from banyan_runtime.model.kernels import power_of_two
from banyan_runtime.model.pool import Cells, KvPool
from banyan_runtime.model.spec import ModelSpec
from banyan_runtime.model.table import DeviceTable, SlotTable
from banyan_runtime.step import I32, Pulse, Step, TableShape

TILE_ROWS: Final = 128  # queries times the heads that share a KV head, in a prompt's tile
FEWEST_ROWS: Final = 16  # of a tile: what tensor cores take
KEYS: Final = 64  # at a time
STRETCH: Final = 512  # keys that a program of a step of few queries meets, at least
PROGRAMS: Final = 512  # that a step of few queries is cut into, about: four for each of a large GPU's processors
FEW_QUERIES: Final = 16  # of the longest sequence of a step: it is computed as decode steps are, however it calls itself


@dataclass(frozen=True, slots=True)
class _Tiles:
    """A step's tiles on the device, int32 [tiles] each."""

    rows_of: Tensor  # of the slot table
    firsts: Tensor
    counts: Tensor
    positions: Tensor
    ends: Tensor  # [tokens] keys that each sees
    stretch: Tensor  # keys of a stretch, in the first cell
    slots: Tensor  # int64 or int32 [tokens]
    rows: int  # of a tile
    stretches: int  # 1: the context is not cut


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
        self._keys = KEYS if self._width < 256 or pool.dtype != torch.float32 else FEWEST_ROWS
        self._scale = 1.0 / math.sqrt(spec.head_dim)
        self._table: DeviceTable | None = None
        self.cells = Cells(pool, torch.empty(0, dtype=torch.int64))
        self._planned: _Tiles | None = None
        self._firsts = torch.empty(0, dtype=torch.int32)  # of decode steps that are replayed

    @staticmethod
    def refusal(spec: ModelSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, asked: bool) -> str | None:
        if device.type != "cuda":
            return "it computes on CUDA devices"
        if reason := kernels.missing():
            return reason
        needed = kernels.needed_capability(kv_dtype)
        if torch.cuda.get_device_capability(device) < needed:
            return f"it needs compute capability {needed[0]}.{needed[1]}"
        return "heads wider than 256 do not fit its tiles" if spec.head_dim > 256 else None

    def reserve(self, shape: TableShape) -> None:
        self._table = DeviceTable(shape, self._pool.device)
        self._compile()

    def plan(self, step: Step, table: SlotTable) -> None:
        if self._table is None:
            self.reserve(TableShape(*table.slots.shape))
        assert self._table is not None
        self._table.follow(step, table)
        group, device = self._spec.group, self._pool.device
        longest, most_keys = int(step.query_lens.max()), int(step.kv_lens.max())
        few = longest <= FEW_QUERIES
        rows = self._rows(longest)
        most = rows // group  # queries of a tile
        tiles = -(-step.query_lens // most)
        sequences = np.repeat(np.arange(len(step.rows)), tiles)
        offsets = (np.arange(len(sequences)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * most
        begun = np.cumsum(step.query_lens) - step.query_lens
        stretches = self._stretches(len(sequences)) if few else 1
        length = _stretch(most_keys, stretches)

        def on_device(column: npt.NDArray[np.signedinteger]) -> Tensor:
            return tensor(column, device, torch.int32)

        self._planned = _Tiles(
            rows_of=on_device(step.rows[sequences]),
            firsts=on_device(begun[sequences] + offsets),
            counts=on_device(np.minimum(step.query_lens[sequences] - offsets, most)),
            positions=on_device((step.kv_lens - step.query_lens)[sequences] + offsets),
            ends=on_device(step.positions + 1),
            stretch=on_device(np.array([length])),
            slots=tensor(step.out_slots, device),
            rows=rows,
            stretches=min(stretches, -(-most_keys // length)),
        )
        self.cells = Cells(self._pool, self._planned.slots)

    def hold(self, rows: int) -> None:
        self._firsts = torch.arange(rows, dtype=torch.int32, device=self._pool.device)

    def plan_held(self, held: Held) -> None:
        table = self._table
        assert table is not None, "reserve comes first"
        rows = held.size
        self._kernels.note[(rows,)](table.slots, table.slots.stride(0), held.rows, held.positions, held.slots, held.counts)
        tile = max(FEWEST_ROWS, power_of_two(self._spec.group))
        self._planned = _Tiles(
            held.rows, self._firsts[:rows], held.counts, held.positions, held.ends, held.own, held.slots, tile, self._stretches(rows)
        )
        self.cells = Cells(self._pool, held.slots)

    def fill(self, step: Step, table: SlotTable, own: I32) -> None:
        assert self._table is not None, "reserve comes first"
        self._table.follow_updates(step, table)
        own[0] = _stretch(int(step.kv_lens.max()), self._stretches(len(own)))

    def _rows(self, longest: int) -> int:
        """Of the tiles of a step, by its longest sequence's queries: times the heads that share a KV head."""
        most = TILE_ROWS if self._pool.dtype != torch.float32 else FEWEST_ROWS  # whose exact products take eight times the registers
        rows = max(most, power_of_two(self._spec.group))
        if longest > FEW_QUERIES:
            return rows
        return min(rows, max(FEWEST_ROWS, power_of_two(self._spec.group * longest)))

    def _compile(self) -> None:
        """Launch every kernel that a step may take with nothing to do, so that no request waits for a compiler."""
        spec, device = self._spec, self._pool.device
        nothing, one = (torch.full((1,), number, dtype=torch.int32, device=device) for number in (0, KEYS))
        q = torch.zeros((1, spec.heads, spec.head_dim), dtype=self._pool.dtype, device=device)
        few = {(self._rows(longest), stretches) for longest in range(1, FEW_QUERIES + 1) for stretches in (1, 2)}
        for rows, stretches in sorted(few | {(self._rows(FEW_QUERIES + 1), 1)}):
            self._planned = _Tiles(nothing, nothing, nothing, nothing, nothing, one, nothing.long(), rows, stretches)
            for layer in {window: layer for layer, window in enumerate(spec.windows)}.values():
                self.attend(layer, q)
        self._planned = None

    def _stretches(self, tiles: int) -> int:
        """How many stretches the context is cut into at most, for so many tiles."""
        return max(1, PROGRAMS // (tiles * self._spec.kv_heads))

    def attend(self, layer: int, q: Tensor) -> Tensor:
        self._pulse()
        plan, table, spec = self._planned, self._table, self._spec
        assert plan is not None, "a step is planned first"
        assert table is not None
        keys, values = self._pool.slots(layer)
        q = q.contiguous()
        tokens, heads, dim = q.shape
        out = torch.empty_like(q)
        cut = plan.stretches > 1
        parts, highs, masses = out, out, out
        if cut:
            parts = torch.empty((plan.stretches, tokens, heads, dim), dtype=torch.float32, device=q.device)
            highs, masses = (torch.empty((plan.stretches, tokens, heads), dtype=torch.float32, device=q.device) for _ in range(2))
        self._kernels.attend[(len(plan.rows_of), spec.kv_heads, plan.stretches)](
            q, keys, values, parts, highs, masses,
            plan.rows_of, plan.firsts, plan.counts, plan.positions, table.slots, table.slots.stride(0), plan.stretch,
            keys.stride(0), tokens, self._scale,
            GROUP=spec.group, HEADS=heads, DIM=dim, WIDTH=self._width, ROWS=plan.rows, KEYS=self._keys, SPLIT=cut,
            WINDOW=spec.windows[layer] or 0, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=8 if plan.rows >= TILE_ROWS else 4,  # of 128 wide heads four would keep less than they need in registers
        )  # fmt: skip
        if cut:
            self._kernels.join[(tokens * heads,)](
                parts, highs, masses, plan.ends, out, plan.stretch, tokens * heads, HEADS=heads, DIM=dim, WIDTH=self._width
            )
        return out


def _stretch(keys: int, stretches: int) -> int:
    """How many keys of a context a program meets."""
    return max(STRETCH, -(-keys // (stretches * KEYS)) * KEYS)
