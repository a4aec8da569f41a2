"""The blocks' parts: norm, linear, gated MLP, head. Plain callables on [rows, width] tensors, no module machinery: a step of a
small model is bound by the number of Python calls.

`Kernels` chooses what computes a step from its tokens to the next ones, once at start: `PlainKernels` anywhere, `PackedKernels` on the
CPU, where weights are stored in oneDNN's blocked layout, and `FusedKernels` on CUDA. Measured on 2 cores, 3072x576: bf16 83 us
against 128 us for one row and 185 against 253 us for 16 rows; fp32 92 against 136 us and 300 against 518 us.

On the CPU every part is measured when it is made (`invariance.py`), with the shape that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from banyan_runtime.model.attention import Held
from banyan_runtime.model.heads import Heads, PlainHeads
from banyan_runtime.model.invariance import LADDER, Measured, RowSizes, agreement, probe_row, probe_weight
from banyan_runtime.model.mail import Mail
from banyan_runtime.model.rope import Rope
from banyan_runtime.model.sampler import PlainSampler, Sampler
from banyan_runtime.model.spec import ModelSpec
from banyan_runtime.step import Pulse


class Layer(Protocol):
    """Maps [rows, in] to [rows, out] in the model's dtype, each row by itself."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Begin(Protocol):
    """What a replayed step begins with."""

    def __call__(self, held: Held, latest: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Embeddings [T, hidden_size] of the tokens that `held` tells by then, and cosines and sines of their positions, as `Rope.at`. A
        negative token is the latest one of its row: `latest` int64 [rows]. Can be captured."""


class Kernels(Protocol):
    """Makes layers of weights; may take the weights over in another form. And what is computed before the first layer, and behind the
    last."""

    @property
    def rows(self) -> RowSizes:
        """The numbers of rows with which all layers made so far must be called for results that do not depend on them."""

    def norm(self, weight: Tensor, eps: float, heads: int = 1) -> RmsNorm:
        """The norm of vectors like weight [width], of which each row has `heads`."""

    def heads(self, spec: ModelSpec, rope: Rope, q_norm: Tensor | None, k_norm: Tensor | None) -> Heads:
        """What is done to heads before attention; weights of their norms [head_dim]."""

    def entry(self, norm: RmsNorm, layer: Layer) -> Entry:
        """A layer behind a norm; both were made by these kernels."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Layer:
        """x @ weight.T + bias; weight [out, in], bias [out]."""

    def gated(self, weight: Tensor, bias: Tensor | None) -> Layer:
        """silu(x @ gate.T) * (x @ up.T); weight [2 * inner, in] holds gate above up, bias [2 * inner]."""

    def begin(self, embed: Tensor, rope: Rope) -> Begin:
        """What replayed steps begin with; embed [vocab_size, hidden_size]."""

    def sampler(self) -> Sampler:
        """What makes tokens of logits, in steps of every kind."""

    def mail(self, device: torch.device) -> Mail:
        """How steps are told, and tokens sent."""


class RmsNorm:
    """Root mean square norm in fp32, rounded to the model's dtype before the weight is applied, as transformers does."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.mul(wide, wide).mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return (wide * scale).to(x.dtype) * self.weight

    def added(self, h: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """h + delta, and its norm. Both [rows, width]."""
        h = h + delta
        return h, self(h)


class Entry:
    """A norm and the layer behind it: the way into attention, and into the MLP."""

    def __init__(self, norm: RmsNorm, layer: Layer) -> None:
        self.norm = norm
        self.layer = layer

    def __call__(self, h: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """h + delta, and the layer of its norm. h and delta [rows, width]; None: nothing is added."""
        if delta is None:
            return h, self.layer(self.norm(h))
        h, normed = self.norm.added(h, delta)
        return h, self.layer(normed)


class Head:
    """The vocabulary's logits in fp32. On the CPU in slices, which are small enough to be measured with the shape they have."""

    SLICE: Final = 4096  # tokens; a slice more costs 5 us a step

    def __init__(self, weight: Tensor, kernels: Kernels) -> None:
        self._outputs = weight.shape[0]
        slices = torch.split(weight, self.SLICE) if weight.device.type == "cpu" else [weight]
        self._slices: Sequence[Layer] = [kernels.linear(part, None) for part in slices]

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, width]; the result [rows, vocab_size]."""
        if len(self._slices) == 1:
            return self.own(x).float()
        logits = torch.empty(x.shape[0], self._outputs, dtype=torch.float32, device=x.device)
        for part, layer in zip(torch.split(logits, self.SLICE, 1), self._slices, strict=True):
            part.copy_(layer(x))
        return logits

    def own(self, x: Tensor) -> Tensor:
        """The logits in the type that they were computed in: of 16 bits they are a third of the bytes."""
        return self._slices[0](x) if len(self._slices) == 1 else self(x)


class PlainKernels:
    """torch's own products."""

    def __init__(self, pulse: Pulse = lambda: None) -> None:
        self._measured = _MeasuredLayers(pulse)

    @property
    def rows(self) -> RowSizes:
        return self._measured.rows

    def norm(self, weight: Tensor, eps: float, heads: int = 1) -> RmsNorm:
        self._measured.norm(weight, heads)
        return RmsNorm(weight, eps)

    def heads(self, spec: ModelSpec, rope: Rope, q_norm: Tensor | None, k_norm: Tensor | None) -> Heads:
        if q_norm is None or k_norm is None:
            return PlainHeads(spec, rope)
        norms = self.norm(q_norm, spec.norm_eps, spec.heads), self.norm(k_norm, spec.norm_eps, spec.kv_heads)
        return PlainHeads(spec, rope, norms)

    def entry(self, norm: RmsNorm, layer: Layer) -> Entry:
        return Entry(norm, layer)

    def linear(self, weight: Tensor, bias: Tensor | None) -> Layer:
        self._measured.product(_PlainLinear, weight, bias)
        return _PlainLinear(weight, bias)

    def gated(self, weight: Tensor, bias: Tensor | None) -> Layer:
        self._measured.product(_PlainGated, weight, bias)
        return _PlainGated(weight, bias)

    def begin(self, embed: Tensor, rope: Rope) -> Begin:
        return _PlainBegin(embed, rope)

    def sampler(self) -> Sampler:
        return PlainSampler()

    def mail(self, device: torch.device) -> Mail:
        return Mail()


class PackedKernels(PlainKernels):
    """oneDNN products over packed weights, on the CPU."""

    @staticmethod
    def supports(dtype: torch.dtype) -> bool:
        """Whether this torch has oneDNN, and oneDNN this type on this processor."""
        if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
            return False
        return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))

    def linear(self, weight: Tensor, bias: Tensor | None) -> Layer:
        self._measured.product(_PackedLinear, weight, bias)
        return _PackedLinear(weight, bias)

    def gated(self, weight: Tensor, bias: Tensor | None) -> Layer:
        self._measured.product(_PackedGated, weight, bias)
        return _PackedGated(weight, bias)


class _MeasuredLayers:
    """Measures each kind of layer and shape once, on the CPU: only there results are promised not to depend on the number of
    rows."""

    # What was found holds for the process: neither the library nor the processor changes, and threads are part of the key.
    KNOWN: Final[dict[Hashable, dict[int, int | None]]] = {}

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._measured = Measured()

    @cached_property
    def rows(self) -> RowSizes:
        return self._measured.sizes()

    def product(self, kind: Callable[[Tensor, Tensor | None], Layer], weight: Tensor, bias: Tensor | None) -> None:
        """A bias of zeros takes part where there is one: it chooses the kernel, and hides no rounding errors."""

        def make() -> Callable[[int], Tensor]:
            (outputs, width), dtype = weight.shape, weight.dtype
            layer = kind(probe_weight(outputs, width, dtype), None if bias is None else torch.zeros(outputs, dtype=dtype))
            most = probe_row(width, dtype).repeat(LADDER[-1], 1)
            return lambda rows: layer(most[:rows])

        self._measure((kind, weight.shape, weight.dtype, bias is None), weight, make)

    def norm(self, weight: Tensor, heads: int) -> None:
        """In fp32 whatever the model's type is: the norm computes in it, and rounding would hide how."""

        def make() -> Callable[[int], Tensor]:
            norm, row = RmsNorm(torch.ones(weight.shape), 0.0), probe_row(weight.shape[0], torch.float32)
            if heads == 1:
                most = row.repeat(LADDER[-1], 1)
                return lambda rows: norm(most[:rows])
            beside = row.repeat(LADDER[-1], heads + 1, 1)[:, :heads]  # others, as in qkv
            return lambda rows: norm(beside[:rows])

        self._measure((RmsNorm, weight.shape, heads), weight, make)

    def _measure(self, layer: Hashable, weight: Tensor, make: Callable[[], Callable[[int], Tensor]]) -> None:
        key = (layer, torch.get_num_threads())
        if weight.device.type != "cpu" or key in self._measured:
            return
        if key not in self.KNOWN:
            self.KNOWN[key] = agreement(make(), LADDER, self._pulse)
        self._measured.add(key, self.KNOWN[key])
        self.__dict__.pop("rows", None)


class _PlainBegin:
    def __init__(self, embed: Tensor, rope: Rope) -> None:
        self._embed = embed
        self._rope = rope

    def __call__(self, held: Held, latest: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        ids = torch.where(held.ids < 0, latest.index_select(0, held.rows), held.ids)
        return F.embedding(ids, self._embed), self._rope.at(held.positions)


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
        self.activation = _silu_on_cpu if weight.device.type == "cpu" else F.silu

    def __call__(self, x: Tensor) -> Tensor:
        both = F.linear(x, self.weight, self.bias)
        return self.activation(both[:, : self.inner]) * both[:, self.inner :]


def _silu_on_cpu(x: Tensor) -> Tensor:
    """torch's own silu computes the ends of each thread's share with another exponential than the rest, so its last bits would
    depend on where a row stands. In fp64 they are gone after rounding."""
    return F.silu(x.double()).to(x.dtype)


class _PackedLinear:
    # The layout hint changes the speed by at most 20 %; 256 rows did best for few and for many rows.
    HINT = 256

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str = "none") -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self.HINT)
        self.bias = bias
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, self.activation, [], "")
        return out


class _PackedGated:
    """The activation is part of the gate's product, where every result is computed alike."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        inner = weight.shape[0] // 2
        gate_bias, up_bias = (None, None) if bias is None else (bias[:inner].contiguous(), bias[inner:].contiguous())
        self.gate = _PackedLinear(weight[:inner], gate_bias, "swish")
        self.up = _PackedLinear(weight[inner:], up_bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.gate(x).mul_(self.up(x))
