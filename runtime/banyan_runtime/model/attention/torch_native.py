"""Attention in plain torch, on the CPU and on CUDA: gather keys, multiply, mask, softmax, multiply.

Batched products instead of torch's fused attention, which is 30 times slower on the CPU with one query for each sequence.
Contexts are computed block by block, so that memory does not grow with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from banyan_runtime.model.device import tensor
from banyan_runtime.model.pool import Cells, KvPool
from banyan_runtime.model.table import SlotTable
from banyan_runtime.models.config import DecoderSpec
from banyan_runtime.step import PADDING_SLOT, Pulse, Step, TableShape

TILE: Final = 64  # queries of a sequence that are computed together
BLOCK: Final = 512  # keys that are computed together; a multiple of every page size
MAX_SCORES: Final = 1 << 20  # of a batch of tiles, so that they stay in the cache
MAX_GATHERED: Final = 1 << 22  # numbers in the keys that are copied together


@dataclass(frozen=True, slots=True)
class _Tile:
    """Consecutive queries of a sequence."""

    row: int  # of the slot table
    token: int  # of the first query, in the step
    queries: int
    keys: int  # that the last query sees

    @property
    def size(self) -> tuple[int, int]:
        """Tiles of one size share products."""
        return self.queries, -(-self.keys // BLOCK)


@dataclass(frozen=True, slots=True)
class _Batch:
    """n tiles of q queries each."""

    rows: npt.NDArray[np.int64]  # [n]
    keys: npt.NDArray[np.int64]  # [n]
    tokens: Tensor  # int64 [n * q]
    positions: Tensor  # int64 [n, q, 1, 1]
    earliest: int  # position
    last: int  # key, plus one
    pages: dict[int, Tensor] = field(default_factory=dict)  # of a block of keys, by its first position


class TorchAttention:
    name = "torch_native"

    def __init__(self, spec: DecoderSpec, pool: KvPool, pulse: Pulse) -> None:
        self._layers = [layer.attention for layer in spec.layers]
        self._heads = max(layer.heads for layer in self._layers)
        self._widest = max(layer.kv_heads * layer.head_dim for layer in self._layers)
        self._pool = pool
        self._pulse = pulse
        self.cells = Cells(pool, torch.empty(0, dtype=torch.int64))
        self._batches: list[_Batch] = []
        self._table = SlotTable(TableShape(0, 0))
        self._page_size = 1

    @staticmethod
    def beside(shape: TableShape, rows: int, tokens: int) -> int:
        return 0

    @staticmethod
    def refusal(spec: DecoderSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, asked: bool) -> str | None:
        return None

    def plan(self, step: Step, table: SlotTable) -> None:
        """The table takes no later step in before the last layer of this one."""
        self.cells = Cells(self._pool, tensor(step.out_slots, self._pool.device))
        self._table, self._page_size = table, step.page_size
        tiles = sorted(_tiles(step), key=lambda tile: tile.size)
        self._batches = [self._batch(part) for _, alike in groupby(tiles, lambda tile: tile.size) for part in self._parts(list(alike))]

    def _parts(self, tiles: list[_Tile]) -> Iterator[list[_Tile]]:
        """As many tiles of one size as may be computed together."""
        most = min(MAX_SCORES // (self._heads * tiles[0].queries), MAX_GATHERED // self._widest) // BLOCK
        for first in range(0, len(tiles), max(1, most)):
            yield tiles[first : first + max(1, most)]

    def _batch(self, tiles: list[_Tile]) -> _Batch:
        offsets = np.arange(tiles[0].queries)
        keys, firsts = np.array([tile.keys for tile in tiles]), np.array([tile.token for tile in tiles])
        positions = keys[:, None] - len(offsets) + offsets
        return _Batch(
            rows=np.array([tile.row for tile in tiles]),
            keys=keys,
            tokens=tensor((firsts[:, None] + offsets).reshape(-1), self._pool.device),
            positions=tensor(positions, self._pool.device)[:, :, None, None],
            earliest=int(positions.min()),
            last=int(keys.max()),
        )

    def attend(self, layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        spec = self._layers[layer]
        q = q * spec.scale
        if len(self._batches) == 1:  # it has all tokens, in their order
            return self._attend(layer, q, self._batches[0], sinks)
        out = q.new_empty(*q.shape[:2], spec.value_size)
        for batch in self._batches:
            out.index_copy_(0, batch.tokens, self._attend(layer, q.index_select(0, batch.tokens), batch, sinks))
        return out

    def _attend(self, layer: int, q: Tensor, batch: _Batch, sinks: Tensor | None) -> Tensor:
        """q [n * queries, heads, head_dim] and the result, of values' size. An online softmax over blocks of keys."""
        spec, (n, queries) = self._layers[layer], batch.positions.shape[:2]
        window, cap = spec.window, spec.soft_cap
        shape = (n, queries, spec.kv_heads, spec.group, spec.head_dim)
        q = q.view(shape).permute(2, 0, 1, 3, 4).reshape(spec.kv_heads * n, -1, spec.head_dim)
        state: tuple[Tensor, Tensor, Tensor] | None = None  # the largest score, the weights' sum and the weighted values so far
        if sinks is not None:  # as a key before all others, whose value is zero
            highest = sinks.float().view(spec.kv_heads, 1, spec.group).expand(-1, n * queries, -1).reshape(*q.shape[:2], 1)
            state = highest, torch.ones_like(highest), highest.new_zeros(*q.shape[:2], spec.value_size)
        first = 0 if window is None else max(0, batch.earliest - window + 1) // self._page_size * self._page_size
        for begin in range(first, batch.last, BLOCK):
            self._pulse()
            pages = self._pages(batch, begin, min(begin + BLOCK, batch.last))
            keys = self._pool.keys(layer, pages).view(len(q), -1, spec.head_dim)
            own = self._pool.values(layer, pages).view(len(q), -1, spec.value_size)
            scores = torch.bmm(q, keys.transpose(1, 2)).float()
            if cap is not None:
                scores = scores.div_(cap).tanh_().mul_(cap)
            end = begin + scores.shape[-1]
            if window is not None or end > batch.earliest + 1:
                at = torch.arange(begin, end, device=q.device)
                hidden = at > batch.positions
                if window is not None:
                    hidden |= at <= batch.positions - window
                scores.view(spec.kv_heads, n, queries, spec.group, -1).masked_fill_(hidden, torch.finfo(torch.float32).min)
            highest = scores.amax(-1, keepdim=True)
            if state is not None:
                highest = torch.maximum(highest, state[0])
            weights = scores.sub_(highest).exp_()
            mass, values = weights.sum(-1, keepdim=True), torch.bmm(weights.to(q.dtype), own)
            if state is not None:
                kept = (state[0] - highest).exp_()
                mass, values = mass + state[1] * kept, values + state[2] * kept
            state = highest, mass, values
        assert state is not None, "a query sees a key at least"
        _, mass, values = state
        out = (values / mass).to(q.dtype).view(spec.kv_heads, n, queries, spec.group, spec.value_size)
        return out.permute(1, 2, 0, 3, 4).reshape(n * queries, spec.heads, spec.value_size)

    def _pages(self, batch: _Batch, begin: int, end: int) -> Tensor:
        """int32 [n * pages] of the keys begin to end; the padding page where a sequence is shorter. Layers share them."""
        if (found := batch.pages.get(begin)) is None:
            starts = np.arange(begin, end, self._page_size)
            pages = self._table.pages(batch.rows, begin // self._page_size, len(starts), self._page_size)
            own = np.where(starts < batch.keys[:, None], pages, PADDING_SLOT).reshape(-1)
            found = batch.pages[begin] = tensor(own, self._pool.device, torch.int32)
        return found


def _tiles(step: Step) -> Iterator[_Tile]:
    token = 0
    for row, queries, keys in zip(step.rows.tolist(), step.query_lens.tolist(), step.kv_lens.tolist(), strict=True):
        for start in range(0, queries, TILE):
            end = min(start + TILE, queries)
            yield _Tile(row, token + start, end - start, keys - queries + end)
        token += queries
