"""Where a container leaves its last words."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

MESSAGE_BYTES: Final = 4096
"""What the kubelet keeps of a termination message."""


class Termination:
    """A termination message, empty at first. It is in memory: what a container says at its end must not be lost to a disk that is full,
    or to a folder that somebody clears, and of memory nothing stays behind. `otherwise`: the file for it where a system has no such files.

    Raises OSError where it cannot be made.
    """

    def __init__(self, otherwise: Path) -> None:
        if sys.platform == "linux":
            self._handle = os.memfd_create(otherwise.name)
            # by the operator's own process: a command that is started by another one need not have been given the file
            self.path = Path(f"/proc/{os.getpid()}/fd/{self._handle}")
        else:
            otherwise.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(otherwise, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            self.path = otherwise

    def __enter__(self) -> Termination:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    def read(self) -> str:
        """What was left by now."""
        return os.pread(self._handle, MESSAGE_BYTES, 0).decode(errors="replace").strip()
