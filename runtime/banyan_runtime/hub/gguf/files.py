"""Which file is a GGUF file, and which one of a folder is its model. Imports nothing that takes time: every command asks."""

from __future__ import annotations

import re
from pathlib import Path, PurePath
from typing import Final, TypeVar

from banyan_runtime.errors import ModelError

MAGIC: Final = b"GGUF"
PROJECTOR: Final = "mmproj"  # begins the names of files that hold an image encoder alone
_PART: Final = re.compile(r"(.+)-(\d{5})-of-(0\d{4})\.gguf", re.ASCII)  # as llama-gguf-split names parts
_Path = TypeVar("_Path", bound=PurePath)


def is_gguf(path: Path) -> bool:
    """Whether a regular file begins as a GGUF file does. Raises OSError."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def find(folder: Path) -> Path | None:
    """The GGUF file that is the model of a folder: the only one, or the first part of the only one, where there are no safetensors.
    Raises ModelError for several."""
    if any(folder.glob("*.safetensors")):
        return None
    found = [path for path in sorted(folder.glob("*.gguf")) if not path.name.startswith(PROJECTOR) and first_part(path) in (None, path)]
    if len(found) > 1:
        named = ", ".join(path.name for path in found[:4])
        raise ModelError(f"{folder}: holds {len(found)} GGUF files ({named}{', …' if len(found) > 4 else ''}); name one with --model-path")
    return found[0] if found else None


def first_part(path: _Path) -> _Path | None:
    """The first part of a file that is split, by its name; None: it is whole."""
    match = _PART.fullmatch(path.name)
    return None if match is None else path.with_name(f"{match[1]}-00001-of-{match[3]}.gguf")


def parts(path: Path) -> list[Path]:
    """All parts of a file that are there, in their order; the file alone if it is whole."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    found = [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(1, int(match[3]) + 1)]
    return [part for part in found if part.is_file()]
