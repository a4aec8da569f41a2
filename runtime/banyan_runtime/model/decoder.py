"""The one decoder: embedding, blocks of attention and gated MLP, norm, head. What a family adds is an option of its spec."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from banyan_runtime.model.attention import Attention, Held
from banyan_runtime.model.layers import Kernels
from banyan_runtime.model.rope import Rope
from banyan_runtime.model.spec import ModelSpec
from banyan_runtime.step import Pulse

Weights = dict[str, Tensor]


class Decoder:
    """Token ids → hidden states → logits. Takes the weights over: each leaves the dict when its layer is made, so packed
    copies never double the memory."""

    def __init__(self, spec: ModelSpec, weights: Weights, kernels: Kernels, rope: Rope, pulse: Pulse) -> None:
        self.spec = spec
        self.pulse = pulse
        self.kernels = kernels
        self.rope = rope
        self.embed = weights.pop("embed")
        self.dtype = self.embed.dtype
        self.blocks = [_Block(spec, index, weights, kernels, rope) for index in range(spec.layers)]
        self.norm = kernels.norm(weights.pop("norm"), spec.norm_eps)
        self.head = kernels.linear(self.embed if spec.tied else weights.pop("head"), None)
        self.sampler = kernels.sampler()
        self.mail = kernels.mail(self.embed.device)
        self._begin = kernels.begin(self.embed, rope)
        assert not weights, f"no layer took {sorted(weights)}"

    def hidden(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Last hidden states [T, hidden_size] of tokens [T] at positions [T]; `attention` was planned for them."""
        h, delta = self._through(F.embedding(token_ids, self.embed), self.rope.at(positions), attention)
        return h + delta

    def hidden_held(self, held: Held, latest: Tensor, attention: Attention, out: Tensor) -> None:
        """Likewise of the tokens that `held` tells by then, into `out`; as `layers.Begin`. Can be captured."""
        h, at = self._begin(held, latest)
        h, delta = self._through(h, at, attention)
        torch.add(h, delta, out=out)

    def _through(self, h: Tensor, at: tuple[Tensor, Tensor], attention: Attention) -> tuple[Tensor, Tensor]:
        delta: Tensor | None = None
        for block in self.blocks:
            self.pulse()
            h, delta = block(h, delta, at, attention)
        assert delta is not None, "a model has blocks"
        return h, delta

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [n, vocab_size] of n hidden states."""
        self.pulse()
        return self.head(self.norm(hidden)).float()

    def pick(self, hidden: Tensor, settings: Tensor | None, tokens: Tensor, failed: Tensor) -> None:
        """A token for each of n hidden states, and which rows failed: as `Sampler.pick`."""
        self.pulse()
        self.sampler.pick(self.head(self.norm(hidden)), settings, tokens, failed)

    def normed(self, hidden: Tensor) -> Tensor:
        """n hidden states as the head reads them, [n, hidden_size]."""
        return self.norm(hidden)


class _Block:
    def __init__(self, spec: ModelSpec, index: int, weights: Weights, kernels: Kernels, rope: Rope) -> None:
        def take(name: str) -> Tensor:
            return weights.pop(f"layers.{index}.{name}")

        def bias(name: str, present: bool) -> Tensor | None:
            return take(name) if present else None

        self.index = index
        qkv = kernels.linear(take("qkv"), bias("qkv_bias", spec.qkv_bias))
        self.qkv = kernels.entry(kernels.norm(take("input_norm"), spec.norm_eps), qkv)
        norms = (take("q_norm"), take("k_norm")) if spec.qk_norm else (None, None)
        self.heads = kernels.heads(spec, rope, *norms)
        self.out = kernels.linear(take("out"), bias("out_bias", spec.output_bias))
        gate_up = kernels.gated(take("gate_up"), bias("gate_up_bias", spec.mlp_bias))
        self.gate_up = kernels.entry(kernels.norm(take("mlp_norm"), spec.norm_eps), gate_up)
        self.down = kernels.linear(take("down"), bias("down_bias", spec.mlp_bias))

    def __call__(self, h: Tensor, delta: Tensor | None, at: tuple[Tensor, Tensor], attention: Attention) -> tuple[Tensor, Tensor]:
        """Hidden states [T, hidden_size], and what is still to be added to them; likewise what comes out: the next norm adds it."""
        h, qkv = self.qkv(h, delta)
        attended = self.heads.attended(self.index, qkv, at, attention).reshape(h.shape[0], -1)
        h, inner = self.gate_up(h, self.out(attended))
        return h, self.down(inner)
