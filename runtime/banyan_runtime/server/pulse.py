"""A counter that two processes share: the engine counts what it gets done, the front sees whether the count moves.

It lies in a file that both map, so that neither socket nor thread nor Python's lock is needed to beat or to look: a step that
computes for minutes in one call is told from one that hangs, and a native runner may count at the same address.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Final

from banyan_runtime.errors import ConfigError

_BYTES: Final = mmap.PAGESIZE
NAME: Final = "pulse"  # of the file in the server's private folder


class Pulse:
    """The counter in `path`, which is made where it is missing. Calling it counts; the file's name may go once both have it."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError where there is no room for the file."""
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(handle, 0, _BYTES)  # in a file with a hole a full disk would end us at the first beat
                self._memory = mmap.mmap(handle, _BYTES)
            finally:
                os.close(handle)
        except OSError as error:
            why = error.strerror or str(error)
            raise ConfigError(f"{path} cannot be made ({why}); set TMPDIR to a folder with room for files of {_BYTES} bytes") from error
        self._cell = memoryview(self._memory).cast("Q")

    def __call__(self) -> None:
        self._cell[0] += 1

    @property
    def count(self) -> int:
        return self._cell[0]


class PulseWatch:
    """How long a pulse has not moved. Looks when asked; the clock gives seconds."""

    def __init__(self, pulse: Pulse, now: float) -> None:
        self._pulse = pulse
        self._seen = pulse.count
        self._moved_at = now

    def silent(self, now: float) -> float:
        """Seconds since the pulse was last seen moving."""
        if (count := self._pulse.count) != self._seen:
            self._seen, self._moved_at = count, now
        return now - self._moved_at
