"""Room on the disk that is kept back, so that a full disk can still be told, and statuses written."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from banyan_runtime.batch.host.refusals import is_full
from banyan_runtime.storage.store import StoreError

BYTES: Final = 16 << 20
NAME: Final = ".banyan-reserve"
ROOM: Final = f"{BYTES >> 20} MiB of the disk are kept back; once they were needed, {2 * BYTES >> 20} MiB must be free to go on."
T = TypeVar("T")


class Reserve:
    """`folder` None: the storage is no disk of ours."""

    def __init__(self, folder: Path | None, size: int = BYTES) -> None:
        self._folder = folder
        self._size = size
        self._lock = threading.Lock()

    @property
    def free(self) -> int | None:
        """Bytes that others may still fill; None: nobody knows."""
        if self._folder is None:
            return None
        try:
            figures = os.statvfs(self._folder)
        except OSError:
            return None
        missing = self._size if not self._file.exists() else 0
        return max(0, figures.f_bavail * figures.f_frsize - missing)

    @property
    def whole(self) -> bool:
        return self._folder is None or self._file.exists()

    def fill(self) -> bool:
        """Put the reserve back, if there is room for it and as much again."""
        with self._lock:
            if self.whole:
                return True
            room = self.free
            if room is None or room < self._size:
                return False
            try:
                with self._file.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, self._size)
            except OSError:
                self._drop()
                return False
            return True

    def spend(self, write: Callable[[], T]) -> T:
        """Do a small write that must not fail for want of room: once the disk is full, the reserve is given up for it."""
        try:
            return write()
        except StoreError as error:
            if not is_full(error) or self._folder is None or not self._file.exists():
                raise
            self.release()
            return write()

    def release(self) -> None:
        """Give the reserve up, for what has to be written now."""
        if self._folder is not None:
            with self._lock:
                self._drop()

    @property
    def _file(self) -> Path:
        assert self._folder is not None
        return self._folder / NAME

    def _drop(self) -> None:
        with contextlib.suppress(OSError):
            self._file.unlink()
