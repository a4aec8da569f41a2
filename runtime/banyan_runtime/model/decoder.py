"""The one decoder: embedding, blocks of attention and gated MLP, norm, head. What a family adds is an option of its spec."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from banyan_runtime.model.attention import Attention, Held
from banyan_runtime.model.heads import joined
from banyan_runtime.model.invariance import aligned, report
from banyan_runtime.model.layers import Entry, Head, Kernels
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
        self.sampler = kernels.sampler()
        self.mail = kernels.mail(self.embed.device)
        self._begin = kernels.begin(self.embed, rope)
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
        h, deltas = self._through(h, tokens, at, attention)
        return joined([block + delta for block, delta in zip(h, deltas, strict=True)])[:tokens]

    def hidden_held(self, held: Held, latest: Tensor, attention: Attention, out: Tensor) -> None:
        """Likewise of the tokens that `held` tells by then, into `out`; as `layers.Begin`. For kernels to which the number of rows is all
        one. Can be captured."""
        h, at = self._begin(held, latest)
        (block,), (delta,) = self._through([h], held.size, [at], attention)
        torch.add(block, delta, out=out)

    def _through(
        self, h: list[Tensor], tokens: int, at: list[tuple[Tensor, Tensor]], attention: Attention
    ) -> tuple[list[Tensor], list[Tensor]]:
        deltas: list[Tensor] | None = None
        for block in self.blocks:
            self.pulse()
            h, deltas = block(h, deltas, tokens, at, attention)
        assert deltas is not None, "a model has blocks"
        return h, deltas

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [n, vocab_size] of n hidden states."""
        self.pulse()
        return self._by_blocks(hidden, lambda block: self.head(self.norm(block)))

    def pick(self, hidden: Tensor, settings: Tensor | None, tokens: Tensor, failed: Tensor) -> None:
        """A token for each of n hidden states, and which rows failed: as `Sampler.pick`."""
        self.pulse()
        self.sampler.pick(self._by_blocks(hidden, lambda block: self.head.own(self.norm(block))), settings, tokens, failed)

    def normed(self, hidden: Tensor) -> Tensor:
        """n hidden states as the head reads them, [n, hidden_size]."""
        return self._by_blocks(hidden, self.norm)

    def _by_blocks(self, hidden: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        rows = hidden.shape[0]
        sizes = self.rows.split(rows)
        if padding := sum(sizes) - rows:
            hidden = F.pad(hidden, (0, 0, 0, padding))
        return joined([compute(aligned(block)) for block in torch.split(hidden, sizes)])[:rows]


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

    def __call__(
        self, h: list[Tensor], deltas: list[Tensor] | None, tokens: int, at: list[tuple[Tensor, Tensor]], attention: Attention
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Blocks [rows, hidden_size], of which the first `tokens` rows are real and the rest padding, and what is still to be added to
        them; likewise what comes out: the next norm adds it. Everything but attention is computed block by block."""
        h, qkv = _through(self.qkv, h, deltas)
        attended = self.heads.attended(self.index, qkv, at, attention).reshape(tokens, -1)
        sizes = [block.shape[0] for block in h]
        if padding := sum(sizes) - tokens:
            attended = F.pad(attended, (0, 0, 0, padding))
        h, inner = _through(self.gate_up, h, [self.out(aligned(part)) for part in torch.split(attended, sizes)])
        return h, [self.down(block) for block in inner]


def _through(entry: Entry, h: list[Tensor], deltas: list[Tensor] | None) -> tuple[list[Tensor], list[Tensor]]:
    """The sums, and what comes out."""
    added: Sequence[Tensor | None] = deltas or [None] * len(h)
    sums, out = zip(*map(entry, h, added), strict=True)
    return list(sums), list(out)
