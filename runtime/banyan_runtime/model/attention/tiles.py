"""How a step's attention is cut into batched products. Pure numpy, no torch.

The unit is a tile: up to `TILE` consecutive queries of one sequence against all keys up to the last of them. Keys are cut
into chunks of `CHUNK` at absolute positions, and long contexts into blocks of chunks, one computed after another, so that
memory does not grow with the context. Tiles of similar size form a group, padded to the largest and computed by one batched
product; padding changes nothing in the results, so which tiles share a group is only a matter of speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from banyan_runtime.model.table import SlotTable
from banyan_runtime.step import PADDING_SLOT, Step

I64 = npt.NDArray[np.int64]

TILE: Final = 64  # queries
CHUNK: Final = 128  # keys; a multiple of every page size
MAX_SCORES: Final = 1 << 20  # cells of one group's score matrix: 4 MB in fp32, so that the passes over it stay in the cache
MAX_GATHERED: Final = 1 << 22  # numbers in the keys that are copied together: 16 MB in fp32
_MOST_CHUNKS: Final = 16  # of a block
_GATHER_WORTH: Final = 8  # copying a chunk of keys costs about as much as 8 queries against it
_GROUP_WORTH: Final = 150  # what one more group costs in (queries + _GATHER_WORTH) · chunks: a dozen operator calls


@dataclass(frozen=True, slots=True)
class Tile:
    row: int  # of the slot table
    token: int  # first query, index in the step
    queries: int
    position: int  # of the first query

    @property
    def chunks(self) -> int:
        return -(-(self.position + self.queries) // CHUNK)

    @property
    def work(self) -> int:
        return (self.queries + _GATHER_WORTH) * self.chunks


@dataclass(frozen=True, slots=True)
class Sizes:
    """What of a model decides how large tiles and blocks may be."""

    heads: int
    kv_width: int  # numbers in a token's keys of one layer
    block: int  # chunks; a constant of the model, for blocks decide the order of summation

    @classmethod
    def of(cls, heads: int, kv_heads: int, head_dim: int) -> Sizes:
        """With the largest block in which one tile's scores and keys stay small."""
        block, width = _MOST_CHUNKS, kv_heads * head_dim
        while block > 1 and (TILE * heads * block * CHUNK > 2 * MAX_SCORES or width * block * CHUNK > MAX_GATHERED):
            block //= 2
        return cls(heads, width, block)


@dataclass(frozen=True, slots=True)
class Group:
    """n tiles, each padded to `queries` queries and `chunks` chunks of keys."""

    queries: int
    chunks: int
    tokens: I64  # [n * queries] index in the step; padding repeats a real one
    positions: I64  # [n, queries] of each query; a padding query stands at its tile's first
    real: I64 | None  # indices in [n * queries] that are no padding; None: all, in the step's order
    rows: I64  # [n] of the slot table
    lengths: I64  # [n] keys

    @property
    def earliest(self) -> int:
        """The position of its first query."""
        return int(self.positions.min())

    def pages(self, table: SlotTable, begin: int, end: int, size: int) -> I64:
        """[n, (end - begin) * CHUNK / size] pages of the keys of some chunks; the padding page where there are none. The table has
        taken the step in, and no later one."""
        starts = np.arange(begin * CHUNK, end * CHUNK, size)
        pages = table.pages(self.rows, begin * CHUNK // size, len(starts), size)
        return np.where(starts < self.lengths[:, None], pages, PADDING_SLOT)


def groups(step: Step, sizes: Sizes) -> list[Group]:
    """All groups of a step."""
    return [_group(step, tiles) for tiles in _partition(list(_tiles(step)), sizes)]


def _tiles(step: Step) -> Iterator[Tile]:
    token = 0
    for row, queries, length in zip(step.rows.tolist(), step.query_lens.tolist(), step.kv_lens.tolist(), strict=True):
        for start in range(0, queries, TILE):
            yield Tile(row, token + start, min(TILE, queries - start), length - queries + start)
        token += queries


def _partition(tiles: list[Tile], sizes: Sizes) -> Iterator[list[Tile]]:
    """Neighbours in size share a group as long as the padding costs less than another group would."""
    tiles.sort(key=lambda tile: (-tile.queries, -tile.chunks, tile.token))
    group: list[Tile] = []
    queries = chunks = work = 0
    for tile in tiles:
        wider, deeper, more = max(queries, tile.queries), max(chunks, tile.chunks), work + tile.work
        padded = (len(group) + 1) * (wider + _GATHER_WORTH) * deeper
        keys = (len(group) + 1) * min(deeper, sizes.block) * CHUNK  # computed together
        large = keys * wider * sizes.heads > MAX_SCORES or keys * sizes.kv_width > MAX_GATHERED
        if group and (padded - more > _GROUP_WORTH + more // 4 or large):
            yield group
            group, wider, deeper, more = [], tile.queries, tile.chunks, tile.work
        group.append(tile)
        queries, chunks, work = wider, deeper, more
    yield group


def _group(step: Step, tiles: list[Tile]) -> Group:
    tiles.sort(key=lambda tile: tile.token)
    queries, chunks = max(tile.queries for tile in tiles), max(tile.chunks for tile in tiles)
    counts = np.array([tile.queries for tile in tiles])[:, None]
    offsets = np.arange(queries)[None]
    real = offsets < counts
    tokens = np.where(real, np.array([tile.token for tile in tiles])[:, None] + offsets, tiles[0].token).reshape(-1)
    positions = np.array([tile.position for tile in tiles])[:, None] + np.where(real, offsets, 0)
    everything = len(tokens) == len(step.token_ids) and bool(real.all())
    return Group(
        queries=queries,
        chunks=chunks,
        tokens=tokens.astype(np.int64),
        positions=positions.astype(np.int64),
        real=None if everything else np.flatnonzero(real.reshape(-1)),
        rows=np.array([tile.row for tile in tiles]),
        lengths=np.array([tile.position + tile.queries for tile in tiles]),
    )
