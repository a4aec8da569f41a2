"""What hubs and buckets have in common: the files of a model, and what their bytes must hash to."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, Literal

from banyan_runtime.errors import ModelError
from banyan_runtime.hub.gguf.files import PROJECTOR, first_part

_NAME: Final = re.compile(r"[A-Za-z0-9_][\w.+-]{0,199}", re.ASCII)
_SUFFIXES: Final = (".safetensors", ".json", ".jinja", ".model", ".tiktoken")
_NAMES: Final = ("merges.txt", "vocab.txt")
_QUANTIZATION: Final = re.compile(r"(?:^|[-./])((?:UD-)?[A-Za-z0-9]+(?:_[A-Za-z0-9]+)*)(?:-\d{5}-of-\d{5})?\.gguf$", re.ASCII)
_SHOWN: Final = 12
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


def needed(files: list[RemoteFile], title: str, gguf: str = "") -> list[RemoteFile]:
    """Of the files of a folder those that serving reads: weights as safetensors, configuration, tokenizer, templates. No pickles and
    no code, and no weights beside those that the loader takes. `gguf`: the name or the quantization of the GGUF file that is wanted; it
    is also taken where it is the only one and there are no safetensors. Raises ModelError where they make no model."""
    if (gguf or not any(file.name.endswith(".safetensors") for file in files)) and (chosen := _gguf(files, title, gguf)):
        return chosen
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


def _gguf(files: list[RemoteFile], title: str, wanted: str) -> list[RemoteFile]:
    """All parts of the GGUF file that is wanted; nothing beside it, for it holds configuration, tokenizer and template."""
    known = {file.name: file for file in files if file.name.endswith(".gguf") and all(map(_NAME.fullmatch, file.name.split("/")))}
    models = {name: first_part(PurePosixPath(name)) for name in known if not PurePosixPath(name).name.startswith(PROJECTOR)}
    wholes: dict[str, list[str]] = {}
    for name, first in models.items():
        wholes.setdefault(name if first is None else str(first), []).append(name)
    found = [name for name in wholes if not wanted or name == wanted or _quantization(name).casefold() == wanted.casefold()]
    if len(found) == 1:
        return [known[part] for part in sorted(wholes[found[0]])]
    if not wanted and not found:
        return []
    listed = ", ".join(sorted(found or wholes)[:_SHOWN]) + (", …" if len(found or wholes) > _SHOWN else "")
    problem = f"{len(found)} GGUF files fit" if found else f"no GGUF file is {wanted}"
    raise ModelError(f"{title}: {problem}; there are {listed or 'none'}: name one by its file name", code="model_not_found")


def _quantization(name: str) -> str:
    """The end of a file's name, without the number of a part: Q4_K_M of name-Q4_K_M-00001-of-00002.gguf."""
    match = _QUANTIZATION.search(name)
    return "" if match is None else match[1]
