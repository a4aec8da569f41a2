"""HTTP/1.1 with one address: kept connections, one request at a time on each, at less than half of a general client's cost.

httptools (the parser under our own server too) reads the framing: lengths, chunks, interim answers; here are the bounds and
what a connection's end means.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from dataclasses import dataclass, field
from typing import Final, cast

import httptools

MAX_ANSWER_BYTES: Final = 64 << 20
MAX_HEAD_BYTES: Final = 64 << 10
CONNECT_S: Final = 5.0
KEEPALIVE_S: Final = 4.0  # below uvicorn's 5 s, so a kept connection is not closed by the server just when it is used again
STALE_S: Final = 0.5  # after so long a rest the server may be closing a connection just when it is used again
_KEPT_HEADERS: Final = frozenset({b"x-request-id", b"retry-after"})
_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})


class ConnectFailed(Exception):
    """No connection: nothing was sent."""


class Broken(Exception):
    """What came is not the answer to our request."""


class Cut(Broken):
    """The connection ended before the answer was whole. `silent`: before its first byte."""

    def __init__(self, message: str, *, silent: bool) -> None:
        super().__init__(message)
        self.silent = silent


@dataclass(slots=True)
class Reply:
    """A whole answer. `headers` holds those that a batch needs, names in lower case."""

    status: int = 0
    body: bytes = b""
    headers: dict[bytes, bytes] = field(default_factory=dict)


class Connection(asyncio.Protocol):
    """One connection. It is of no more use once `usable` is false."""

    def __init__(self) -> None:
        self.usable = False
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._waiter: asyncio.Future[Reply] | None = None
        self._reply = Reply()
        self._pieces: list[bytes] = []
        self._body_bytes = self._head_bytes = 0
        self._framed = self._in_body = False

    async def exchange(self, request: bytes) -> Reply:
        """Send one request and wait for its answer. Raises Broken; whoever cancels this ends the connection."""
        assert self._transport is not None
        assert self._waiter is None, "one request at a time"
        self._waiter = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)  # a fresh one: nothing of an earlier answer can leak into this one
        self._begin()
        self._transport.write(request)
        try:
            return await self._waiter
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            self._waiter = None

    def abort(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    # --- the transport's calls ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.usable = True

    def data_received(self, data: bytes) -> None:
        if self._waiter is None or self._waiter.done() or self._parser is None:
            self.abort()  # nobody asked: whatever comes next could not be told from an answer
            return
        if not self._in_body:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(Broken("the server wants another protocol"))
        except httptools.HttpParserError as error:
            cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else None
            self._fail(cause if isinstance(cause, Broken) else Broken(f"the answer is not HTTP/1.1 ({error.__class__.__name__})"))
        else:
            if not self._in_body and self._head_bytes > MAX_HEAD_BYTES and not self._waiter.done():
                self._fail(Broken(f"the answer's head is longer than {MAX_HEAD_BYTES >> 10} KiB"))

    def eof_received(self) -> bool:
        if self._in_body and not self._framed:
            self._finish(keep=False)  # an answer without a length ends with its connection
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        how = "was cut" if error is None else f"broke ({error.__class__.__name__})"
        self._fail(Cut(f"the connection {how}", silent=self._head_bytes == 0))

    # --- the parser's calls ---

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in _KEPT_HEADERS:
            self._reply.headers[name] = value
        elif name in _FRAMING:
            self._framed = True

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._reply.status = self._parser.get_status_code()
        self._in_body = self._reply.status >= 200

    def on_body(self, piece: bytes) -> None:
        self._body_bytes += len(piece)
        if self._body_bytes > MAX_ANSWER_BYTES:
            raise Broken(f"the answer is longer than {MAX_ANSWER_BYTES >> 20} MiB")
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        if self._reply.status < 200:
            self._begin()  # 100 and its like: the answer is yet to come
            return
        assert self._parser is not None
        assert self._transport is not None
        # an answer before the request was read whole leaves the rest of it in the way
        self._finish(keep=self._parser.should_keep_alive() and self._transport.get_write_buffer_size() == 0)

    def _begin(self) -> None:
        self._reply = Reply()
        self._pieces = []
        self._body_bytes = self._head_bytes = 0
        self._framed = self._in_body = False

    def _finish(self, *, keep: bool) -> None:
        if self._waiter is None or self._waiter.done():
            self.abort()  # a second answer to one request
            return
        self._reply.body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._waiter.set_result(self._reply)
        if not keep:
            self.abort()

    def _fail(self, error: Broken) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
        self.abort()


class Pool:
    """The kept connections with one address. `name` is what certificates are checked against."""

    def __init__(self, address: str, port: int, *, tls: ssl.SSLContext | None = None, name: str = "") -> None:
        self._address = address
        self._port = port
        self._tls = tls
        self._name = name or address
        self._idle: deque[Connection] = deque()
        self._busy: set[Connection] = set()

    async def exchange(self, request: bytes) -> Reply:
        """The answer to a request. Raises ConnectFailed and Broken.

        A connection that has rested may end just when it is used again: then, if no byte of an answer came, a new one is tried.
        One that was busy until now was not closed for resting: this request may be what ended it.
        """
        if (kept := self._kept()) is not None:
            rested_s = asyncio.get_running_loop().time() - kept.idle_since
            try:
                return await self._use(kept, request)
            except Cut as cut:
                if not cut.silent or rested_s < STALE_S:
                    raise
        return await self._use(await self._connect(), request)

    def close(self) -> None:
        for connection in (*self._idle, *self._busy):
            connection.abort()
        self._idle.clear()

    def _kept(self) -> Connection | None:
        """The connection used last, so that what is too many grows old and goes."""
        oldest = asyncio.get_running_loop().time() - KEEPALIVE_S
        while self._idle and (self._idle[0].idle_since < oldest or not self._idle[0].usable):
            self._idle.popleft().abort()
        while self._idle:
            if (connection := self._idle.pop()).usable:
                return connection
        return None

    async def _use(self, connection: Connection, request: bytes) -> Reply:
        self._busy.add(connection)
        try:
            reply = await connection.exchange(request)
        finally:
            self._busy.discard(connection)
        if connection.usable:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)
        return reply

    async def _connect(self) -> Connection:
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await asyncio.get_running_loop().create_connection(
                    Connection, self._address, self._port, ssl=self._tls, server_hostname=self._name if self._tls else None
                )
        except (OSError, TimeoutError) as error:  # ssl.SSLError is an OSError
            raise ConnectFailed(error.strerror or error.__class__.__name__ if isinstance(error, OSError) else "timed out") from error
        return connection
