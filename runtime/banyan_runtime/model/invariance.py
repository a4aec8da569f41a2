"""Finds how many rows a matrix product may have so that a row's result does not depend on how many rows there are.

Libraries choose another order of summation for other row counts, so a request's last bits, and in time its text, would change
with what else runs. Which counts agree is a property of library, shape, processor and number of threads: MKL in fp32 treats
all but multiples of four apart, oneDNN single rows of wide layers, and with AMX also 16, 32 and 384 to 1,024 rows. So nothing
is assumed. Products are only ever called with row counts of a short ladder, each of which was measured at start to give every
row, wherever it stands, the same bits as all others in use; more rows are cut into blocks, other counts are padded.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from banyan_runtime.model import host
from banyan_runtime.step import Pulse

log = logging.getLogger("banyan")

Size = TypeVar("Size", bound=Hashable)
Bits = npt.NDArray[np.int16] | npt.NDArray[np.int32]

# Every count that a few running requests make; from there on padding costs less than what the steps between would take to
# measure. 512 rows are where larger products are hardly faster any more.
LADDER: Final = (*range(1, 17), 20, 24, 28, 32, 40, 48, 64, 96, 128, 192, 256, 512)

_CALL_WORTH: Final = 16  # rows that take as long as reading the weights once more
_TYPICAL: Final = (1, 2, 4, 8, 16, 32, 64, 256, 2048)  # row counts by which sets of sizes are compared
_ALIGNMENT: Final = 64  # bytes; MKL promises equal results only for equally aligned operands


class RowSizes:
    """The row counts with which products are called.

    `sizes` is None where nothing is promised: any count is used then, as on CUDA. Otherwise it is not empty, and products of
    these counts agree bit for bit in each row.
    """

    def __init__(self, sizes: Iterable[int] | None) -> None:
        self.sizes = None if sizes is None else tuple(sorted(sizes))
        self._largest = self.sizes[-1] if self.sizes else 0
        self._best: list[tuple[int, int]] = _cheapest_splits(self.sizes) if self.sizes else []

    @property
    def invariant(self) -> bool:
        return self.sizes is not None

    def split(self, rows: int) -> list[int]:
        """Blocks for `rows` >= 1 rows: sizes that are used one after another, whose sum is at least `rows`."""
        if not self.sizes:
            return [rows]
        blocks = [self._largest] * (rows // self._largest)
        rest = rows % self._largest
        while rest > 0:
            blocks.append(self._best[rest][1])
            rest -= blocks[-1]
        return blocks

    def cost(self, rows: int) -> int:
        """What the blocks for so many rows cost, in rows."""
        return sum(_CALL_WORTH + block for block in self.split(rows))


class Measured:
    """What measurements of one or several products found: for each size the class of sizes with which it agrees."""

    def __init__(self) -> None:
        self._classes: dict[Hashable, Mapping[int, Hashable]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._classes

    def add(self, key: Hashable, classes: Mapping[int, Hashable]) -> None:
        """`classes` as `agreement` returns them; all that are added together have the same sizes."""
        self._classes[key] = classes

    def sizes(self) -> RowSizes:
        """The sizes that agree for all that was added: of several such sets the one that costs least."""
        together: dict[Hashable, list[int]] = {}
        every = list(self._classes.values())
        for size in every[0] if every else ():
            found = tuple(classes[size] for classes in every)
            if None not in found:
                together.setdefault(found, []).append(size)
        candidates = [RowSizes(sizes) for sizes in together.values()]
        return min(candidates, key=_relative_cost, default=RowSizes(None))


def agreement(product: Callable[[Size], Tensor], sizes: Iterable[Size], pulse: Pulse = lambda: None) -> dict[Size, int | None]:
    """Which sizes give a row the same bits: equal numbers for those that agree, None for a size whose rows differ.

    `product` computes a size of equal rows: [..., outputs], all rows of which should be equal. A size that agrees with no other
    must at least agree with itself when it is computed again. `pulse` is called before each product.
    """
    seen: list[Bits] = []
    first_of: list[Size] = []
    classes: dict[Size, int | None] = {}
    for size in sizes:
        pulse()
        row = _common_row(product(size))
        if row is None:
            classes[size] = None
            continue
        same = (number for number, other in enumerate(seen) if np.array_equal(row, other))
        number = classes[size] = next(same, len(seen))
        if number == len(seen):
            seen.append(row)
            first_of.append(size)
    shared = Counter(classes.values())
    for number, size in enumerate(first_of):
        if shared[number] == 1:
            pulse()
            row = _common_row(product(size))
            if row is None or not np.array_equal(row, seen[number]):
                classes[size] = None
    return classes


def _common_row(results: Tensor) -> Bits | None:
    """The bits of each row, if all have the same. By numpy, which starts no threads: on a busy machine waiting for them takes
    far longer than the comparison."""
    rows = results.flatten(0, -2).view(torch.int16 if results.element_size() == 2 else torch.int32).numpy()
    return rows[0].copy() if (rows == rows[:1]).all() else None


def probe_weight(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """[rows, width] whose products with a `probe_row` are nothing but rounding errors.

    Large terms cancel in pairs, far from each other, so any other order of summation shows in most results. With random
    numbers it would show once in ten thousand results in bf16, and a measurement would miss it.
    """
    half = torch.randn(min(rows, 64), width // 2, generator=torch.Generator().manual_seed(width))
    cancelling = _spread(torch.cat((half, -half), 1), width).to(dtype)
    return cancelling.repeat(-(-rows // 64), 1)[:rows].contiguous()


def probe_row(width: int, dtype: torch.dtype) -> Tensor:
    """[1, width] to multiply with a `probe_weight`. Its numbers are of very different size, so that sums round often."""
    generator = torch.Generator().manual_seed(width + 1)
    half = torch.randn(1, width // 2, generator=generator)
    half = half * torch.exp2(torch.randint(-6, 7, half.shape, generator=generator))
    return _spread(torch.cat((half, half), -1), width).to(dtype)


def aligned(block: Tensor) -> Tensor:
    """The block of rows itself, or a copy where it does not begin as a new tensor does."""
    return block if block.data_ptr() % _ALIGNMENT == 0 else block.clone()


def report(what: str, rows: RowSizes) -> None:
    """Log what was found for layers or attention on the CPU."""
    if rows.sizes is not None:
        sizes = rows.sizes
        log.info("Batch invariance: %s computed in blocks of %d to %d rows, of %d sizes.", what, sizes[0], sizes[-1], len(sizes))
        return
    amx = "amx_bf16" in host.instruction_sets()
    log.warning(
        "Batch invariance: no numbers of rows were found for which %s computed with the same rounding on this processor%s: a "
        "request's greedy text may depend on what else runs. Remedy: %s.",
        what, " (amx_bf16)" if amx else "",
        "start with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment" if amx else "--dtype float32, or OMP_NUM_THREADS=1",
    )  # fmt: skip


def _relative_cost(rows: RowSizes) -> float:
    """Against a library that computes any number of rows at once."""
    return sum(rows.cost(count) / (_CALL_WORTH + count) for count in _TYPICAL)


def _cheapest_splits(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """For each count below the largest size: the cost of its cheapest blocks, in rows, and the first of them."""
    best = [(0, 0)]
    for rows in range(1, sizes[-1]):
        best.append(min((_CALL_WORTH + size + best[max(0, rows - size)][0], -size) for size in sizes))
    return [(cost, -size) for cost, size in best]


def _spread(pairs: Tensor, width: int) -> Tensor:
    """Shuffle the columns, the same way for each width; an odd one gets a column of zeros."""
    if pairs.shape[-1] < width:
        pairs = torch.cat((pairs, pairs.new_zeros(*pairs.shape[:-1], 1)), -1)
    return pairs[..., torch.randperm(width, generator=torch.Generator().manual_seed(width + 2))]
