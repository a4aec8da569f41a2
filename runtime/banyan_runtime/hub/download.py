"""Bring a listing's files into a folder: several at once, each continued where it broke off, each checked by size and hash.

A file that is whole or begun already, because a fetch was killed, is read and hashed, and only what lacks is asked for.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import queue
import random
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from banyan_runtime.errors import ModelError, SourceUnreachable, UnavailableError
from banyan_runtime.hub import manifest
from banyan_runtime.hub.progress import Bar, Report
from banyan_runtime.hub.source import Interrupted, Listing, RemoteFile, Source

log = logging.getLogger("banyan")

FILES_AT_ONCE: Final = 8
PATIENCE_S: Final = 300.0  # without a single new byte; a server that starts has nothing better to do than to wait
_LONGEST_WAIT_S: Final = 30.0
_TELL_AFTER_S: Final = 5.0
_SPARE: Final = 64 << 20  # bytes that a disk keeps free
_TRIES: Final = 2  # at a file whose bytes are wrong: a proxy may have kept half a file
_READ: Final = 4 << 20

T = TypeVar("T")


def patiently(call: Callable[[], T], remedy: str, patience_s: float = PATIENCE_S, tell: Callable[[str], None] = lambda _: None) -> T:
    """Call until another try can no longer be hoped for. `remedy`: as of `Source`; `tell` is told why it was in vain each time.

    Raises SourceUnreachable where nobody answered at last, UnavailableError with another reason.
    """
    waits = Waits(patience_s, remedy)
    while True:
        try:
            return call()
        except Interrupted as reason:
            wait = waits.next(reason)
            tell(waits.words(reason))
            time.sleep(wait)


class Waits:
    """How long to wait before each next try: twice as long each time, or as long as the source asks. `remedy`: as of `Source`."""

    def __init__(self, patience_s: float, remedy: str) -> None:
        self._patience_s, self._remedy = patience_s, remedy
        self._count = 0
        self._since = time.monotonic()

    def progress(self) -> None:
        """Something came: whoever is asked is there."""
        self._count, self._since = 0, time.monotonic()

    def next(self, reason: Interrupted) -> float:
        """Seconds to wait after `reason`. Raises SourceUnreachable or UnavailableError where that is longer than patience lasts."""
        wait = min(_LONGEST_WAIT_S, 0.5 * 2**self._count * random.uniform(0.75, 1.25))
        wait = wait if reason.after is None else reason.after + random.uniform(0.0, 0.5)
        self._count = min(self._count + 1, 16)
        if time.monotonic() - self._since + wait > self._patience_s:
            asked = f"; it asks to come back in {reason.after:.0f} s" if reason.after else ""
            if reason.unanswered:
                raise SourceUnreachable(f"{reason}: given up, what was fetched is kept; {self._remedy}") from reason
            raise UnavailableError(f"{reason}{asked}: given up, what was fetched is kept; try again later") from reason
        if wait > _TELL_AFTER_S or time.monotonic() - self._since > _TELL_AFTER_S:
            log.warning("%s; trying again in %.0f s", self.words(reason), wait)
        return wait

    def words(self, reason: Interrupted) -> str:
        """`reason`, with what to look at where nobody answered."""
        return f"{reason}; {self._remedy}" if reason.unanswered else str(reason)


@dataclass(frozen=True, slots=True)
class Hooks:
    """`check` is called before each piece that is written, and ends the work by what it raises; `report` hears of the progress."""

    check: Callable[[], None]
    report: Report
    patience_s: float = PATIENCE_S


class Download:
    """One use: `run`."""

    def __init__(self, source: Source, listing: Listing, folder: Path, hooks: Hooks) -> None:
        self._source, self._listing, self._folder, self._hooks = source, listing, folder, hooks
        self._lock = threading.Lock()
        self._done = 0  # bytes that lie in the folder, hashed
        self._hashes: dict[str, str] = {}
        self._error: BaseException | None = None
        self._stop = threading.Event()

    def run(self) -> dict[str, str]:
        """Returns the sha256 of each file by its name. Raises UserErrors, OSError, and what `check` raises; what is there stays there."""
        files = sorted(self._listing.files, key=lambda file: -file.size)
        total = sum(file.size for file in files)
        self._make_room(total)
        todo: queue.SimpleQueue[RemoteFile] = queue.SimpleQueue()
        for file in files:
            todo.put(file)
        # Daemons: an interrupt ends the process at once, not when the last piece has come.
        threads = [threading.Thread(target=self._work, args=(todo,), daemon=True) for _ in files[:FILES_AT_ONCE]]
        title = f"Downloading {self._source.title}"
        try:
            with Bar(title, total, unit="B", phase="downloading", report=self._hooks.report) as bar:
                for thread in threads:
                    thread.start()
                for thread in threads:
                    while thread.is_alive():
                        thread.join(0.2)
                        bar.to(max(0, min(self._done, total)))
                if self._error is None:
                    bar.to(total)
        finally:
            self._stop.set()
        if self._error is not None:
            raise self._error
        return self._hashes

    def _make_room(self, total: int) -> None:
        """Raises UnavailableError where the disk lacks room for what is still to come."""
        here = 0
        for file in self._listing.files:
            with contextlib.suppress(OSError):
                here += min(file.size, (self._folder / file.name).stat().st_size)
        needed, free = total - here + _SPARE, shutil.disk_usage(self._folder).free
        if free < needed:
            raise UnavailableError(
                f"{self._folder.parent}: {needed / 1e6:,.0f} MB are needed for {self._source.title} and {free / 1e6:,.0f} MB are free: "
                f"{(needed - free) / 1e6:,.0f} MB are missing; make room, or name a folder on another disk in --download-dir (BANYAN_CACHE)"
            )

    def _work(self, todo: queue.SimpleQueue[RemoteFile]) -> None:
        try:
            while not self._stop.is_set():
                try:
                    file = todo.get_nowait()
                except queue.Empty:
                    return
                self._hashes[file.name] = self._bring(file, self._folder / file.name)
        except BaseException as error:
            with self._lock:
                self._error = self._error or error
            self._stop.set()

    def _bring(self, file: RemoteFile, path: Path) -> str:
        """Make `path` hold the whole file; returns its sha256."""
        expected = patiently(lambda: self._source.digest(file), self._source.remedy, self._hooks.patience_s)
        found = ""
        for _ in range(_TRIES):
            sha256 = hashlib.sha256()
            # most often it is the same hash: then it is computed once
            other = sha256 if expected is None or expected.kind == "sha256" else expected.begin(file.size)
            self._complete(file, path, (sha256,) if other is sha256 else (sha256, other))
            found = other.hexdigest()
            if expected is None or found == expected.value:
                manifest.sync(path)
                return sha256.hexdigest()
            log.warning(
                "%s: %s came with %s %s, not %s; fetching it again", self._source.title, file.name, expected.kind, found, expected.value
            )
            path.unlink(missing_ok=True)  # another holder's open file is left alone
            self._count(-file.size)
        assert expected is not None
        raise ModelError(
            f"{self._source.title}: the {expected.kind} of {file.name} is {found}, the source says {expected.value}; "
            "the download is damaged or was replaced, this file was not kept"
        )

    def _complete(self, file: RemoteFile, path: Path, hashes: tuple[hashlib._Hash, ...]) -> None:
        """Append what lacks to `path`, hashing all."""
        waits = Waits(self._hooks.patience_s, self._source.remedy)
        if path.exists() and path.stat().st_size > file.size:
            path.unlink()
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0) as opened:
            at = 0
            while piece := opened.read(_READ):
                self._pass()
                for each in hashes:
                    each.update(piece)
                at += len(piece)
                self._count(len(piece))
            while at < file.size:
                try:
                    for piece in self._source.read(file, at):
                        self._pass()
                        if at + len(piece) > file.size:
                            raise Interrupted(f"{self._source.title}: {file.name} has more bytes than the {file.size} that were listed")
                        _write(opened.fileno(), piece, at)
                        for each in hashes:
                            each.update(piece)
                        at += len(piece)
                        self._count(len(piece))
                        waits.progress()
                    if at < file.size:
                        raise Interrupted(f"{self._source.title}: {file.name} ended at byte {at} of {file.size}")
                except Interrupted as reason:
                    self._stop.wait(waits.next(reason))
                    self._pass()

    def _pass(self) -> None:
        if self._stop.is_set():
            raise Interrupted("another file failed")
        self._hooks.check()

    def _count(self, more: int) -> None:
        with self._lock:
            self._done += more


def _write(file: int, data: bytes, at: int) -> None:
    """At its place and not at the end: should two holders write, they write the same."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, at)
        view, at = view[written:], at + written
