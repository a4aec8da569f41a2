"""Attention in plain torch, on the CPU and on CUDA: gather the keys, multiply, mask, softmax, multiply.

Matrix products instead of torch's fused attention: with one query per sequence the fused kernel is 30 times slower on the
CPU, and its bits differ between prefill and decode. Here a query's result does not depend on what it is computed beside:
each chunk of 128 keys is a product and a softmax of its own, whatever the batch, and chunks are joined by their weights.
Products are therefore always of one width and one depth; `products.py` sees to their rows and their number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from banyan_runtime.model.attention.products import Products
from banyan_runtime.model.attention.tiles import CHUNK, groups
from banyan_runtime.model.invariance import report
from banyan_runtime.model.pool import KvPool
from banyan_runtime.model.spec import ModelSpec
from banyan_runtime.step import Step


@dataclass(frozen=True, slots=True)
class _Planned:
    """A group of tiles on the device."""

    tiles: int
    queries: int
    chunks: int
    tokens: Tensor | None  # [tiles * queries] which tokens of the step; None: all, in order
    real: Tensor | None  # [tokens of this group] in tiles * queries; None: all
    targets: Tensor | None  # [tokens of this group] in the step; None: all, in order
    pages: Tensor
    hidden: dict[int | None, Tensor]  # window → bool [tiles, last chunks, queries, 1, CHUNK]: keys that a query does not see


class TorchAttention:
    name = "torch_native"

    def __init__(self, spec: ModelSpec, pool: KvPool) -> None:
        self._spec = spec
        self._pool = pool
        self._windows = frozenset(spec.windows)
        self._scale = 1.0 / math.sqrt(spec.head_dim)
        self._products = Products(spec, pool.dtype, pool.device)
        if pool.device.type == "cpu":
            report("attention is", self._products.rows)
        self._slots = torch.empty(0, dtype=torch.int64)
        self._groups: list[_Planned] = []

    @property
    def batch_invariant(self) -> bool:
        """Whether the bits of a query's result are the same whatever else is in the step."""
        return self._products.rows.invariant

    def plan(self, step: Step) -> None:
        device = self._pool.device
        self._slots = torch.from_numpy(step.out_slots).to(device, torch.int64)
        self._groups = []
        for group in groups(step, self._spec.heads):
            tokens = torch.from_numpy(group.tokens).to(device)
            real = None if group.real is None else torch.from_numpy(group.real).to(device)
            positions = torch.from_numpy(group.positions).to(device)[:, None, :, None, None]
            keys = torch.arange(group.chunks * CHUNK, device=device).view(-1, 1, 1, CHUNK)
            late = keys[int(group.positions.min()) // CHUNK :]  # every query sees all keys before these
            future = late > positions
            self._groups.append(
                _Planned(
                    tiles=positions.shape[0],
                    queries=group.queries,
                    chunks=group.chunks,
                    tokens=None if real is None else tokens,
                    real=real,
                    targets=None if real is None else tokens[real],
                    pages=torch.from_numpy(group.pages).to(device),
                    hidden={w: future if w is None else (keys > positions) | (keys <= positions - w) for w in self._windows},
                )
            )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._pool.store(layer, self._slots, k, v)
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
        spec, n, chunks = self._spec, group.tiles, group.chunks
        kv_heads, dim, batch = spec.kv_heads, spec.head_dim, spec.kv_heads * n
        rows = group.queries * spec.group  # queries times the heads that share a KV head: all meet the same keys
        sizes = self._products.rows.split(rows)
        padded = sum(sizes)
        q = q.view(n, group.queries, kv_heads, spec.group, dim).permute(2, 0, 1, 3, 4).reshape(batch, rows, dim)
        if padded > rows:
            q = F.pad(q, (0, 0, 0, padded - rows))
        # Every chunk gets the queries: a copy that is half as large as the scores, and spares one of these.
        q = q.unsqueeze(1).expand(batch, chunks, padded, dim).reshape(batch * chunks, padded, dim)
        keys = self._pool.keys(layer, group.pages).view(batch * chunks, CHUNK, dim)
        scores = self._products(q, keys.transpose(1, 2), sizes)
        seen = scores.view(kv_heads, n, chunks, padded, CHUNK)[:, :, :, :rows].view(kv_heads, n, chunks, group.queries, spec.group, CHUNK)
        hidden = group.hidden[spec.windows[layer]]
        seen[:, :, chunks - hidden.shape[1] :].masked_fill_(hidden, torch.finfo(scores.dtype).min)
        scores = scores.float()
        weights = torch.softmax(scores, -1)
        values = self._pool.values(layer, group.pages).view(batch * chunks, CHUNK, dim)
        parts = self._products(weights.to(q.dtype), values, sizes)
        if chunks > 1:
            shares = _shares(scores, weights, chunks).unsqueeze(-1)
            parts = parts.view(batch, chunks, padded, dim).float().mul_(shares).sum(1).to(q.dtype)
        out = parts.view(kv_heads, n, padded, dim)[:, :, :rows].view(kv_heads, n, group.queries, spec.group, dim)
        return out.permute(1, 2, 0, 3, 4).reshape(n * group.queries, spec.heads, dim)


def _shares(scores: Tensor, weights: Tensor, chunks: int) -> Tensor:
    """What each chunk counts in the whole: fp32 [batch, chunks, rows], sum 1 over the chunks.

    scores, weights: [batch * chunks, rows, CHUNK], weights the softmax over the last. A chunk's sum of exponentials, relative
    to its largest, is one over its largest weight. A chunk that is wholly masked gets exactly 0. In fp64, so that how many
    such chunks stand behind the real ones leaves no trace in the rounded result.
    """
    logsum = scores.amax(-1).double() - weights.amax(-1).double().log_()
    return torch.softmax(logsum.view(-1, chunks, logsum.shape[1]), 1).float()
