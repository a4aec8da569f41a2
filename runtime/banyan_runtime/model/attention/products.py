"""The batched products of attention, called only with numbers of rows and of items that were measured to agree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from banyan_runtime.model.attention.tiles import CHUNK, TILE
from banyan_runtime.model.invariance import Measured, RowSizes, agreement, probe_row, probe_weight
from banyan_runtime.model.spec import ModelSpec
from banyan_runtime.step import Pulse

# Of one call. Larger calls are hardly faster, and would take longer to measure.
MOST_ROWS: Final = 4096  # of all items together: 2 MB of scores in fp32
MOST_ITEMS: Final = 256

Classes = dict[tuple[int, int], int | None]  # (rows, items) → those that agree, as in `agreement`


class Products:
    """left [items, rows, depth] times right [items, depth, width]; an item is a chunk of keys of one KV head.

    `rows.split` gives the blocks in which rows are computed; more items than were measured are cut likewise. On CUDA, and
    where no numbers agree, everything is one call.
    """

    # What was found holds for the process, by shape, type and threads: with others the library may cut its work otherwise.
    KNOWN: Final[dict[tuple[int, int, int, torch.dtype, int], tuple[Classes, Classes]]] = {}

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, pulse: Pulse = lambda: None) -> None:
        self.rows = RowSizes(None)
        self._items: dict[int, list[int]] = {}  # by rows: numbers of items, the largest first
        if device.type != "cpu":
            return
        key = spec.kv_heads, spec.group, spec.head_dim, dtype, torch.get_num_threads()
        if key not in self.KNOWN:
            self.KNOWN[key] = _agreement(*key[:4], pulse)
        pairs = self.KNOWN[key]
        alone = Measured()  # by the fewest items: a sequence of one chunk
        for number, classes in enumerate(pairs):
            alone.add(number, {rows: found for (rows, items), found in classes.items() if items == spec.kv_heads})
        self.rows = alone.sizes()
        for rows in self.rows.sizes or ():
            fits = [n for r, n in pairs[0] if r == rows and all(classes[r, n] == classes[r, spec.kv_heads] for classes in pairs)]
            self._items[rows] = sorted(fits, reverse=True)

    def __call__(self, left: Tensor, right: Tensor, sizes: list[int]) -> Tensor:
        """left has sum(sizes) rows, the blocks that `rows.split` gave."""
        if len(sizes) == 1:
            return self._block(left, right)
        blocks = [self._block(block.contiguous(), right) for block in torch.split(left, sizes, 1)]
        return torch.cat(blocks, 1)

    def _block(self, left: Tensor, right: Tensor) -> Tensor:
        items, rows = left.shape[:2]
        counts = self._items.get(rows)
        if counts is None or items in counts:
            return multiply(left, right)
        first = 0
        parts = []
        for count in _cut(items, counts):
            parts.append(multiply(left[first : first + count], right[first : first + count]))
            first += count
        return torch.cat(parts)


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """What is measured and used: one call of the library."""
    return torch.bmm(left, right)


def _cut(items: int, counts: list[int]) -> Iterator[int]:
    for count in counts:
        while items >= count:
            yield count
            items -= count
    assert items == 0, "items come in multiples of the KV heads"


def _agreement(kv_heads: int, group: int, head_dim: int, dtype: torch.dtype, pulse: Pulse) -> tuple[Classes, Classes]:
    """Which numbers of rows and items agree: for queries times keys, and for weights times values.

    Whatever can be is made once: a product takes microseconds, and beside it everything else that threads share would count.
    """
    rows = sorted({TILE * group, *(n for n in _rounds(1) if group < n < TILE * group), group})
    pairs = [(r, n) for r in rows for n in _rounds(kv_heads) if n == kv_heads or (n * r <= MOST_ROWS and n <= MOST_ITEMS)]
    most, most_rows = max(items for _, items in pairs), max(rows * items for rows, items in pairs)
    queries, weights = (probe_row(width, dtype).repeat(most_rows, 1) for width in (head_dim, CHUNK))
    keys = probe_weight(CHUNK, head_dim, dtype).repeat(most, 1, 1)
    values = probe_weight(head_dim, CHUNK, dtype).t().repeat(most, 1, 1)

    def scores(pair: tuple[int, int]) -> Tensor:
        rows, items = pair
        return multiply(queries[: items * rows].view(items, rows, -1), keys[:items].transpose(1, 2))

    def mixed(pair: tuple[int, int]) -> Tensor:
        rows, items = pair
        return multiply(weights[: items * rows].view(items, rows, -1), values[:items])

    return agreement(scores, pairs, pulse), agreement(mixed, pairs, pulse)


def _rounds(unit: int) -> list[int]:
    """The unit times 1, 2, 3, 4, 6, 8, 12, 16 … to far beyond what is used."""
    powers = [unit << k for k in range(14)]
    return sorted({*powers, *(power // 2 * 3 for power in powers[1:])})
