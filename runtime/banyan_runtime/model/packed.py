"""Checkpoints that other tools have quantized (`packing.py`): matrices of integers become blocks that hold the same numbers, to
float16's precision, where there are such; those of 8-bit floats plain ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from banyan_runtime.errors import ModelError
from banyan_runtime.hub.files import shown
from banyan_runtime.model import blocks
from banyan_runtime.model.block_values import BlockKind, Floats
from banyan_runtime.model.blocks import Blocks
from banyan_runtime.model.reading import Span
from banyan_runtime.model.stored import Safetensors, Stored, changed
from banyan_runtime.models.quantization import Grouped, Packing, Scaled

_BLOCKS: Final[dict[int, BlockKind]] = {4: "Q4_1", 8: "Q8_0"}
_IN_ORDER: Final = {bits: np.arange(0, 32, bits, dtype=np.uint32) for bits in _BLOCKS}  # where the bits of neighbours stand
_EVEN_FIRST: Final = np.array([0, 16, 4, 20, 8, 24, 12, 28], np.uint32)
_FLOATS: Final = ("F32", "F16", "BF16")
_ONES: Final = {4: 0x11111111, 8: 0x01010101}  # one in each number
_MOST: Final = 65504  # of float16
_UNTOLD: Final = -1  # the group of each input, where a tool has made room for it and not told it
Words = npt.NDArray[np.uint32]
Codes = npt.NDArray[np.uint8]
Read = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A packed matrix: the tensors it is made of, by what they are."""

    stored: Stored
    parts: dict[str, str]
    kept: BlockKind | None


def _with_scales(kind: str) -> str:
    return f"{kind} with scales"


def _of(bits: int) -> str:
    return f"{bits} bits"


def _spread(bits: int) -> str:
    return f"{bits} bits with groups or zeros that blocks do not have"


class PackedSafetensors:
    form = Safetensors.form
    title = Safetensors.title
    block_kinds = frozenset({*map(_of, _BLOCKS), _with_scales("I8")})
    kinds = Safetensors.kinds | block_kinds | {*map(_spread, _BLOCKS), _with_scales("F8_E4M3")}
    remedy = ""

    def __init__(self, files: Mapping[Path, Set[str]], packing: Packing) -> None:
        """Raises ModelError for a matrix whose parts are missing or do not fit together."""
        self._plain = Safetensors(files)
        self._packing = packing
        self._matrices = self._found()
        parts = {part for matrix in self._matrices.values() for part in matrix.parts.values()}
        self.tensors = {name: stored for name, stored in self._plain.tensors.items() if name not in parts} | {
            name: matrix.stored for name, matrix in self._matrices.items()
        }

    def spelled(self, name: str) -> str:
        return name

    def kept(self, name: str) -> BlockKind | None:
        return self._matrices[name].kept if name in self._matrices else None

    def span(self, name: str) -> Span | None:
        return None if name in self._matrices else self._plain.span(name)

    def spare(self, name: str) -> bool:
        """GPTQ's tools write a bias for each matrix they pack: of zeros, where the model has none. Others write zeros that are none."""
        beside = any(name.endswith(end) and f"{name.removesuffix(end)}.weight" in self._matrices for end in (".bias", ".weight_zero_point"))
        with ExitStack() as stack:
            return self._plain.spare(name) or (beside and not self._reader(stack)(name).any())

    def values(self, wanted: Container[str]) -> Iterator[tuple[str, Blocks | Tensor, str]]:
        plain = [name for name in self.tensors if name in wanted and name not in self._matrices]
        yield from self._plain.values(plain)
        with ExitStack() as stack:
            read = self._reader(stack)
            for name, matrix in self._matrices.items():
                if name in wanted:
                    if isinstance(self._packing, Scaled):
                        yield name, _scaled(name, matrix, self._packing, read), matrix.stored.file.name
                    else:
                        yield name, _grouped(name, matrix, self._packing, read), matrix.stored.file.name

    def _reader(self, stack: ExitStack) -> Read:
        opened: dict[Path, Any] = {}

        def read(name: str) -> Tensor:
            file = self._plain.tensors[name].file
            try:
                if file not in opened:
                    opened[file] = stack.enter_context(safe_open(str(file), framework="pt"))
                found: Tensor = opened[file].get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise changed(file, error) from error
            return found

        return read

    def changes(self, wanted: Container[str]) -> str | None:
        lost = Counter(
            matrix.stored.kind for name, matrix in self._matrices.items() if name in wanted and matrix.kept is None
        )  # fmt: skip
        if not lost:
            return None
        listed = ", ".join(f"{count} in {kind}" for kind, count in sorted(lost.items()))
        return (
            f"Nothing computes on some of this checkpoint's packed matrices: {listed} become unquantized, larger and slower. "
            "--quantization w8a16 makes them blocks of 8 bits, on which the CPU computes."
        )

    def _found(self) -> dict[str, _Matrix]:
        """By the name of its matrix in a checkpoint that is not packed."""
        packing = self._packing
        if isinstance(packing, Scaled):
            names = [name for name, stored in self._plain.tensors.items() if name.endswith(".weight") and stored.kind == packing.kind]
            return {name: self._scaled(name, packing) for name in names}
        end = ".weight_packed" if packing.form == "packed" else ".qweight"
        bases = [name.removesuffix(end) for name in self._plain.tensors if name.endswith(end)]
        with ExitStack() as stack:
            read = self._reader(stack)
            return {f"{base}.weight": self._grouped(base, packing, read) for base in bases}

    def _scaled(self, name: str, packing: Scaled) -> _Matrix:
        stored = self._plain.tensors[name]
        scale = next(
            (end for end in ("weight_scale_inv", "weight_scale") if self._beside(name, end) in self._plain.tensors), "weight_scale"
        )
        rows, columns = self._two(name)
        shapes: list[tuple[int, ...]] = [(), (1,), (1, 1), (rows,), (rows, 1)]
        if packing.block is not None:
            shapes = [(-(-rows // packing.block[0]), -(-columns // packing.block[1]))]
        self._part(self._beside(name, scale), _FLOATS, *shapes)
        whole = Stored(stored.file, _with_scales(stored.kind), stored.shape)
        fit = stored.kind == "I8" and packing.block is None and blocks.fits("Q8_0", columns)
        return _Matrix(whole, {"codes": name, "scale": self._beside(name, scale)}, "Q8_0" if fit else None)

    def _grouped(self, base: str, packing: Grouped, read: Read) -> _Matrix:
        packed, each = packing.form == "packed", packing.each
        codes = f"{base}.weight_packed" if packed else f"{base}.qweight"
        first, second = self._two(codes)
        if packing.form == "gptq":
            rows, columns = second, each * first
        else:
            rows, columns = (first, each * second) if packed else (each * second, first)
        self._part(codes, ("I32",), (first, second))
        group = min(packing.group or columns, columns)
        groups = -(-columns // group)
        parts = {"codes": codes}
        if packed:
            parts["scale"] = self._part(f"{base}.weight_scale", _FLOATS, (rows, groups))
            if not packing.symmetric:
                parts["zeros"] = self._part(f"{base}.weight_zero_point", ("I32",), (-(-rows // each), groups))
        else:
            parts["scale"] = self._part(f"{base}.scales", _FLOATS, (groups, rows))
            parts["zeros"] = self._part(f"{base}.qzeros", ("I32",), (groups, rows // each))
        if (order := f"{base}.weight_g_idx" if packed else f"{base}.g_idx") in self._plain.tensors:
            parts["order"] = self._part(order, ("I32",), (columns,))
        kind = _BLOCKS[packing.bits]
        whole = group % 32 == 0 and blocks.fits(kind, columns) and (kind == "Q4_1" or packing.symmetric)
        if whole and not packing.ordered and "order" in parts:
            told = read(parts["order"]).numpy()
            whole = bool((told == np.arange(columns) // group).all() or (told == _UNTOLD).all())
        stored = Stored(self._plain.tensors[codes].file, (_of if whole else _spread)(packing.bits), (rows, columns))
        return _Matrix(stored, parts, kind if whole else None)

    def _beside(self, name: str, end: str) -> str:
        return f"{name.removesuffix('weight')}{end}"

    def _two(self, name: str) -> tuple[int, int]:
        stored = self._plain.tensors[name]
        if len(stored.shape) != 2 or 0 in stored.shape:
            raise ModelError(f"{stored.file.name}: tensor {shown(name)} has shape {list(stored.shape)}, not that of a matrix")
        return stored.shape[0], stored.shape[1]

    def _part(self, name: str, kinds: tuple[str, ...], *shapes: tuple[int, ...]) -> str:
        """Its name, if it is there and as it has to be."""
        stored = self._plain.tensors.get(name)
        if stored is None:
            raise ModelError(
                f"tensor {shown(name)} is missing from the {self.form} files: quantization_config asks for it; fetch the model again"
            )
        if stored.kind not in kinds or stored.shape not in shapes:
            found, shape = f"{stored.kind} of shape {list(stored.shape)}", " or ".join(str(list(shape)) for shape in shapes)
            raise ModelError(
                f"{stored.file.name}: tensor {shown(name)} is {found}, and quantization_config asks for {' or '.join(kinds)} of shape "
                f"{shape}; the checkpoint and its config belong to different models"
            )
        return name


def _scaled(name: str, matrix: _Matrix, packing: Scaled, read: Read) -> Blocks | Tensor:
    """fp32 [rows, columns], where blocks do not hold it."""
    stored, (rows, columns) = read(matrix.parts["codes"]), matrix.stored.shape
    codes, scale = stored.view(torch.uint8).numpy(), read(matrix.parts["scale"]).float()
    by_block: Floats = (scale if packing.block else scale.reshape(-1, 1)).numpy()
    if matrix.kept is not None:
        _check(name, matrix, by_block)
        steps = np.broadcast_to(by_block, (rows, columns // 32))
        return _blocks(matrix, lambda part: blocks.q8_0(codes[part].view(np.int8), steps[part]))
    meant: Floats = torch.arange(256, dtype=torch.uint8).view(stored.dtype).float().numpy()
    height, width = packing.block or (rows if scale.numel() == 1 else 1, columns)
    width = min(width, columns)
    found = np.empty((rows, columns), np.float32)

    def work(part: slice) -> None:
        own = by_block[np.arange(part.start, part.stop) // height]
        np.multiply(meant[codes[part]], own.repeat(width, axis=1)[:, :columns] if packing.block else own, out=found[part])

    blocks.by_rows(rows, columns, work)
    return torch.from_numpy(found)


def _grouped(name: str, matrix: _Matrix, packing: Grouped, read: Read) -> Blocks | Tensor:
    file, (rows, columns) = matrix.stored.file.name, matrix.stored.shape
    codes = _Codes(packing, _words(read(matrix.parts["codes"])))
    scale: Floats = read(matrix.parts["scale"]).float().numpy()
    scale = scale if packing.form == "packed" else scale.T
    zeros = np.full_like(scale, packing.half)
    if not packing.symmetric:
        # Where one is missing, it was taken from the whole word, and may have been lent by the number above.
        words = _words(read(matrix.parts["zeros"])) + np.uint32(_ONES[packing.bits] * packing.lowered)
        if packing.form == "packed":
            words = np.ascontiguousarray(words.T)
        shifts = _EVEN_FIRST if packing.form == "awq" else _IN_ORDER[packing.bits]
        zeros = _unpacked(words, shifts).astype(np.float32).T[:rows]
    group = min(packing.group or columns, columns)
    order = np.arange(columns) // group
    if "order" in matrix.parts and not ((told := read(matrix.parts["order"]).numpy()) == _UNTOLD).all():
        if (told < 0).any() or (told >= scale.shape[1]).any():
            raise ModelError(f"{file}: the g_idx of {shown(name)} names groups beyond the {scale.shape[1]} that there are; fetch it again")
        if matrix.kept is not None and (told != order).any():
            raise ModelError(f"{file}: the g_idx of {shown(name)} is not in order, and quantization_config says that it is")
        order = told
    if matrix.kept is None:
        found = np.empty((rows, columns), np.float32)

        def plain(part: slice) -> None:
            found[part] = (codes.of(part) - zeros[part][:, order]) * scale[part][:, order]

        blocks.by_rows(rows, columns, plain)
        return torch.from_numpy(found)

    def shared(numbers: Floats, part: slice) -> Floats:
        """By blocks."""
        return numbers[part].repeat(group // 32, axis=1)[:, : columns // 32]

    if matrix.kept == "Q8_0":
        flip = np.uint8(packing.half)  # one bit: from 0 … 255 to -128 … 127
        _check(name, matrix, scale)
        return _blocks(matrix, lambda part: blocks.q8_0((codes.of(part) ^ flip).view(np.int8), shared(scale, part)))
    least = -zeros * scale
    _check(name, matrix, scale, least)
    return _blocks(matrix, lambda part: blocks.q4_1(codes.of(part), shared(scale, part), shared(least, part)))


def _blocks(matrix: _Matrix, made: Callable[[slice], Blocks]) -> Blocks:
    """Of some rows after others."""
    assert matrix.kept is not None
    rows, columns = matrix.stored.shape
    data = np.empty((rows, blocks.row_bytes(matrix.kept, columns)), np.uint8)

    def work(part: slice) -> None:
        data[part] = made(part).data

    blocks.by_rows(rows, columns, work)
    return Blocks(matrix.kept, rows, columns, data)


def _check(name: str, matrix: _Matrix, *numbers: Floats) -> None:
    """Raises ModelError for what float16 does not hold."""
    if not all(np.abs(each).max(initial=0) <= _MOST for each in numbers):  # also for NaN
        raise ModelError(f"{matrix.stored.file.name}: the scales of {shown(name)} are no numbers that float16 holds; fetch it again")


class _Codes:
    """Of a matrix, some rows at a time."""

    def __init__(self, packing: Grouped, words: Words) -> None:
        self._packing = packing
        self._words = words

    def of(self, rows: slice) -> Codes:
        """[rows, columns], without signs."""
        in_order = _IN_ORDER[self._packing.bits]
        if self._packing.form == "packed":
            return _unpacked(self._words[rows], in_order)
        if self._packing.form == "gptq":
            return _unpacked(np.ascontiguousarray(self._words[:, rows].T), in_order)
        first, last = rows.start // 8, -(-rows.stop // 8)
        wide = _unpacked(self._words[:, first:last], _EVEN_FIRST)
        return np.ascontiguousarray(wide[:, rows.start - 8 * first : rows.stop - 8 * first].T)


def _words(tensor: Tensor) -> Words:
    return tensor.numpy().view(np.uint32)


def _unpacked(packed: Words, shifts: Words) -> Codes:
    """[n, m] → [n, len(shifts) * m]: the numbers in each, in the order of `shifts`."""
    codes = np.empty((*packed.shape, len(shifts)), np.uint8)
    mask = np.uint32((1 << (32 // len(shifts))) - 1)
    for place, shift in enumerate(shifts):
        codes[..., place] = packed >> shift & mask
    return codes.reshape(len(packed), -1)
