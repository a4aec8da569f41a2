"""Rotary position embeddings, in the layout that rotates the two halves of a head against each other."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from banyan_runtime.models.config import (
    DecoderSpec,
    LinearRope,
    Llama3Rope,
    LongRope,
    PlainRope,
    ProportionalRope,
    Rope,
    YarnRope,
)


def inverse_frequencies(rope: Rope, context_len: int) -> Tensor:
    """Radians per position of each pair, for a server with contexts of so many tokens: fp32 [dim / 2]."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    plain = 1.0 / (rope.theta**exponents)
    match rope.scaling:
        case PlainRope():
            return plain
        case LinearRope(factor=factor):
            return plain / factor
        case ProportionalRope(rotated=rotated, factor=factor):
            return torch.where(torch.arange(len(plain)) < rotated, plain / factor, 0.0)
        case LongRope() as scaling:
            divisors = scaling.long if context_len > scaling.original_context else scaling.short
            return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * rope.theta**exponents)
        case Llama3Rope() as scaling:
            wavelength = 2 * math.pi / plain
            ramp = scaling.original_context / wavelength - scaling.low_freq_factor
            ramp = ramp / (scaling.high_freq_factor - scaling.low_freq_factor)
            between = (1 - ramp) * plain / scaling.factor + ramp * plain
            short = wavelength < scaling.original_context / scaling.high_freq_factor
            long = wavelength > scaling.original_context / scaling.low_freq_factor
            return torch.where(short, plain, torch.where(long, plain / scaling.factor, between))
        case YarnRope() as scaling:

            def pair(rotations: float) -> float:
                """Index of the pair that rotates so often over the original context."""
                return rope.dim * math.log(scaling.original_context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

            first, last = pair(scaling.fast), pair(scaling.slow)
            if scaling.whole:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, rope.dim - 1)
            last += 0.001 if first == last else 0.0
            slowed = ((torch.arange(rope.dim // 2).float() - first) / (last - first)).clamp(0, 1)
            return plain / scaling.factor * slowed + plain * (1 - slowed)


def rotations(rope: Rope, context_len: int, positions: range) -> tuple[Tensor, Tensor]:
    """Cosines and sines of consecutive positions, times the magnitude that the scaling gives a rotated vector; fp32 [positions, dim / 2]
    each."""
    angles = torch.outer(torch.arange(positions.start, positions.stop).float(), inverse_frequencies(rope, context_len))
    magnitude = rope.scaling.magnitude if isinstance(rope.scaling, YarnRope | LongRope) else 1.0
    return angles.cos() * magnitude, angles.sin() * magnitude


def growth(rope: Rope, positions: range) -> Tensor | None:
    """The factor of queries at consecutive positions, fp32 [positions]; None: 1 everywhere."""
    if rope.growth is None:
        return None
    contexts = torch.arange(positions.start, positions.stop) // rope.growth.original_context
    return 1 + rope.growth.beta * torch.log(1 + contexts.float())


class Rotation(NamedTuple):
    """What rotates the heads of T tokens."""

    cos: Tensor  # [T, 1, dim]
    sin: Tensor  # [T, 1, dim], negative in its first half
    growth: Tensor | None  # [T, 1, 1] factor of queries

    def keys(self, x: Tensor) -> Tensor:
        """x [T, heads, head_dim], the first dim elements of each head rotated."""
        dim = self.cos.shape[-1]
        turned, half = x[..., :dim], dim // 2
        swapped = torch.cat((turned[..., half:], turned[..., :half]), -1)
        turned = (turned * self.cos).add_(swapped.mul_(self.sin))
        return turned if dim == x.shape[-1] else torch.cat((turned, x[..., dim:]), -1)

    def queries(self, x: Tensor) -> Tensor:
        """As `keys`, times the growth."""
        turned = self.keys(x)
        return turned if self.growth is None else turned * self.growth


class RopeTable:
    """Cosines and sines of one rope by position, in the model's dtype.

    Tables, computed in blocks of fixed size, instead of a computation per step: a position's values must not depend on what they are
    computed beside. For 131,072 positions and 128 elements they take 64 MB in bf16.
    """

    BLOCK = 4096  # positions

    def __init__(self, rope: Rope, context_len: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rope = rope
        self._context_len = context_len
        self._cos = torch.empty(0, rope.dim, dtype=dtype, device=device)
        self._sin = self._cos
        self._growth = None if rope.growth is None else torch.empty(0, dtype=dtype, device=device)

    def reserve(self, positions: int) -> None:
        """Make the tables hold positions 0 … positions - 1."""
        cos, sin, grown = [self._cos], [self._sin], [] if self._growth is None else [self._growth]
        for start in range(self._cos.shape[0], positions, self.BLOCK):
            block = range(start, start + self.BLOCK)
            cosines, sines = rotations(self._rope, self._context_len, block)
            # The sign that the rotation gives the first half is kept in the table.
            cos.append(torch.cat((cosines, cosines), -1).to(self._cos))
            sin.append(torch.cat((-sines, sines), -1).to(self._sin))
            if (factors := growth(self._rope, block)) is not None:
                grown.append(factors.to(self._cos))
        self._cos, self._sin = torch.cat(cos), torch.cat(sin)
        self._growth = torch.cat(grown) if grown else None

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of reserved positions, [positions, dim] each."""
        return self._cos, self._sin

    def at(self, positions: Tensor) -> Rotation:
        """The rotation of tokens at reserved positions [T]."""
        cos, sin = (table.index_select(0, positions).unsqueeze(1) for table in self.tables)
        return Rotation(cos, sin, None if self._growth is None else self._growth.index_select(0, positions)[:, None, None])


class Ropes:
    """The tables of a model's ropes, in the order of `DecoderSpec.ropes`."""

    def __init__(self, spec: DecoderSpec, context_len: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tables = [RopeTable(rope, context_len, dtype, device) for rope in spec.ropes]

    def reserve(self, positions: int) -> None:
        for table in self.tables:
            table.reserve(positions)

    def at(self, positions: Tensor) -> list[Rotation]:
        return [table.at(positions) for table in self.tables]


def table_bytes(spec: DecoderSpec, positions: int, dtype: torch.dtype) -> int:
    """Of one kind of table, of all ropes."""
    blocks = -(-positions // RopeTable.BLOCK)
    return sum(blocks * RopeTable.BLOCK * rope.dim * dtype.itemsize for rope in spec.ropes)
