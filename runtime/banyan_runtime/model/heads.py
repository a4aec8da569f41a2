"""Between the product that makes queries, keys and values and attention: norms, turns to positions, keys and values to their cells."""

from __future__ import annotations

from collections.abc import Callable
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
    def __call__(self, layer: int, qkv: Tensor, at: tuple[Tensor, Tensor], cells: Cells) -> Tensor:
        """Queries [T, heads, head_dim] of qkv [T, (heads + 2 * kv_heads) * head_dim], at their positions (`Rope.at`). Keys and values go
        into the cells."""

    def attended(self, layer: int, qkv: Tensor, at: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        """What the attention, planned for these tokens, makes of them, [T, heads, head_dim]."""
        return attention.attend(layer, self(layer, qkv, at, attention.cells))


class PlainHeads(Heads):
    def __init__(self, spec: ModelSpec, rope: Rope, norms: tuple[Norm, Norm] | None = None) -> None:
        """`norms`: of queries and of keys."""
        self._sizes = [spec.heads, spec.kv_heads, spec.kv_heads]
        self._head_dim = spec.head_dim
        self._rope = rope
        self._norms = norms

    def __call__(self, layer: int, qkv: Tensor, at: tuple[Tensor, Tensor], cells: Cells) -> Tensor:
        q, k, v = torch.split(qkv.view(qkv.shape[0], -1, self._head_dim), self._sizes, 1)
        if self._norms is not None:
            q, k = self._norms[0](q), self._norms[1](k)
        cells.store(layer, self._rope.rotate(k, at), v)
        return self._rope.rotate(q, at)
