"""From the projected queries, keys and values to attention: norms, rotation, keys and values into the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from banyan_runtime.model.attention import Attention
from banyan_runtime.model.pool import Cells
from banyan_runtime.model.rope import Rotation
from banyan_runtime.models import config as models

Norm = Callable[[Tensor], Tensor]
"""Of the last dimension."""


class Heads(Protocol):
    def __call__(self, layer: int, qkv: Tensor, rotations: Sequence[Rotation], cells: Cells) -> Tensor:
        """Queries [T, heads, head_dim] of qkv [T, rows of the parameter], rotated. Keys and values go into the cells."""

    def attended(self, layer: int, qkv: Tensor, rotations: Sequence[Rotation], attention: Attention) -> Tensor:
        """What the attention, planned for these tokens, makes of them, [T, heads, value size]."""
        return attention.attend(layer, self(layer, qkv, rotations, attention.cells))


class PlainHeads(Heads):
    def __init__(self, spec: models.Attention, rope: int | None, q_norm: Norm | None, k_norm: Norm | None, v_norm: Norm | None) -> None:
        """`rope`: index among the model's; None: no rotation."""
        self._spec = spec
        self._rope = rope
        self._q_norm, self._k_norm, self._v_norm = q_norm, k_norm, v_norm

    def __call__(self, layer: int, qkv: Tensor, rotations: Sequence[Rotation], cells: Cells) -> Tensor:
        spec, rotation = self._spec, None if self._rope is None else rotations[self._rope]
        q_width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        queries = self._turned(qkv[:, :q_width], self._q_norm, None if rotation is None else rotation.queries)
        if spec.kv_layer is None:
            key = qkv[:, q_width : q_width + kv_width]
            value = (key if spec.value_is_key else qkv[:, q_width + kv_width :]).reshape(len(qkv), spec.kv_heads, spec.head_dim)
            value = value if self._v_norm is None else self._v_norm(value)
            cells.store(layer, self._turned(key, self._k_norm, None if rotation is None else rotation.keys), value)
        return queries

    def _turned(self, x: Tensor, norm: Norm | None, turn: Callable[[Tensor], Tensor] | None) -> Tensor:
        """x [T, width] → [T, heads, head_dim], normed and rotated in the order of the spec."""
        spec = self._spec
        if norm is not None and spec.qk_norm == "row":
            x, norm = norm(x), None
        x = x.reshape(len(x), -1, spec.head_dim)
        if norm is not None and not spec.norm_after_rope:
            x, norm = norm(x), None
        if turn is not None:
            x = turn(x)
        return x if norm is None else norm(x)


def unit_norm(eps: float) -> Norm:
    """An RMS norm without weight."""

    def norm(x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)

    return norm
