"""Products on CUDA: torch's own, and Triton's of few rows and of some (`kernels/products.py`, `kernels/tiles.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from banyan_runtime.model.kernel_choices import Kernel, KernelChoices, Product, class_of
from banyan_runtime.model.kernels import FEWEST_ROWS, LARGE, power_of_two, shared_bytes
from banyan_runtime.model.layers import RmsNorm
from banyan_runtime.models.config import Activation

MOST_ROWS: Final = 2
"""Of a product whose rows each read the weight, side by side: all but the first from the cache, which is read about twice as fast."""
MOST_STAGED: Final = 16
"""Rows of a product whose weights wait for them: as many as one of its programs multiplies, which reads them all."""
_STAGED_COLUMNS: Final = 2048  # at most: sixteen lines of 64 KB, of which with one row three programs' fit into a processor
MOST_BYTES: Final = 32 << 20
"""Of a weight that more than one row reads so. A step of two rows of Llama-3.1-8B's shape took 5.3 ms on an H200, one of four, computed
otherwise, 4.4; of Qwen2.5-0.5B's 0.66 and 0.85."""
AHEAD_BYTES: Final = 24 << 20
"""Of weights that are brought into the cache before they are asked for: half of a large GPU's, which keeps what lies in the other half
of it twice."""
SMALL_BYTES: Final = 16 << 20
"""Of a weight whose lines are all on their way at once."""
_GATED_BLOCK: Final = 1024
_COLUMNS: Final = 1024  # of a weight that a program reads at a time
_OUTPUTS: Final = 8  # outputs, likewise: 16 KB of a weight in 16 bits are on their way at once
_REGISTERS: Final = 128  # of a thread: four programs fit into a processor then, where some more would leave room for three
_GRID: Final = 1 << 16  # programs along a grid's second axis, fewer than these
_MANY: Final = 2112  # lines: fewer are cut into halves, so that all processors of a large GPU have two programs
_ARRIVED: Final = 4096  # tiles that are shared by several programs, at most


def cut(rows: int, product: Product, itemsize: int, *, whole: bool) -> dict[str, int]:
    """How a product of few rows is cut and compiled. `whole`: its lines may be asked for together; there is no norm before it, and each
    begins at a multiple of 16 bytes.

    Back to back, programs that hold more of each line read wide weights faster (benchmarks/gpu_kernels.py). In a decode step, where the
    next product begins while this one ends, they do not: on an H200 gate, up and down of Llama-3.1-8B's shape took 92 us then instead of
    87, those of Qwen2.5-0.5B's 10.4 instead of 9.7. All of a weight at once is faster where it is small: Qwen2.5-0.5B's down took 2.8 us
    of a step of one row instead of 4.3, with a program for each line.
    """
    outputs, width, gated = product
    small = outputs * width * itemsize <= SMALL_BYTES
    if small and width > 2 * _COLUMNS and not gated and whole and itemsize == 2:
        columns, each = (_COLUMNS, 1) if rows == 1 else (2 * _COLUMNS, 2)
        return {"OUTPUTS": each, "COLUMNS": columns, "WHOLE": True, "num_warps": 4}
    # Of 32 bits, or of two lines for each output, as many would not fit into registers.
    each = _OUTPUTS if outputs >= _MANY and itemsize == 2 and not gated else _OUTPUTS // 2
    while -(-outputs // each) >= _GRID:
        each *= 2
    way = {"OUTPUTS": each, "COLUMNS": min(_COLUMNS, power_of_two(width)), "WHOLE": False, "num_warps": 4}
    return way | ({"maxnreg": _REGISTERS} if itemsize == 2 else {})


def stretch_of(width: int) -> int:
    """Columns of a product whose weights wait that one program multiplies."""
    block = power_of_two(width)
    return block if block <= _STAGED_COLUMNS else _STAGED_COLUMNS // 2


def warps_of(stretch: int) -> int:
    """That multiply so many columns of lines, each some of them."""
    return 4 if stretch <= 1024 else 8


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
    late: bool = False  # what comes next is brought up when this has multiplied: its programs would crowd where none of these runs

    ENOUGH = 128  # programs: one for each of a large GPU's processors
    STRETCH = 768  # columns, at least: of fewer ones adding up costs more than it spares
    RESIDENT = 264  # programs that run at once, two on each of a large GPU's processors
    ROOM = 96 << 10  # bytes of shared memory: two programs fit into a processor then
    DEEP_BYTES = 32 << 20  # of weights that are read for so long that more of them on their way count for more than a second program

    @classmethod
    def of(cls, rows: int, product: Product, shared: int) -> Tile:
        """For up to so many rows, one of `kernel_choices.ROWS`, where a program may have `shared` bytes of shared memory. The widest tile
        of which there are programs enough: rows are read for each again.

        What was faster in decode steps on an H200 (benchmarks/results), of Qwen2.5-0.5B's shape and Llama-3.1-8B's.
        """
        most = min(128 if product.gated else 64, max(FEWEST_ROWS, rows))
        if product.bytes > cls.DEEP_BYTES and most <= 64:
            return cls._deep(most, product, shared)
        columns = 128 if product.width % 128 == 0 and most <= 64 else 64
        splits = 1 if product.gated else max(1, product.width // cls.STRETCH)
        widest = 128 if most == 128 and shared >= LARGE else 64
        for outputs in (widest, 32, 16):
            tiles = -(-product.outputs // outputs) * -(-rows // most)
            if tiles * splits >= cls.ENOUGH or 4 * outputs <= most or rows > most:
                break
        turns = product.width // columns
        splits = -(-turns // -(-turns // min(splits, -(-cls.ENOUGH // tiles))))  # each with as many of them, but for the last
        lines = outputs * (2 if product.gated else 1)
        stage = 2 * columns * (most + lines)
        held = 3 if outputs == 128 else cls.ROOM // stage + (most < 64)  # products of 64 rows and more end while the next begin
        together = min(cls.RESIDENT, tiles * splits) * lines * 2  # bytes of a column of all that run at once
        # Of fewer rows and of gates what is multiplied is there as soon.
        bring = 0 if most < 64 or product.gated else max(64, min(product.width, AHEAD_BYTES // together // 64 * 64))
        return cls(most, outputs, columns, splits, 8 if most == 128 else 4, min(6, held), bring, late=rows > most)

    @classmethod
    def _deep(cls, rows: int, product: Product, shared: int) -> Tile:
        """One program for each processor, with four turns of its weight on their way."""
        outputs = 64 if product.gated or -(-product.outputs // 64) * 4 >= cls.ENOUGH * 3 else 32
        columns = next(one for one in ((128, 64) if outputs == 64 else (256, 128, 64)) if product.width % one == 0)
        stage = 2 * columns * (rows + outputs * (2 if product.gated else 1))
        assert shared >= 2 * stage, "of GPUs that it computes on none has less"
        return cls(rows, outputs, columns, 1, 4, min(4, shared // stage), 0)


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
    gelu = False  # the activation of gates; else it is SiLU

    def __init__(self, weight: Tensor, bias: Tensor | None, choices: KernelChoices | None = None, arrived: Arrived | None = None) -> None:
        from banyan_runtime.model.kernels import dependent, products, staged, tiles

        assert weight.is_contiguous()
        self.weight = weight
        self.bias = bias
        self.outputs = weight.shape[0] // (2 if self.gated else 1)
        self.product = Product(self.outputs, weight.shape[1], self.gated)
        self._choices = KernelChoices("") if choices is None else choices
        self._arrived = Arrived() if arrived is None else arrived
        self._aligned = weight.data_ptr() % 16 == 0 and weight.shape[1] * weight.itemsize % 16 == 0
        self._kernel, self._staged, self._tiles = products.product, staged.staged, tiles.tile
        self._outcome = staged.LINES.value  # lines of one of its programs
        self._lines = self._outcome // (2 if self.gated else 1)  # outputs likewise
        self._stretch = stretch_of(weight.shape[1])  # columns that each of them multiplies
        self._stretches = -(-weight.shape[1] // self._stretch)
        self._parts = warps_of(self._stretch)
        self._options, self._shared = dependent.options(weight.device), shared_bytes(weight.device)
        width = weight.shape[1]
        self._way = {"BIASED": bias is not None, "GATED": self.gated, "GELU": self.gelu, "WIDTH": width}
        self._block = power_of_two(width)

    @property
    def tileable(self) -> bool:
        """Whether `of_some` computes it."""
        return self.weight.itemsize == 2 and self.weight.shape[1] % 64 == 0

    def few(self, rows: int) -> bool:
        """Whether `of_few` computes so many rows."""
        return 0 < rows <= (MOST_ROWS if self.weight.nbytes <= MOST_BYTES else min(1, MOST_ROWS))  # which a benchmark sets to none

    def enters(self, rows: int) -> bool:
        """Whether `of_few` computes what comes before such a product of so many rows, too."""
        return self.few(rows) and (not self._is_staged(rows) or (rows == 1 and self._stretches == 1))  # a norm takes all columns

    @property
    def stageable(self) -> bool:
        """Whether `of_staged` computes it, and does so sooner: kernels begin before others end."""
        fit = self._stretches == 1 or (not self.gated and self.weight.nbytes <= SMALL_BYTES)
        return self.weight.itemsize == 2 and self._aligned and self._stretch >= 64 and fit and self._options["DEPENDENT"]

    def offers(self, rows: int) -> list[Kernel]:
        """The kernels that can compute so many rows."""
        offers: list[Kernel] = ["default"]
        if self.tileable and not self.few(rows):
            offers.append("tiles")
        if self.stageable and rows <= MOST_STAGED:
            offers.append("staged")
        return offers

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if self._is_staged(rows):
            return self.of_staged(x)[1]
        if self.few(rows):
            return self.of_few(x)[1]
        most = class_of(rows)
        if rows and most is not None and self._choices.kernel(self.product, rows) == "tiles":
            return self.of_some(x, Tile.of(most, self.product, self._shared))
        return self.of_many(x)

    def _is_staged(self, rows: int) -> bool:
        return 0 < rows <= MOST_STAGED and self._choices.kernel(self.product, rows) == "staged"

    def of_many(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def of_few(self, x: Tensor, delta: Tensor | None = None, norm: RmsNorm | None = None) -> tuple[Tensor, Tensor]:
        """x + delta, and what comes of its norm; of itself without one."""
        rows = x.shape[0]
        if self._is_staged(rows):
            return self.of_staged(x, delta, norm)
        out = torch.empty((rows, self.outputs), dtype=x.dtype, device=x.device)
        sums, more = (x, x) if delta is None else (torch.empty(x.shape, dtype=x.dtype, device=x.device), delta)
        assert x.stride(1) == more.stride(1) == 1
        way = cut(rows, self.product, x.itemsize, whole=self._aligned and delta is None and norm is None)
        self._kernel[(rows, -(-self.outputs // way["OUTPUTS"]))](
            x, more, self.weight if norm is None else norm.weight, self.weight, self.weight if self.bias is None else self.bias, sums, out,
            x.stride(0), more.stride(0), self.outputs, 0.0 if norm is None else norm.eps,
            ADDED=delta is not None, NORMED=norm is not None, BLOCK=self._block, **way, **self._way, **self._options,
        )  # fmt: skip
        return sums, out

    def of_staged(self, x: Tensor, delta: Tensor | None = None, norm: RmsNorm | None = None) -> tuple[Tensor, Tensor]:
        """As `of_few`; of more than one row nothing comes first."""
        rows = x.shape[0]
        assert rows == 1 or (delta is None and norm is None)
        out = torch.empty((rows, self.outputs), dtype=x.dtype, device=x.device)
        sums, more = (x, x) if delta is None else (torch.empty(x.shape, dtype=x.dtype, device=x.device), delta)
        assert x.stride(1) == more.stride(1) == 1
        each = 1 if rows == 1 else FEWEST_ROWS // 2 if rows <= FEWEST_ROWS // 2 else FEWEST_ROWS
        tiles = -(-self.outputs // self._lines)  # as many rows as there may be are one tile's
        shares, arrived = out, out
        if self._stretches > 1:
            assert tiles <= _ARRIVED, "of so many tiles none is shared"
            shares = torch.empty((self._stretches, tiles, self._outcome, max(each, FEWEST_ROWS // 2)), dtype=torch.float32, device=x.device)
            arrived = self._arrived.on(x.device)
        self._staged[(1, tiles, self._stretches)](
            x, more, self.weight if norm is None else norm.weight, self.weight, self.weight if self.bias is None else self.bias, sums, out,
            shares, arrived, rows, x.stride(0), more.stride(0), self.outputs, 0.0 if norm is None else norm.eps,
            ADDED=delta is not None, NORMED=norm is not None, ROWS=each, PARTS=self._parts, SPLITS=self._stretches, num_warps=self._parts,
            BLOCK=self._stretch, **self._way, **self._options,
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
        self._tiles[(tiles, tile.splits)](
            x, self.weight, self.weight if self.bias is None else self.bias, out, parts, arrived, rows, x.stride(0), self.outputs,
            ROWS=tile.rows, OUTPUTS=tile.outputs, COLUMNS=tile.columns, SPLITS=tile.splits, BRING=tile.bring, LATE=tile.late,
            num_warps=tile.warps, num_stages=tile.stages, **self._way, **self._options,
        )  # fmt: skip
        return out


class FusedGated(FusedLinear):
    gated = True

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        choices: KernelChoices | None = None,
        arrived: Arrived | None = None,
        activation: Activation = "silu",
    ) -> None:
        from banyan_runtime.model.kernels import rows

        self.gelu = activation == "gelu_tanh"
        super().__init__(weight, bias, choices, arrived)
        self._gate = rows.gated

    def of_many(self, x: Tensor) -> Tensor:
        both = super().of_many(x)
        out = torch.empty((x.shape[0], self.outputs), dtype=x.dtype, device=x.device)
        if x.shape[0]:
            grid = (x.shape[0], -(-self.outputs // _GATED_BLOCK))
            self._gate[grid](both, out, self.outputs, GELU=self.gelu, BLOCK=_GATED_BLOCK, **self._options)
        return out
