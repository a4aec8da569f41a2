"""Attention in Triton, on CUDA: our own kernels (`kernels/paged_attention.py`), which need no compiler but Triton's.

Prompts are cut into tiles of queries, each computed by one program for each KV head. Few tiles would leave most of a GPU idle,
so steps of few also cut the context into stretches, and join them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
STRETCH: Final = 128  # keys that a program of a step of few tiles meets, at least: two turns, one behind the other's reads
PROGRAMS: Final = 512  # that a step of few tiles is cut into, about: four for each of a large GPU's processors
TOGETHER: Final = 16  # stretches that are joined at once
FEW_QUERIES: Final = 16  # of the longest sequence of a step: its tiles are as small as they can be


@dataclass(frozen=True, slots=True)
class _Tiles:
    """A step's tiles on the device."""

    columns: Tensor  # int32 [4, tiles]: row of the slot table, first token, queries, position of the first; 16 bytes aligned
    ends: Tensor  # int32 [tokens] keys that each sees
    stretch: Tensor  # int32: keys of a stretch, in the first cell
    rows: int  # of a tile
    stretches: int  # 1: the context is not cut


class TritonAttention:
    name = "triton"
    batch_invariant = False  # products around it are the vendor's

    def __init__(self, spec: ModelSpec, pool: KvPool, pulse: Pulse) -> None:
        from banyan_runtime.model.kernels import dependent, paged_attention

        self._kernels = paged_attention
        self._options = dependent.options(pool.device)
        self._spec = spec
        self._pool = pool
        self._pulse = pulse
        self._width = max(16, power_of_two(spec.head_dim))
        self._keys = KEYS if self._width < 256 or pool.dtype != torch.float32 else FEWEST_ROWS
        self._scale = 1.0 / math.sqrt(spec.head_dim)
        self._table: DeviceTable | None = None
        self.cells = Cells(pool, torch.empty(0, dtype=torch.int64))
        self._planned: _Tiles | None = None

    @staticmethod
    def beside(shape: TableShape, rows: int, tokens: int) -> int:
        return DeviceTable.bytes(shape)

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

    def reserve(self, shape: TableShape) -> DeviceTable:
        self._table = DeviceTable(shape, self._pool.device)
        self._compile()
        return self._table

    @property
    def _there(self) -> DeviceTable:
        assert self._table is not None, "reserve comes first"
        return self._table

    def plan(self, step: Step, table: SlotTable) -> None:
        if self._table is None:
            self.reserve(TableShape(*table.slots.shape))
        self._there.follow(step, table)
        rows = self._rows(int(step.query_lens.max()))
        tiles = self._tiles(step, rows)
        most_keys, stretches = int(step.kv_lens.max()), self._stretches(len(tiles[0]))
        length = _stretch(most_keys, stretches)
        columns = np.zeros((len(tiles), -(-len(tiles[0]) // 4) * 4), np.int32)
        for column, values in zip(columns, tiles, strict=True):
            column[: len(values)] = values

        def on_device(column: npt.NDArray[np.signedinteger]) -> Tensor:
            return tensor(column, self._pool.device, torch.int32)

        self._planned = _Tiles(
            on_device(columns)[:, : len(tiles[0])], on_device(step.positions + 1), on_device(np.array([length])), rows,
            min(stretches, -(-most_keys // length)),
        )  # fmt: skip
        self.cells = Cells(self._pool, on_device(step.out_slots))

    def hold(self, steps: Sequence[Held]) -> None:
        """They are told everything."""

    def plan_held(self, held: Held) -> None:
        table, tiles = self._there, self._tiles_held(held)
        self._kernels.note[(held.size,)](
            table.slots, table.slots.stride(0), held.rows, held.positions, held.slots, held.counts, **self._options
        )
        self._planned = _Tiles(held.own[1:, :tiles], held.ends, held.own[0], self._rows_held(held), self._stretches(tiles))
        self.cells = Cells(self._pool, held.slots)

    def fill(self, step: Step, table: SlotTable, held: Held) -> I32:
        self._there.follow_updates(step, table)
        own = np.zeros(tuple(held.own.shape), np.int32)
        own[0, 0] = _stretch(int(step.kv_lens.max()), self._stretches(self._tiles_held(held)))
        for column, values in zip(own[1:], self._tiles(step, self._rows_held(held)), strict=True):
            column[: len(values)] = values
        return own

    def _rows_held(self, held: Held) -> int:
        """Of the tiles of a step that is replayed."""
        return self._rows(1 if held.sequences is None else FEW_QUERIES + 1)

    def _tiles_held(self, held: Held) -> int:
        """Tiles of a step that is replayed, at most: those that a sequence does not fill are as many as sequences."""
        if held.sequences is None:
            return held.size
        return min(held.size, held.size // (self._rows_held(held) // self._spec.group) + held.sequences)

    def _tiles(self, step: Step, rows: int) -> tuple[npt.NDArray[np.signedinteger], ...]:
        """Tiles of at most so many rows, as in `_Tiles.columns`."""
        if (queries := len(step.token_ids)) == len(step.rows):
            return step.rows, np.arange(queries), np.ones(queries, np.int32), step.positions
        most = rows // self._spec.group  # queries of a tile
        tiles = -(-step.query_lens // most)
        sequences = np.repeat(np.arange(len(step.rows)), tiles)
        offsets = (np.arange(len(sequences)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * most
        begun = np.cumsum(step.query_lens) - step.query_lens
        return (
            step.rows[sequences],
            begun[sequences] + offsets,
            np.minimum(step.query_lens[sequences] - offsets, most),
            (step.kv_lens - step.query_lens)[sequences] + offsets,
        )

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
        nothing, one = (torch.full((4, 4), number, dtype=torch.int32, device=device) for number in (0, KEYS))  # aligned as a step's
        q = torch.zeros((1, spec.heads, spec.head_dim), dtype=self._pool.dtype, device=device)
        for rows, stretches in sorted({(self._rows(longest), stretches) for longest in range(1, FEW_QUERIES + 2) for stretches in (1, 2)}):
            self._planned = _Tiles(nothing[:, :1], nothing, one, rows, stretches)
            for layer in {window: layer for layer, window in enumerate(spec.windows)}.values():
                self.attend(layer, q)
        self._planned = None

    def _stretches(self, tiles: int) -> int:
        """How many stretches the context is cut into at most, for so many tiles."""
        return max(1, PROGRAMS // (tiles * self._spec.kv_heads))

    def attend(self, layer: int, q: Tensor) -> Tensor:
        self._pulse()
        plan, table, spec = self._planned, self._there, self._spec
        assert plan is not None, "a step is planned first"
        keys, values = self._pool.slots(layer)
        q = q.contiguous()
        tokens, heads, dim = q.shape
        out = torch.empty_like(q)
        cut = plan.stretches > 1
        parts, highs, masses = out, out, out
        if cut:
            parts = torch.empty((plan.stretches, tokens, heads, dim), dtype=torch.float32, device=q.device)
            highs, masses = (torch.empty((plan.stretches, tokens, heads), dtype=torch.float32, device=q.device) for _ in range(2))
        self._kernels.attend[(spec.kv_heads * plan.columns.shape[1], plan.stretches)](
            q, keys, values, parts, highs, masses, *plan.columns.unbind(0), table.slots, table.slots.stride(0), plan.stretch,
            keys.stride(0), tokens, self._scale,
            GROUP=spec.group, HEADS=heads, DIM=dim, WIDTH=self._width, ROWS=plan.rows, KEYS=self._keys, SPLIT=cut,
            WINDOW=spec.windows[layer] or 0, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=8 if plan.rows >= TILE_ROWS else 4,  # of 128 wide heads four would keep less than they need in registers
            **self._options,
        )  # fmt: skip
        if cut:
            self._kernels.join[(tokens * heads,)](
                parts, highs, masses, plan.ends, out, plan.stretch, tokens * heads, HEADS=heads, DIM=dim, WIDTH=self._width,
                TOGETHER=TOGETHER, **self._options,
            )  # fmt: skip
        return out


def _stretch(keys: int, stretches: int) -> int:
    """How many keys of a context a program meets."""
    return max(STRETCH, -(-keys // (stretches * KEYS)) * KEYS)
