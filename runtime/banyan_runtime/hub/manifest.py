"""What a fetched model's folder must hold: sizes, times and hashes, written with it and compared with it at each start.

A file whose size or time differs is hashed. So is what fits into a budget of bytes whatever its time says, the smallest
files first: hashing costs a fifth of a second for 270 MB, and a disk that damages data keeps the times.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from banyan_runtime.hub.files import JSON_BYTES

NAME: Final = ".banyan-manifest.json"
START_BYTES: Final = 512 << 20  # hashed at each start: a third of a second with SHA instructions, one without
_THREADS: Final = 4


class Entry(msgspec.Struct, frozen=True):
    """`size` in bytes, `mtime_ns` as stat has it."""

    size: int
    mtime_ns: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """`source` is an address for people; equal versions mean equal files."""

    source: str
    version: str
    files: dict[str, Entry]

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.files.values())


@dataclass(frozen=True, slots=True)
class Findings:
    """`damaged`: files with what is wrong with them. `current`: the manifest with the times that the whole files have now."""

    damaged: dict[str, str]
    current: Manifest


def read(folder: Path) -> Manifest | None:
    """The manifest of a folder, None where it has none. One that cannot be read vouches for nothing: it has no files."""
    try:
        content = (folder / NAME).read_bytes()[:JSON_BYTES]
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return None
    try:
        found = msgspec.json.decode(content, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Manifest("", "", {})
    return found if all(Path(name).name == name for name in found.files) else Manifest("", "", {})


def write(folder: Path, manifest: Manifest) -> None:
    """Put a manifest in place by one rename, lasting."""
    scratch = folder / f"{NAME}.{os.getpid()}.{threading.get_ident()}"
    try:
        with scratch.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(folder / NAME)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    sync(folder)


def of(folder: Path, source: str, version: str, hashes: dict[str, str]) -> Manifest:
    """The manifest of files that lie in `folder` and have the sha256 `hashes`."""
    entries = {}
    for name, sha256 in hashes.items():
        found = (folder / name).stat()
        entries[name] = Entry(found.st_size, found.st_mtime_ns, sha256)
    return Manifest(source, version, entries)


def check(folder: Path, manifest: Manifest, budget: int | None = START_BYTES) -> Findings:
    """Compare a folder with its manifest. Of files that look unchanged at most `budget` bytes are hashed; None: all are."""
    damaged: dict[str, str] = {}
    times: dict[str, int] = {}
    doubtful: list[str] = []
    left = float("inf") if budget is None else budget
    for name, entry in sorted(manifest.files.items(), key=lambda item: item[1].size):
        try:
            found = (folder / name).stat()
        except OSError as error:
            damaged[name] = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be looked at ({error.strerror})"
            continue
        times[name] = found.st_mtime_ns
        if found.st_size != entry.size:
            damaged[name] = f"has {found.st_size} bytes, not {entry.size}"
        elif found.st_mtime_ns != entry.mtime_ns:
            doubtful.append(name)
        elif entry.size <= left:
            left -= entry.size
            doubtful.append(name)
    for name, found_hash in zip(doubtful, sha256_of(folder / name for name in doubtful), strict=True):
        if found_hash != manifest.files[name].sha256:
            damaged[name] = f"has other bytes than were fetched (sha256 {found_hash[:12]}…, not {manifest.files[name].sha256[:12]}…)"
    files = {name: entry if name in damaged else Entry(entry.size, times[name], entry.sha256) for name, entry in manifest.files.items()}
    return Findings(damaged, Manifest(manifest.source, manifest.version, files))


def sha256_of(paths: Iterable[Path]) -> list[str]:
    """The sha256 of each file, several at once; of one that cannot be read, what kept it from that."""

    def digest(path: Path) -> str:
        try:
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            return str(error.strerror)

    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(digest, paths))


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, last through a power cut, where the volume can do that."""
    with contextlib.suppress(OSError):
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
