"""The blocks' parts: norm, linear, gated MLP. Plain callables on [rows, width] tensors, no module machinery: a step of a
small model is bound by the number of Python calls.

`Kernels` chooses how matrices are multiplied, once at start: `PlainKernels` anywhere, `PackedKernels` on the CPU, where
weights are stored in oneDNN's blocked layout. Measured on 2 cores, 3072x576: bf16 83 us against 128 us for one row and
185 against 253 us for 16 rows; fp32 92 against 136 us and 300 against 518 us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from banyan_runtime.model.invariance import probe_input, probe_weight, row_multiple


class Layer(Protocol):
    """Maps [rows, in] to [rows, out] in the model's dtype, each row by itself."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Kernels(Protocol):
    """Makes layers of weights; may take the weights over in another form."""

    @property
    def row_multiple(self) -> int:
        """Rows must be padded to a multiple of this for results that do not depend on their number."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Layer:
        """x @ weight.T + bias; weight [out, in], bias [out]."""

    def gated(self, weight: Tensor, bias: Tensor | None) -> Layer:
        """silu(x @ gate.T) * (x @ up.T); weight [2 * inner, in] holds gate above up, bias [2 * inner]."""


class RmsNorm:
    """Root mean square norm in fp32, rounded to the model's dtype before the weight is applied, as transformers does."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.mul(wide, wide).mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return (wide * scale).to(x.dtype) * self.weight


class PlainKernels:
    """torch's own products."""

    def __init__(self) -> None:
        self._rows = _RowCounts()

    @property
    def row_multiple(self) -> int:
        return self._rows.multiple

    def linear(self, weight: Tensor, bias: Tensor | None) -> Layer:
        self._rows.measure(weight, lambda probe: _PlainLinear(probe, None))
        return _PlainLinear(weight, bias)

    def gated(self, weight: Tensor, bias: Tensor | None) -> Layer:
        self._rows.measure(weight, lambda probe: _PlainLinear(probe, None))
        return _PlainGated(weight, bias)


class PackedKernels:
    """oneDNN products over packed weights, on the CPU."""

    def __init__(self) -> None:
        self._rows = _RowCounts()

    @property
    def row_multiple(self) -> int:
        return self._rows.multiple

    @staticmethod
    def supports(dtype: torch.dtype) -> bool:
        """Whether this torch has oneDNN, and oneDNN this type on this processor."""
        if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
            return False
        return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))

    def linear(self, weight: Tensor, bias: Tensor | None) -> Layer:
        self._rows.measure(weight, lambda probe: _PackedLinear(probe, None, "none"))
        return _PackedLinear(weight, bias, "none")

    def gated(self, weight: Tensor, bias: Tensor | None) -> Layer:
        inner = weight.shape[0] // 2
        gate_bias, up_bias = (None, None) if bias is None else (bias[:inner].contiguous(), bias[inner:].contiguous())
        self._rows.measure(weight[:inner], lambda probe: _PackedLinear(probe, None, "swish"))
        return _PackedGated(_PackedLinear(weight[:inner], gate_bias, "swish"), _PackedLinear(weight[inner:], up_bias, "none"))


class _RowCounts:
    """Measures each shape once, on the CPU: only there results are promised not to depend on the number of rows."""

    # A vocabulary's head is measured by fewer outputs of the same alignment: its probe would take as much memory again.
    MOST_OUTPUTS = 4096

    def __init__(self) -> None:
        self.multiple = 1
        self._measured: set[torch.Size] = set()

    def measure(self, weight: Tensor, layer: Callable[[Tensor], Layer]) -> None:
        if weight.device.type != "cpu" or weight.shape in self._measured:
            return
        self._measured.add(weight.shape)
        outputs, width = weight.shape
        if outputs > 2 * self.MOST_OUTPUTS:
            outputs = self.MOST_OUTPUTS + outputs % self.MOST_OUTPUTS
        found = row_multiple(layer(probe_weight(outputs, width, weight.dtype)), probe_input((), width, weight.dtype))
        self.multiple = max(self.multiple, found)


class _PlainLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class _PlainGated:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.inner = weight.shape[0] // 2

    def __call__(self, x: Tensor) -> Tensor:
        both = F.linear(x, self.weight, self.bias)
        return F.silu(both[:, : self.inner]) * both[:, self.inner :]


class _PackedLinear:
    # The layout hint changes the speed by at most 20 %; 256 rows did best for few and for many rows.
    HINT = 256

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self.HINT)
        self.bias = bias
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, self.activation, [], "")
        return out


class _PackedGated:
    """The activation is part of the gate's product: torch's own silu computes the ends of each thread's share with another
    exponential than the rest, so its last bits depend on the number of rows (measured with 176 columns)."""

    def __init__(self, gate: Layer, up: Layer) -> None:
        self.gate = gate
        self.up = up

    def __call__(self, x: Tensor) -> Tensor:
        return self.gate(x).mul_(self.up(x))
