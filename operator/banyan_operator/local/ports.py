"""Free TCP ports on this machine, from a range that no outgoing connection takes them from again."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator

FIRST, LAST = 20000, 32767
"""Below the range that Linux gives outgoing connections: a port found free stays free until it is bound."""

BACKLOG = 1024


class Ports:
    """Hands out ports, none twice while it is held."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._held: set[int] = set()

    def take(self, purpose: str) -> int:
        """A free port. The same purpose gets the same port whenever it can, so that URLs survive a restart."""
        for port in _candidates(purpose):
            if port not in self._held and self._is_free(port):
                self._held.add(port)
                return port
        raise OSError(f"no free port between {FIRST} and {LAST} on {self._host}")

    def listen(self, purpose: str) -> socket.socket:
        """A socket that listens on a port for `purpose` already, so that nobody else can come first."""
        for port in _candidates(purpose):
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((self._host, port))
                listener.listen(BACKLOG)
            except OSError:
                listener.close()
                continue
            self._held.add(port)
            return listener
        raise OSError(f"no free port between {FIRST} and {LAST} on {self._host}")

    def give_back(self, port: int) -> None:
        self._held.discard(port)

    def _is_free(self, port: int) -> bool:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free for a server
            try:
                probe.bind((self._host, port))
                probe.listen(1)
            except OSError:
                return False
        return True


def _candidates(purpose: str) -> Iterator[int]:
    size = LAST - FIRST + 1
    start = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:4], "big") % size
    return (FIRST + (start + step) % size for step in range(size))
