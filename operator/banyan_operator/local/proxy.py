"""A server's one port: a TCP proxy that deals new connections out to the replicas that take requests, in turn."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Sequence
from typing import Final

from banyan_operator.local.ports import HOST

CONNECT_TIMEOUT_S: Final = 5.0
CHUNK: Final = 64 * 1024
HEAD_LIMIT_S: Final = 1.0

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Proxy:
    """One listening port. `targets` may change at any time; connections that are open stay where they are."""

    def __init__(self, name: str, listener: socket.socket) -> None:
        self.port: int = listener.getsockname()[1]
        self.url = f"http://{HOST}:{self.port}"
        self.targets: Sequence[int] = ()
        """Ports of this machine."""
        self._name = name
        self._listener = listener
        self._turn = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Take connections; those that came since the socket listens have waited."""
        self._server = await asyncio.start_server(self._accept, sock=self._listener)

    def stop_listening(self) -> None:
        """Take no new connections; those that are open go on."""
        if self._server is not None:
            self._server.close()
        self._listener.close()

    async def close(self) -> None:
        """Stop listening and cut what is open."""
        self.stop_listening()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            target = await self._connect()
            if target is None:
                await self._say_unavailable(reader, writer)
            else:
                await _join((reader, writer), target)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _connect(self) -> Streams | None:
        """To the next target that accepts; None when there is none."""
        targets = list(self.targets)
        for _ in targets:
            port = targets[self._turn % len(targets)]
            self._turn += 1
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    return await asyncio.open_connection(HOST, port)
        return None

    async def _say_unavailable(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """In a cluster the connection would be refused; a person at a terminal is better served with a reason."""
        # unread input would turn the close into a reset, which takes the answer away from the client
        with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(HEAD_LIMIT_S):
                await reader.readuntil(b"\r\n\r\n")
        text = f"no replica of '{self._name}' is ready; see 'banyan-operator status'"
        body = json.dumps({"error": {"message": text, "type": "server_error", "param": None, "code": "not_ready"}}).encode()
        head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"Retry-After: 1\r\nConnection: close\r\n\r\n" + body)
        await writer.drain()


async def _join(client: Streams, server: Streams) -> None:
    """Copy both ways until both sides are done, or one breaks: then the other is cut too, so that aborts get through."""
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_copy(client[0], server[1]))
            group.create_task(_copy(server[0], client[1]))
    except* OSError:
        server[1].transport.abort()
        client[1].transport.abort()
    finally:
        server[1].close()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(CHUNK):
        sink.write(data)
        await sink.drain()
    if sink.can_write_eof():
        sink.write_eof()
