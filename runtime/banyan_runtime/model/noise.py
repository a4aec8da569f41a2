"""The randomness of sampling: a function of (seed, position, token id) and nothing else.

So the same seed gives the same text whatever else runs, in whichever slot, before or after a retraction. A murmur-style hash
of the three gives 32 bits, and those a Gumbel variable; the largest (log probability + Gumbel) is a fair draw.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from banyan_runtime.model.device import tensor
from banyan_runtime.step import I32, U64

_WORD: Final = 0xFFFFFFFF
_C1: Final = 0xCC9E2D51
_C2: Final = 0x1B873593
_ADD: Final = 0xE6546B64
_MIX1: Final = 0x85EBCA6B
_MIX2: Final = 0xC2B2AE35
_BYTES: Final = 16  # hashed: two words of the seed, the position, the token id


def hashes(seeds: U64, positions: I32, token_ids: Tensor) -> Tensor:
    """32 bits for each cell, as int32 [n, m], for n rows and their token ids [n, m] or [m]."""
    starts = [_start(int(seed), int(position)) for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True)]
    start = tensor(np.array(starts, dtype=np.uint32).view(np.int32), token_ids.device, torch.int32).unsqueeze(1)
    word = token_ids.to(torch.int32)
    word = _rotate(word * _signed(_C1), 15).mul_(_signed(_C2))
    bits = _rotate(word ^ start, 13).mul_(5).add_(_signed(_ADD))
    bits ^= _BYTES
    bits ^= _shift(bits, 16)
    bits *= _signed(_MIX1)
    bits ^= _shift(bits, 13)
    bits *= _signed(_MIX2)
    bits ^= _shift(bits, 16)
    return bits


def gumbel(bits: Tensor) -> Tensor:
    """Gumbel variables, fp64, of hashes."""
    uniform = (bits.long() & _WORD).double() / _WORD
    return -torch.log(-torch.log(uniform).clamp_(max=-(2.0**-32)))


def distance_to_one(bits: Tensor) -> Tensor:
    """1 - u for the uniform variable u of each hash, fp32 with its rounding: cheap, to rule cells out."""
    rest = bits.bitwise_not().float()
    return torch.where(rest < 0, rest + (_WORD + 1), rest) / _WORD


def _start(seed: int, position: int) -> int:
    """The hash after the words that a row's cells share."""
    bits = 0
    for word in (seed & _WORD, seed >> 32, position):
        word = word * _C1 & _WORD
        word = (word << 15 | word >> 17) & _WORD
        bits ^= word * _C2 & _WORD
        bits = (bits << 13 | bits >> 19) & _WORD
        bits = bits * 5 + _ADD & _WORD
    return bits


def _signed(word: int) -> int:
    """The int32 with these bits: torch has no unsigned arithmetic, but multiplies and adds modulo 2**32 all the same."""
    return word - (1 << 32) if word >> 31 else word


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical shift right."""
    return (bits >> by) & (_WORD >> by)


def _rotate(bits: Tensor, by: int) -> Tensor:
    return (bits << by) | _shift(bits, 32 - by)
