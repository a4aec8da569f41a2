"""Ids of clients' own that run in any process of a server, as locks of a file that has no name and no bytes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from hashlib import blake2b
from typing import Final

_LOCK: Final = struct.Struct("hhqqi0q")  # struct flock of 64-bit Linux: type, whence, start, length, pid


class SharedClaims:
    """One process's view (`front.live.Claims`): what it has taken is a lock of the byte at the id's hash, and ends with the process at the
    latest. Where the system cannot lock, ids are free."""

    def __init__(self, shared: int) -> None:
        """`shared`: a descriptor of the file, which is opened anew: locks are by opening. It remains the caller's. Raises OSError."""
        self._file = os.open(f"/proc/self/fd/{shared}", os.O_RDWR | os.O_CLOEXEC)

    @staticmethod
    def new() -> int:
        """A descriptor of a new file. Raises OSError."""
        return os.memfd_create("banyan-ids", os.MFD_CLOEXEC)

    def take(self, request_id: str) -> bool:
        try:
            self._set(fcntl.F_WRLCK, request_id)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:
            return True
        return True

    def leave(self, request_id: str) -> None:
        with contextlib.suppress(OSError):
            self._set(fcntl.F_UNLCK, request_id)

    def _set(self, kind: int, request_id: str) -> None:
        at = int.from_bytes(blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()) >> 2
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, at, 1, 0))
