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
from banyan_runtime.step import I32, U32, U64

WORD: Final = 0xFFFFFFFF
C1: Final = 0xCC9E2D51
C2: Final = 0x1B873593
ADD: Final = 0xE6546B64
MIX1: Final = 0x85EBCA6B
MIX2: Final = 0xC2B2AE35
BYTES: Final = 16  # hashed: two words of the seed, the position, the token id


def starts(seeds: U64, positions: I32) -> U32:
    """The hash of each row after the words that its cells share."""
    return behind(of_seeds(seeds), positions)


def of_seeds(seeds: U64) -> U32:
    """After those of the seeds alone, which stay while positions move on."""
    none = np.zeros(len(seeds), np.uint32)
    return _hashed(_hashed(none, seeds.astype(np.uint32)), (seeds >> np.uint64(32)).astype(np.uint32))


def behind(bits: U32, positions: I32) -> U32:
    """`starts`, of what `of_seeds` gave."""
    return _hashed(bits, positions.astype(np.uint32))


def _hashed(bits: U32, words: U32) -> U32:
    """One word more of each row."""
    word = words * np.uint32(C1)
    word = word << np.uint32(15) | word >> np.uint32(17)
    bits = bits ^ word * np.uint32(C2)
    bits = bits << np.uint32(13) | bits >> np.uint32(19)
    return bits * np.uint32(5) + np.uint32(ADD)


def hashes(seeds: U64, positions: I32, token_ids: Tensor) -> Tensor:
    """32 bits for each cell, as int32 [n, m], for n rows and their token ids [n, m] or [m]."""
    start = tensor(starts(seeds, positions).view(np.int32), token_ids.device, torch.int32).unsqueeze(1)
    word = token_ids.to(torch.int32)
    word = _rotate(word * _signed(C1), 15).mul_(_signed(C2))
    bits = _rotate(word ^ start, 13).mul_(5).add_(_signed(ADD))
    bits ^= BYTES
    bits ^= _shift(bits, 16)
    bits *= _signed(MIX1)
    bits ^= _shift(bits, 13)
    bits *= _signed(MIX2)
    bits ^= _shift(bits, 16)
    return bits


def gumbel(bits: Tensor) -> Tensor:
    """Gumbel variables, fp64, of hashes."""
    uniform = (bits.long() & WORD).double() / WORD
    return -torch.log(-torch.log(uniform).clamp_(max=-(2.0**-32)))


def distance_to_one(bits: Tensor) -> Tensor:
    """1 - u for the uniform variable u of each hash, fp32 with its rounding: cheap, to rule cells out."""
    rest = bits.bitwise_not().float()
    return torch.where(rest < 0, rest + (WORD + 1), rest) / WORD


def _signed(word: int) -> int:
    """The int32 with these bits: torch has no unsigned arithmetic, but multiplies and adds modulo 2**32 all the same."""
    return word - (1 << 32) if word >> 31 else word


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical shift right."""
    return (bits >> by) & (WORD >> by)


def _rotate(bits: Tensor, by: int) -> Tensor:
    return (bits << by) | _shift(bits, 32 - by)
