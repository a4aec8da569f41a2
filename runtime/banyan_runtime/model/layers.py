"""The blocks' parts: norm, linear, MLP, head. Plain callables on [rows, width] tensors, no module machinery: a step of a small model is
bound by the number of Python calls.

`Kernels` chooses what computes a step from its tokens to the next ones, once at start: `PlainKernels` anywhere, `FusedKernels` on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from banyan_runtime.model.attention import Held
from banyan_runtime.model.heads import Heads, PlainHeads, unit_norm
from banyan_runtime.model.mail import Mail
from banyan_runtime.model.rope import Ropes, Rotation
from banyan_runtime.model.sampler import PlainSampler, Sampler
from banyan_runtime.models.config import Activation, DecoderSpec, Mlp
from banyan_runtime.models.config import Norm as NormSpec

ACTIVATIONS: Final[dict[Activation, Callable[[Tensor], Tensor]]] = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


class Layer(Protocol):
    """Maps [rows, in] to [rows, out] in the model's dtype, each row by itself."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Begun(NamedTuple):
    """A step of T tokens before its first layer."""

    hidden: Tensor  # [T, hidden_size]
    rotations: list[Rotation]
    ids: Tensor | None  # int64 [T], where layers read them


class Begin(Protocol):
    """What a replayed step begins with."""

    def __call__(self, held: Held, latest: Tensor) -> Begun:
        """Of the tokens that `held` tells by then. A negative token is the latest of its row: `latest` int64 [rows]. Can be captured."""


class Norm(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """The norm of x [rows, width]."""

    def added(self, h: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """h + delta, and its norm. Both [rows, width]."""
        h = h + delta
        return h, self(h)


class Kernels(Protocol):
    """Makes layers of weights; may take the weights over in another form. And what is computed before the first layer, and behind the
    last."""

    def norm(self, spec: NormSpec, weight: Tensor, bias: Tensor | None = None) -> Norm:
        """The norm of vectors like weight [width]."""

    def heads(self, spec: DecoderSpec, layer: int, q_norm: Tensor | None, k_norm: Tensor | None) -> Heads:
        """What is done to heads before attention; weights of their norms [head_dim], or [rows] of a norm over all heads."""

    def entry(self, norm: Norm, layer: Layer) -> Entry:
        """A layer behind a norm; both were made by these kernels."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Layer:
        """x @ weight.T + bias; weight [out, in], bias [out]."""

    def activated(self, mlp: Mlp, weight: Tensor, bias: Tensor | None) -> Layer:
        """The MLP up to its activation; weight [2 * inner, in] holds gate above up, or [inner, in] without a gate; bias as many rows."""

    def begin(self, spec: DecoderSpec, embed: Tensor, ropes: Ropes) -> Begin:
        """What replayed steps begin with; embed [vocab_size, hidden_size]."""

    def sampler(self) -> Sampler:
        """What makes tokens of logits, in steps of every kind."""

    def mail(self, device: torch.device) -> Mail:
        """How steps are told, and tokens sent."""


class RmsNorm(Norm):
    """x / sqrt(mean(x^2) + eps) in float32, times the weight (Zhang and Sennrich 2019).

    `wide`: the weight is float32 and applied before the result is rounded to the model's dtype (Gemma, OLMo); else after (Llama).
    """

    def __init__(self, weight: Tensor, eps: float, *, wide: bool = False) -> None:
        self.weight = weight
        self.eps = eps
        self.wide = wide

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.mul(wide, wide).mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return (wide * scale * self.weight).to(x.dtype) if self.wide else (wide * scale).to(x.dtype) * self.weight


class LayerNorm(Norm):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias in float32 (Ba et al. 2016)."""

    def __init__(self, weight: Tensor, eps: float, bias: Tensor | None) -> None:
        self.weight = weight
        self.eps = eps
        self.bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self.eps).to(x.dtype)


class Entry:
    """A norm and the layer behind it: the way into attention, and into the MLP."""

    def __init__(self, norm: Norm, layer: Layer) -> None:
        self.norm = norm
        self.layer = layer

    def __call__(self, h: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """h + delta, and the layer of its norm. h and delta [rows, width]; None: nothing is added."""
        if delta is None:
            return h, self.layer(self.norm(h))
        h, normed = self.norm.added(h, delta)
        return h, self.layer(normed)


class PlainKernels:
    """torch's own products."""

    def norm(self, spec: NormSpec, weight: Tensor, bias: Tensor | None = None) -> Norm:
        if spec.kind == "layer":
            return LayerNorm(weight, spec.eps, bias)
        return RmsNorm(weight, spec.eps, wide=spec.kind == "rms_wide")

    def heads(self, spec: DecoderSpec, layer: int, q_norm: Tensor | None, k_norm: Tensor | None) -> Heads:
        attention = spec.layers[layer].attention
        first, second = (None if weight is None else self.norm(spec.norm, weight) for weight in (q_norm, k_norm))
        rope = None if attention.rope is None else spec.ropes.index(attention.rope)
        return PlainHeads(attention, rope, first, second, unit_norm(spec.norm.eps) if attention.value_norm else None)

    def entry(self, norm: Norm, layer: Layer) -> Entry:
        return Entry(norm, layer)

    def linear(self, weight: Tensor, bias: Tensor | None) -> Layer:
        return _PlainLinear(weight, bias)

    def activated(self, mlp: Mlp, weight: Tensor, bias: Tensor | None) -> Layer:
        return (_PlainGated if mlp.gated else _PlainActivated)(weight, bias, ACTIVATIONS[mlp.activation])

    def begin(self, spec: DecoderSpec, embed: Tensor, ropes: Ropes) -> Begin:
        return _PlainBegin(embed, spec.embed_scale, ropes)

    def sampler(self) -> Sampler:
        return PlainSampler()

    def mail(self, device: torch.device) -> Mail:
        return Mail()


def embedded(ids: Tensor, embed: Tensor, scale: float) -> Tensor:
    """Rows of embed [vocabulary, width] for ids [T], times the scale rounded to their dtype, as such models were trained."""
    found = F.embedding(ids, embed)
    return found if scale == 1.0 else found * torch.tensor(scale, dtype=embed.dtype).item()


class _PlainBegin:
    def __init__(self, embed: Tensor, scale: float, ropes: Ropes) -> None:
        self._embed = embed
        self._scale = scale
        self._ropes = ropes

    def __call__(self, held: Held, latest: Tensor) -> Begun:
        ids = torch.where(held.ids < 0, latest.index_select(0, held.rows), held.ids)
        return Begun(embedded(ids, self._embed, self._scale), self._ropes.at(held.positions), ids)


class _PlainLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class _PlainActivated:
    def __init__(self, weight: Tensor, bias: Tensor | None, activation: Callable[[Tensor], Tensor]) -> None:
        self.weight = weight
        self.bias = bias
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.activation(F.linear(x, self.weight, self.bias))


class _PlainGated(_PlainActivated):
    def __call__(self, x: Tensor) -> Tensor:
        both = F.linear(x, self.weight, self.bias)
        inner = both.shape[1] // 2
        return self.activation(both[:, :inner]) * both[:, inner:]
