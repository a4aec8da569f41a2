"""Layers on CUDA with what is done to rows between products fused into one launch each (`kernels/rows.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from banyan_runtime.model.heads import Heads, joined
from banyan_runtime.model.kernels import missing, needed_capability, power_of_two
from banyan_runtime.model.layers import Layer, PlainKernels, RmsNorm
from banyan_runtime.model.pool import Cells
from banyan_runtime.model.rope import Rope
from banyan_runtime.model.spec import ModelSpec
from banyan_runtime.step import PADDING_SLOT

_SILU_BLOCK: Final = 1024
_FEW: Final = 64  # rows: of fewer ones each is spread over programs, which keeps a GPU busy
_TOGETHER: Final = 4096  # numbers of heads that a program takes else, about


def supports(device: torch.device, kept: torch.dtype) -> bool:
    """Whether it computes there, with keys and values kept in such a type."""
    return device.type == "cuda" and missing() is None and torch.cuda.get_device_capability(device) >= needed_capability(kept)


class FusedKernels(PlainKernels):
    """torch's own products, and Triton between them."""

    def norm(self, weight: Tensor, eps: float, heads: int = 1) -> RmsNorm:
        assert heads == 1, "heads are normed on their way to attention"
        return _FusedNorm(weight, eps)

    def heads(self, spec: ModelSpec, rope: Rope, q_norm: Tensor | None, k_norm: Tensor | None) -> Heads:
        return _FusedHeads(spec, q_norm, k_norm)

    def gated(self, weight: Tensor, bias: Tensor | None) -> Layer:
        return _FusedGated(weight, bias)


class _FusedNorm(RmsNorm):
    def __init__(self, weight: Tensor, eps: float) -> None:
        from banyan_runtime.model.kernels import rows

        super().__init__(weight, eps)
        self._kernel = rows.rms_norm
        self._block = power_of_two(weight.shape[0])

    def __call__(self, x: Tensor) -> Tensor:
        return self._launch(x, None)[1]

    def added(self, h: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        return self._launch(h, delta)

    def _launch(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sum, or x where nothing is added, and its norm."""
        assert x.stride(1) == 1
        assert delta is None or delta.stride(1) == 1
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        sums = x if delta is None else torch.empty_like(out)
        more = x if delta is None else delta
        if x.shape[0]:
            self._kernel[(x.shape[0],)](
                x, more, self.weight, sums, out, x.stride(0), more.stride(0), self.eps,
                ADDED=delta is not None, WIDTH=x.shape[1], BLOCK=self._block,
            )  # fmt: skip
        return sums, out


class _FusedHeads:
    def __init__(self, spec: ModelSpec, q_norm: Tensor | None, k_norm: Tensor | None) -> None:
        from banyan_runtime.model.kernels import rows

        self._kernel = rows.place
        self._spec = spec
        self._norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
        self._half = power_of_two(spec.head_dim // 2)
        turned = spec.heads + spec.kv_heads
        self._together = min(power_of_two(turned), max(1, _TOGETHER // (2 * self._half)))

    def __call__(self, layer: int, qkv: Sequence[Tensor], at: Sequence[tuple[Tensor, Tensor]], cells: Cells) -> Tensor:
        own, (cos, sin), spec = joined(qkv), (joined(parts) for parts in zip(*at, strict=True)), self._spec
        tokens = cells.slots.shape[0]
        assert own.stride(1) == 1
        keys, values = cells.pool.slots(layer)
        queries = torch.empty((tokens, spec.heads, spec.head_dim), dtype=own.dtype, device=own.device)
        q_weight, k_weight = (own, own) if self._norms is None else self._norms
        together = min(self._together, 4) if tokens < _FEW else self._together
        if tokens:
            self._kernel[(tokens, -(-(spec.heads + spec.kv_heads) // together))](
                own, cos, sin, q_weight, k_weight, cells.slots, queries, keys, values, own.stride(0), keys.stride(0), spec.norm_eps,
                NORMED=self._norms is not None, HEADS=spec.heads, KV_HEADS=spec.kv_heads, TOGETHER=together,
                HALF=spec.head_dim // 2, BLOCK=self._half, PADDING=PADDING_SLOT, LARGEST=cells.pool.largest, NARROW=cells.pool.narrow,
            )  # fmt: skip
        return queries


class _FusedGated:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        from banyan_runtime.model.kernels import rows

        self.weight = weight
        self.bias = bias
        self.inner = weight.shape[0] // 2
        self._kernel = rows.silu_times

    def __call__(self, x: Tensor) -> Tensor:
        both = F.linear(x, self.weight, self.bias)
        out = torch.empty((x.shape[0], self.inner), dtype=x.dtype, device=x.device)
        if x.shape[0]:
            self._kernel[(x.shape[0], -(-self.inner // _SILU_BLOCK))](both, out, self.inner, BLOCK=_SILU_BLOCK)
        return out
