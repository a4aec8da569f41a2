"""The connection between front and engine: whole messages over one Unix socket, each as its length and its bytes.

No thread stands between who sends and who reads, so a message costs each side one system call and wakes nobody but its reader.
Neither end ever waits for the other: what is not taken yet is kept, and leaves when the socket has room again.
"""

from __future__ import annotations

import errno
import select
import socket
import struct
import time
from collections import deque
from typing import Final

_LENGTH: Final = struct.Struct("<I")
_READ_BYTES: Final = 256 << 10  # taken in at a time


class Link:
    """One end. Whoever watches `fileno()` calls `receive` when there is something to read, and `flush` when there is room
    again while something is `unsent`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._memory = bytearray(_READ_BYTES)
        self._view = memoryview(self._memory)
        self._begun = bytearray()  # of a message that has not come whole
        self._kept: deque[memoryview] = deque()
        self.ended = False  # nobody is at the other end any more, and all it said has been read
        self._deaf = False  # it takes nothing more: what is sent is dropped; there may still be something to read
        self.more = False  # the last `receive` may have left something to be read

    @staticmethod
    def connect(address: str) -> Link:
        """To who listens at this path. Raises OSError."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(address)
        except OSError:
            connection.close()
            raise
        return Link(connection)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def unsent(self) -> int:
        """How many messages are kept."""
        return len(self._kept)

    def send(self, message: bytes) -> None:
        """Send, or keep until there is room."""
        whole = _LENGTH.pack(len(message)) + message
        if self._deaf:
            return
        sent = 0 if self._kept else self._write(whole)
        if sent < len(whole) and not self._deaf:
            self._kept.append(memoryview(whole)[sent:])
            self.flush()

    def flush(self) -> None:
        """Send of what is kept as much as there is room for."""
        while self._kept:
            part = self._kept[0]
            sent = self._write(part)
            if sent < len(part):
                if self._kept:
                    self._kept[0] = part[sent:]
                return
            self._kept.popleft()

    def receive(self) -> list[bytes]:
        """Messages that have come, in order; after one call there may be `more`."""
        try:
            size = self._socket.recv_into(self._memory)
        except BlockingIOError:
            self.more = False
            return []
        except OSError:
            size = 0
        self.more = size == _READ_BYTES
        if not size:
            self.ended = True
            self._drop()
            return []
        if not self._begun:
            first = self._whole_at_once(size)
            if first is not None:
                return [first]
        self._begun += self._view[:size]
        return self._cut()

    def wait_for_room(self, seconds: float | None = None) -> None:
        """Wait until some of what is unsent can leave, and send it."""
        poll = select.poll()
        poll.register(self, select.POLLOUT)
        poll.poll(None if seconds is None else seconds * 1000)
        self.flush()

    def close(self, linger_s: float = 0.0) -> None:
        """End the connection; what is unsent may take so long to leave."""
        until = time.monotonic() + linger_s
        while self._kept and (left := until - time.monotonic()) > 0:
            self.wait_for_room(left)
        self._socket.close()

    def _whole_at_once(self, size: int) -> bytes | None:
        """What was read, where it is one message: the frequent case."""
        if size >= _LENGTH.size and _LENGTH.unpack_from(self._memory)[0] == size - _LENGTH.size:
            return bytes(self._view[_LENGTH.size : size])
        return None

    def _cut(self) -> list[bytes]:
        """Take the whole messages out of what has come."""
        found, at, begun = list[bytes](), 0, self._begun
        with memoryview(begun) as view:
            while len(begun) - at >= _LENGTH.size:
                end = at + _LENGTH.size + _LENGTH.unpack_from(begun, at)[0]
                if end > len(begun):
                    break
                found.append(bytes(view[at + _LENGTH.size : end]))
                at = end
        del begun[:at]
        return found

    def _write(self, part: bytes | memoryview) -> int:
        """How much of it was sent."""
        try:
            return self._socket.send(part)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno not in (errno.ENOBUFS, errno.ENOMEM):  # the kernel's memory, which comes back
                self._drop()
            return 0

    def _drop(self) -> None:
        self._deaf = True
        self._kept.clear()
