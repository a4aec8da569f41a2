"""What hubs and buckets have in common: the files of a model, and what their bytes must hash to."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from banyan_runtime.errors import ModelError

_NAME: Final = re.compile(r"[A-Za-z0-9_][\w.+-]{0,199}", re.ASCII)
_SUFFIXES: Final = (".safetensors", ".json", ".jinja", ".model", ".tiktoken")
_NAMES: Final = ("merges.txt", "vocab.txt")
_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Digest:
    """`git`: the SHA-1 of a git blob, of its length and its bytes."""

    kind: Literal["sha256", "md5", "git"]
    value: str

    def of(self, path: Path) -> str:
        """What the file hashes to, by this kind. Raises OSError."""
        prefix = f"blob {path.stat().st_size}\0".encode()
        with path.open("rb") as file:
            if self.kind == "git":
                return hashlib.file_digest(file, lambda: hashlib.sha1(prefix, usedforsecurity=False)).hexdigest()
            return hashlib.file_digest(file, lambda: hashlib.new(self.kind, usedforsecurity=False)).hexdigest()


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """`name` in the model's folder; `size` in bytes; `tag` is the ETag of an object."""

    name: str
    size: int
    tag: str = ""
    digest: Digest | None = None


def needed(files: list[RemoteFile], title: str) -> list[RemoteFile]:
    """Of the files of a folder those that serving reads: weights as safetensors, configuration, tokenizer, templates. No pickles and
    no code, and no weights beside those that the loader takes. Raises ModelError where they make no model."""
    found = {file.name: file for file in files if _NAME.fullmatch(file.name) and (file.name.endswith(_SUFFIXES) or file.name in _NAMES)}
    weights = {name for name in found if name.endswith(".safetensors")}
    if _INDEX in found:
        spare = {name for name in weights if name.startswith("consolidated")}  # the same weights again, in the maker's own form
    else:
        spare = weights - {_SINGLE} if _SINGLE in weights else set()
    if "config.json" not in found:
        raise ModelError(f"{title}: holds no config.json, so it is not a model folder")
    if not weights:
        raise ModelError(f"{title}: holds no *.safetensors; weights in other forms (*.bin, *.pt) are not read: convert them first")
    return [found[name] for name in sorted(found.keys() - spare)]
