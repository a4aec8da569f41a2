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
from banyan_runtime.models import config as models
from banyan_runtime.models.config import DecoderSpec, Feature, Norm
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
USUAL: Final = 256  # width of heads, at most; of wider ones a tile has fewer rows and keys
WIDEST: Final = 512  # head
OWN: Final = 5  # columns of a held step for each kind of heads: four that describe tiles, and one number beside them
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
        if width > USUAL:
            return cls(2 * FEWEST_ROWS, 4 if rows <= FEWEST_ROWS else 8, 3)
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


UNKNOWN: Final[frozenset[Feature]] = frozenset({"attention sinks", "value sizes"})
"""What models may need and another backend computes."""


def fuses_heads(attention: models.Attention, norm: Norm) -> bool:
    """Whether `rows.place` and `turn_and_attend` prepare the heads of such a layer; else torch's own operations do."""
    rope = attention.rope
    turned = rope is not None and rope.dim == attention.head_dim <= USUAL and rope.growth is None
    normed = attention.qk_norm is None or (attention.qk_norm == "head" and not attention.norm_after_rope and norm.kind != "layer")
    return turned and normed and attention.kv_layer is None and not (attention.value_is_key or attention.value_norm)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """A step's tiles on the device."""

    columns: Tensor  # int32 [4, tiles]: row of the slot table, first token, queries, position of the first; 16 bytes aligned
    ends: Tensor  # int32 [tokens] keys that each sees
    stretch: Tensor  # int32: keys of a stretch, in the first cell
    rows: int  # of a tile
    stretches: int  # 1: the context is not cut
    single: bool  # one query of one sequence each, in the step's order: what lies before it is of earlier steps


@dataclass(frozen=True, slots=True)
class _Heads:
    """Heads of the layers that share their tiles."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    shared: int  # bytes of shared memory that a program may have

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def width(self) -> int:
        return max(16, power_of_two(self.dim))

    def rows(self, longest: int) -> int:
        """Of the tiles of a step, by its longest sequence's queries: times the heads that share a KV head."""
        most = NARROW_ROWS if self.width <= 64 else TILE_ROWS
        if self.dtype == torch.float32:
            most = FEWEST_ROWS  # whose exact products take eight times the registers
        if self.width > USUAL or (self.width > 128 and self.shared < LARGE):
            most = min(most, 2 * FEWEST_ROWS)
        rows = max(most, power_of_two(self.group))
        if longest > FEW_QUERIES:
            return rows
        return min(rows, max(FEWEST_ROWS, power_of_two(self.group * longest)))

    def rows_held(self, held: Held) -> int:
        """Of the tiles of a step that is replayed."""
        return self.rows(1 if held.sequences is None else FEW_QUERIES + 1)

    def tiles_held(self, held: Held) -> int:
        """Tiles of a step that is replayed, at most: those that a sequence does not fill are as many as sequences."""
        if held.sequences is None:
            return held.size
        return min(held.size, held.size // (self.rows_held(held) // self.group) + held.sequences)

    def tiles(self, step: Step, rows: int) -> tuple[npt.NDArray[np.signedinteger], ...]:
        """Tiles of at most so many rows, as in `_Tiles.columns`."""
        if (queries := len(step.token_ids)) == len(step.rows):
            return step.rows, np.arange(queries), np.ones(queries, np.int32), step.positions
        most = rows // self.group  # queries of a tile
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

    def planned(self, step: Step, ends: Tensor) -> _Tiles:
        rows = self.rows(int(step.query_lens.max()))
        tiles = self.tiles(step, rows)
        programs = self.kv_heads * len(tiles[0])
        length = stretch(step.kv_lens, programs)
        columns = np.zeros((len(tiles), -(-len(tiles[0]) // 4) * 4), np.int32)
        for column, values in zip(columns, tiles, strict=True):
            column[: len(values)] = values
        return _Tiles(
            tensor(columns, ends.device, torch.int32)[:, : len(tiles[0])], ends, tensor(np.array([length]), ends.device, torch.int32), rows,
            min(most_stretches(programs), -(-int(step.kv_lens.max()) // length)), len(step.token_ids) == len(step.rows),
        )  # fmt: skip

    def planned_held(self, held: Held, own: Tensor) -> _Tiles:
        """`own`: what `fill` makes for these heads."""
        tiles = self.tiles_held(held)
        stretches = most_stretches(self.kv_heads * tiles)
        return _Tiles(own[1:, :tiles], held.ends, own[0], self.rows_held(held), stretches, held.sequences is None)

    def fill(self, step: Step, held: Held, own: I32) -> None:
        """Into own [OWN, tokens]: the stretch, then tiles."""
        most = self.tiles_held(held)
        own[0, 0] = stretch(step.kv_lens, self.kv_heads * most)
        for column, values in zip(own[1:], self.tiles(step, self.rows_held(held)), strict=True):
            # Programs take them from the last one on, and so come to those without queries at the end. A row's own stays where it is.
            first = 0 if held.sequences is None else most - len(values)
            column[first : first + len(values)] = values


class TritonAttention:
    name = "triton"

    def __init__(self, spec: DecoderSpec, pool: KvPool, pulse: Pulse) -> None:
        from banyan_runtime.model.kernels import dependent, paged_attention

        self._kernels = paged_attention
        self._options = dependent.options(pool.device)
        self._layers, self._norm = [layer.attention for layer in spec.layers], spec.norm
        self.pool = pool
        self._pulse = pulse
        shared = kernels.shared_bytes(pool.device)
        of_layers = [_Heads(at.heads, at.kv_heads, at.head_dim, pool.dtype, shared) for at in self._layers]
        self._heads = list(dict.fromkeys(of_layers))  # a kind each
        self._heads_of = [self._heads.index(heads) for heads in of_layers]  # by layer
        self.own = OWN * len(self._heads)
        self._table: DeviceTable | None = None
        self.cells = Cells(pool, torch.empty(0, dtype=torch.int32))
        self._planned: list[_Tiles] = []  # by kind of heads

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
        if unknown := spec.features & UNKNOWN:
            return f"it does not compute {', '.join(sorted(unknown))}"
        widest = max(layer.attention.head_dim for layer in spec.layers)
        return f"heads wider than {WIDEST} do not fit its tiles" if widest > WIDEST else None

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
        ends = tensor(step.positions + 1, self.pool.device, torch.int32)
        self._planned = [heads.planned(step, ends) for heads in self._heads]
        self.cells = Cells(self.pool, tensor(step.out_slots, self.pool.device, torch.int32))

    def hold(self, steps: Sequence[Held]) -> None:
        """They are told everything."""

    def plan_held(self, held: Held) -> None:
        table = self._there
        self._kernels.note[(held.size,)](
            table.slots, table.slots.stride(0), held.rows, held.positions, held.slots, held.counts, **self._options
        )
        self._planned = [heads.planned_held(held, own) for heads, own in zip(self._heads, held.own.view(-1, OWN, held.size), strict=True)]
        self.cells = Cells(self.pool, held.slots)

    def fill(self, step: Step, table: SlotTable, held: Held) -> I32:
        self._there.follow_updates(step, table)
        own = np.zeros((len(self._heads), OWN, held.size), np.int32)
        for heads, columns in zip(self._heads, own, strict=True):
            heads.fill(step, held, columns)
        return own.reshape(-1, held.size)

    def _compile(self) -> None:
        """Launch every kernel that a step may take with nothing to do, so that no request waits for a compiler."""
        kinds = {
            (heads, at.window, at.soft_cap, fuses_heads(at, self._norm), at.qk_norm): layer
            for layer, (heads, at) in enumerate(zip(self._heads_of, self._layers, strict=True))
        }
        for index, heads in enumerate(self._heads):
            self._compile_tiles(heads, [layer for layer in kinds.values() if self._heads_of[layer] == index])
        self._planned = []

    def _compile_tiles(self, heads: _Heads, layers: list[int]) -> None:
        device, dtype = self.pool.device, self.pool.dtype
        q = torch.zeros((1, heads.heads, heads.dim), dtype=dtype, device=device)
        one = torch.full((4,), KEYS, dtype=torch.int32, device=device)
        for rows in sorted({heads.rows(longest) for longest in range(1, FEW_QUERIES + 2)}):
            ways = {}  # each with the fewest programs that go it, for where kernels are interpreted many take long
            for tiles, single in itertools.product(compiled_tiles(heads.kv_heads), (False, True)):
                if single and rows != heads.rows(1):
                    continue
                way = Way.of(heads.width, dtype, rows, tiles * heads.kv_heads, single=single, shared=heads.shared)
                ways[way, single] = tiles
            for ((_, single), tiles), stretches in itertools.product(ways.items(), (1, 2)):
                nothing = torch.zeros((4, -(-tiles // 4) * 4), dtype=torch.int32, device=device)  # aligned as a step's
                self._planned = [_Tiles(nothing[:, :tiles], nothing[0], one, rows, stretches, single)] * len(self._heads)
                self.cells = Cells(self.pool, nothing[0, :tiles])
                for layer in layers:
                    at = self._layers[layer]
                    if single and fuses_heads(at, self._norm):
                        qkv = torch.zeros((tiles, (heads.heads + 2 * heads.kv_heads) * heads.dim), dtype=dtype, device=device)
                        turn = qkv[:, : heads.dim].contiguous()
                        weight = torch.zeros(heads.dim, dtype=torch.float32 if self._norm.kind == "rms_wide" else dtype, device=device)
                        self.turn_and_attend(layer, qkv, (turn, turn), (weight, weight) if at.qk_norm is not None else None)
                    else:
                        self.attend(layer, q)

    @property
    def turns(self) -> bool:
        """Whether `turn_and_attend` computes what is planned."""
        return self._planned[0].single

    def attend(self, layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        assert sinks is None, "such models are refused"
        heads, plan = self._next(layer)
        keys, values = self.pool.slots(layer)
        q = q.contiguous()
        into = self._into(heads, plan, q.shape[0], q)
        grid, way, options = self._way(heads, plan, layer)
        self._kernels.attend[grid](
            q, keys, values, *into, *plan.columns.unbind(0), self._there.slots, self._there.slots.stride(0), plan.stretch,
            keys.stride(0), q.shape[0], self._layers[layer].scale, KEYS=way.keys, **options,
        )  # fmt: skip
        return self._joined(heads, plan, *into)

    def turn_and_attend(self, layer: int, qkv: Tensor, at: tuple[Tensor, Tensor], norms: tuple[Tensor, Tensor] | None) -> Tensor:
        """As heads.Heads and `attend` one behind the other, of a step of one token for each sequence (`turns`), in one launch, of heads
        that `fuses_heads`.

        qkv [T, (heads + 2 * kv_heads) * head_dim] at positions (`RopeTable.at`); `norms`: weights of queries' and of keys', [head_dim].
        """
        (heads, plan), pool = self._next(layer), self.pool
        keys, values = pool.slots(layer)
        tokens = self.cells.slots.shape[0]
        into = self._into(heads, plan, tokens, qkv)
        grid, way, options = self._way(heads, plan, layer)
        rows_of, _, counts, positions = plan.columns.unbind(0)
        q_weight, k_weight = norms or (qkv, qkv)
        assert qkv.stride(1) == 1
        self._kernels.turn_and_attend[grid](
            qkv, *at, q_weight, k_weight, self.cells.slots, keys, values, *into, rows_of, counts, positions, self._there.slots,
            self._there.slots.stride(0), plan.stretch, qkv.stride(0), keys.stride(0), tokens, self._norm.eps, self._layers[layer].scale,
            NORMED=norms is not None, WIDE=self._norm.kind == "rms_wide", KEYS=way.keys, AHEAD=way.ahead, PADDING=PADDING_SLOT,
            LARGEST=pool.largest, NARROW=pool.narrow, **options,
        )  # fmt: skip
        return self._joined(heads, plan, *into)

    def _next(self, layer: int) -> tuple[_Heads, _Tiles]:
        self._pulse()
        assert self._planned, "a step is planned first"
        index = self._heads_of[layer]
        return self._heads[index], self._planned[index]

    def _into(self, heads: _Heads, plan: _Tiles, tokens: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a launch writes: the result [tokens, heads, head_dim], and of each stretch a part, its highest score and its mass."""
        shape = tokens, heads.heads, heads.dim
        out = torch.empty(shape, dtype=like.dtype, device=like.device)
        if plan.stretches == 1:
            return out, out, out, out
        parts = torch.empty((plan.stretches, *shape), dtype=torch.float32, device=like.device)
        highs, masses = (torch.empty((plan.stretches, *shape[:2]), dtype=torch.float32, device=like.device) for _ in range(2))
        return out, parts, highs, masses

    def _way(self, heads: _Heads, plan: _Tiles, layer: int) -> tuple[tuple[int, int], Way, dict[str, object]]:
        """Programs of a launch, and how they are compiled."""
        at, programs = self._layers[layer], heads.kv_heads * plan.columns.shape[1]
        way = Way.of(heads.width, heads.dtype, plan.rows, programs, single=plan.single, shared=heads.shared)
        options: dict[str, object] = {
            "GROUP": heads.group, "HEADS": heads.heads, "DIM": heads.dim, "WIDTH": heads.width, "ROWS": plan.rows,
            "SPLIT": plan.stretches > 1, "WINDOW": at.window or 0, "CAP": at.soft_cap or 0.0,
            "PRECISION": "ieee" if heads.dtype == torch.float32 else "tf32", "num_warps": way.warps, "num_stages": way.stages,
        }  # fmt: skip
        return (programs, plan.stretches), way, {**options, **self._options}

    def _joined(self, heads: _Heads, plan: _Tiles, out: Tensor, *parts: Tensor) -> Tensor:
        pairs = out.shape[0] * heads.heads
        if plan.stretches > 1:
            self._kernels.join[(pairs,)](
                *parts, plan.ends, out, plan.stretch, pairs, HEADS=heads.heads, DIM=heads.dim, WIDTH=heads.width, TOGETHER=TOGETHER,
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
