"""The connection between two processes of a server: whole messages over one Unix socket, each as its length and its bytes, and maybe a
file descriptor beside it.

No thread stands between who sends and who reads, so a message costs each side one system call and wakes nobody but its reader.
Neither end ever waits for the other: what is not taken yet is kept, and leaves when the socket has room again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import time
from array import array
from collections import deque
from collections.abc import Iterator
from typing import Final

_LENGTH: Final = struct.Struct("<I")
_READ_BYTES: Final = 256 << 10  # taken in at a time
_DESCRIPTOR_BYTES: Final = array("i").itemsize
_ROOM: Final = socket.CMSG_SPACE(16 * _DESCRIPTOR_BYTES)  # the system passes on those of one message in one read; we send one a message


class Link:
    """One end. Whoever watches `fileno()` calls `receive` when there is something to read, and `flush` when there is room
    again while something is `unsent`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._memory = bytearray(_READ_BYTES)
        self._view = memoryview(self._memory)
        self._begun = bytearray()  # of a message that has not come whole
        self._kept: deque[tuple[memoryview, int | None]] = deque()  # with a descriptor that leaves with the first byte
        self._descriptors: deque[int | None] = deque()  # that have come, and nobody has taken; None: there was no room for it here
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

    def send(self, message: bytes, descriptor: int | None = None) -> bool:
        """Send, or keep until there is room. `descriptor`: of an open file, which is given away with the message; the other end has it
        from `descriptor()` where the messages say so, in the order of the messages. False: nobody is there; it is still the caller's."""
        whole = _LENGTH.pack(len(message)) + message
        if self._deaf:
            return False
        sent = 0 if self._kept else self._write(whole, descriptor)
        if self._deaf:
            return sent > 0
        if sent < len(whole):
            self._kept.append((memoryview(whole)[sent:], None if sent else descriptor))
            self.flush()
        return True

    def flush(self) -> None:
        """Send of what is kept as much as there is room for."""
        while self._kept:
            part, descriptor = self._kept[0]
            sent = self._write(part, descriptor)
            if sent < len(part):
                if self._kept:
                    self._kept[0] = (part[sent:], None if sent else descriptor)
                return
            self._kept.popleft()

    def receive(self) -> list[bytes]:
        """Messages that have come, in order; after one call there may be `more`."""
        try:
            size, passed, flags, _ = self._socket.recvmsg_into([self._memory], _ROOM, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            self.more = False
            return []
        except OSError:
            size, passed, flags = 0, [], 0
        for _, _, raw in passed:
            self._descriptors.extend(array("i", raw[: len(raw) - len(raw) % _DESCRIPTOR_BYTES]))
        if lost := bool(flags & socket.MSG_CTRUNC) and not passed:
            self._descriptors.append(None)
        self.more = size == _READ_BYTES or bool(passed) or lost  # a read ends where a descriptor comes
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

    def received(self) -> Iterator[bytes]:
        """All messages that have come by now."""
        more = True
        while more:
            yield from self.receive()
            more = self.more

    def descriptor(self) -> int | None:
        """The descriptor of a message that has come with one. None: this process had no room for one more, and it is lost."""
        return self._descriptors.popleft()

    def wait_for_room(self, seconds: float | None = None) -> None:
        """Wait until some of what is unsent can leave, and send it."""
        poll = select.poll()
        poll.register(self, select.POLLOUT)
        poll.poll(None if seconds is None else seconds * 1000)
        self.flush()

    def end(self) -> None:
        """Say nothing more, and hear no more than has come: the next `receive` that finds nothing sees the end."""
        self._drop()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self, linger_s: float = 0.0) -> None:
        """End the connection; what is unsent may take so long to leave."""
        until = time.monotonic() + linger_s
        while self._kept and (left := until - time.monotonic()) > 0:
            self.wait_for_room(left)
        self._drop()
        while self._descriptors:
            _close(self._descriptors.popleft())
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

    def _write(self, part: bytes | memoryview, descriptor: int | None) -> int:
        """How much of it was sent; where something was, the descriptor is closed."""
        try:
            if descriptor is None:
                return self._socket.send(part)
            sent = self._socket.sendmsg([part], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))])
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno not in (errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS):  # the kernel's memory, which comes back
                self._drop()
            return 0
        _close(descriptor)
        return sent

    def _drop(self) -> None:
        self._deaf = True
        for _, descriptor in self._kept:
            _close(descriptor)
        self._kept.clear()


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        with contextlib.suppress(OSError):
            os.close(descriptor)
