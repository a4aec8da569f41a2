"""Free TCP ports on this machine, below those that Linux gives outgoing connections: a port found free stays free until it is bound."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from typing import Final

HOST: Final = "127.0.0.1"
FIRST, LAST = 20000, 32767
BACKLOG: Final = 1024


class Ports:
    """Hands out ports, none twice while it is held. The same purpose gets the same port whenever it can: URLs survive a restart."""

    def __init__(self) -> None:
        self._held: set[int] = set()

    def take(self, purpose: str) -> int:
        with self.listen(purpose) as listener:
            port: int = listener.getsockname()[1]
        return port

    def listen(self, purpose: str) -> socket.socket:
        """A socket that listens already, so that nobody else can come first."""
        for port in (one for one in _candidates(purpose) if one not in self._held):
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free for a server
            try:
                listener.bind((HOST, port))
                listener.listen(BACKLOG)
            except OSError:
                listener.close()
                continue
            self._held.add(port)
            return listener
        raise OSError(f"no free port between {FIRST} and {LAST} on {HOST}")

    def give_back(self, port: int) -> None:
        self._held.discard(port)


def _candidates(purpose: str) -> Iterator[int]:
    size = LAST - FIRST + 1
    start = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:4], "big") % size
    return (FIRST + (start + step) % size for step in range(size))
