"""Folders of fetched models: fetched by one process for all that share the volume, and whole where the manifest says so.

MODELS/NAME/                          a catalog model
MODELS/s3/BUCKET--PREFIX/VERSION/     a model of a bucket
MODELS/hf/models--ORG--NAME/          a repository, as huggingface_hub lays out its cache
"""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from filelock import BaseFileLock, FileLock, Timeout

from banyan_runtime.errors import CacheNotWritable, UnavailableError
from banyan_runtime.hub import manifest
from banyan_runtime.hub.manifest import Entry, Manifest
from banyan_runtime.hub.progress import Report

log = logging.getLogger("banyan")

_SPARE: Final = 64 << 20  # bytes that a disk keeps free
_POLL_S: Final = 2.0
_ADVICE: Final = "make room, or name a folder on another disk in --download-dir (BANYAN_CACHE)"


def whole(folder: Path, version: str, *, hashes: bool = False) -> bool:
    """Whether `folder` holds this version, with files of the right sizes, and with `hashes` of the right bytes."""
    found = manifest.read(folder)
    return found is not None and found.version == version and bool(found.files) and not manifest.damaged(folder, found, hashes=hashes)


def ensure(
    folder: Path, title: str, version: str, bring: Callable[[Path], dict[str, Entry]], report: Report, *, hashes: bool = False
) -> Path:
    """Make `folder` hold this version, and return it. `bring` fetches what the folder lacks; it runs in one process at a time.

    Raises CacheNotWritable for a folder that may not be written, UnavailableError for a full disk, and what `bring` raises.
    """
    try:
        if whole(folder, version, hashes=hashes):
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder, lambda: report("downloading", 0, f"{title}: another process fetches it")):
            if not _prepare(folder, title, version, hashes=hashes):
                manifest.write(folder, Manifest(title, version, bring(folder)))
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise CacheNotWritable(
                f"{folder}: {title} cannot be kept there ({error.strerror}); mount the volume for writing, or name another folder with "
                "--download-dir (BANYAN_CACHE)"
            ) from error
        advice = f"; {_ADVICE}" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise UnavailableError(f"{folder}: {title} cannot be kept there ({error.strerror or error}){advice}") from error
    return folder


def _prepare(folder: Path, title: str, version: str, *, hashes: bool) -> bool:
    """Remove what is damaged or of another version; returns whether nothing lacks, since another process has fetched it."""
    found = manifest.read(folder)
    if found is None or found.version != version:
        unwanted = dict.fromkeys(found.files, "is of another version") if found else {}
        manifest.write(folder, Manifest(title, version, {}))
    else:
        unwanted = manifest.damaged(folder, found, hashes=hashes)
        if not unwanted:
            return bool(found.files)
    if unwanted:
        log.warning("%s: %s; fetching that again", folder, manifest.describe(unwanted))
    for name in unwanted:
        manifest.remove(folder / name)
    return False


def _alone(folder: Path, waiting: Callable[[], None]) -> AbstractContextManager[BaseFileLock]:
    """The lock of a folder, held until the block ends. Raises OSError."""
    lock = FileLock(folder.parent / f".{folder.name}.lock", mode=0o664)
    while True:
        try:
            return lock.acquire(timeout=_POLL_S)
        except Timeout:
            waiting()


def make_room(folder: Path, needed: int, title: str) -> None:
    """Raises UnavailableError where the disk lacks room for `needed` bytes."""
    needed += _SPARE
    if (free := shutil.disk_usage(folder).free) < needed:
        raise UnavailableError(
            f"{folder}: {needed / 1e6:,.0f} MB are needed for {title} and {free / 1e6:,.0f} MB are free: "
            f"{(needed - free) / 1e6:,.0f} MB are missing; {_ADVICE}"
        )
