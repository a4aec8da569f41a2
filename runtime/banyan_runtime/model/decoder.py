"""The one decoder: embedding, blocks of attention and gated MLP, norm, head. What a family adds is an option of its spec."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from banyan_runtime.model.attention import Attention
from banyan_runtime.model.invariance import round_up
from banyan_runtime.model.layers import Kernels, RmsNorm
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
        self.norm = RmsNorm(weights.pop("norm"), spec.norm_eps)
        self.head = kernels.linear(self.embed if spec.tied else weights.pop("head"), None)
        assert not weights, f"no layer took {sorted(weights)}"

    def hidden(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Last hidden states [T, hidden_size] of tokens [T] at positions [T]; `attention` was planned for them."""
        tokens = token_ids.shape[0]
        padding = round_up(tokens, self.kernels.row_multiple) - tokens
        h = F.embedding(F.pad(token_ids, (0, padding)) if padding else token_ids, self.embed)
        at = self.rope.at(positions)
        for block in self.blocks:
            self.pulse()
            h = block(h, tokens, at, attention)
        return h[:tokens]

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [n, vocab_size] of n hidden states."""
        self.pulse()
        rows = hidden.shape[0]
        padding = round_up(rows, self.kernels.row_multiple) - rows
        normed = self.norm(F.pad(hidden, (0, 0, 0, padding)) if padding else hidden)
        return self.head(normed)[:rows].float()


class _Block:
    def __init__(self, spec: ModelSpec, index: int, weights: Weights, kernels: Kernels, rope: Rope) -> None:
        def take(name: str) -> Tensor:
            return weights.pop(f"layers.{index}.{name}")

        def bias(name: str, present: bool) -> Tensor | None:
            return take(name) if present else None

        self.index = index
        self.rope = rope
        self.heads = [spec.heads, spec.kv_heads, spec.kv_heads]
        self.head_dim = spec.head_dim
        self.input_norm = RmsNorm(take("input_norm"), spec.norm_eps)
        self.qkv = kernels.linear(take("qkv"), bias("qkv_bias", spec.qkv_bias))
        self.q_norm = RmsNorm(take("q_norm"), spec.norm_eps) if spec.qk_norm else None
        self.k_norm = RmsNorm(take("k_norm"), spec.norm_eps) if spec.qk_norm else None
        self.out = kernels.linear(take("out"), bias("out_bias", spec.output_bias))
        self.mlp_norm = RmsNorm(take("mlp_norm"), spec.norm_eps)
        self.gate_up = kernels.gated(take("gate_up"), bias("gate_up_bias", spec.mlp_bias))
        self.down = kernels.linear(take("down"), bias("down_bias", spec.mlp_bias))

    def __call__(self, h: Tensor, tokens: int, at: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        """h [rows, hidden_size], of which the first `tokens` rows are real and the rest padding."""
        qkv = self.qkv(self.input_norm(h))[:tokens].view(tokens, -1, self.head_dim)
        q, k, v = torch.split(qkv, self.heads, 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        attended = attention.attend(self.index, self.rope.rotate(q, at), self.rope.rotate(k, at), v).view(tokens, -1)
        if tokens < h.shape[0]:
            attended = F.pad(attended, (0, 0, 0, h.shape[0] - tokens))
        h = h + self.out(attended)
        return h + self.down(self.gate_up(self.mlp_norm(h)))
