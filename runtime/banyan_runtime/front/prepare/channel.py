"""The front's end of a worker's socket: sends and reads on the event loop, in pieces that never hold it up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
from typing import Final

import msgspec

from banyan_runtime.front.prepare.frames import FRAME_HEAD, HELLO
from banyan_runtime.process import cpu_seconds

_SMALL: Final = 65_536  # bytes that are sent or read at once


class ChannelError(Exception):
    """The worker has gone."""


class Channel:
    """One worker's connection. `close` ends the worker."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._buffer = b""
        self.pid = 0  # of the worker, once it has said hello

    @staticmethod
    def pair() -> tuple[Channel, socket.socket]:
        """A channel, and the worker's end of it. Raises ChannelError."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:  # no file descriptor is left
            raise ChannelError(str(error)) from error
        return Channel(ours), theirs

    @property
    def gone(self) -> bool:
        """Whether the worker has ended: it alone holds the other end of the connection."""
        if self._connection.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))

    @property
    def cpu_s(self) -> float:
        """Seconds that the worker has computed."""
        return 0.0 if self.gone else cpu_seconds(self.pid)

    async def greeting(self) -> None:
        """Wait until the worker says that it is there. Raises ChannelError; on any error the worker is ended."""
        try:
            kind, content = await self.frame()
        except BaseException:
            self.close()
            raise
        assert kind == HELLO, kind
        self.pid = msgspec.msgpack.decode(content, type=int)

    async def send(self, head: bytes, body: bytes | bytearray) -> None:
        """Raises ChannelError."""
        loop = asyncio.get_running_loop()
        try:
            if len(body) <= _SMALL:
                await loop.sock_sendall(self._connection, head + body)
                return
            await loop.sock_sendall(self._connection, head)
            # As much as the socket takes at a time is copied, and the loop goes round in between.
            with memoryview(body) as view:
                await loop.sock_sendall(self._connection, view)
        except OSError as error:
            raise ChannelError from error

    async def frame(self) -> tuple[bytes, bytes | bytearray]:
        """The next frame: its kind, and its content as msgpack. Raises ChannelError."""
        kind, size = FRAME_HEAD.unpack(await self.read(FRAME_HEAD.size))
        return kind, await self.read(size)

    async def read(self, size: int) -> bytes | bytearray:
        """Exactly so many bytes. Raises ChannelError."""
        buffer = self._buffer
        if len(buffer) < size <= _SMALL:
            buffer = await self._more(buffer, size)
        if len(buffer) >= size:
            self._buffer = buffer[size:]
            return buffer[:size]
        raw = bytearray(size)
        view, filled = memoryview(raw), len(buffer)
        view[:filled] = buffer
        self._buffer = b""
        loop = asyncio.get_running_loop()
        try:
            while filled < size:
                got = await loop.sock_recv_into(self._connection, view[filled:])
                if not got:
                    raise ChannelError
                filled += got
        except OSError as error:
            raise ChannelError from error
        finally:
            view.release()
        return raw

    async def _more(self, buffer: bytes, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        try:
            while len(buffer) < size:
                piece = await loop.sock_recv(self._connection, _SMALL)
                if not piece:
                    raise ChannelError
                buffer += piece
        except OSError as error:
            raise ChannelError from error
        return buffer

    def kill(self) -> None:
        """End the worker, whatever it is doing; who reads from it gets a ChannelError."""
        if self.pid and not self.gone:  # nobody waits for ended workers, so that the number may be another process's by then
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the worker and the connection."""
        self.kill()
        self._connection.close()
