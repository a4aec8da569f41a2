"""Attention in Triton, on CUDA: our own kernels (`kernels/paged_attention.py`), which need no compiler but Triton's.

Prompts are cut into tiles of queries, each computed by one program for each KV head. Few tiles would leave most of a GPU idle,
so steps of few also cut the context into stretches, and join them.
"""

from __future__ import annotations

import itertools
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
from banyan_runtime.model.kernels import FEWEST_ROWS, LARGE, power_of_two
from banyan_runtime.model.pool import Cells, KvPool
from banyan_runtime.model.table import DeviceTable, SlotTable
from banyan_runtime.models.config import DecoderSpec, Feature
from banyan_runtime.step import I32, PADDING_SLOT, Pulse, Step, TableShape

TILE_ROWS: Final = 128  # queries times the heads that share a KV head, in a prompt's tile
NARROW_ROWS: Final = 64  # of heads that are no wider than 64, likewise: 6 % sooner of 8,192 tokens on an H200, a fifth of 32 times 128
KEYS: Final = 64  # at a time
STRETCH: Final = 64  # keys that a program of a step of few tiles meets, at least
PROGRAMS: Final = 256  # that a step of few tiles is cut into, about: two for each of a large GPU's processors
ENOUGH: Final = 128  # programs that are not cut where contexts are even: they read as fast as any, and need not be joined
EVEN: Final = 2  # times the mean context that the longest is then, at most
RESIDENT: Final = 396  # programs that a large GPU holds at once, three on a processor
LIGHT: Final = 16
"""Programs of a decode step, uncut, at most: so few wait for themselves and not for memory, so more warps share what each executes. The
first keys of wide heads are read before what comes before is waited for."""
FEWEST: Final = 4  # programs likewise, of which those of narrow heads are too: of 32 that was slower, and nobody has measured others
TOGETHER: Final = 16  # stretches that are joined at once
FEW_QUERIES: Final = 16  # of the longest sequence of a step: its tiles are as small as they can be


@dataclass(frozen=True, slots=True)
class Way:
    """How `attend` is compiled: what was fastest on an H200 (benchmarks/gpu_ways.py, gpu_kernels.py)."""

    keys: int  # at a time
    warps: int
    stages: int  # 5: keys of two turns are on their way, 3: of one
    ahead: bool = False  # of `turn_and_attend`

    @classmethod
    def of(cls, width: int, dtype: torch.dtype, rows: int, programs: int, *, single: bool, shared: int) -> Way:
        """For heads so wide, tiles of so many rows, and so many programs before the context is cut; `single` as in `_Tiles`, and `shared`
        the bytes of shared memory that a program may have."""
        light = single and rows <= FEWEST_ROWS and width <= 128 and programs <= LIGHT
        ahead = light and (width > 64 or programs <= FEWEST)
        if dtype == torch.float32:
            return cls(KEYS if width < 256 else FEWEST_ROWS, 4, 3, ahead)
        if single and rows > FEWEST_ROWS and shared < LARGE:  # room for a token's own key is left
            return cls(KEYS // 4 if width > 128 else KEYS // 2, 8 if rows >= TILE_ROWS else 4, 2)
        if width > 128 and shared < LARGE:
            return cls(KEYS, 4, 3) if rows <= 2 * FEWEST_ROWS else cls(KEYS // 2, 4, 2) if rows < TILE_ROWS else cls(KEYS // 4, 8, 2)
        if rows >= TILE_ROWS:  # of 128 wide heads four warps would keep less than they need in registers
            return cls(2 * KEYS, 8, 2) if width == 128 and shared >= LARGE else cls(KEYS, 8, 3)
        if rows > FEWEST_ROWS or width > 128:
            return cls(KEYS, 4, 3)
        if light:
            return cls(KEYS, 8 if width > 64 else 4, 3, ahead)
        return cls(KEYS, 2, 5 if width <= 64 or programs <= RESIDENT else 3)


_UNKNOWN: Final[frozenset[Feature]] = frozenset({"attention sinks", "attention soft cap", "head sizes by layer", "value sizes"})


@dataclass(frozen=True, slots=True)
class _Tiles:
    """A step's tiles on the device."""

    columns: Tensor  # int32 [4, tiles]: row of the slot table, first token, queries, position of the first; 16 bytes aligned
    ends: Tensor  # int32 [tokens] keys that each sees
    stretch: Tensor  # int32: keys of a stretch, in the first cell
    rows: int  # of a tile
    stretches: int  # 1: the context is not cut
    single: bool  # one query of one sequence each, in the step's order: what lies before it is of earlier steps


class TritonAttention:
    name = "triton"

    def __init__(self, spec: DecoderSpec, pool: KvPool, pulse: Pulse) -> None:
        from banyan_runtime.model.kernels import dependent, paged_attention

        self._kernels = paged_attention
        self._options = dependent.options(pool.device)
        uniform = spec.uniform
        assert uniform is not None
        self.spec, self._eps, self._windows = uniform, spec.norm.eps, spec.windows
        self.pool = pool
        self._pulse = pulse
        self._shared = kernels.shared_bytes(pool.device)
        self._width = max(16, power_of_two(uniform.head_dim))
        self._scale = uniform.scale
        self._table: DeviceTable | None = None
        self.cells = Cells(pool, torch.empty(0, dtype=torch.int32))
        self._planned: _Tiles | None = None

    @staticmethod
    def beside(shape: TableShape, rows: int, tokens: int) -> int:
        return DeviceTable.bytes(shape)

    @staticmethod
    def refusal(spec: DecoderSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, asked: bool) -> str | None:
        if device.type != "cuda":
            return "it computes on CUDA devices"
        if reason := kernels.missing():
            return reason
        needed = kernels.needed_capability(kv_dtype)
        if torch.cuda.get_device_capability(device) < needed:
            return f"it needs compute capability {needed[0]}.{needed[1]}"
        if unknown := spec.features & _UNKNOWN:
            return f"it does not compute {', '.join(sorted(unknown))}"
        return "heads wider than 256 do not fit its tiles" if spec.layers[0].attention.head_dim > 256 else None

    def reserve(self, shape: TableShape) -> DeviceTable:
        self._table = DeviceTable(shape, self.pool.device)
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
        programs = self.spec.kv_heads * len(tiles[0])
        stretches, length = most_stretches(programs), stretch(step.kv_lens, programs)
        columns = np.zeros((len(tiles), -(-len(tiles[0]) // 4) * 4), np.int32)
        for column, values in zip(columns, tiles, strict=True):
            column[: len(values)] = values

        def on_device(column: npt.NDArray[np.signedinteger]) -> Tensor:
            return tensor(column, self.pool.device, torch.int32)

        self._planned = _Tiles(
            on_device(columns)[:, : len(tiles[0])], on_device(step.positions + 1), on_device(np.array([length])), rows,
            min(stretches, -(-int(step.kv_lens.max()) // length)), len(step.token_ids) == len(step.rows),
        )  # fmt: skip
        self.cells = Cells(self.pool, on_device(step.out_slots))

    def hold(self, steps: Sequence[Held]) -> None:
        """They are told everything."""

    def plan_held(self, held: Held) -> None:
        table, tiles = self._there, self._tiles_held(held)
        self._kernels.note[(held.size,)](
            table.slots, table.slots.stride(0), held.rows, held.positions, held.slots, held.counts, **self._options
        )
        self._planned = _Tiles(
            held.own[1:, :tiles],
            held.ends,
            held.own[0],
            self._rows_held(held),
            most_stretches(self.spec.kv_heads * tiles),
            held.sequences is None,
        )
        self.cells = Cells(self.pool, held.slots)

    def fill(self, step: Step, table: SlotTable, held: Held) -> I32:
        self._there.follow_updates(step, table)
        own = np.zeros(tuple(held.own.shape), np.int32)
        most = self._tiles_held(held)
        own[0, 0] = stretch(step.kv_lens, self.spec.kv_heads * most)
        for column, values in zip(own[1:], self._tiles(step, self._rows_held(held)), strict=True):
            # Programs take them from the last one on, and so come to those without queries at the end. A row's own stays where it is.
            first = 0 if held.sequences is None else most - len(values)
            column[first : first + len(values)] = values
        return own

    def _rows_held(self, held: Held) -> int:
        """Of the tiles of a step that is replayed."""
        return self._rows(1 if held.sequences is None else FEW_QUERIES + 1)

    def _tiles_held(self, held: Held) -> int:
        """Tiles of a step that is replayed, at most: those that a sequence does not fill are as many as sequences."""
        if held.sequences is None:
            return held.size
        return min(held.size, held.size // (self._rows_held(held) // self.spec.group) + held.sequences)

    def _tiles(self, step: Step, rows: int) -> tuple[npt.NDArray[np.signedinteger], ...]:
        """Tiles of at most so many rows, as in `_Tiles.columns`."""
        if (queries := len(step.token_ids)) == len(step.rows):
            return step.rows, np.arange(queries), np.ones(queries, np.int32), step.positions
        most = rows // self.spec.group  # queries of a tile
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
        most = NARROW_ROWS if self._width <= 64 else TILE_ROWS
        if self.pool.dtype == torch.float32:
            most = FEWEST_ROWS  # whose exact products take eight times the registers
        if self._width > 128 and self._shared < LARGE:
            most = min(most, 2 * FEWEST_ROWS)
        rows = max(most, power_of_two(self.spec.group))
        if longest > FEW_QUERIES:
            return rows
        return min(rows, max(FEWEST_ROWS, power_of_two(self.spec.group * longest)))

    def _compile(self) -> None:
        """Launch every kernel that a step may take with nothing to do, so that no request waits for a compiler."""
        spec, device, dtype = self.spec, self.pool.device, self.pool.dtype
        q = torch.zeros((1, spec.heads, spec.head_dim), dtype=dtype, device=device)
        one = torch.full((4,), KEYS, dtype=torch.int32, device=device)
        for rows in sorted({self._rows(longest) for longest in range(1, FEW_QUERIES + 2)}):
            ways = {}  # each with the fewest programs that go it, for where kernels are interpreted many take long
            for tiles, single in itertools.product(compiled_tiles(spec.kv_heads), (False, True)):
                way = Way.of(self._width, dtype, rows, tiles * spec.kv_heads, single=single, shared=self._shared)
                ways[way, single] = tiles
            for ((_, single), tiles), stretches in itertools.product(ways.items(), (1, 2)):
                nothing = torch.zeros((4, -(-tiles // 4) * 4), dtype=torch.int32, device=device)  # aligned as a step's
                self._planned = _Tiles(nothing[:, :tiles], nothing[0], one, rows, stretches, single)
                self.cells = Cells(self.pool, nothing[0, :tiles])
                for layer in {window: layer for layer, window in enumerate(self._windows)}.values():
                    if not single:
                        self.attend(layer, q)
                    elif rows == self._rows(1):
                        qkv = torch.zeros((tiles, (spec.heads + 2 * spec.kv_heads) * spec.head_dim), dtype=dtype, device=device)
                        at = qkv[:, : spec.head_dim].contiguous()
                        self.turn_and_attend(layer, qkv, (at, at), (at[0], at[0]) if spec.qk_norm is not None else None)
        self._planned = None

    @property
    def turns(self) -> bool:
        """Whether `turn_and_attend` computes what is planned."""
        assert self._planned is not None, "a step is planned first"
        return self._planned.single

    def attend(self, layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        assert sinks is None, "such models are refused"
        plan = self._next()
        keys, values = self.pool.slots(layer)
        q = q.contiguous()
        into = self._into(plan, q.shape[0], q)
        grid, way, options = self._way(plan, layer)
        self._kernels.attend[grid](
            q, keys, values, *into, *plan.columns.unbind(0), self._there.slots, self._there.slots.stride(0), plan.stretch,
            keys.stride(0), q.shape[0], self._scale, KEYS=way.keys, **options,
        )  # fmt: skip
        return self._joined(plan, *into)

    def turn_and_attend(self, layer: int, qkv: Tensor, at: tuple[Tensor, Tensor], norms: tuple[Tensor, Tensor] | None) -> Tensor:
        """As heads.Heads and `attend` one behind the other, of a step of one token for each sequence (`turns`), in one launch.

        qkv [T, (heads + 2 * kv_heads) * head_dim] at positions (`Rope.at`); `norms`: weights of queries' and of keys', [head_dim].
        """
        plan, pool = self._next(), self.pool
        keys, values = pool.slots(layer)
        tokens = self.cells.slots.shape[0]
        into = self._into(plan, tokens, qkv)
        grid, way, options = self._way(plan, layer)
        rows_of, _, counts, positions = plan.columns.unbind(0)
        q_weight, k_weight = norms or (qkv, qkv)
        assert qkv.stride(1) == 1
        self._kernels.turn_and_attend[grid](
            qkv, *at, q_weight, k_weight, self.cells.slots, keys, values, *into, rows_of, counts, positions, self._there.slots,
            self._there.slots.stride(0), plan.stretch, qkv.stride(0), keys.stride(0), tokens, self._eps, self._scale,
            NORMED=norms is not None, KEYS=way.keys, AHEAD=way.ahead, PADDING=PADDING_SLOT, LARGEST=pool.largest, NARROW=pool.narrow,
            **options,
        )  # fmt: skip
        return self._joined(plan, *into)

    def _next(self) -> _Tiles:
        self._pulse()
        assert self._planned is not None, "a step is planned first"
        return self._planned

    def _into(self, plan: _Tiles, tokens: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a launch writes: the result [tokens, heads, head_dim], and of each stretch a part, its highest score and its mass."""
        heads, dim = self.spec.heads, self.spec.head_dim
        out = torch.empty((tokens, heads, dim), dtype=like.dtype, device=like.device)
        if plan.stretches == 1:
            return out, out, out, out
        parts = torch.empty((plan.stretches, tokens, heads, dim), dtype=torch.float32, device=like.device)
        highs, masses = (torch.empty((plan.stretches, tokens, heads), dtype=torch.float32, device=like.device) for _ in range(2))
        return out, parts, highs, masses

    def _way(self, plan: _Tiles, layer: int) -> tuple[tuple[int, int], Way, dict[str, object]]:
        """Programs of a launch, and how they are compiled."""
        spec, dtype, programs = self.spec, self.pool.dtype, self.spec.kv_heads * plan.columns.shape[1]
        way = Way.of(self._width, dtype, plan.rows, programs, single=plan.single, shared=self._shared)
        options: dict[str, object] = {
            "GROUP": spec.group, "HEADS": spec.heads, "DIM": spec.head_dim, "WIDTH": self._width, "ROWS": plan.rows,
            "SPLIT": plan.stretches > 1, "WINDOW": self._windows[layer] or 0, "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
            "num_warps": way.warps, "num_stages": way.stages,
        }  # fmt: skip
        return (programs, plan.stretches), way, {**options, **self._options}

    def _joined(self, plan: _Tiles, out: Tensor, *parts: Tensor) -> Tensor:
        tokens, heads, dim = out.shape
        if plan.stretches > 1:
            self._kernels.join[(tokens * heads,)](
                *parts, plan.ends, out, plan.stretch, tokens * heads, HEADS=heads, DIM=dim, WIDTH=self._width, TOGETHER=TOGETHER,
                **self._options,
            )  # fmt: skip
        return out


def compiled_tiles(kv_heads: int) -> list[int]:
    """Numbers of tiles of which each is the fewest that go some way, the most first."""
    return [1 + number // kv_heads for number in (RESIDENT, LIGHT, FEWEST, 0)]


def most_stretches(programs: int) -> int:
    """That a context is cut into, where so many programs would run uncut."""
    return max(1, (2 * PROGRAMS if programs >= ENOUGH else PROGRAMS) // programs)


def stretch(kv_lens: I32, programs: int) -> int:
    """How many keys of contexts of such lengths a program meets, likewise."""
    longest = int(kv_lens.max())
    stretches = 1 if programs >= ENOUGH and longest <= EVEN * float(kv_lens.mean()) else most_stretches(programs)
    return max(STRETCH, -(-longest // (stretches * KEYS)) * KEYS)
