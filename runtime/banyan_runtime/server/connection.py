"""One HTTP connection: bounds what a client sends and how long it takes. uvicorn's protocol answers the requests."""

from __future__ import annotations

import asyncio
import enum
import logging
import re
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from banyan_runtime.front import errors
from banyan_runtime.front.errors import ApiError

if TYPE_CHECKING:
    from banyan_runtime.server.http import HttpServer

log = logging.getLogger("banyan.http")

CONNECTION: Final = "banyan.connection"  # in the ASGI scope's `state`
RESERVED_FILES: Final = 256  # descriptors that connections leave to probes, the engine's sockets and files
_PIECE: Final = (
    16 * 1024
)  # bytes of a chunked body that are parsed in one turn of the loop: a chunk of one byte costs as much as a large one
_UNREAD: Final = 64 * 1024  # bytes of later requests that may wait for the answer to this one
_TCP_ENDED: Final = (7, 8)  # TCP_CLOSE: it was reset; TCP_CLOSE_WAIT
_BLANK_LINE: Final = b"\r\n\r\n"
_UPGRADE: Final = re.compile(rb"\r\nupgrade[ \t]*:[^\r\n]*", re.IGNORECASE)
_CHUNKED: Final = b"\r\ntransfer-encoding: chunked\r\n"
_INTERIM: Final = b"HTTP/1.1 100 "


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one connection may take. Times in seconds."""

    head_bytes: int = 16 * 1024  # request line and headers
    headers: int = 100
    head_s: float = 10.0  # from the first byte of a request to the end of its headers
    body_s: float = 30.0  # in each such time this many bytes of the body must come, or its end
    body_bytes: int = 32 * 1024
    drain_body_s: float = 5.0  # body_s while the server drains, for as much less of the body
    idle_s: float = 75.0  # longer than the idle time-out of common load balancers and client pools (60 s)
    write_s: float = 60.0  # without the client taking a byte of what is sent
    linger_s: float = 2.0  # after the last answer: a connection that is closed with unread bytes is reset, and the answer lost
    connections: int = 32_000  # beyond it only probes are answered
    crowded_idle_s: float = 2.0  # idle_s and head_s while there are too many connections


class Reading(enum.Enum):
    """What the next byte of a connection belongs to."""

    NOTHING = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()


class _Transport(asyncio.Transport):
    """The transport that uvicorn's protocol has."""

    def __init__(self, connection: HttpConnection) -> None:
        super().__init__()
        self._connection = connection
        self._transport = connection.transport
        self.write = connection.write  # type: ignore[method-assign]
        self.close = connection.close  # type: ignore[method-assign]

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self._connection.refused or self._transport.is_closing()

    def pause_reading(self) -> None:
        self._connection.pause(application=True)

    def resume_reading(self) -> None:
        self._connection.pause(application=False)


class HttpConnection(asyncio.Protocol):
    """Reads each request with a parser of its own, and hands it to uvicorn's protocol. A request waits for the answer to the one before."""

    transport: asyncio.Transport

    def __init__(self, *, http: HttpServer, app_state: dict[str, Any], **uvicorns: Any) -> None:
        """`uvicorns`: arguments of uvicorn's protocol."""
        self._http = http
        self._limits = http.limits
        self._state = {**app_state, CONNECTION: self}
        self._protocol: asyncio.Protocol | None = HttpToolsProtocol(app_state=self._state, **uvicorns)
        self._loop = asyncio.get_running_loop()
        self._parser: Any = httptools.HttpRequestParser(self)
        self._unread = bytearray()
        self._reading = Reading.NOTHING
        self._since = time.monotonic()  # when this reading or the idleness began
        self._progress = 0  # bytes of the body since then
        self._head = bytearray()  # what is parsed of a head that has not ended
        self._headers = self._hosts = 0
        self._length: int | None = None  # bytes of the body that are still to come; None: it is chunked
        self._silent = 0  # bytes of a chunked body since its last data
        self._end = b""  # the last bytes of the piece before
        self._paused = [False, False]  # by the connection, by the application
        self._writable = True
        self._asked = False  # the application has a request that it has not answered
        self._begun = False  # its answer has begun
        self._chunked = False  # in chunks
        self._watchers: list[Callable[[], None]] = []
        self._close_at: float | None = None  # the last word is said
        self._unsent = (0, self._since)  # bytes in the buffer when it last changed, and when that was
        self.refused = False  # nothing that comes is read any more
        self.only_probed: bool | None = None  # all that it asked is how we are; None: it asked nothing yet
        self.from_afar = False  # a client that is not on this machine asked more than that

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._http.connections.add(self)
        assert self._protocol is not None
        self._protocol.connection_made(_Transport(self))
        if len(self._http.connections) > self._limits.connections + RESERVED_FILES // 2:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self.refused:
            self._unread += data
            self._advance()

    def eof_received(self) -> bool:
        """The client has ended its side. A client that only half-closes is not told apart from one that is gone."""
        if self._reading is Reading.NOTHING or self.refused:
            return False
        self._refuse(errors.malformed_http("the connection ended in the middle of the request"))
        return True

    def pause_writing(self) -> None:
        self._writable = False
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._writable = True
        if self._protocol is not None:
            self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._http.connections.discard(self)
        if self.from_afar:
            self._http.asked_from_afar = time.monotonic()
        self.refused = True
        self._drop(exc)
        self._state.clear()  # no cycle for the garbage collector
        self._parser = None

    # --- reading ---

    def _advance(self) -> None:
        """Hand over what was received, up to the end of one request."""
        while self._unread and not self.refused and not self.transport.is_closing():
            if self._reading is Reading.NOTHING and (self._asked or not self._begins()):
                break
            piece = self._next_piece()
            in_head = self._reading is Reading.HEAD
            if in_head and len(self._head) + len(piece) > self._limits.head_bytes:
                self._refuse(errors.head_too_large(self._limits.head_bytes, self._limits.headers))
                return
            try:
                self._parser.feed_data(piece)
            except httptools.HttpParserUpgrade:
                self._ignore_upgrade(piece)
                continue
            except httptools.HttpParserError as error:
                cause = error.__context__
                self._refuse(cause if isinstance(cause, ApiError) else errors.malformed_http())
                return
            if in_head:
                self._head += piece
                if self._reading is Reading.HEAD:
                    continue
                piece = bytes(self._head)
                self._head.clear()
                self._asked, self._begun, self._chunked = True, False, False
            assert self._protocol is not None
            self._protocol.data_received(piece)
            if self._length is None and self._reading is Reading.BODY:
                if self._silent > self._limits.head_bytes:
                    self._refuse(errors.head_too_large(self._limits.head_bytes, self._limits.headers))
                elif self._unread:
                    self.pause(connection=True)
                    self._loop.call_soon(self._advance)
                    return
        self.pause(connection=len(self._unread) > _UNREAD)

    def _begins(self) -> bool:
        """Whether a request begins. Some clients send an empty line behind a body (RFC 9112, 2.2)."""
        if self._unread[:1] in b"\r\n":
            self._unread = self._unread.lstrip(b"\r\n")
        if not self._unread:
            return False
        self._read(Reading.HEAD)
        self._headers, self._hosts, self._length, self._end = 0, 0, 0, b""
        return True

    def _next_piece(self) -> bytes:
        """Take bytes that at most one request is in: heads and chunked bodies end with an empty line."""
        left = self._length if self._reading is Reading.BODY else 0  # a head may come in pieces behind its Content-Length
        if left:
            size = left
        else:
            found = (self._end + self._unread[:_PIECE]).find(_BLANK_LINE)
            size = _PIECE if found < 0 else found + len(_BLANK_LINE) - len(self._end)
        piece = bytes(self._unread[:size])
        del self._unread[:size]
        if left:
            self._length = left - len(piece)
        else:
            self._end = (self._end + piece)[-3:]
            self._silent += len(piece)
        return piece

    def _ignore_upgrade(self, piece: bytes) -> None:
        """Read the head again without the offer to change the protocol. Java's client sends one with each first request."""
        self._unread[:0] = _UPGRADE.sub(b"", self._head + piece)
        self._head.clear()
        self._parser = httptools.HttpRequestParser(self)
        self._reading = Reading.NOTHING

    def _read(self, reading: Reading) -> None:
        self._reading = reading
        self._since = time.monotonic()
        self._progress = self._silent = 0

    def pause(self, *, connection: bool | None = None, application: bool | None = None) -> None:
        """Read nothing more while the connection or the application has enough."""
        for number, enough in enumerate((connection, application)):
            if enough is not None:
                self._paused[number] = enough
        if self.transport.is_closing():
            return
        if any(self._paused) and not self.refused:
            self.transport.pause_reading()
        elif not self.transport.is_reading():
            self.transport.resume_reading()

    # --- httptools ---

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading is Reading.BODY:
            return  # a trailer
        self._headers += 1
        if self._headers > self._limits.headers:
            raise errors.head_too_large(self._limits.head_bytes, self._limits.headers)
        name = name.lower()
        if name == b"host":
            self._hosts += 1
        elif name == b"content-length":
            self._length = int(value)
        elif name == b"transfer-encoding":
            if value.strip().lower() != b"chunked":
                raise errors.malformed_http("of transfer encodings only chunked is known here; send the body as it is")
            self._length = None

    def on_headers_complete(self) -> None:
        if self._parser.get_method() == b"CONNECT":
            raise errors.malformed_http("this is no proxy")
        if self._parser.get_http_version() == "1.1" and self._hosts != 1:
            raise errors.malformed_http("HTTP/1.1 asks for exactly one Host header")  # two readers would go by different ones
        self._read(Reading.BODY)

    def on_body(self, body: bytes) -> None:
        self._progress += len(body)
        self._silent = 0

    def on_message_complete(self) -> None:
        self._read(Reading.NOTHING)

    # --- answering ---

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """As uvicorn's protocol has it."""
        if not self._begun and data[: len(_INTERIM)] != _INTERIM:
            self._begun, self._chunked = True, _CHUNKED in bytes(data)
        self.transport.write(data)

    def write_part(self, body: bytes) -> bool:
        """Write a part of a response's body (`event_stream.DIRECT_WRITE`)."""
        if not self._writable or not self._chunked or self.refused:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def watch(self, gone: Callable[[], None]) -> Callable[[], None]:
        """See `transport.WATCH`."""
        if not self._asked or self.refused:
            return self._loop.call_soon(gone).cancel
        watchers = self._watchers
        watchers.append(gone)
        return lambda: watchers.remove(gone) if gone in watchers else None

    def answered(self) -> None:
        """The application has answered its request."""
        self._asked = False
        self._watchers = []
        if self._reading is Reading.NOTHING:
            self._since = time.monotonic()
            if self._unread:
                self._loop.call_soon(self._advance)

    def close(self) -> None:
        """As uvicorn's protocol has it."""
        if self.refused:
            return
        if self._reading is Reading.BODY:
            self._linger()
        else:
            self.transport.close()

    def give_up(self, error: ApiError) -> None:
        """Answer with `error` where no answer has begun."""
        if self._asked and not self._begun:
            self._refuse(error)

    def _refuse(self, error: ApiError) -> None:
        """Read no further, and answer with `error`. A request that the application has ends as if its client were gone."""
        if self._begun if self._asked else self._reading is Reading.BODY:
            self.transport.abort()  # the client has the answer or a part of it
            return
        if not self._asked:
            self._http.on_refused(error.status)
        self.refused = True
        self._drop(None)
        request_id = uuid.uuid4().hex
        client = self.transport.get_extra_info("peername")
        log.info("request %s from %s was answered with %d: %s", request_id, client, error.status, error.message)
        answer = error.response()
        head = [*answer.raw_headers, (b"date", formatdate(usegmt=True).encode()), (b"x-request-id", request_id.encode())]
        lines = [b"HTTP/1.1 %d %b" % (error.status, HTTPStatus(error.status).phrase.encode()), *(b"%b: %b" % item for item in head)]
        self.transport.write(b"\r\n".join([*lines, b"connection: close", b"", bytes(answer.body)]))
        self._linger()

    def _linger(self) -> None:
        """All is said. The connection is closed a little later; what comes until then is dropped."""
        self.refused = True
        self._close_at = time.monotonic() + self._limits.linger_s
        self.pause()
        self.transport.write_eof()

    def _drop(self, exc: Exception | None) -> None:
        """Have the application hear that its client is gone."""
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.connection_lost(exc)
        watchers, self._watchers = self._watchers, []
        for gone in watchers:
            gone()

    # --- time ---

    def sweep(self, now: float) -> None:
        """Every second: end what takes too long."""
        limits = self._limits
        unsent = self.transport.get_write_buffer_size()
        if not unsent or unsent != self._unsent[0]:
            self._unsent = (unsent, now)
        elif now - self._unsent[1] > limits.write_s:
            self.transport.abort()
            return
        if self.transport.is_closing():
            return
        if self._close_at is not None:
            if now > self._close_at:
                self.transport.abort()
            return
        if not self.transport.is_reading():
            self._since, self._progress = now, 0  # it is we who keep the client waiting
            if self._ended():
                self.transport.abort()
                return
        taken = now - self._since
        if self._reading is Reading.HEAD:
            if taken > (limits.crowded_idle_s if self._http.crowded else limits.head_s):
                self._refuse(errors.request_timeout("headers"))
        elif self._reading is Reading.BODY:
            draining = self._http.draining
            window = min(limits.drain_body_s, limits.body_s) if draining else limits.body_s
            if taken > window:
                if self._progress < limits.body_bytes * window / limits.body_s:
                    self._refuse(errors.shutting_down() if draining else errors.request_timeout("body"))
                self._since, self._progress = now, 0
        elif not self._asked and taken > (limits.crowded_idle_s if self._http.crowded else limits.idle_s):
            self.transport.close()

    def _ended(self) -> bool:
        """Whether the client has ended its side, maybe behind bytes that are not read yet."""
        connection: socket.socket = self.transport.get_extra_info("socket")
        try:
            return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[0] in _TCP_ENDED
        except OSError:
            return False
