"""Where a model's files come from: the seam between fetching, which is the same for all, and the hub or the bucket."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from banyan_runtime.errors import ModelError

MOST_FILES: Final = 4096  # of one model; the largest checkpoints have some hundreds
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

    def begin(self, size: int) -> hashlib._Hash:
        """A hash that has seen nothing of a file of `size` bytes yet."""
        if self.kind == "git":
            return hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
        return hashlib.new(self.kind, usedforsecurity=False)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """`name` in the model's folder; `size` in bytes; `tag` is what the source knows its content by."""

    name: str
    size: int
    tag: str = ""
    digest: Digest | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """Equal versions mean equal files."""

    version: str
    files: tuple[RemoteFile, ...]


class Interrupted(Exception):
    """Another try may help. `after`: seconds that the source asks to wait first. `unanswered`: it was not reached."""

    def __init__(self, reason: str, after: float | None = None, *, unanswered: bool = False) -> None:
        super().__init__(reason)
        self.after = after
        self.unanswered = unanswered


class Source(Protocol):
    """All calls block, are safe from several threads, and raise Interrupted for what another try may mend; what it will not mend is a
    UserError that names the address and the remedy."""

    @property
    def title(self) -> str:
        """The address, for people."""

    @property
    def asked(self) -> str:
        """Who is asked: a URL without paths, or a service."""

    @property
    def remedy(self) -> str:
        """What to look at where nobody answers, as an imperative."""

    def listing(self) -> Listing:
        """The files that a model needs."""

    def digest(self, file: RemoteFile) -> Digest | None:
        """What the file's bytes must hash to, where the source can tell."""

    def read(self, file: RemoteFile, start: int) -> Iterator[bytes]:
        """The bytes from `start` on, in pieces of at most a few MB, of the version that was listed."""


def needed(files: list[RemoteFile], title: str) -> tuple[RemoteFile, ...]:
    """Of the files of a folder those that serving reads: weights as safetensors, configuration, tokenizer, templates. No pickles and
    no code, and no weights beside those that the loader takes. Raises ModelError where they make no model."""
    found = {file.name: file for file in files if _NAME.fullmatch(file.name) and (file.name.endswith(_SUFFIXES) or file.name in _NAMES)}
    weights = {name for name in found if name.endswith(".safetensors")}
    if _INDEX in found:
        spare = {name for name in weights if name.startswith("consolidated")}  # the same weights again, in the maker's own form
    else:
        spare = weights - {_SINGLE} if _SINGLE in weights else set()
    wanted = tuple(found[name] for name in sorted(found.keys() - spare))
    if "config.json" not in found:
        raise ModelError(f"{title}: holds no config.json, so it is not a model folder")
    if not weights:
        raise ModelError(f"{title}: holds no *.safetensors; weights in other forms (*.bin, *.pt) are not read: convert them first")
    if len(wanted) > MOST_FILES:
        raise ModelError(f"{title}: has {len(wanted)} files; at most {MOST_FILES} are fetched")
    return wanted
