"""The weight files of a model folder: which there are, and what their headers say. Read by hand, with bounds, before the
safetensors library sees a file: it takes a header of 100 MB, which costs gigabytes and seconds.

Names in an index are text that came with the model, so they must stay below its folder. Links are followed wherever they
lead: a snapshot in a Hugging Face cache consists of links, and whoever can place a link in the folder could place the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, TypeGuard

from banyan_runtime.errors import AccessError, ModelError
from banyan_runtime.hub.files import INDEX_BYTES, parse_object, read_object, refuse_pointer, shown

INDEX: Final = "model.safetensors.index.json"
HEADER_BYTES: Final = 8 << 20  # 1,024 layers of 14 tensors take 3 MB; the format itself would allow 100 MB
_PREFIX: Final = 8  # bytes in front of the header: its length, little-endian
UNREAD: Final = (
    ".input_scale", ".input_scale_ub", ".input_zero_point", ".output_scale", ".activation_scale",
    ".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".weight_shape",
)  # fmt: skip
"""Ends of names beside packed matrices: of activations, which stay as they are here, and what a matrix's own shape says."""
_DIMENSIONS: Final = 8  # a decoder's tensors have one or two
_NAMED: Final = 10  # files named in one error
_BITS: Final = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I8": 8, "U8": 8, "BOOL": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the header of its file describes it; `dtype` in the format's words (BF16)."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    offset: int  # of its bytes in the file
    nbytes: int


def files(folder: Path) -> dict[Path, Set[str]]:
    """The weight files to read, in order: those of the index, each with the names of the tensors that it places there, else
    model.safetensors, else every *.safetensors; maybe none.

    Raises ModelError for an index that is broken, names a file outside the folder, or names one that is not there.
    """
    index = folder / INDEX
    try:
        found = read_object(index, INDEX_BYTES)
    except FileNotFoundError:
        if (single := folder / "model.safetensors").exists():
            return {single: frozenset()}
        return {file: frozenset() for file in sorted(folder.glob("*.safetensors"))}
    names = _names(found.get("weight_map"), index)
    try:
        missing = [name for name in names if not (folder / name).is_file()]
    except OSError as error:  # a name that is too long, a folder below that may not be entered
        raise ModelError(f"{index}: names a file that cannot be looked at ({error.strerror}: {shown(error.filename)})") from error
    if missing:
        listed = ", ".join(missing[:_NAMED]) + (f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else "")
        raise ModelError(f"{folder}: {listed} is missing, {INDEX} names it; fetch the model again")
    return {folder / name: placed for name, placed in names.items()}


def tensors(files: Mapping[Path, Set[str]]) -> list[StoredTensor]:
    """What the headers of all `files` say, each tensor once: of one that is in several files, the copy that the index places.

    Raises ModelError as `header`, and for a tensor in several files that the index places in none of them.
    """
    found: dict[str, StoredTensor] = {}
    copies: list[StoredTensor] = []
    for file, placed in files.items():
        for tensor in header(file):
            if tensor.name in found and tensor.name not in placed:
                copies.append(tensor)
                continue
            if tensor.name in found:
                copies.append(found[tensor.name])
            found[tensor.name] = tensor
    for copy in copies:
        kept = found[copy.name].file
        if copy.name not in files[kept]:
            raise ModelError(f"{copy.file.name}: tensor {shown(copy.name)} is also in {kept.name}; remove the stray file")
    return list(found.values())


def _names(weight_map: Any, index: Path) -> dict[str, set[str]]:
    """The file names of a weight_map, sorted, and which tensors each of them has."""
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(
            f"{index}: cannot be read as a safetensors index: 'weight_map' is {shown(weight_map)}, not an object of file names"
        )
    names: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            raise ModelError(f"{index}: weight_map[{shown(tensor)}] is {shown(name)}, not a file name")
        if name not in names:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or path.suffix != ".safetensors" or not name.isprintable() or "\\" in name:
                raise ModelError(
                    f"{index}: weight_map[{shown(tensor)}] is {shown(name)}; only *.safetensors files below the model's own folder are read"
                )
            names[name] = set()
        names[name].add(tensor)
    return dict(sorted(names.items()))


def header(file: Path) -> list[StoredTensor]:
    """What the header of a safetensors file says, checked: the tensors' bytes fill the file, each as many as its shape needs.

    Raises ModelError that names the file and the tensor, AccessError for a file that may not be read.
    """
    try:
        if not file.is_file():
            raise ModelError(f"{file}: is no regular file; fetch it again")
        with file.open("rb") as stream:
            size = file.stat().st_size
            first = stream.read(_PREFIX)
            refuse_pointer(file, first)
            length = int.from_bytes(first, "little")
            if size < _PREFIX + length:
                raise _broken(file, f"is truncated (it holds {size} bytes): its header alone should have {length}")
            if length > HEADER_BYTES:
                raise _broken(file, f"has a header of {length} bytes; at most {HEADER_BYTES} are read, no supported model needs more")
            content = stream.read(length)
    except PermissionError:
        raise AccessError(f"{file}: may not be read; give this user read access (fsGroup, or chmod a+rX)") from None
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror}); fetch it again") from error
    entries = parse_object(content, f"{file}: the safetensors header")
    entries.pop("__metadata__", None)
    data_bytes = size - _PREFIX - length
    spans = {name: _span(file, name, entry) for name, entry in entries.items()}
    expected, last = 0, ""
    for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        if begin != expected:
            raise _broken(file, f"tensor {shown(name)} begins at byte {begin} of the data and not where {shown(last)} ends, at {expected}")
        if end > data_bytes:
            raise _broken(file, f"is truncated (it holds {size} bytes): tensor {shown(name)} ends at byte {_PREFIX + length + end}")
        expected, last = end, name
    if expected != data_bytes:
        raise _broken(file, f"holds {data_bytes - expected} bytes behind its last tensor")
    data = _PREFIX + length
    return [
        StoredTensor(name, file, tuple(entry["shape"]), entry["dtype"], data + begin, end - begin)
        for (name, entry), (begin, end) in zip(entries.items(), spans.values(), strict=True)
    ]


def _span(file: Path, name: str, entry: Any) -> tuple[int, int]:
    """Where a tensor's bytes begin and end behind the header; checks the whole entry."""
    if not isinstance(entry, dict):
        raise _broken(file, f"tensor {shown(name)} is described by {shown(entry)}, not by an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise _broken(file, f"tensor {shown(name)} has dtype {shown(dtype)}, which safetensors does not know")
    if not _sizes(shape) or len(shape) > _DIMENSIONS:
        raise _broken(file, f"tensor {shown(name)} has shape {shown(shape)}, not a list of at most {_DIMENSIONS} sizes")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _broken(file, f"tensor {shown(name)} has data_offsets {shown(offsets)}, not its first byte and the one behind its last")
    bits = _BITS[dtype]
    for extent in shape:
        bits *= extent
    begin, end = offsets
    if bits != 8 * (end - begin):
        raise _broken(file, f"tensor {shown(name)} has {end - begin} bytes, its shape {shown(shape)} in {dtype} needs {-(-bits // 8)}")
    return begin, end


def _sizes(value: object) -> TypeGuard[list[int]]:
    """Whether a value is a list of non-negative integers of 63 bits."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _broken(file: Path, problem: str) -> ModelError:
    return ModelError(f"{file}: {problem}; it is damaged or not a safetensors file, fetch it again")
