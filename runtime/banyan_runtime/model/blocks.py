"""Weights in the block formats of GGUF: 32 or 256 neighbours of a row share one or two scales.

The formats are those of the GGUF specification, and `quantize` rounds the three simple ones as their reference does, so that a
file made elsewhere and one made here hold the same bytes. `block_values.py` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from banyan_runtime.model import host
from banyan_runtime.model.block_values import DECODE, PAIRS, SIZES, BlockKind, Bytes, Floats

_CHUNK: Final = 1 << 18  # values that a thread works on at once: with what is made of them they stay in its cache


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Rows of a matrix in one of GGUF's block formats, byte for byte as such a file holds them."""

    kind: BlockKind
    rows: int
    columns: int  # values; a multiple of those of a block
    data: Bytes  # [rows, bytes of a row], C-contiguous; may be read-only memory of the file

    def __post_init__(self) -> None:
        assert self.data.shape == (self.rows, row_bytes(self.kind, self.columns)), (self, self.data.shape)
        assert self.data.flags.c_contiguous

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def taken(self, rows: slice | npt.NDArray[np.intp]) -> Blocks:
        """Some of its rows, in the order of `rows`: a view for a slice, a copy for indices."""
        data = self.data[rows]
        return Blocks(self.kind, len(data), self.columns, data)


Parameter = Tensor | tuple[Blocks | Tensor, ...]
"""A parameter whole, or its parts, one below the other: q, k and v of qkv may be of different kinds."""


def row_bytes(kind: BlockKind, columns: int) -> int:
    """Bytes of a row of so many values."""
    values, nbytes = SIZES[kind]
    assert columns % values == 0, (kind, columns)
    return columns // values * nbytes


def fits(kind: BlockKind, columns: int) -> bool:
    """Whether rows of so many values can be cut into blocks of a kind."""
    return columns % SIZES[kind][0] == 0


def nbytes(parameters: Iterable[Parameter]) -> int:
    """Bytes of parameters as they lie."""
    return sum(part.nbytes for parameter in parameters for part in (parameter if isinstance(parameter, tuple) else (parameter,)))


def elements(parameters: Iterable[Parameter]) -> int:
    """Values in parameters."""
    parts = [part for parameter in parameters for part in (parameter if isinstance(parameter, tuple) else (parameter,))]
    return sum(part.rows * part.columns if isinstance(part, Blocks) else part.numel() for part in parts)


def dequantize(blocks: Blocks) -> Floats:
    """The values of the blocks, float32 [rows, columns]."""
    out = np.empty((blocks.rows, blocks.columns), np.float32)
    decode, size = DECODE[blocks.kind], SIZES[blocks.kind][1]

    def work(rows: slice) -> None:
        out[rows] = decode(blocks.data[rows].reshape(-1, size)).reshape(-1, blocks.columns)

    by_rows(blocks.rows, blocks.columns, work)
    return out


def quantize(values: Floats | Tensor, kind: BlockKind) -> Blocks:
    """The nearest blocks of a matrix [rows, columns] of any float type; a Tensor may be on any device."""
    rows, columns = values.shape
    data = np.empty((rows, row_bytes(kind, columns)), np.uint8)
    encode, (length, _) = _ENCODE[kind], SIZES[kind]

    def work(part: slice) -> None:
        taken = values[part]
        floats = taken.to("cpu", torch.float32).numpy() if isinstance(taken, Tensor) else taken
        data[part] = encode(floats.reshape(-1, length)).reshape(-1, data.shape[1])

    by_rows(rows, columns, work)
    return Blocks(kind, rows, columns, data)


def q4_1(codes: Bytes, step: Floats, least: Floats) -> Blocks:
    """Blocks of known numbers: codes [rows, columns] below 16, times the step of their 32, and the least value of these; both are
    [rows, columns / 32]."""
    rows, columns = codes.shape
    halves = [_half(np.ascontiguousarray(part).reshape(-1, 1)) for part in (step, least)]
    data = np.concatenate((*halves, _packed(codes.reshape(-1, 2, 16))), axis=1)
    return Blocks("Q4_1", rows, columns, data.reshape(rows, -1))


def q8_0(codes: npt.NDArray[np.int8], step: Floats) -> Blocks:
    """Likewise: codes [rows, columns] times the step of their 32, [rows, columns / 32]."""
    rows, columns = codes.shape
    data = np.concatenate((_half(np.ascontiguousarray(step).reshape(-1, 1)), codes.view(np.uint8).reshape(-1, 32)), axis=1)
    return Blocks("Q8_0", rows, columns, data.reshape(rows, -1))


def dequantized(parameters: dict[str, Parameter], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Parameters as tensors: blocks become `dtype`, what is a tensor already keeps its type, as norms in float32 must. Takes them over:
    each leaves the dict before the next is made, so memory holds the result and at most one parameter more."""
    result: dict[str, Tensor] = {}
    for name in list(parameters):
        result[name] = _whole(parameters.pop(name), dtype, device)
    return result


def _whole(parameter: Parameter, dtype: torch.dtype, device: torch.device) -> Tensor:
    if isinstance(parameter, Tensor):
        return parameter.to(device)
    parts = [(part.rows, part.columns) if isinstance(part, Blocks) else tuple(part.shape) for part in parameter]
    whole = torch.empty((sum(rows for rows, *_ in parts), *parts[0][1:]), dtype=dtype, device=device)
    first = 0
    for part, (rows, *_) in zip(parameter, parts, strict=True):
        fill(whole[first : first + rows], part)
        first += rows
    return whole


def fill(target: Tensor, values: Blocks | Tensor) -> None:
    """Copy values to a tensor of their shape, some rows of blocks at a time."""
    if isinstance(values, Tensor):
        target.copy_(values)
        return
    step = max(1, 64 * _CHUNK // values.columns)  # 64 MB in float32, whatever the size of the matrix
    for begin in range(0, values.rows, step):
        some = values.taken(slice(begin, begin + step))
        target[begin : begin + some.rows].copy_(torch.from_numpy(dequantize(some)))


def by_rows(rows: int, columns: int, work: Callable[[slice], None]) -> None:
    """Do `work` for all rows, some at a time, on all cores: numpy lets go of Python's lock."""
    step = max(1, _CHUNK // columns)
    parts = [slice(begin, min(begin + step, rows)) for begin in range(0, rows, step)]
    if len(parts) <= 1 or host.cores() == 1:
        for part in parts:
            work(part)
        return
    with ThreadPoolExecutor(host.cores()) as pool:
        for _ in pool.map(work, parts):
            pass


# --- writing: float32 [n, values] → blocks [n, bytes] ---


def _half(column: Floats) -> Bytes:
    """A column as float16, two bytes each."""
    return column.astype("<f2").view(np.uint8)


def _inverse(column: Floats) -> Floats:
    """1 / x, and 0 for 0: blocks of zeros have no scale."""
    return np.divide(np.float32(1), column, out=np.zeros_like(column), where=column != 0)


def _packed(halves: Bytes) -> Bytes:
    """[..., 2, n] values below 16 → [..., n] bytes: what `nibbles` takes apart."""
    packed: Bytes = halves[..., 0, :] | halves[..., 1, :] << np.uint8(4)
    return packed


def _write_q8_0(values: Floats) -> Bytes:
    step = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    scaled = values * _inverse(step)
    whole = np.floor(np.abs(scaled))
    whole += np.abs(scaled) - whole >= 0.5  # halves go away from zero, as C's roundf has it
    return np.concatenate((_half(step), np.copysign(whole, scaled).astype(np.int8).view(np.uint8)), axis=1)


def _write_q4_0(values: Floats) -> Bytes:
    """The value that is farthest from 0 becomes -8, exactly."""
    farthest = np.take_along_axis(values, np.abs(values).argmax(axis=1)[:, None], axis=1)
    step = farthest / np.float32(-8)
    whole = (values * _inverse(step) + np.float32(8.5)).astype(np.uint8).clip(0, 15)
    return np.concatenate((_half(step), _packed(whole.reshape(-1, 2, 16))), axis=1)


def _write_q4_1(values: Floats) -> Bytes:
    least = values.min(axis=1, keepdims=True)
    step = (values.max(axis=1, keepdims=True) - least) / np.float32(15)
    whole = ((values - least) * _inverse(step) + np.float32(0.5)).astype(np.uint8).clip(0, 15)
    return np.concatenate((_half(step), _half(least), _packed(whole.reshape(-1, 2, 16))), axis=1)


def _write_q4_k(values: Floats) -> Bytes:
    """Each group of 32 from its least value (or 0) to its greatest, rounded to nearest."""
    groups = values.reshape(-1, 8, 32)
    least = np.minimum(groups.min(axis=2), 0)
    steps, depths = (groups.max(axis=2) - least).clip(0) / np.float32(15), -least
    step, depth = (column.max(axis=1, keepdims=True) / np.float32(63) for column in (steps, depths))
    scales = np.rint(steps * _inverse(step)).astype(np.uint8)
    minima = np.rint(depths * _inverse(depth)).astype(np.uint8)
    packed = np.concatenate(
        (scales[:, :4] | scales[:, 4:] >> 4 << 6, minima[:, :4] | minima[:, 4:] >> 4 << 6, scales[:, 4:] & 15 | minima[:, 4:] << 4), axis=1
    )
    kept = [_half(column).view("<f2").astype(np.float32) for column in (step, depth)]  # what a reader will multiply with
    base, unit = (minima * kept[1])[:, :, None], (scales * kept[0])[:, :, None]
    whole = np.rint((groups + base) * _inverse(unit)).clip(0, 15).astype(np.uint8)
    return np.concatenate((_half(step), _half(depth), packed, _packed(whole.reshape(-1, 4, 2, 32)).reshape(-1, 128)), axis=1)


def _write_q6_k(values: Floats) -> Bytes:
    """Each group of 16 with its farthest value at -32, rounded to nearest."""
    groups = values.reshape(-1, 16, 16)
    farthest = np.take_along_axis(groups, np.abs(groups).argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
    steps = farthest / np.float32(-32)
    step = np.abs(steps).max(axis=1, keepdims=True) / np.float32(127)
    scales = np.rint(steps * _inverse(step)).astype(np.int8)
    unit = (scales * _half(step).view("<f2").astype(np.float32))[:, :, None]
    whole = (np.rint(groups * _inverse(unit)).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = _packed((whole & 15).reshape(-1, 2, 2, 64)).reshape(-1, 128)
    high = np.bitwise_or.reduce(whole >> 4 << PAIRS, axis=2).reshape(-1, 64)
    return np.concatenate((low, high, scales.view(np.uint8), _half(step)), axis=1)


_ENCODE: Final[dict[BlockKind, Callable[[Floats], Bytes]]] = {
    "Q8_0": _write_q8_0, "Q4_0": _write_q4_0, "Q4_1": _write_q4_1, "Q4_K": _write_q4_k, "Q6_K": _write_q6_k,
}  # fmt: skip
