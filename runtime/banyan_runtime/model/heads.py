"""Between the product that makes queries, keys and values and attention: norms, turns to positions, keys and values to their cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from banyan_runtime.model.attention import Attention
from banyan_runtime.model.pool import Cells
from banyan_runtime.model.rope import Rope
from banyan_runtime.model.spec import ModelSpec

Norm = Callable[[Tensor], Tensor]
"""Of vectors [rows, heads, head_dim]."""


class Heads(Protocol):
    def __call__(self, layer: int, qkv: Sequence[Tensor], at: Sequence[tuple[Tensor, Tensor]], cells: Cells) -> Tensor:
        """Queries [T, heads, head_dim] of blocks [rows, (heads + 2 * kv_heads) * head_dim], at their positions (`Rope.at`).

        The first T rows of the blocks together are those of the cells, where keys and values go; the rest is padding.
        """

    def attended(self, layer: int, qkv: Sequence[Tensor], at: Sequence[tuple[Tensor, Tensor]], attention: Attention) -> Tensor:
        """What the attention, planned for these tokens, makes of them, [T, heads, head_dim]."""
        return attention.attend(layer, self(layer, qkv, at, attention.cells))


class PlainHeads(Heads):
    def __init__(self, spec: ModelSpec, rope: Rope, norms: tuple[Norm, Norm] | None = None) -> None:
        """`norms`: of queries and of keys."""
        self._sizes = [spec.heads, spec.kv_heads, spec.kv_heads]
        self._head_dim = spec.head_dim
        self._rope = rope
        self._norms = norms

    def __call__(self, layer: int, qkv: Sequence[Tensor], at: Sequence[tuple[Tensor, Tensor]], cells: Cells) -> Tensor:
        tokens = cells.slots.shape[0]
        q, k, v = (joined(parts)[:tokens] for parts in zip(*map(self._turned, qkv, at), strict=True))
        cells.store(layer, k, v)
        return q

    def _turned(self, qkv: Tensor, at: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = torch.split(qkv.view(qkv.shape[0], -1, self._head_dim), self._sizes, 1)
        if self._norms is not None:
            q, k = self._norms[0](q), self._norms[1](k)
        return self._rope.rotate(q, at), self._rope.rotate(k, at), v


def joined(blocks: Sequence[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(list(blocks))
