"""Files of weights as a loader sees them: which tensors there are, under the names of checkpoints, and their values one by one."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, get_args

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from banyan_runtime.errors import ModelError
from banyan_runtime.hub import checkpoint
from banyan_runtime.hub.gguf import architectures, header
from banyan_runtime.hub.gguf.tensors import Named, half_split, name_in_file, named
from banyan_runtime.model.block_values import BlockKind
from banyan_runtime.model.blocks import Blocks, dequantize
from banyan_runtime.model.reading import Span

_BLOCKS: Final[dict[str, BlockKind]] = {kind: kind for kind in get_args(BlockKind)}
_FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_KINDS: Final = {"F64": torch.float64, **_FLOATS}  # of safetensors


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as its file's header describes it."""

    file: Path
    kind: str  # in the words of the file's format: BF16, Q4_1
    shape: tuple[int, ...]


class Source(Protocol):
    form: str  # of its files' names
    title: str  # of its progress
    tensors: dict[str, Stored]  # by the names of checkpoints
    kinds: frozenset[str]  # that can be read
    block_kinds: frozenset[str]  # those of them that are quantized
    remedy: str  # for who has another kind

    def spelled(self, name: str) -> str:
        """How the file spells a checkpoint's name."""

    def kept(self, name: str) -> BlockKind | None:
        """The kind of blocks that a tensor's value will be; None: a Tensor."""

    def span(self, name: str) -> Span | None:
        """Where the bytes of a tensor lie, row by row; None: its value has to be made."""

    def spare(self, name: str) -> bool:
        """Whether a tensor that has no place may be passed over."""

    def values(self, wanted: Container[str]) -> Iterator[tuple[str, Blocks | Tensor, str]]:
        """Name, value and file of each wanted tensor; a Tensor is of the type that the file has. Raises ModelError."""

    def changes(self, wanted: Container[str]) -> str | None:
        """What the values have lost of their file's form, for the log."""


class Safetensors:
    form = "*.safetensors"
    title = "Loading safetensors"
    kinds = frozenset(_KINDS)
    block_kinds: frozenset[str] = frozenset()
    remedy = ""

    def __init__(self, files: Mapping[Path, Set[str]]) -> None:
        """`files`: as `checkpoint.files` finds them. Raises ModelError as `checkpoint.tensors`."""
        self._files = files
        found = checkpoint.tensors(files)
        self.tensors = {tensor.name: Stored(tensor.file, tensor.dtype, tensor.shape) for tensor in found}
        self._offsets = {tensor.name: tensor.offset for tensor in found}

    def spelled(self, name: str) -> str:
        return name

    def kept(self, name: str) -> BlockKind | None:
        return None

    def span(self, name: str) -> Span | None:
        return Span(self.tensors[name].file, self._offsets[name], _KINDS[self.tensors[name].kind])

    def spare(self, name: str) -> bool:
        """Scales of a cache that is kept in fewer bits, which lie beside plain matrices, too."""
        return name.endswith(checkpoint.UNREAD)

    def values(self, wanted: Container[str]) -> Iterator[tuple[str, Blocks | Tensor, str]]:
        for file in self._files:
            try:
                with safe_open(str(file), framework="pt") as shard:
                    for name in shard.keys():  # noqa: SIM118 - a shard cannot be iterated
                        if name in wanted and self.tensors[name].file == file:
                            yield name, shard.get_tensor(name), file.name
            except (SafetensorError, OSError) as error:
                raise changed(file, error) from error

    def changes(self, wanted: Container[str]) -> str | None:
        return None


def changed(file: Path, error: Exception) -> ModelError:
    """Of a safetensors file that cannot be read any more: its header could."""
    return ModelError(f"{file}: is truncated or not a safetensors file ({error}); fetch it again")


class GgufFile:
    form = "*.gguf"
    title = "Loading GGUF"
    kinds = frozenset({*_FLOATS, *_BLOCKS})
    block_kinds = frozenset(_BLOCKS)
    remedy = "; take another quantization of the model (Q4_K_M, Q4_0, Q8_0)"

    def __init__(self, file: Path) -> None:
        """Raises ModelError for a header that is broken."""
        self._header = header.read(file)
        fields = header.Fields(self._header)
        self._named, self._architecture = named(fields), architectures.of(fields)
        self.tensors = {name: Stored(each.tensor.file, each.tensor.kind, each.tensor.shape) for name, each in self._named.items()}

    def spelled(self, name: str) -> str:
        return self._named[name].tensor.name if name in self._named else name_in_file(name, self._architecture)

    def kept(self, name: str) -> BlockKind | None:
        tensor = self.tensors[name]
        return _BLOCKS.get(tensor.kind) if len(tensor.shape) == 2 else None

    def span(self, name: str) -> Span | None:
        return None

    def spare(self, name: str) -> bool:
        return False

    def values(self, wanted: Container[str]) -> Iterator[tuple[str, Blocks | Tensor, str]]:
        memory = self._header.memory()
        for name, each in self._named.items():
            if name in wanted:
                value = _value(each, each.tensor.lines(memory))
                order = None if each.heads is None else half_split(each.tensor.shape[0], each.heads)
                if isinstance(value, Blocks):
                    yield name, value if order is None else value.taken(order), each.tensor.file.name
                    continue
                if each.offset:
                    value = value.float() - each.offset
                yield name, value if order is None else value[torch.from_numpy(order)], each.tensor.file.name

    def changes(self, wanted: Container[str]) -> str | None:
        return None


def _value(each: Named, lines: header.Bytes) -> Blocks | Tensor:
    """The value of a tensor, its rows in the file's order."""
    tensor = each.tensor
    columns = tensor.shape[-1]
    if tensor.kind in _FLOATS:
        own = torch.from_numpy(np.array(lines).reshape(-1))  # torch takes no memory that it may not write to
        return own.view(_FLOATS[tensor.kind]).view(tensor.shape)
    held = Blocks(_BLOCKS[tensor.kind], len(lines), columns, lines)
    return held if len(tensor.shape) == 2 else torch.from_numpy(dequantize(held)).view(tensor.shape)
