"""The header of a GGUF file (versions 2 and 3, little-endian): keys with values, and where each tensor lies.

Read by hand, with bounds: whoever made the file is not trusted, and a count in it may say anything. No tensor is read.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from banyan_runtime.errors import AccessError, ModelError
from banyan_runtime.hub.files import shown
from banyan_runtime.hub.gguf.files import MAGIC, parts

Bytes = npt.NDArray[np.uint8]

_VERSIONS: Final = (2, 3)
_MOST_STRINGS: Final = 1_000_000  # of a file: vocabularies of 262,144 tokens come with 514,000 merges; each costs 0.5 us and 100 bytes
_MOST_NUMBERS: Final = 4_000_000  # in lists: a type and a score for each token
_MOST_KEYS: Final = 10_000  # known: 60
_MOST_TENSORS: Final = 100_000  # 1,024 layers of 14
_LONGEST_NAME: Final = 4096  # bytes; the format says 65,535 for a key and 64 for a tensor
_DIMENSIONS: Final = 4
_LARGEST_ALIGNMENT: Final = 1 << 20  # known: 32

_NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of values, as `struct` spells them."""
_LENGTH: Final = struct.Struct("<Q")
_STRING: Final = 8
_LIST: Final = 9
_KINDS: Final = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
"""Types of tensors: name, values of a block, bytes of a block."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the header describes it; `kind` in the format's words (Q4_1), `shape` with the columns last."""

    file: Path
    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int  # bytes from the beginning of the file
    nbytes: int

    def lines(self, memory: Mapping[Path, Bytes]) -> Bytes:
        """Its bytes in the memory of the files, a line for each row; a vector is one line."""
        rows = self.shape[0] if len(self.shape) > 1 else 1
        return memory[self.file][self.offset : self.offset + self.nbytes].reshape(rows, -1)


@dataclass(frozen=True, slots=True)
class Header:
    """The keys of a file, and its tensors, with those of its other parts."""

    path: Path
    fields: Mapping[str, Any]  # numbers, texts, truths, and lists of one kind of these
    tensors: Mapping[str, StoredTensor]

    def memory(self) -> Mapping[Path, Bytes]:
        """The whole files as memory that may only be read. Raises ModelError."""
        found: dict[Path, Bytes] = {}
        for tensor in self.tensors.values():
            if tensor.file not in found:
                found[tensor.file] = _mapped(tensor.file)
            if tensor.offset + tensor.nbytes > len(found[tensor.file]):
                raise ModelError(f"{tensor.file}: has become shorter since its header was read; fetch it again")
        return found


def _mapped(path: Path) -> Bytes:
    try:
        return np.memmap(path, np.uint8, "r").view(np.ndarray)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read any more ({error}); fetch it again") from error


def read(path: Path) -> Header:
    """The header of a file, checked: every tensor's bytes lie within the file, and no two tensors share any. The tensors of a file that
    is the first of several parts are those of all parts.

    Raises ModelError that names the file and the key or tensor, AccessError for a file that may not be read.
    """
    first = _read(path)
    count, number = (first.fields.get(f"split.{key}", default) for key, default in (("count", 1), ("no", 0)))
    if type(count) is not int or count <= 1:
        return first
    others = parts(path)
    if number != 0 or len(others) != count:
        raise ModelError(
            f"{path}: is one of {count} parts, of which {len(others)} are there; name the first one, and put all others beside it"
        )
    tensors = dict(first.tensors)
    for index, other in enumerate(others[1:], start=1):
        part = _read(other)
        if (part.fields.get("split.no"), part.fields.get("split.count")) != (index, count) or tensors.keys() & part.tensors.keys():
            raise ModelError(f"{other}: is not part {index + 1} of the {count} of {path.name}; fetch it again")
        tensors |= part.tensors
    return Header(path, first.fields, tensors)


def _read(path: Path) -> Header:
    try:
        if not path.is_file():
            raise ModelError(f"{path}: is no regular file; fetch it again")
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ModelError(f"{path}: does not begin with {MAGIC.decode()}, so it is no GGUF file; fetch it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Reader(path, content).header()
    except PermissionError:
        raise AccessError(f"{path}: may not be read; give this user read access (fsGroup, or chmod a+rX)") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}); fetch it again") from error


class _Reader:
    """Walks through a header from its beginning."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path = path
        self._content = content
        self._size = len(content)
        self._at = len(MAGIC)
        self._strings = 0
        self._numbers = 0

    def header(self) -> Header:
        version = self._number("I", "the version")
        if version not in _VERSIONS:
            swapped = " (it is big-endian)" if version in (2 << 24, 3 << 24) else ""
            raise self._broken(f"is of version {version}{swapped}; supported are 2 and 3, little-endian")
        tensors = self._count("Q", "tensors", _MOST_TENSORS)
        keys = self._count("Q", "keys", _MOST_KEYS)
        fields: dict[str, Any] = {}
        for _ in range(keys):
            key = self._text("a key", _LONGEST_NAME)
            if key in fields:
                raise self._broken(f"has the key {shown(key)} twice")
            fields[key] = self._value(self._number("I", f"the type of key {shown(key)}"), f"key {shown(key)}")
        described = [self._tensor() for _ in range(tensors)]
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= _LARGEST_ALIGNMENT or alignment & (alignment - 1):
            raise self._broken(f"general.alignment is {shown(alignment)}, not a power of 2 of at most {_LARGEST_ALIGNMENT}")
        return Header(self._path, fields, self._placed(described, -self._at % alignment + self._at, alignment))

    def _tensor(self) -> StoredTensor:
        """The description of a tensor; its offset is still that from the beginning of the data."""
        name = self._text("the name of a tensor", _LONGEST_NAME)
        dimensions = self._number("I", f"the dimensions of tensor {shown(name)}")
        if not 1 <= dimensions <= _DIMENSIONS:
            raise self._broken(f"tensor {shown(name)} has {dimensions} dimensions; at most {_DIMENSIONS} are known")
        shape = tuple(self._number("Q", f"the shape of tensor {shown(name)}") for _ in range(dimensions))[::-1]
        number = self._number("I", f"the type of tensor {shown(name)}")
        offset = self._number("Q", f"the place of tensor {shown(name)}")
        if number not in _KINDS:
            raise self._broken(f"tensor {shown(name)} is of type {number}, which is not known")
        kind, values, size = _KINDS[number]
        count = 1
        for extent in shape:
            count *= extent
        if not count or shape[-1] % values:
            raise self._broken(f"tensor {shown(name)} has shape {shown(shape)}; rows of {kind} are multiples of {values}")
        return StoredTensor(self._path, name, kind, shape, offset, count // values * size)

    def _placed(self, described: list[StoredTensor], data: int, alignment: int) -> dict[str, StoredTensor]:
        placed: dict[str, StoredTensor] = {}
        behind, last = data, ""
        for tensor in sorted(described, key=lambda tensor: tensor.offset):
            begin = data + tensor.offset
            if tensor.name in placed:
                raise self._broken(f"has the tensor {shown(tensor.name)} twice")
            if tensor.offset % alignment or begin < behind:
                raise self._broken(f"tensor {shown(tensor.name)} begins at byte {begin}, within {shown(last)} or between its places")
            behind, last = begin + tensor.nbytes, tensor.name
            if behind > self._size:
                raise self._broken(f"is truncated (it holds {self._size} bytes): tensor {shown(last)} ends at byte {behind}")
            placed[last] = replace(tensor, offset=begin)
        return placed

    def _value(self, kind: int, what: str) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind], what)
        if kind == _STRING:
            return self._text(what)
        if kind != _LIST:
            raise self._broken(f"{what} is of type {kind}, which is not known")
        inner = self._number("I", what)
        count = self._number("Q", what)
        if inner == _STRING:
            self._strings += self._limited(count, _MOST_STRINGS - self._strings, _LENGTH.size, what)
            return self._texts(count, what)
        if inner not in _NUMBERS:
            raise self._broken(f"{what} is a list of values of type {inner}, which is not known")
        form = _NUMBERS[inner]
        self._numbers += self._limited(count, _MOST_NUMBERS - self._numbers, struct.calcsize(f"<{form}"), what)
        return list(struct.unpack(f"<{count}{form}", self._bytes(count * struct.calcsize(f"<{form}"), what)))

    def _count(self, form: str, what: str, most: int) -> int:
        return self._limited(self._number(form, f"the number of {what}"), most, 8, what)

    def _limited(self, count: int, most: int, each: int, what: str) -> int:
        """A count that the rest of the file can hold, at so many bytes each, and that is not more than any model has."""
        if count * each > self._size - self._at:
            raise self._broken(f"ends where {count} values of {what} should be, at byte {self._at}")
        if count > most:
            raise self._broken(f"{what}: {count} are too many; no supported model has so many")
        return count

    def _number(self, form: str, what: str) -> Any:
        length = struct.calcsize(f"<{form}")
        return struct.unpack(f"<{form}", self._bytes(length, what))[0]

    def _text(self, what: str, most: int = 1 << 26) -> str:
        length = self._number("Q", what)
        if length > most:
            raise self._broken(f"{what} has {length} bytes, and at most {most} are read")
        try:
            return self._bytes(length, what).decode()
        except UnicodeDecodeError as error:
            raise self._broken(f"{what} is not UTF-8 text ({error.reason})") from None

    def _texts(self, count: int, what: str) -> list[str]:
        """As many of `_text`, in a loop of its own: there are half a million of them."""
        content, size, at, unpack = self._content, self._size, self._at, _LENGTH.unpack_from
        found: list[str] = []
        try:
            for _ in range(count):
                begin = at + _LENGTH.size
                at = begin + unpack(content, at)[0]
                if at > size:
                    break
                found.append(content[begin:at].decode())
        except UnicodeDecodeError as error:
            raise self._broken(f"{what} holds what is not UTF-8 text ({error.reason})") from None
        except struct.error:
            at = size + 1
        if at > size:
            raise self._broken(f"ends where {count} values of {what} should be, at byte {size}")
        self._at = at
        return found

    def _bytes(self, length: int, what: str) -> bytes:
        end = self._at + length
        if end > self._size:
            raise self._broken(f"ends where {what} should be, at byte {self._at}")
        content, self._at = self._content[self._at : end], end
        return content

    def _broken(self, problem: str) -> ModelError:
        return ModelError(f"{self._path}: {problem}; it is damaged or not a GGUF file of a supported kind, fetch it again")


class Fields:
    """Typed reads of a header's keys, with errors that name the file and the key."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.where = header.path
        self._values = header.fields

    def has(self, key: str) -> bool:
        return key in self._values

    def text(self, key: str, default: str | None = None) -> str:
        found: str = self._read(key, default, lambda value: isinstance(value, str), "text")
        return found

    def size(self, key: str, default: int | None = None) -> int:
        found: int = self._read(key, default, lambda value: _is_whole(value) and value > 0, "a positive whole number")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        """A float as short as its 32 bits allow: 1e-05, where the file says 9.99999974e-06."""
        value = self._read(key, default, lambda value: type(value) in (int, float) and 0 < value < float("inf"), "a positive number")
        return float(str(np.float32(value)))

    def truth(self, key: str, *, default: bool) -> bool:
        found: bool = self._read(key, default, lambda value: isinstance(value, bool), "true or false")
        return found

    def texts(self, key: str, default: list[str] | None = None) -> list[str]:
        found: list[str] = self._read(
            key, default, lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value), "a list of texts"
        )
        return found

    def numbers(self, key: str) -> list[int]:
        found: list[int] = self._read(
            key, None, lambda value: isinstance(value, list) and all(map(_is_whole, value)), "a list of whole numbers"
        )
        return found

    def floats(self, key: str) -> list[float]:
        found: list[float] = self._read(
            key, None, lambda value: isinstance(value, list) and all(isinstance(item, float) for item in value), "a list of numbers"
        )
        return found

    def index(self, key: str, size: int) -> int | None:
        """A number below `size`; None where the key is not there, or is the format's word for none."""
        if (value := self._values.get(key)) is None or value == (1 << 32) - 1:
            return None
        if not _is_whole(value) or not 0 <= value < size:
            raise ModelError(f"{self.where}: '{key}' is {shown(value)}, not one of {size} tokens; fetch the file again")
        return int(value)

    def _read(self, key: str, default: Any, fits: Callable[[Any], bool], form: str) -> Any:
        value = self._values.get(key, default)
        if value is None:
            raise ModelError(f"{self.where}: key '{key}' is missing; the file is not a complete model, fetch it again")
        if not fits(value):
            raise ModelError(f"{self.where}: '{key}' is {shown(value)}, not {form}; this kind of file is not supported")
        return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
