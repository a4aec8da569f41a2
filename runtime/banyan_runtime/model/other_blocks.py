"""Block formats that occur in GGUF files and that nothing computes on: they become others when they are loaded.

llama.cpp puts Q5_0 where rows cannot be cut into blocks of 256 (Qwen2.5-0.5B in Q4_K_M); it becomes Q8_0 without any
rounding. Q5_1 and Q5_K have offsets that Q8_0 lacks and become float values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from banyan_runtime.model.blocks import Blocks, Bytes, Floats, affine, group_scales, nibbles, scale

SIZES: Final = {"Q5_0": (32, 22), "Q5_1": (32, 24), "Q5_K": (256, 176)}
"""Of one block: values, bytes."""


def q8_0_of_q5_0(data: Bytes, columns: int) -> Blocks:
    """The same values as Q8_0: `data` [rows, bytes of a row] is in Q5_0, whose scale and whole numbers are Q8_0's."""
    rows, blocks = len(data), data.reshape(-1, SIZES["Q5_0"][1])
    whole = (_five_bits(blocks[:, 6:], blocks[:, 2:6]).view(np.int8) - np.int8(16)).view(np.uint8)
    return Blocks("Q8_0", rows, columns, np.concatenate((blocks[:, :2], whole), axis=1).reshape(rows, -1))


def values(kind: str, data: Bytes, columns: int) -> Floats:
    """float32 [rows, columns] of `data` [rows, bytes of a row]; `kind` is a key of `VALUES`."""
    return VALUES[kind](data.reshape(-1, SIZES[kind][1])).reshape(-1, columns)


def _five_bits(low: Bytes, high: Bytes) -> Bytes:
    """[n, 32] numbers below 32: four bits in `low` [n, 16], the fifth in `high` [n, 4]."""
    whole: Bytes = nibbles(low).reshape(-1, 32) | np.unpackbits(high, axis=1, bitorder="little") << np.uint8(4)
    return whole


def _read_q5_1(blocks: Bytes) -> Floats:
    return _five_bits(blocks[:, 8:], blocks[:, 4:8]).astype(np.float32) * scale(blocks, 0) + scale(blocks, 2)


def _read_q5_k(blocks: Bytes) -> Floats:
    scales, minima = group_scales(blocks[:, 4:16])
    low = nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    high: Bytes = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    whole = (low | high << 4).astype(np.float32)
    return affine(whole, scales * scale(blocks, 0)[:, :, None], minima * scale(blocks, 2)[:, :, None])


VALUES: Final[dict[str, Callable[[Bytes], Floats]]] = {"Q5_1": _read_q5_1, "Q5_K": _read_q5_k}
