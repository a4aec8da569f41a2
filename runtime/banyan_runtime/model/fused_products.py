"""Products on CUDA: torch's own, and Triton's of few rows and of some (`kernels/products.py`, `kernels/tiles.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from banyan_runtime.model.kernels import power_of_two
from banyan_runtime.model.layers import RmsNorm
from banyan_runtime.model.ways import AHEAD, Product, Ways

MOST_ROWS: Final = 2
"""Of a product whose rows each read the weight, side by side: all but the first from the cache, which is read about twice as fast."""
AHEAD_BYTES: Final = 24 << 20
"""Of weights that are brought into the cache before they are asked for: half of a large GPU's, which keeps what lies in the other half
of it twice."""
_SILU_BLOCK: Final = 1024
_COLUMNS: Final = 1024  # of a weight that a program reads at a time
_OUTPUTS: Final = 8  # outputs, likewise: 16 KB of a weight in 16 bits are on their way at once
_GRID: Final = 1 << 16  # programs along a grid's second axis, fewer than these
_MANY: Final = 2112  # lines: fewer are cut into halves, so that all processors of a large GPU have two programs
_ROUNDING: Final = 0.02  # of the largest result
_ARRIVED: Final = 4096  # tiles that are shared by several programs, at most


def few(rows: int) -> bool:
    return 0 < rows <= MOST_ROWS


def cut(outputs: int, width: int, itemsize: int, *, gated: bool) -> dict[str, int]:
    """How a product of few rows is cut and compiled, for so many outputs of so many columns.

    Back to back, programs that hold more of each line read wide weights faster (benchmarks/gpu_kernels.py). In a decode step, where the
    next product begins while this one ends, they do not: on an H200 gate, up and down of Llama-3.1-8B's shape took 92 us then instead of
    87, those of Qwen2.5-0.5B's 10.4 instead of 9.7.
    """
    # Of 32 bits, or of two lines for each output, as many would not fit into registers.
    each = _OUTPUTS if outputs >= _MANY and itemsize == 2 and not gated else _OUTPUTS // 2
    while -(-outputs // each) >= _GRID:
        each *= 2
    return {"OUTPUTS": each, "COLUMNS": min(_COLUMNS, power_of_two(width)), "num_warps": 4}


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product of some rows is cut and compiled."""

    rows: int
    outputs: int
    columns: int  # at a time
    splits: int  # programs that share a tile, each with a stretch of its columns
    warps: int
    stages: int
    bring: int  # columns, at most, that a program brings into the cache before it waits

    ENOUGH = 128  # programs: one for each of a large GPU's processors
    STRETCH = 768  # columns, at least: of fewer ones adding up costs more than it spares
    RESIDENT = 264  # programs that run at once, two on each of a large GPU's processors
    ROOM = 96 << 10  # bytes of shared memory: two programs fit into a processor then

    @classmethod
    def of(cls, rows: int, product: Product) -> Tile:
        """For up to so many rows, one of `ways.SIZES`. The widest tile of which there are programs enough: rows are read for each again."""
        most = min(128, max(16, rows))
        columns = 128 if product.width % 128 == 0 and most <= 64 else 64
        splits = 1 if product.gated else max(1, product.width // cls.STRETCH)
        for outputs in (64, 32, 16):
            tiles = -(-product.outputs // outputs) * -(-rows // most)
            if tiles * splits >= cls.ENOUGH or 4 * outputs <= most:
                break
        turns = product.width // columns
        splits = -(-turns // -(-turns // min(splits, -(-cls.ENOUGH // tiles))))  # each with as many of them, but for the last
        lines = outputs * (2 if product.gated else 1)
        stage = 2 * columns * (most + lines)
        together = min(cls.RESIDENT, tiles * splits) * lines * 2  # bytes of a column of all that run at once
        held = cls.ROOM // stage + (most < 64)  # products of 64 rows and more end while the next begin, over one stage more
        bring = max(64, AHEAD_BYTES // together // 64 * 64)
        return cls(most, outputs, columns, splits, 8 if most == 128 else 4, min(6, held), min(bring, product.width))


class Arrived:
    """Counters of tiles that several programs share, zeros between launches: those of all products, of which no two run at once."""

    def __init__(self) -> None:
        self._counters: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        if self._counters is None:
            self._counters = torch.zeros(_ARRIVED, dtype=torch.int32, device=device)
        return self._counters


class FusedLinear:
    """torch's product, but of so few rows that reading the weight takes longest."""

    gated = False

    def __init__(self, weight: Tensor, bias: Tensor | None, ways: Ways | None = None, arrived: Arrived | None = None) -> None:
        """`ways`: those of a product that a layer of each block has."""
        from banyan_runtime.model.kernels import dependent, products, tiles

        assert weight.is_contiguous()
        self.weight = weight
        self.bias = bias
        self.outputs = weight.shape[0] // (2 if self.gated else 1)
        self.product = Product(self.outputs, weight.shape[1], self.gated)
        self._ways = Ways() if ways is None else ways
        self._arrived = Arrived() if arrived is None else arrived
        self._kernel, self._tiles = products.product, tiles.tile
        self._options = dependent.options(weight.device)
        width = power_of_two(weight.shape[1])
        way = cut(self.outputs, weight.shape[1], weight.itemsize, gated=self.gated)
        self._programs = -(-self.outputs // way["OUTPUTS"])
        self._shape = {"BIASED": bias is not None, "GATED": self.gated, "WIDTH": weight.shape[1], "BLOCK": width, **way}
        self._then: list[Tensor] = []

    def before(self, *later: FusedLinear) -> None:
        """What is multiplied soon behind this, which follows attention: its programs are there while that still runs."""
        left = AHEAD_BYTES
        for layer in later:
            parts = layer.weight.chunk(2) if layer.gated and layer.weight.nbytes > left else (layer.weight,)
            most = left // len(parts) // layer.weight.itemsize
            brought = [part.view(-1)[: min(part.numel(), most) // 64 * 64] for part in parts if part.data_ptr() % 16 == 0]
            brought = [part for part in brought if part.numel()]
            self._then += brought
            left -= sum(part.nbytes for part in brought)
        del self._then[2:]  # there is room for two

    @property
    def brings(self) -> bool:
        """Whether it can bring what comes behind it into the cache."""
        return bool(self._options["DEPENDENT"]) and bool(self._then)

    @property
    def tileable(self) -> bool:
        """Whether `of_some` computes it."""
        return self.weight.itemsize == 2 and self.weight.shape[1] % 64 == 0

    def agrees(self, rows: int) -> bool:
        """Whether `of_some` gives for so many random rows what torch's product does, but for rounding."""
        if few(rows):
            return False
        x = torch.randn(rows, self.weight.shape[1], dtype=self.weight.dtype, device=self.weight.device)
        found, expected = self.of_some(x, Tile.of(rows, self.product)).float(), self.of_many(x).float()
        return bool((found - expected).abs().max() <= _ROUNDING * expected.abs().max())

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if few(rows):
            return self.of_few(x)[1]
        if rows and (most := self._ways.taken(self.product, rows)) is not None:
            return self.of_some(x, Tile.of(most, self.product))
        return self.of_many(x)

    def of_many(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def of_few(self, x: Tensor, delta: Tensor | None = None, norm: RmsNorm | None = None) -> tuple[Tensor, Tensor]:
        """x + delta, and what comes of its norm; of itself without one."""
        rows = x.shape[0]
        out = torch.empty((rows, self.outputs), dtype=x.dtype, device=x.device)
        sums, more = (x, x) if delta is None else (torch.empty(x.shape, dtype=x.dtype, device=x.device), delta)
        assert x.stride(1) == more.stride(1) == 1
        then, ahead = self._ahead(rows)
        self._kernel[(rows, self._programs)](
            x, more, self.weight if norm is None else norm.weight, self.weight, self.weight if self.bias is None else self.bias, sums, out,
            *then, x.stride(0), more.stride(0), self.outputs, 0.0 if norm is None else norm.eps,
            ADDED=delta is not None, NORMED=norm is not None, **ahead, **self._shape, **self._options,
        )  # fmt: skip
        return sums, out

    def of_some(self, x: Tensor, tile: Tile) -> Tensor:
        rows, device = x.shape[0], x.device
        assert x.stride(1) == 1
        out = torch.empty((rows, self.outputs), dtype=x.dtype, device=device)
        tiles = -(-self.outputs // tile.outputs) * -(-rows // tile.rows)
        parts, arrived = out, out
        if tile.splits > 1:
            assert tiles <= _ARRIVED, "of so many tiles none is shared"
            parts = torch.empty((tile.splits, tiles, tile.rows, tile.outputs), dtype=torch.float32, device=device)
            arrived = self._arrived.on(device)
        then, ahead = self._ahead(rows)
        self._tiles[(tiles, tile.splits)](
            x, self.weight, self.weight if self.bias is None else self.bias, out, parts, arrived, *then, rows, x.stride(0), self.outputs,
            BIASED=self.bias is not None, GATED=self.gated, WIDTH=self.weight.shape[1], ROWS=tile.rows, OUTPUTS=tile.outputs,
            COLUMNS=tile.columns, SPLITS=tile.splits, BRING=tile.bring,
            num_warps=tile.warps, num_stages=tile.stages, **ahead, **self._options,
        )  # fmt: skip
        return out

    def _ahead(self, rows: int) -> tuple[tuple[Tensor, Tensor], dict[str, int]]:
        """What is brought into the cache, and how much of it."""
        if not self._then or self._ways.taken(AHEAD, rows) is None:
            return (self.weight, self.weight), {"THEN": 0, "BEYOND": 0}
        first, *rest = self._then
        beyond = rest[0] if rest else None
        return (first, first if beyond is None else beyond), {"THEN": first.numel(), "BEYOND": 0 if beyond is None else beyond.numel()}


class FusedGated(FusedLinear):
    gated = True

    def __init__(self, weight: Tensor, bias: Tensor | None, ways: Ways | None = None, arrived: Arrived | None = None) -> None:
        from banyan_runtime.model.kernels import rows

        super().__init__(weight, bias, ways, arrived)
        self._silu_times = rows.silu_times

    def of_many(self, x: Tensor) -> Tensor:
        both = super().of_many(x)
        out = torch.empty((x.shape[0], self.outputs), dtype=x.dtype, device=x.device)
        if x.shape[0]:
            self._silu_times[(x.shape[0], -(-self.outputs // _SILU_BLOCK))](both, out, self.outputs, BLOCK=_SILU_BLOCK, **self._options)
        return out
