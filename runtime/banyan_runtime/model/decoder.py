"""The decoder in torch: embedding, blocks of attention and MLP, norm, head, as `DecoderSpec` describes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from banyan_runtime.model.attention import Attention, Held
from banyan_runtime.model.layers import ACTIVATIONS, Begun, Kernels, Layer, Norm, embedded
from banyan_runtime.model.mail import Mail
from banyan_runtime.model.rope import Ropes, Rotation
from banyan_runtime.model.sampler import Sampler
from banyan_runtime.models.config import DecoderSpec
from banyan_runtime.step import Pulse

Weights = dict[str, Tensor]


class StepDecoder(Protocol):
    """Token ids → hidden states → logits, for every implementation of the layers."""

    spec: DecoderSpec
    dtype: torch.dtype
    embed: Tensor  # [vocab_size, width]
    sampler: Sampler
    mail: Mail

    def reserve(self, positions: int) -> None:
        """Called before the first step: no text has more positions."""

    def hidden(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Last hidden states [T, hidden_size] of tokens [T] at positions [T]; `attention` was planned for them."""

    def hidden_held(self, held: Held, latest: Tensor, attention: Attention, out: Tensor) -> None:
        """Likewise of the tokens that `held` tells by then, into `out`; as `layers.Begin`. Can be captured."""

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [n, vocab_size] of n hidden states."""

    def pick(self, hidden: Tensor, settings: Tensor | None, tokens: Tensor, failed: Tensor) -> None:
        """A token for each of n hidden states, and which rows failed: as `Sampler.pick`."""

    def normed(self, hidden: Tensor) -> Tensor:
        """n hidden states as the head reads them, [n, hidden_size]."""


class Decoder:
    """A `StepDecoder` of our own layers. Takes the weights over: each leaves the dict when its layer is made, so packed
    copies never double the memory."""

    def __init__(self, spec: DecoderSpec, weights: Weights, kernels: Kernels, ropes: Ropes, pulse: Pulse) -> None:
        self.spec = spec
        self.pulse = pulse
        self.kernels = kernels
        self.ropes = ropes
        self.embed = weights.pop("embed")
        self.dtype = self.embed.dtype
        self.inputs = _LayerInputs(spec, weights, kernels) if spec.layer_inputs is not None else None
        self.blocks = [_Block(spec, index, weights, kernels) for index in range(len(spec.layers))]
        self.norm = _norm(spec, weights, kernels, "norm")
        self.head = _Head(spec, kernels.linear(self.embed if spec.tied else weights.pop("head"), None))
        self.sampler = kernels.sampler()
        self.mail = kernels.mail(self.embed.device)
        self._begin = kernels.begin(spec, self.embed, ropes)
        assert not weights, f"no layer took {sorted(weights)}"

    def reserve(self, positions: int) -> None:
        self.ropes.reserve(positions)

    def hidden(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        h = embedded(token_ids, self.embed, self.spec.embed_scale)
        h, delta = self._through(Begun(h, self.ropes.at(positions), token_ids), attention)
        return h if delta is None else h + delta

    def hidden_held(self, held: Held, latest: Tensor, attention: Attention, out: Tensor) -> None:
        h, delta = self._through(self._begin(held, latest), attention)
        if delta is None:
            out.copy_(h)
        else:
            torch.add(h, delta, out=out)

    def _through(self, begun: Begun, attention: Attention) -> tuple[Tensor, Tensor | None]:
        h, delta = begun.hidden, None
        inputs = None if self.inputs is None or begun.ids is None else self.inputs(begun.ids, h)
        for index, block in enumerate(self.blocks):
            self.pulse()
            h, delta = block(h, delta, begun.rotations, attention)
            if block.inputs is not None and inputs is not None:
                h = h + delta
                delta = block.inputs(h, inputs[:, index])
            if block.scale is not None:
                h, delta = (h + delta) * block.scale, None
        return h, delta

    def logits(self, hidden: Tensor) -> Tensor:
        self.pulse()
        return self.head(self.norm(hidden)).float()

    def pick(self, hidden: Tensor, settings: Tensor | None, tokens: Tensor, failed: Tensor) -> None:
        self.pulse()
        self.sampler.pick(self.head(self.norm(hidden)), settings, tokens, failed)

    def normed(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class _Head:
    """Logits, scaled and capped."""

    def __init__(self, spec: DecoderSpec, linear: Layer) -> None:
        self._linear = linear
        self._scale, self._cap = spec.logit_scale, spec.logit_soft_cap

    def __call__(self, x: Tensor) -> Tensor:
        logits = self._linear(x)
        if self._scale != 1.0:
            logits = logits * self._scale
        return logits if self._cap is None else torch.tanh(logits / self._cap) * self._cap


class _LayerInputs:
    """What each layer adds of the tokens themselves: (their embedding + a projection of their hidden state) / sqrt(2)."""

    def __init__(self, spec: DecoderSpec, weights: Weights, kernels: Kernels) -> None:
        assert spec.layer_inputs is not None
        self._shape = (len(spec.layers), spec.layer_inputs.size)
        self._hidden_scale = spec.hidden_size**-0.5
        self._embed = weights.pop("inputs_embed")
        self._projection = kernels.linear(weights.pop("inputs_projection"), None)
        self._norm = _norm(spec, weights, kernels, "inputs_norm")

    def __call__(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """ids [T] and their scaled embeddings [T, hidden_size] → [T, layers, size]."""
        own = embedded(ids, self._embed, self._shape[1] ** 0.5).view(-1, *self._shape)
        projected = (self._projection(hidden) * self._hidden_scale).view(-1, *self._shape)
        return (self._norm(projected) + own) * 2**-0.5


class _InputGate:
    """norm(up(act(gate(h)) * inputs))"""

    def __init__(self, spec: DecoderSpec, at: str, weights: Weights, kernels: Kernels) -> None:
        assert spec.layer_inputs is not None
        self._activation = ACTIVATIONS[spec.layer_inputs.activation]
        self._gate = kernels.linear(weights.pop(f"{at}.inputs_gate"), None)
        self._projection = kernels.linear(weights.pop(f"{at}.inputs_projection"), None)
        self._norm = _norm(spec, weights, kernels, f"{at}.inputs_norm")

    def __call__(self, h: Tensor, inputs: Tensor) -> Tensor:
        """h [T, hidden_size] and inputs [T, size] → what is to be added to h."""
        return self._norm(self._projection(self._activation(self._gate(h)) * inputs))


class _Block:
    def __init__(self, spec: DecoderSpec, index: int, weights: Weights, kernels: Kernels) -> None:
        at, layer = f"layers.{index}", spec.layers[index]
        attention, mlp = layer.attention, layer.mlp

        def norm(name: str, *placements: str) -> Norm | None:
            return _norm(spec, weights, kernels, f"{at}.{name}") if layer.norms in placements else None

        def bias(name: str, present: bool) -> Tensor | None:
            return weights.pop(f"{at}.{name}_bias") if present else None

        self.index = index
        self.residual_scale = layer.residual_scale
        self.qkv = kernels.linear(weights.pop(f"{at}.qkv"), bias("qkv", attention.qkv_bias))
        q_norm, k_norm = (weights.pop(f"{at}.{name}", None) for name in ("q_norm", "k_norm"))
        self.heads = kernels.heads(spec, index, q_norm, k_norm)
        self.out = kernels.linear(weights.pop(f"{at}.out"), bias("out", attention.out_bias))
        up = "gate_up" if mlp.gated else "up"
        self.up = kernels.activated(mlp, weights.pop(f"{at}.{up}"), bias(up, mlp.bias))
        self.down = kernels.linear(weights.pop(f"{at}.down"), bias("down", mlp.bias))
        self.input_norm = norm("input_norm", "pre", "both", "parallel")
        self.mlp_norm = norm("mlp_norm", "pre", "both")
        self.post_attention_norm = norm("post_attention_norm", "post", "both")
        self.post_mlp_norm = norm("post_mlp_norm", "post", "both")
        self.qkv_entry = kernels.entry(self.input_norm, self.qkv) if self.input_norm is not None else None
        self.up_entry = kernels.entry(self.mlp_norm, self.up) if self.mlp_norm is not None else None
        self.inputs = _InputGate(spec, at, weights, kernels) if spec.layer_inputs is not None else None
        self.scale = weights.pop(f"{at}.scale") if layer.learned_scale else None
        self._parallel = layer.norms == "parallel"

    def __call__(self, h: Tensor, delta: Tensor | None, rotations: Sequence[Rotation], attention: Attention) -> tuple[Tensor, Tensor]:
        """Hidden states [T, hidden_size], and what is still to be added to them; likewise what comes out: the next norm adds it."""
        if self._parallel:
            assert self.input_norm is not None
            h, normed = (h, self.input_norm(h)) if delta is None else self.input_norm.added(h, delta)
            return h, self._attended(self.qkv(normed), rotations, attention) + self.down(self.up(normed))
        if self.qkv_entry is not None:
            h, qkv = self.qkv_entry(h, delta)
        else:
            h = h if delta is None else h + delta
            qkv = self.qkv(h)
        delta = self._scaled(self._attended(qkv, rotations, attention), self.post_attention_norm)
        if self.up_entry is not None:
            h, inner = self.up_entry(h, delta)
        else:
            h = h + delta
            inner = self.up(h)
        return h, self._scaled(self.down(inner), self.post_mlp_norm)

    def _attended(self, qkv: Tensor, rotations: Sequence[Rotation], attention: Attention) -> Tensor:
        return self.out(self.heads.attended(self.index, qkv, rotations, attention).flatten(1))

    def _scaled(self, delta: Tensor, norm: Norm | None) -> Tensor:
        delta = delta if norm is None else norm(delta)
        return delta if self.residual_scale == 1.0 else delta * self.residual_scale


def _norm(spec: DecoderSpec, weights: Weights, kernels: Kernels, name: str) -> Norm:
    return kernels.norm(spec.norm, weights.pop(name), weights.pop(f"{name}_bias", None))
