"""One fetch of a model at a time, among all processes and machines that share its folder.

File locks are not to be had on every volume that machines share, and one held by a frozen process is held for ever. So a
holder claims the next number by creating a file exclusively, and rewrites that file every two seconds. Whoever sees the
newest claim unchanged for twenty seconds of its own clock claims the number behind it. The highest number holds; a holder
that wakes up finds a higher one and stops. What it writes until it looks does no harm: the same bytes at the same places.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final

import msgspec

log = logging.getLogger("banyan")

BEAT_S: Final = 2.0
STALE_S: Final = 20.0  # ten beats: a volume may stall, and a machine may be busy
_POLL_S: Final = 0.5
_LENGTH: Final = 512  # of a claim, always: rewriting one needs no room on the disk, and leaves no end of a longer one


class Lost(Exception):
    """Somebody else holds the lease now."""


class Claim(msgspec.Struct, frozen=True):
    """What a holder says in its file."""

    machine: str = ""  # of the process id: a boot and a process namespace
    host: str = ""
    pid: int = 0
    beat: int = 0
    free: bool = False
    percent: int = 0

    def is_over(self) -> bool:
        """Whether its holder let go, or was a process of this machine that is gone."""
        if self.free:
            return True
        if self.machine != _machine() or self.pid in (0, os.getpid()):
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass
        return False


class Lease:
    """Held while its `with` block runs. `folder` holds the claims and stays, with the last of them."""

    def __init__(
        self, folder: Path, waiting: Callable[[Claim], None] = lambda _: None, *, beat_s: float = BEAT_S, stale_s: float = STALE_S
    ) -> None:
        self._folder, self._waiting, self._beat_s, self._stale_s = folder, waiting, beat_s, stale_s
        self._number = 0
        self._beats = 0
        self._beaten = 0.0
        self._percent = 0
        self._lost = False
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def __enter__(self) -> Lease:
        """Wait until nobody else holds it; `waiting` is told of whoever does, twice a second."""
        self._folder.mkdir(parents=True, exist_ok=True)
        seen: tuple[int, bytes] | None = None
        since = time.monotonic()
        while True:
            number = self._newest()
            content = self._read(number)
            if (number, content) != seen:
                seen, since = (number, content), time.monotonic()
            claim = _parse(content)
            stale = time.monotonic() - since > self._stale_s
            if number == 0 or claim.is_over() or stale:
                if self._claim(number + 1):
                    break
                continue
            self._waiting(claim)
            time.sleep(min(_POLL_S, self._stale_s / 4))
        if stale:
            log.warning("%s: its holder on %s has not moved for %.0f s; going on in its place", self._folder, claim.host, self._stale_s)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end.set()
        self._thread.join(1.0)  # on a volume that hangs it may not end
        with contextlib.suppress(Lost, OSError):
            self._beat(free=True)

    def check(self) -> None:
        """Raises Lost where somebody else has taken over. Costs nothing while the beats go out."""
        if not self._lost and time.monotonic() - self._beaten > self._stale_s / 2:
            with contextlib.suppress(OSError):
                self._beat()
        if self._lost:
            raise Lost

    def verify(self) -> None:
        """As `check`, by looking now."""
        self._beat()

    def tell(self, percent: int) -> None:
        """Say with the next beat how far the work is."""
        self._percent = percent

    def _keep(self) -> None:
        while not self._end.wait(self._beat_s):
            try:
                self._beat()
            except Lost:
                return
            except OSError:
                continue

    def _beat(self, *, free: bool = False) -> None:
        with self._lock:
            if self._lost or self._newest() != self._number:
                self._lost = True
                raise Lost
            self._beats += 1
            try:
                self._write(os.O_WRONLY, free=free)
            except FileNotFoundError:
                self._lost = True
                raise Lost from None
            self._beaten = time.monotonic()

    def _claim(self, number: int) -> bool:
        self._number = number
        try:
            self._write(os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return False
        if self._newest() != number:  # while we looked, the number behind ours came and went
            self._path(number).unlink(missing_ok=True)
            return False
        self._beaten = time.monotonic()
        for old in self._numbers():
            if old < number:
                self._path(old).unlink(missing_ok=True)
        return True

    def _write(self, how: int, *, free: bool = False) -> None:
        claim = Claim(_machine(), platform.node()[:64], os.getpid(), self._beats, free, self._percent)
        file = os.open(self._path(self._number), how, 0o644)
        try:
            os.pwrite(file, msgspec.json.encode(claim).ljust(_LENGTH), 0)
        finally:
            os.close(file)

    def _newest(self) -> int:
        return max(self._numbers(), default=0)

    def _numbers(self) -> list[int]:
        return [int(path.name) for path in self._folder.iterdir() if re.fullmatch(r"[0-9]{1,18}", path.name)]

    def _read(self, number: int) -> bytes:
        try:
            with self._path(number).open("rb") as file:
                return file.read(_LENGTH)
        except OSError:
            return b""

    def _path(self, number: int) -> Path:
        return self._folder / str(number)


def _parse(content: bytes) -> Claim:
    """A claim that is being written says nothing yet."""
    try:
        return msgspec.json.decode(content, type=Claim)
    except msgspec.DecodeError:
        return Claim()


def _machine() -> str:
    """Where a process id means the same process: this boot of the kernel, this namespace."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return platform.node()
