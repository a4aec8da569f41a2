"""The one decoder: embedding, blocks of attention and gated MLP, norm, head. What a family adds is an option of its spec."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from banyan_runtime.model.attention import Attention
from banyan_runtime.model.invariance import aligned, report
from banyan_runtime.model.layers import Head, Kernels
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
        self.head = Head(self.embed if spec.tied else weights.pop("head"), kernels)
        assert not weights, f"no layer took {sorted(weights)}"
        self.rows = kernels.rows
        if self.embed.device.type == "cpu":
            report("layers are", self.rows)

    @property
    def batch_invariant(self) -> bool:
        """Whether the bits of a token's results are the same whatever else is in the step."""
        return self.rows.invariant

    def hidden(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Last hidden states [T, hidden_size] of tokens [T] at positions [T]; `attention` was planned for them."""
        tokens = token_ids.shape[0]
        sizes = self.rows.split(tokens)
        if padding := sum(sizes) - tokens:
            token_ids, positions = F.pad(token_ids, (0, padding)), F.pad(positions, (0, padding))
        h = [F.embedding(ids, self.embed) for ids in torch.split(token_ids, sizes)]
        at = [self.rope.at(block) for block in torch.split(positions, sizes)]
        for block in self.blocks:
            self.pulse()
            h = block(h, tokens, at, attention)
        return _joined(h)[:tokens]

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [n, vocab_size] of n hidden states."""
        self.pulse()
        return self._by_blocks(hidden, lambda block: self.head(self.norm(block)))

    def normed(self, hidden: Tensor) -> Tensor:
        """n hidden states as the head reads them, [n, hidden_size]."""
        return self._by_blocks(hidden, self.norm)

    def _by_blocks(self, hidden: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        rows = hidden.shape[0]
        sizes = self.rows.split(rows)
        if padding := sum(sizes) - rows:
            hidden = F.pad(hidden, (0, 0, 0, padding))
        return _joined([compute(aligned(block)) for block in torch.split(hidden, sizes)])[:rows]


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
        self.input_norm = kernels.norm(take("input_norm"), spec.norm_eps)
        self.qkv = kernels.linear(take("qkv"), bias("qkv_bias", spec.qkv_bias))
        self.q_norm = kernels.norm(take("q_norm"), spec.norm_eps, spec.heads) if spec.qk_norm else None
        self.k_norm = kernels.norm(take("k_norm"), spec.norm_eps, spec.kv_heads) if spec.qk_norm else None
        self.out = kernels.linear(take("out"), bias("out_bias", spec.output_bias))
        self.mlp_norm = kernels.norm(take("mlp_norm"), spec.norm_eps)
        self.gate_up = kernels.gated(take("gate_up"), bias("gate_up_bias", spec.mlp_bias))
        self.down = kernels.linear(take("down"), bias("down_bias", spec.mlp_bias))

    def __call__(self, h: list[Tensor], tokens: int, at: list[tuple[Tensor, Tensor]], attention: Attention) -> list[Tensor]:
        """h: blocks [rows, hidden_size], of which the first `tokens` rows are real and the rest padding. Everything but
        attention is computed block by block."""
        q, k, v = (_joined(parts)[:tokens] for parts in zip(*map(self._project, h, at), strict=True))
        attended = attention.attend(self.index, q, k, v).view(tokens, -1)
        sizes = [block.shape[0] for block in h]
        if padding := sum(sizes) - tokens:
            attended = F.pad(attended, (0, 0, 0, padding))
        return [self._finish(block, aligned(part)) for block, part in zip(h, torch.split(attended, sizes), strict=True)]

    def _project(self, h: Tensor, at: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [rows, heads, head_dim] of a block, at their positions."""
        q, k, v = torch.split(self.qkv(self.input_norm(h)).view(h.shape[0], -1, self.head_dim), self.heads, 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.rope.rotate(q, at), self.rope.rotate(k, at), v

    def _finish(self, h: Tensor, attended: Tensor) -> Tensor:
        """What attention [rows, heads * head_dim] and MLP add to a block."""
        h = h + self.out(attended)
        return h + self.down(self.gate_up(self.mlp_norm(h)))


def _joined(blocks: Sequence[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(list(blocks))
