"""Layers on CUDA with what is done to rows between products fused into one launch each (`kernels/rows.py`), and both ends of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from banyan_runtime.model.attention import Attention, Held
from banyan_runtime.model.attention.triton_paged import TritonAttention, fuses_heads
from banyan_runtime.model.fused_products import Arrived, FusedGated, FusedLinear
from banyan_runtime.model.fused_sampler import FusedSampler
from banyan_runtime.model.heads import Heads
from banyan_runtime.model.kernel_choices import KernelChoices
from banyan_runtime.model.kernels import missing, needed_capability, power_of_two
from banyan_runtime.model.layers import Begin, Begun, Entry, Layer, Norm, PlainKernels, RmsNorm
from banyan_runtime.model.mail import DirectMail, Mail
from banyan_runtime.model.pool import Cells
from banyan_runtime.model.rope import Ropes, RopeTable, Rotation
from banyan_runtime.model.sampler import Sampler
from banyan_runtime.models.config import DecoderSpec, Feature, Mlp
from banyan_runtime.models.config import Norm as NormSpec
from banyan_runtime.step import PADDING_SLOT

_FEW: Final = 64  # rows: of fewer ones each is spread over programs, which keeps a GPU busy
_BEGIN_FEATURES: Final[frozenset[Feature]] = frozenset({"embedding scale", "layer inputs", "query growth"})
"""Of models that torch's own operations begin."""
_TOGETHER: Final = 4096  # numbers of heads that a program takes else, about


def supports(device: torch.device, kept: torch.dtype) -> bool:
    """Whether it computes there, with keys and values kept in such a type."""
    return device.type == "cuda" and missing() is None and torch.cuda.get_device_capability(device) >= needed_capability(kept)


class FusedKernels(PlainKernels):
    """torch's own products, Triton's of few rows and, where that is faster, of some; and Triton between them, before and behind."""

    def __init__(self, device_name: str = "") -> None:
        self.choices = KernelChoices(device_name)
        self._arrived = Arrived()

    def norm(self, spec: NormSpec, weight: Tensor, bias: Tensor | None = None) -> Norm:
        if spec.kind == "layer":
            return super().norm(spec, weight, bias)
        return _FusedNorm(weight, spec.eps, wide=spec.kind == "rms_wide")

    def heads(self, spec: DecoderSpec, layer: int, q_norm: Tensor | None, k_norm: Tensor | None) -> Heads:
        if not fuses_heads(spec.layers[layer].attention, spec.norm):
            return super().heads(spec, layer, q_norm, k_norm)
        return _FusedHeads(spec, layer, q_norm, k_norm)

    def entry(self, norm: Norm, layer: Layer) -> Entry:
        fused = isinstance(norm, _FusedNorm) and not norm.wide and isinstance(layer, FusedLinear)
        return _FusedEntry(norm, layer) if fused else super().entry(norm, layer)

    def linear(self, weight: Tensor, bias: Tensor | None) -> Layer:
        return self._added(FusedLinear(weight, bias, self.choices, self._arrived))

    def activated(self, mlp: Mlp, weight: Tensor, bias: Tensor | None) -> Layer:
        if not mlp.gated:
            return super().activated(mlp, weight, bias)
        return self._added(FusedGated(weight, bias, self.choices, self._arrived, mlp.activation))

    def _added(self, layer: FusedLinear) -> FusedLinear:
        self.choices.add(layer.product, layer.offers)
        return layer

    def begin(self, spec: DecoderSpec, embed: Tensor, ropes: Ropes) -> Begin:
        if spec.features & _BEGIN_FEATURES or len(ropes.tables) != 1:
            return super().begin(spec, embed, ropes)
        return _FusedBegin(embed, ropes.tables[0])

    def sampler(self) -> Sampler:
        return FusedSampler()

    def mail(self, device: torch.device) -> Mail:
        return DirectMail() if device.type == "cuda" else Mail()


class _FusedBegin:
    """In one launch."""

    def __init__(self, embed: Tensor, rope: RopeTable) -> None:
        from banyan_runtime.model.kernels import dependent, rows

        self._kernel, self._options = rows.begin, dependent.options(embed.device)
        self._embed, self._rope = embed, rope

    def __call__(self, held: Held, latest: Tensor) -> Begun:
        cos, sin = self._rope.tables
        (width, dim), tokens = (self._embed.shape[1], cos.shape[1]), held.size
        hidden = torch.empty((tokens, width), dtype=self._embed.dtype, device=self._embed.device)
        own_cos, own_sin = (torch.empty((tokens, 1, dim), dtype=cos.dtype, device=cos.device) for _ in range(2))
        self._kernel[(tokens,)](
            held.ids, held.rows, held.positions, latest, self._embed, cos, sin, hidden, own_cos, own_sin,
            WIDTH=width, BLOCK=power_of_two(width), DIM=dim, DIM_BLOCK=power_of_two(dim), **self._options,
        )  # fmt: skip
        return Begun(hidden, [Rotation(own_cos, own_sin, None)], None)


class _FusedNorm(RmsNorm):
    def __init__(self, weight: Tensor, eps: float, *, wide: bool) -> None:
        from banyan_runtime.model.kernels import dependent, rows

        super().__init__(weight, eps, wide=wide)
        self._kernel = rows.rms_norm
        self._options = dependent.options(weight.device)
        self._block = power_of_two(weight.shape[0])

    def __call__(self, x: Tensor) -> Tensor:
        return self._launch(x.reshape(-1, x.shape[-1]), None)[1].view(x.shape)

    def added(self, h: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        return self._launch(h, delta)

    def _launch(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sum, or x where nothing is added, and its norm."""
        assert x.stride(1) == 1
        assert delta is None or delta.stride(1) == 1
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        sums = x if delta is None else torch.empty_like(out)
        more = x if delta is None else delta
        if x.shape[0]:
            self._kernel[(x.shape[0],)](
                x, more, self.weight, sums, out, x.stride(0), more.stride(0), self.eps,
                ADDED=delta is not None, WIDE=self.wide, WIDTH=x.shape[1], BLOCK=self._block, **self._options,
            )  # fmt: skip
        return sums, out


class _FusedHeads(Heads):
    def __init__(self, spec: DecoderSpec, layer: int, q_norm: Tensor | None, k_norm: Tensor | None) -> None:
        from banyan_runtime.model.kernels import dependent, rows

        self._kernel = rows.place
        self._options = dependent.options
        self._spec = spec.layers[layer].attention
        assert self._spec.rope is not None
        self._rope = spec.ropes.index(self._spec.rope)
        self._eps, self._wide = spec.norm.eps, spec.norm.kind == "rms_wide"
        self._norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
        self._half = power_of_two(self._spec.head_dim // 2)
        turned = self._spec.heads + self._spec.kv_heads
        self._together = min(power_of_two(turned), max(1, _TOGETHER // (2 * self._half)))

    def __call__(self, layer: int, qkv: Tensor, rotations: Sequence[Rotation], cells: Cells) -> Tensor:
        (cos, sin, _), spec = rotations[self._rope], self._spec
        tokens = cells.slots.shape[0]
        assert qkv.stride(1) == 1
        keys, values = cells.pool.slots(layer)
        queries = torch.empty((tokens, spec.heads, spec.head_dim), dtype=qkv.dtype, device=qkv.device)
        q_weight, k_weight = (qkv, qkv) if self._norms is None else self._norms
        together = min(self._together, 4) if tokens < _FEW else self._together
        if tokens:
            self._kernel[(tokens, -(-(spec.heads + spec.kv_heads) // together))](
                qkv, cos, sin, q_weight, k_weight, cells.slots, queries, keys, values, qkv.stride(0), keys.stride(0), self._eps,
                NORMED=self._norms is not None, WIDE=self._wide, HEADS=spec.heads, KV_HEADS=spec.kv_heads, TOGETHER=together,
                HALF=spec.head_dim // 2, BLOCK=self._half, PADDING=PADDING_SLOT, LARGEST=cells.pool.largest, NARROW=cells.pool.narrow,
                **self._options(qkv.device),
            )  # fmt: skip
        return queries

    def attended(self, layer: int, qkv: Tensor, rotations: Sequence[Rotation], attention: Attention) -> Tensor:
        if isinstance(attention, TritonAttention) and attention.turns:
            return attention.turn_and_attend(layer, qkv, rotations[self._rope][:2], self._norms)
        return super().attended(layer, qkv, rotations, attention)


class _FusedEntry(Entry):
    def __call__(self, h: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        assert isinstance(self.layer, FusedLinear)
        assert isinstance(self.norm, RmsNorm)
        if self.layer.enters(h.shape[0]):
            return self.layer.of_few(h, delta, self.norm)
        return super().__call__(h, delta)
