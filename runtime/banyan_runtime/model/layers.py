"""The blocks' parts: norm, linear, gated MLP, head. Plain callables on [rows, width] tensors, no module machinery: a step of a
small model is bound by the number of Python calls.

`Kernels` chooses what computes a step from its tokens to the next ones, once at start: `PlainKernels` anywhere, `FusedKernels` on CUDA.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from banyan_runtime.model.attention import Held
from banyan_runtime.model.heads import Heads, PlainHeads
from banyan_runtime.model.mail import Mail
from banyan_runtime.model.rope import Rope
from banyan_runtime.model.sampler import PlainSampler, Sampler
from banyan_runtime.model.spec import ModelSpec


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

    def norm(self, weight: Tensor, eps: float) -> RmsNorm:
        """The norm of vectors like weight [width]."""

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


class PlainKernels:
    """torch's own products."""

    def norm(self, weight: Tensor, eps: float) -> RmsNorm:
        return RmsNorm(weight, eps)

    def heads(self, spec: ModelSpec, rope: Rope, q_norm: Tensor | None, k_norm: Tensor | None) -> Heads:
        if q_norm is None or k_norm is None:
            return PlainHeads(spec, rope)
        return PlainHeads(spec, rope, (self.norm(q_norm, spec.norm_eps), self.norm(k_norm, spec.norm_eps)))

    def entry(self, norm: RmsNorm, layer: Layer) -> Entry:
        return Entry(norm, layer)

    def linear(self, weight: Tensor, bias: Tensor | None) -> Layer:
        return _PlainLinear(weight, bias)

    def gated(self, weight: Tensor, bias: Tensor | None) -> Layer:
        return _PlainGated(weight, bias)

    def begin(self, embed: Tensor, rope: Rope) -> Begin:
        return _PlainBegin(embed, rope)

    def sampler(self) -> Sampler:
        return PlainSampler()

    def mail(self, device: torch.device) -> Mail:
        return Mail()


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

    def __call__(self, x: Tensor) -> Tensor:
        both = F.linear(x, self.weight, self.bias)
        return F.silu(both[:, : self.inner]) * both[:, self.inner :]
