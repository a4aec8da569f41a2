"""What a fetched model's folder must hold: sizes and hashes, written once all files have come. A start compares the sizes; `models
verify` and `models fetch` read every byte."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from banyan_runtime.errors import ModelError
from banyan_runtime.hub.source import RemoteFile

NAME: Final = ".banyan-manifest.json"
_THREADS: Final = 4
_SHOWN: Final = 5  # damaged files named in one line


class Entry(msgspec.Struct, frozen=True):
    """`size` in bytes."""

    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """`source` is the model's address. Equal versions mean equal files. There are no `files` until all have come."""

    source: str
    version: str
    files: dict[str, Entry]

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.files.values())


def read(folder: Path) -> Manifest | None:
    """The manifest of a folder, None where it has none. One that cannot be read has no version and no files."""
    try:
        found = msgspec.json.decode((folder / NAME).read_bytes(), type=Manifest)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Manifest("", "", {})
    return found if all(Path(name).name == name for name in found.files) else Manifest("", "", {})


def write(folder: Path, manifest: Manifest) -> None:
    """Put a manifest in place by one rename."""
    scratch = folder / f"{NAME}.{os.getpid()}.{threading.get_ident()}"
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    scratch.replace(folder / NAME)


def damaged(folder: Path, manifest: Manifest, *, hashes: bool) -> dict[str, str]:
    """Files that are not as they were fetched, with what is wrong with them. With `hashes` every byte is read."""

    def problem(name: str) -> str | None:
        entry, path = manifest.files[name], folder / name
        try:
            if (size := path.stat().st_size) != entry.size:
                return f"has {size} bytes, not {entry.size}"
            if hashes and (sha256 := sha256_of(path)) != entry.sha256:
                return f"has other bytes than were fetched (sha256 {sha256[:12]}…, not {entry.sha256[:12]}…)"
        except OSError as error:
            return "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        return None

    with ThreadPoolExecutor(_THREADS) as pool:
        problems = dict(zip(manifest.files, pool.map(problem, manifest.files), strict=True))
    return {name: said for name, said in problems.items() if said is not None}


def describe(damaged: dict[str, str]) -> str:
    """Damaged files and what is wrong with them, on one line."""
    lines = [f"{name} {problem}" for name, problem in sorted(damaged.items())]
    return ", ".join(lines[:_SHOWN]) + (f" and {len(lines) - _SHOWN} more are damaged" if len(lines) > _SHOWN else "")


def checked(folder: Path, files: Sequence[RemoteFile], title: str) -> dict[str, Entry]:
    """The entries of files that came, compared with what their source says of them. A wrong file is removed.

    Raises ModelError that names the wrong file and both hashes, and OSError.
    """

    def check(file: RemoteFile) -> Entry:
        path = folder / file.name
        kind, expected, found = "size", str(file.size), str(path.stat().st_size)
        if file.digest is not None:
            kind, expected, found = file.digest.kind, file.digest.value, file.digest.of(path)
        if found != expected:
            remove(path)
            raise ModelError(
                f"{title}: the {kind} of {file.name} is {found}, the source says {expected}; the download is damaged or was replaced, "
                "this file was not kept: fetch it again"
            )
        return Entry(path.stat().st_size, found if kind == "sha256" else sha256_of(path))

    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip((file.name for file in files), pool.map(check, files), strict=True))


def remove(path: Path) -> None:
    """Remove a file, and the blob that it links to in a Hugging Face cache."""
    path.resolve().unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def sha256_of(path: Path) -> str:
    """The sha256 of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
