"""Which file is a GGUF file, and which one of a folder is its model. Imports nothing that takes time: every command asks."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from banyan_runtime.errors import ModelError

MAGIC: Final = b"GGUF"


def is_gguf(path: Path) -> bool:
    """Whether a regular file begins as a GGUF file does. Raises OSError."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def find(folder: Path) -> Path | None:
    """The GGUF file that is the model of a folder: the only one, where there are no safetensors. Raises ModelError for several."""
    if any(folder.glob("*.safetensors")):
        return None
    found = sorted(folder.glob("*.gguf"))
    if len(found) > 1:
        named = ", ".join(path.name for path in found[:4])
        raise ModelError(f"{folder}: holds {len(found)} GGUF files ({named}{', …' if len(found) > 4 else ''}); name one with --model-path")
    return found[0] if found else None
