"""Rotary position embeddings, in the layout that rotates the two halves of a head against each other."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from banyan_runtime.model.spec import LinearRope, Llama3Rope, ModelSpec, PlainRope, YarnRope


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """Radians per position of each pair of a head: fp32 [head_dim / 2]."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    plain = 1.0 / (spec.rope_theta**exponents)
    match spec.rope:
        case PlainRope():
            return plain
        case LinearRope(factor=factor):
            return plain / factor
        case Llama3Rope() as rope:
            wavelength = 2 * math.pi / plain
            ramp = (rope.original_context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
            between = (1 - ramp) * plain / rope.factor + ramp * plain
            short = wavelength < rope.original_context / rope.high_freq_factor
            long = wavelength > rope.original_context / rope.low_freq_factor
            return torch.where(short, plain, torch.where(long, plain / rope.factor, between))
        case YarnRope() as rope:

            def pair(turns: float) -> float:
                """That turns so often over the original context."""
                return spec.head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(spec.rope_theta))

            first, last = pair(rope.fast), pair(rope.slow)
            if rope.whole:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, spec.head_dim - 1)
            last += 0.001 if first == last else 0.0
            slowed = ((torch.arange(spec.head_dim // 2).float() - first) / (last - first)).clamp(0, 1)
            return plain / rope.factor * slowed + plain * (1 - slowed)


def turns(spec: ModelSpec, positions: range) -> tuple[Tensor, Tensor]:
    """By which the pairs of a head are turned at positions one behind another: cosines and sines, times the magnitude that the scaling
    gives what is turned; fp32 [positions, head_dim / 2] each."""
    angles = torch.outer(torch.arange(positions.start, positions.stop).float(), inverse_frequencies(spec))
    magnitude = spec.rope.magnitude if isinstance(spec.rope, YarnRope) else 1.0
    return angles.cos() * magnitude, angles.sin() * magnitude


class Rope:
    """Cosines and sines by position, in the model's dtype.

    Tables, computed in blocks of fixed size, instead of a computation per step: a position's values must not depend on what
    they are computed beside. For 131,072 positions and heads of 128 they take 64 MB in bf16.
    """

    BLOCK = 4096  # positions

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._spec = spec
        self._half = spec.head_dim // 2
        self._cos = torch.empty(0, spec.head_dim, dtype=dtype, device=device)
        self._sin = self._cos

    def reserve(self, positions: int) -> None:
        """Make the tables hold positions 0 … positions - 1."""
        cos, sin = [self._cos], [self._sin]
        for start in range(self._cos.shape[0], positions, self.BLOCK):
            cosines, sines = turns(self._spec, range(start, start + self.BLOCK))
            # The sign that the rotation gives the first half is kept in the table.
            cos.append(torch.cat((cosines, cosines), -1).to(self._cos))
            sin.append(torch.cat((-sines, sines), -1).to(self._sin))
        self._cos, self._sin = torch.cat(cos), torch.cat(sin)

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Of reserved positions: cosines and sines, [positions, head_dim] each."""
        return self._cos, self._sin

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for reserved positions [T], each [T, 1, head_dim]."""
        return self._cos.index_select(0, positions).unsqueeze(1), self._sin.index_select(0, positions).unsqueeze(1)

    def rotate(self, x: Tensor, at: tuple[Tensor, Tensor]) -> Tensor:
        """x [T, heads, head_dim] rotated by its positions."""
        cos, sin = at
        swapped = torch.cat((x[..., self._half :], x[..., : self._half]), -1)
        return (x * cos).add_(swapped.mul_(sin))
