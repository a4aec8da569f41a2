"""The block formats of GGUF, read: blocks [n, bytes] → float32 [n, values], equal to the format's own library to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

BlockKind = Literal["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q5_K", "Q3_K", "Q2_K", "Q5_0", "Q5_1", "IQ4_NL", "IQ4_XS", "MXFP4"]

SIZES: Final[dict[BlockKind, tuple[int, int]]] = {
    "Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "IQ4_NL": (32, 18), "MXFP4": (32, 17),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "IQ4_XS": (256, 136),
}  # fmt: skip
"""Of one block: values, bytes."""

PAIRS: Final = np.array([0, 2, 4, 6], np.uint8)[:, None]  # where a byte's four numbers of two bits stand
_BITS: Final = np.arange(8, dtype=np.uint8)[:, None]
_UNEVEN: Final = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_E2M1: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # twice the values


def _scale(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block, as a column."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[..., n] bytes → [..., 2, n]: the lower halves, then the upper ones."""
    return np.stack((packed & 15, packed >> 4), axis=-2)


def _five_bits(low: Bytes, high: Bytes) -> Bytes:
    """[n, 32] numbers below 32: four bits in `low` [n, 16], the fifth in `high` [n, 4]."""
    whole: Bytes = _nibbles(low).reshape(-1, 32) | np.unpackbits(high, axis=1, bitorder="little") << np.uint8(4)
    return whole


def _quarters(packed: Bytes) -> Bytes:
    """[n, 64] bytes → [n, 16, 16] numbers below 4, of 16 groups."""
    whole: Bytes = (packed.reshape(-1, 2, 1, 32) >> PAIRS & np.uint8(3)).reshape(-1, 16, 16)
    return whole


def _group_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """Scales and minima [n, 8, 1] of the 32-value groups of Q4_K and Q5_K: 6 bits each, packed in 12 bytes."""
    low, high, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((low & 63, (rest & 15) | (low >> 6 << 4)), axis=1)
    minima = np.concatenate((high & 63, (rest >> 4) | (high >> 6 << 4)), axis=1)
    return scales[:, :, None].astype(np.float32), minima[:, :, None].astype(np.float32)


def _affine(values: Floats, steps: Floats, depths: Floats) -> Floats:
    """Values [n, groups, each] of groups with steps and depths [n, groups, 1], as [n, 256]."""
    spread: Floats = values * steps - depths
    return spread.reshape(-1, 256)


def _read_q8_0(blocks: Bytes) -> Floats:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _scale(blocks, 0)


def _read_q4_0(blocks: Bytes) -> Floats:
    return (_nibbles(blocks[:, 2:]).reshape(-1, 32).astype(np.float32) - 8) * _scale(blocks, 0)


def _read_q4_1(blocks: Bytes) -> Floats:
    return _nibbles(blocks[:, 4:]).reshape(-1, 32).astype(np.float32) * _scale(blocks, 0) + _scale(blocks, 2)


def _read_q5_0(blocks: Bytes) -> Floats:
    return (_five_bits(blocks[:, 6:], blocks[:, 2:6]).astype(np.float32) - 16) * _scale(blocks, 0)


def _read_q5_1(blocks: Bytes) -> Floats:
    return _five_bits(blocks[:, 8:], blocks[:, 4:8]).astype(np.float32) * _scale(blocks, 0) + _scale(blocks, 2)


def _read_iq4_nl(blocks: Bytes) -> Floats:
    return _UNEVEN[_nibbles(blocks[:, 2:]).reshape(-1, 32)] * _scale(blocks, 0)


def _read_mxfp4(blocks: Bytes) -> Floats:
    """The scale is a power of 2, of which the first byte is the exponent; half of it, since the table has twice the values."""
    exponents = blocks[:, :1].astype(np.uint32)
    bits = np.where(exponents < 2, np.uint32(0x00200000) << exponents, (exponents - np.uint32(1)) << np.uint32(23))
    scales: Floats = bits.view(np.float32)
    return _E2M1[_nibbles(blocks[:, 1:]).reshape(-1, 32)] * scales


def _read_q2_k(blocks: Bytes) -> Floats:
    packed = blocks[:, :16]
    steps, depths = (packed & 15).astype(np.float32) * _scale(blocks, 80), (packed >> 4).astype(np.float32) * _scale(blocks, 82)
    return _affine(_quarters(blocks[:, 16:80]).astype(np.float32), steps[:, :, None], depths[:, :, None])


def _read_q3_k(blocks: Bytes) -> Floats:
    packed = blocks[:, 96:108]
    low, high = _nibbles(packed[:, :8]).reshape(-1, 16), (packed[:, None, 8:] >> PAIRS & np.uint8(3)).reshape(-1, 16)
    scales = ((low | high << 4).astype(np.float32) - 32) * _scale(blocks, 108)
    third: Bytes = (blocks[:, None, :32] >> _BITS & np.uint8(1)).reshape(-1, 16, 16)
    values = (_quarters(blocks[:, 32:96]) | third << 2).astype(np.float32) - 4
    return (values * scales[:, :, None]).reshape(-1, 256)


def _read_q4_k(blocks: Bytes) -> Floats:
    scales, minima = _group_scales(blocks[:, 4:16])
    values = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32).astype(np.float32)
    return _affine(values, scales * _scale(blocks, 0)[:, :, None], minima * _scale(blocks, 2)[:, :, None])


def _read_q5_k(blocks: Bytes) -> Floats:
    scales, minima = _group_scales(blocks[:, 4:16])
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high: Bytes = blocks[:, None, 16:48] >> _BITS & np.uint8(1)
    values = (low | high << 4).astype(np.float32)
    return _affine(values, scales * _scale(blocks, 0)[:, :, None], minima * _scale(blocks, 2)[:, :, None])


def _read_q6_k(blocks: Bytes) -> Floats:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high: Bytes = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> PAIRS & np.uint8(3)
    values = (low | high << 4).astype(np.float32).reshape(-1, 16, 16) - 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32) * _scale(blocks, 208)
    return (values * scales[:, :, None]).reshape(-1, 256)


def _read_iq4_xs(blocks: Bytes) -> Floats:
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), axis=2).reshape(-1, 8)
    scales = ((low | high.astype(np.uint8) << 4).astype(np.float32) - 32) * _scale(blocks, 0)
    values: Floats = _UNEVEN[_nibbles(blocks[:, 8:].reshape(-1, 8, 16)).reshape(-1, 8, 32)]
    spread: Floats = values * scales[:, :, None]
    return spread.reshape(-1, 256)


DECODE: Final[dict[BlockKind, Callable[[Bytes], Floats]]] = {
    "Q8_0": _read_q8_0, "Q4_0": _read_q4_0, "Q4_1": _read_q4_1, "Q5_0": _read_q5_0, "Q5_1": _read_q5_1, "IQ4_NL": _read_iq4_nl,
    "MXFP4": _read_mxfp4, "Q2_K": _read_q2_k, "Q3_K": _read_q3_k, "Q4_K": _read_q4_k, "Q5_K": _read_q5_k, "Q6_K": _read_q6_k,
    "IQ4_XS": _read_iq4_xs,
}  # fmt: skip
