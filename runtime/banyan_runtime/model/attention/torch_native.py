"""Attention in plain torch, on the CPU and on CUDA: gather the keys, multiply, mask, softmax, multiply.

Matrix products instead of torch's fused attention: with one query per sequence the fused kernel is 30 times slower on the
CPU, and its bits differ between prefill and decode. Here a query's result does not depend on what it is computed beside:
each chunk of 128 keys is a product and a softmax of its own, whatever the batch, and chunks are joined by their weights:
those of a block together, blocks one after another.
Products are therefore always of one width and one depth; `products.py` sees to their rows and their number.

What is gathered and multiplied at once has a bound of its own (`tiles.py`), and so has what is kept for all layers of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from banyan_runtime.model.attention.products import Products
from banyan_runtime.model.attention.tiles import CHUNK, Group, Sizes, groups
from banyan_runtime.model.device import tensor
from banyan_runtime.model.invariance import report
from banyan_runtime.model.pool import Cells, KvPool
from banyan_runtime.model.spec import ModelSpec
from banyan_runtime.model.table import SlotTable
from banyan_runtime.step import Pulse, Step, TableShape

KEPT: Final = 64 << 20
"""Bytes of what tells all layers of a step which keys are met. 256 rows of a context of 64k tokens take as much, and 8,192 tokens of a
prompt behind 128k. Of a step of more, the rest is made anew for each layer: it grows with the context, which is longer than any that is
tried at start."""


@dataclass(frozen=True, slots=True)
class _Met:
    """The keys of a block."""

    pages: Tensor  # int32 [tiles * chunks * CHUNK / page_size]
    hidden: Tensor | None  # bool [tiles, last chunks, queries, 1, CHUNK]: of the last keys, those that a query does not see

    @property
    def bytes(self) -> int:
        return self.pages.nbytes + (0 if self.hidden is None else self.hidden.nbytes)


@dataclass(slots=True)
class _Block:
    """Some chunks of a group's keys."""

    begin: int
    end: int
    met: _Met | None = None  # None: it is not kept

    @property
    def chunks(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class _Planned:
    """A group of tiles on the device."""

    group: Group
    positions: Tensor  # int64 [tiles, 1, queries, 1, 1]
    tokens: Tensor | None  # [tiles * queries] which tokens of the step; None: all, in order
    real: Tensor | None  # [tokens of this group] in tiles * queries; None: all
    targets: Tensor | None  # [tokens of this group] in the step; None: all, in order
    blocks: dict[int | None, list[_Block]]  # by window; blocks that no query sees are left out

    @property
    def tiles(self) -> int:
        return len(self.group.rows)

    @property
    def queries(self) -> int:
        return self.group.queries


@dataclass(frozen=True, slots=True)
class _Slots:
    """Where the keys of a step lie."""

    table: SlotTable  # which takes no later step in before this one's last layer
    page_size: int
    device: torch.device

    def met(self, planned: _Planned, block: _Block, window: int | None) -> _Met:
        group, begin, end = planned.group, block.begin, block.end
        pages = tensor(group.pages(self.table, begin, end, self.page_size), self.device, torch.int32).view(-1)
        partly = max(begin, group.earliest // CHUNK) if window is None else begin  # every query sees all keys before this chunk
        if partly >= end:
            return _Met(pages, None)
        keys = torch.arange(partly * CHUNK, end * CHUNK, device=self.device).view(-1, 1, 1, CHUNK)
        hidden = keys > planned.positions
        return _Met(pages, hidden if window is None else hidden.logical_or_(keys <= planned.positions - window))


class TorchAttention:
    name = "torch_native"

    def __init__(self, spec: ModelSpec, pool: KvPool, pulse: Pulse) -> None:
        self._spec = spec
        self._pulse = pulse
        self._pool = pool
        self._windows = frozenset(spec.windows)
        self._sizes = Sizes.of(spec.heads, spec.kv_heads, spec.head_dim)
        self._scale = 1.0 / math.sqrt(spec.head_dim)
        self._products = Products(spec, pool.dtype, pool.device, pulse)
        if pool.device.type == "cpu":
            report("attention is", self._products.rows)
        self.cells = Cells(pool, torch.empty(0, dtype=torch.int64))
        self._groups: list[_Planned] = []
        self._slots: _Slots | None = None

    @staticmethod
    def beside(shape: TableShape, rows: int, tokens: int) -> int:
        return 0

    @staticmethod
    def refusal(spec: ModelSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, asked: bool) -> str | None:
        return None

    @property
    def batch_invariant(self) -> bool:
        """Whether the bits of a query's result are the same whatever else is in the step."""
        return self._products.rows.invariant

    def plan(self, step: Step, table: SlotTable) -> None:
        device = self._pool.device
        self.cells = Cells(self._pool, tensor(step.out_slots, device))
        self._slots = slots = _Slots(table, step.page_size, device)
        self._groups = []
        room = KEPT
        for group in groups(step, self._sizes):
            tokens = tensor(group.tokens, device)
            real = None if group.real is None else tensor(group.real, device)
            planned = _Planned(
                group=group,
                positions=tensor(group.positions, device)[:, None, :, None, None],
                tokens=None if real is None else tokens,
                real=real,
                targets=None if real is None else tokens[real],
                blocks={window: self._blocks(group, window) for window in self._windows},
            )
            for window, blocks in planned.blocks.items():
                for block in blocks:
                    if room > 0:
                        block.met = slots.met(planned, block, window)
                        room -= block.met.bytes
            self._groups.append(planned)

    def _blocks(self, group: Group, window: int | None) -> list[_Block]:
        """Blocks start at multiples of their size, whatever the window leaves out."""
        size = self._sizes.block
        first = 0 if window is None else max(0, group.earliest - window + 1) // CHUNK
        starts = range(first // size * size, group.chunks, size)
        return [_Block(max(start, first), min(start + size, group.chunks)) for start in starts]

    def attend(self, layer: int, q: Tensor) -> Tensor:
        q = q * self._scale
        out: Tensor | None = None
        for group in self._groups:
            values = self._attend_group(layer, q if group.tokens is None else q.index_select(0, group.tokens), group)
            if group.real is None or group.targets is None:
                return values
            out = torch.empty_like(q) if out is None else out
            out.index_copy_(0, group.targets, values.index_select(0, group.real))
        assert out is not None, "a step has at least one token"
        return out

    def _attend_group(self, layer: int, q: Tensor, group: _Planned) -> Tensor:
        """q and the result: [tiles * queries, heads, head_dim]."""
        spec, n = self._spec, group.tiles
        kv_heads, dim = spec.kv_heads, spec.head_dim
        rows = group.queries * spec.group  # queries times the heads that share a KV head: all meet the same keys
        sizes = self._products.rows.split(rows)
        padding = sum(sizes) - rows
        q = q.view(n, group.queries, kv_heads, spec.group, dim).permute(2, 0, 1, 3, 4).reshape(kv_heads * n, rows, dim)
        if padding:
            q = F.pad(q, (0, 0, 0, padding))
        blocks = group.blocks[spec.windows[layer]]
        parts = (self._attend_block(layer, q, sizes, group, block, alone=len(blocks) == 1) for block in blocks)
        out = (
            _joined(parts).to(q.dtype).view(kv_heads, n, rows + padding, dim)[:, :, :rows].view(kv_heads, n, group.queries, spec.group, dim)
        )
        return out.permute(1, 2, 0, 3, 4).reshape(n * group.queries, spec.heads, dim)

    def _attend_block(self, layer: int, q: Tensor, sizes: list[int], group: _Planned, block: _Block, alone: bool) -> _Part:
        """Queries [batch, rows, dim] against a block of keys; `alone`: there is no other one to join."""
        self._pulse()
        spec, slots, chunks = self._spec, self._slots, block.chunks
        assert slots is not None, "a step is planned first"
        met = block.met or slots.met(group, block, spec.windows[layer])
        batch, padded, dim = q.shape
        rows = group.queries * spec.group
        # Every chunk gets the queries: a copy that is half as large as the scores, and spares one of these.
        every = q.unsqueeze(1).expand(batch, chunks, padded, dim).reshape(batch * chunks, padded, dim)
        keys = self._pool.keys(layer, met.pages).view(batch * chunks, CHUNK, dim)
        scores = self._products(every, keys.transpose(1, 2), sizes)
        if (hidden := met.hidden) is not None:
            seen = scores.view(spec.kv_heads, group.tiles, chunks, padded, CHUNK)[:, :, chunks - hidden.shape[1] :, :rows]
            seen = seen.view(*seen.shape[:3], group.queries, spec.group, CHUNK)
            seen.masked_fill_(hidden, torch.finfo(scores.dtype).min)
        scores = scores.float()
        weights = torch.softmax(scores, -1)
        logsums = None if chunks == 1 and alone else _logsums(scores, weights).view(batch, chunks, padded)
        del every, keys, scores
        values = self._pool.values(layer, met.pages).view(batch * chunks, CHUNK, dim)
        parts = self._products(weights.to(q.dtype), values, sizes)
        if logsums is None:
            return _Part(parts, None)
        shares = torch.softmax(logsums, 1)
        if chunks > 1:
            parts = parts.view(batch, chunks, padded, dim).float().mul_(shares.float().unsqueeze(-1)).sum(1)
        return _Part(parts, None if alone else logsums.amax(1) - shares.amax(1).log_())


@dataclass(frozen=True, slots=True)
class _Part:
    """What queries get from a block of keys."""

    values: Tensor  # [batch, rows, dim], as if there were no other keys
    logsum: Tensor | None  # fp64 [batch, rows]: the logarithm of the sum of exponentials; None: there are no others


def _joined(parts: Iterator[_Part]) -> Tensor:
    """The values of blocks that come one after another: [batch, rows, dim].

    Each counts by its part of the sum of exponentials. One that is wholly masked counts exactly 0, and those before it exactly
    1, so it makes no difference whether it is computed.
    """
    first = next(parts)
    if first.logsum is None:
        return first.values
    values, highest = first.values.float(), first.logsum
    mass = torch.ones_like(highest)
    for part in parts:
        assert part.logsum is not None
        higher = torch.maximum(highest, part.logsum)
        kept, added = (highest - higher).exp_(), (part.logsum - higher).exp_()
        values = values * kept.float().unsqueeze(-1) + part.values.float() * added.float().unsqueeze(-1)
        mass = mass * kept + added
        highest = higher
    return values.div_(mass.float().unsqueeze(-1))


def _logsums(scores: Tensor, weights: Tensor) -> Tensor:
    """The logarithm of each chunk's sum of exponentials: [items, rows].

    scores, weights: [items, rows, CHUNK], weights the softmax over the last. A chunk's sum of exponentials, relative to its
    largest, is one over its largest weight. A chunk that is wholly masked counts exactly 0 beside others. In fp64, so that how
    many such chunks stand behind the real ones leaves no trace in the rounded result.
    """
    return scores.amax(-1).double() - weights.amax(-1).double().log_()
