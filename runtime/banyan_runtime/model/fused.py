"""Layers and rope on CUDA with what is done to rows between products fused into one launch each (`kernels/rows.py`)."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

from banyan_runtime.model.kernels import power_of_two
from banyan_runtime.model.layers import Layer, PlainKernels, RmsNorm
from banyan_runtime.model.rope import Rope

_SILU_BLOCK = 1024


def supports(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None


class FusedKernels(PlainKernels):
    """torch's own products, and Triton between them."""

    def norm(self, weight: Tensor, eps: float, heads: int = 1) -> RmsNorm:
        return _FusedNorm(weight, eps)

    def gated(self, weight: Tensor, bias: Tensor | None) -> Layer:
        return _FusedGated(weight, bias)


class _FusedNorm(RmsNorm):
    def __init__(self, weight: Tensor, eps: float) -> None:
        from banyan_runtime.model.kernels import rows

        super().__init__(weight, eps)
        self._kernel = rows.rms_norm
        self._block = power_of_two(weight.shape[0])

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, width] or [rows, heads, width], of which heads lie side by side."""
        width = x.shape[-1]
        heads = 1 if x.ndim == 2 else x.shape[1]
        assert x.stride(-1) == 1
        assert heads == 1 or x.stride(1) == width
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.shape[0]:
            self._kernel[(x.shape[0] * heads,)](x, self.weight, out, x.stride(0), heads, self.eps, WIDTH=width, BLOCK=self._block)
        return out


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


class FusedRope(Rope):
    def rotate(self, x: Tensor, at: tuple[Tensor, Tensor]) -> Tensor:
        """x [T, heads, head_dim], of which heads lie side by side, rotated by its positions."""
        from banyan_runtime.model.kernels import rows

        cos, sin = at
        tokens, heads, width = x.shape
        assert x.stride(2) == 1
        assert x.stride(1) == width
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if tokens:
            rows.rotate[(tokens * heads,)](x, cos, sin, out, x.stride(0), heads, HALF=width // 2, BLOCK=power_of_two(width // 2))
        return out
