"""One HTTP connection: uvicorn's protocol, with a bound on what a client may send and on how long it may take over anything."""

from __future__ import annotations

import asyncio
import enum
import functools
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from banyan_runtime.front import errors
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.event_stream import DIRECT_WRITE
from banyan_runtime.front.routes import OPEN_PATHS
from banyan_runtime.front.transport import WATCH
from banyan_runtime.server.answering import answered, too_crowded, without_chunks
from banyan_runtime.server.flow import Flow
from banyan_runtime.server.watchers import Watchers

if TYPE_CHECKING:
    from banyan_runtime.server.http import Http

log = logging.getLogger("banyan.http")

RESERVED_FILES: Final = 256  # descriptors that connections leave to probes, the engine's sockets and files
SAME_MACHINE: Final = ("127.0.0.1", "::1", "::ffff:127.0.0.1")  # and no other of the loopback's: a mesh's proxy has one of them
_TCP_CLOSE: Final = 7  # the state of a socket that was reset
_TCP_CLOSE_WAIT: Final = 8  # of one whose other end has ended, maybe behind what is not read yet
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_STATUS: Final = b"HTTP/1.1 "


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
    linger_s: float = 2.0  # after a refusal: a connection that is closed with unread bytes is reset, and the refusal lost
    probe_s: float = 0.25  # after the client has ended its side: until it is asked whether it is still there
    probe_again_s: float = 15.0
    pieces: int = 2048  # of bodies that are taken in at a time; a chunk of one byte costs as much as one of 16 kB
    pipelined: int = 64  # requests that may wait behind the one that is answered
    connections: int = 32_000  # beyond it only probes are answered
    crowded_idle_s: float = 2.0  # idle_s and head_s while there are too many connections


class Reading(enum.Enum):
    """What the next byte of a connection belongs to."""

    NOTHING = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()


class _Answering:
    """The transport as a cycle has it. An answer's head leaves with what is written in the same turn of the loop: one packet, and one call
    of the system, less. Closed with unread bytes, a connection is reset, and the answer lost: this is closed later."""

    def __init__(self, connection: Connection) -> None:
        self._transport = connection.transport
        self._loop = connection.loop
        self._close: Callable[[], None] = connection.close_answered
        self.is_closing = connection.transport.is_closing
        self.head = b""  # written, and still here

    def write(self, data: bytes) -> None:
        if self.head:
            head, self.head = self.head, b""
            self._transport.write(head + data)
        elif data.startswith(_STATUS):  # a body that begins so leaves no later
            self.head = data
            self._loop.call_soon(self.flush)
        else:
            self._transport.write(data)

    def flush(self) -> None:
        if self.head and not self._transport.is_closing():
            self.write(b"")

    def close(self) -> None:
        self.flush()
        self._close()

    def forget(self) -> None:
        """The connection is over: no cycle for the garbage collector."""
        self._close = self._transport.close


class _LoggedLater:
    """uvicorn's logger of answers, which writes of one before its head: here behind what leaves in the same turn of the loop."""

    def __init__(self, logger: logging.Logger, loop: asyncio.AbstractEventLoop) -> None:
        self._logger = logger
        self._loop = loop

    def info(self, words: str, *values: object) -> None:
        self._loop.call_soon(functools.partial(self._logger.info, words, *values))


class Connection(HttpToolsProtocol):
    """One connection. Besides uvicorn's own: it counts, it keeps time, and it refuses."""

    def __init__(self, *args: Any, http: Http, begun: bytes = b"", **kwargs: Any) -> None:
        """`begun`: what another process had read of it."""
        super().__init__(*args, **kwargs)
        self.access_logger: Any = _LoggedLater(self.access_logger, self.loop)
        self._http = http
        self._taken_over = begun
        self._limits = http.limits
        self._reading = Reading.NOTHING
        self._since = time.monotonic()  # when this reading, or the idleness, began
        self._progress = 0  # bytes of the body since then
        self._silent = 0  # bytes the parser was fed without a word from it
        self._head = 0  # bytes of the current request's head that the parser has told of
        self._pieces = 0  # of bodies, since the event loop was last left to others
        self._rest = b""  # read, and to be parsed when others had their turn
        self._muted = False  # the parser reads a head that we know already
        self._active: RequestResponseCycle | None = None  # the request that is answered; later ones are in `pipeline`
        self._refused = False  # nothing that comes is read any more
        self._refusal: ApiError | None = None  # to be told once the requests before have their answers
        self._close_at: float | None = None  # the last word is said
        self._probe_at: float | None = None  # the client has ended its side
        self._watchers = Watchers()
        self._asked_from_afar = False
        self._asked = False  # more than how we are
        self.only_probed = False  # it has asked that, and nothing else
        self._blank = 0  # bytes of empty lines since the last request
        self._unsent = (0, self._since)  # bytes in the buffer when it last changed, and when that was

    # --- bytes ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._http.opened()
        self.flow = self._flow = Flow(transport)
        self._answering = _Answering(self)
        if len(self.connections) > self._limits.connections + RESERVED_FILES // 2:
            transport.abort()
        if self._taken_over:
            begun, self._taken_over = self._taken_over, b""
            self.data_received(begun)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._reading is Reading.NOTHING:
            if not (data := self._begun(data)) or self._passed_on(data):
                return
            self._read(Reading.HEAD)
        self._unset_keepalive_if_required()
        self._pieces = 0
        while data and not self._refused and not self.transport.is_closing():
            if self._pieces > self._limits.pieces:
                self._rest = data
                self._flow.hold()
                self.loop.call_soon(self._go_on)
                return
            room = self._limits.head_bytes - self._silent
            if room <= 0:
                self._refuse(errors.head_too_large(self._limits.head_bytes, self._limits.headers))
                return
            part, data = data[:room], data[room:]
            self._silent += len(part)  # what the parser tells sets it back
            try:
                self.parser.feed_data(part)
            except httptools.HttpParserUpgrade as upgrade:
                data = part[upgrade.args[0] :] + data
                self._ignore_upgrade()
            except httptools.HttpParserError as error:
                cause = error.__context__
                self._refuse(cause if isinstance(cause, ApiError) else errors.malformed_http())

    def _passed_on(self, data: bytes) -> bool:
        """Whether what begins here is another process's to answer, and went there with the connection."""
        if self._http.elsewhere is None or self._active is not None or not self._http.elsewhere.answers(data):
            return False
        if self.transport.get_write_buffer_size() or self.transport.is_closing():  # the client asks on before it has read its answer
            return False
        given: socket.socket = self.transport.get_extra_info("socket")
        try:
            connection = os.dup(given.fileno())
        except OSError:  # none is left
            return False
        if not self._http.elsewhere.take(connection, data):  # it is still ours
            os.close(connection)
            return False
        self._refused = True
        self.transport.abort()  # of this process's descriptor alone, so the client sees nothing
        return True

    def _begun(self, data: bytes) -> bytes:
        """What there is of a request, behind empty lines, as some clients send one behind a body; nothing: none has begun."""
        begun = data.lstrip(b"\r\n")
        self._blank += len(data) - len(begun)
        if self._blank > self._limits.head_bytes:
            self._refuse(errors.head_too_large(self._limits.head_bytes, self._limits.headers))
            return b""
        if begun:
            self._blank = 0
        return begun

    def _go_on(self) -> None:
        """Take in what is left of the last read. Until then nothing more is read, nor the end noticed."""
        rest, self._rest = self._rest, b""
        if self.transport.is_closing():
            return
        self.data_received(rest)
        if not self._rest:
            self._flow.release()

    def _ignore_upgrade(self) -> None:
        """Go on in HTTP/1.1 where a client offers to change to something else, as Java's does with each request.

        The parser has stopped after the headers. A new one is told of the body's length and reads on from there.
        """
        framing = [item for item in self.headers if item[0] in (b"content-length", b"transfer-encoding")]
        self.parser = httptools.HttpRequestParser(self)
        self._muted = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(b"%b: %b\r\n" % item for item in framing) + b"\r\n")
        self._muted = False

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client has ended its side. It may still wait for answers, or be gone altogether: `probe` finds out."""
        if self._close_at is not None:
            return False
        if self._reading is not Reading.NOTHING and not self._refused:
            self._refuse(errors.malformed_http("the connection ended in the middle of the request"))
        if self._active is None or self.transport.is_closing():
            return False
        if self._refusal is None:
            self.cycle.keep_alive = False
        self._refused = True
        self._half_closed()
        return True

    def _half_closed(self) -> None:
        self._probe_at = time.monotonic() + self._limits.probe_s
        self._http.closed_half(self)
        self._watchers.half_closed()

    def connection_lost(self, exc: Exception | None) -> None:
        self._http.half_closed.discard(self)
        for cycle in (self._active, *(queued for queued, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._watchers.gone()
        self.pipeline.clear()
        self._unset_keepalive_if_required()
        if self._asked_from_afar:
            self._http.asked_from_afar = time.monotonic()
        super().connection_lost(exc)
        self._answering.forget()

    def shutdown(self) -> None:
        if self._close_at is None:
            super().shutdown()
        else:
            self.transport.close()

    # --- what the parser tells ---

    def on_message_begin(self) -> None:
        if self._muted:
            return
        if len(self.pipeline) >= self._limits.pipelined:
            raise errors.malformed_http("too many requests are waiting on this connection")
        self._head = len(b"GET  HTTP/1.1\r\n\r\n")
        if self._reading is not Reading.HEAD:
            self._read(Reading.HEAD)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._muted:
            self._head += len(url)
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._muted:
            return
        self._head += len(name) + len(value) + len(b": \r\n")
        if self._head > self._limits.head_bytes or len(self.headers) >= self._limits.headers:
            raise errors.head_too_large(self._limits.head_bytes, self._limits.headers)
        if self._reading is Reading.HEAD:  # a trailer is no header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._muted or self._refused:
            return
        if self.parser.get_method() == b"CONNECT":
            raise errors.malformed_http("this is no proxy")
        if self.parser.get_http_version() == "1.1" and sum(name == b"host" for name, _ in self.headers) != 1:
            raise errors.malformed_http("HTTP/1.1 asks for exactly one Host header")  # two readers would go by different ones
        for name, value in self.headers:
            if name == b"transfer-encoding" and value.strip().lower() != b"chunked":  # by which the parser would not be led
                raise errors.malformed_http("of transfer encodings only chunked is known here; send the body as it is")
        if self._http.elsewhere is not None and not self._http.elsewhere.may_stay(self.parser.get_method(), self.url):
            self._leave_unanswered()
            return
        super().on_headers_complete()
        self.cycle.transport = self._answering  # type: ignore[assignment]
        if self._http.draining:
            self.cycle.keep_alive = False
        if self.cycle.scope["http_version"] != "1.1":
            self.cycle.waiting_for_100_continue = False  # interim answers are not known there, and to be left out
        elif self.expect_100_continue:
            # Once refused, the client does not send the body, and what follows could not be told from it.
            self.cycle.keep_alive = False
        self._read(Reading.BODY)

    def _leave_unanswered(self) -> None:
        """This request came too early to be passed on, behind one that has not been answered. A server may close a connection behind any
        answer; the client asks again on another."""
        self._read(Reading.BODY)  # what comes of it is taken, so that the answers before it are not lost
        self._refused = True
        if self._active is None:
            self._linger()
        else:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        if self._refused:
            return
        self._silent = 0
        self._pieces += 1
        self._progress += len(body)
        super().on_body(body)
        if self._watchers and self.cycle is self._active:
            self._pass_by(self.cycle)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() or self._refused:
            return
        self._read(Reading.NOTHING)
        super().on_message_complete()

    def _read(self, reading: Reading) -> None:
        self._reading = reading
        self._since = time.monotonic()
        self._progress = 0
        self._silent = 0

    # --- answering ---

    def close_after_answer(self) -> None:
        """The request that is answered now is the last one, if its head is not sent yet."""
        if self._active is not None and not self._active.response_started and not self.pipeline:
            self._active.keep_alive = False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        scope: Any = cycle.scope  # uvicorn's type knows no extensions of others
        scope["extensions"] = {WATCH: functools.partial(self._watch, cycle), DIRECT_WRITE: functools.partial(self._write_part, cycle)}
        self._active = cycle
        probe = cycle.scope["path"] in OPEN_PATHS
        self._asked = self._asked or not probe
        self.only_probed = not self._asked
        if not probe and self.client is not None and self.client[0] not in SAME_MACHINE:
            self._asked_from_afar = True
            self._http.asked_from_afar = time.monotonic()
        if self._http.crowded and not probe:
            app = too_crowded
            self._http.on_refused(HTTPStatus.SERVICE_UNAVAILABLE)
        if cycle.scope["http_version"] != "1.1":
            app = without_chunks(cycle, app)
        super()._start_asgi_task(cycle, functools.partial(answered, cycle, app))

    def _write_part(self, cycle: RequestResponseCycle, body: bytes) -> bool:
        """Write a part of a response's body, which is not empty, as `send` would; False where `send` would wait or drop it."""
        if self.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding:
            return False
        (self._answering if self._answering.head else self.transport).write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def _watch(self, cycle: RequestResponseCycle, gone: Callable[[], None], half_closed: Callable[[], None]) -> Callable[[], None]:
        """See transport.WATCH."""
        if cycle.disconnected or cycle.response_complete:
            return self.loop.call_soon(gone).cancel
        self._pass_by(cycle)
        forget, tell_half_closed = self._watchers.add(gone, half_closed)
        if self._probe_at is not None:
            self.loop.call_soon(tell_half_closed)
        return forget

    def _pass_by(self, cycle: RequestResponseCycle) -> None:
        """What has come of a body is not read any more, and is not to keep the client's end from being seen behind it."""
        cycle.body = bytearray()
        self.flow.resume_reading()

    def on_response_complete(self) -> None:
        self._answering.flush()
        self._active = None
        self._watchers.forget()
        if self._reading is Reading.NOTHING:
            self._since = time.monotonic()
        super().on_response_complete()
        if self._refusal is not None and self._active is None and self._close_at is None and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._last_word(self._refusal)

    def _refuse(self, error: ApiError) -> None:
        """Read no further. Earlier requests get their answers, then this one, where its answer has not begun; then it is over."""
        self._refused = True
        if self._reading is not Reading.BODY:  # else the application has been asked, and hears that its client is gone
            self._http.on_refused(error.status)
        if self._reading is Reading.BODY and self.pipeline:
            self.pipeline.popleft()
        elif self._reading is Reading.BODY:
            if self._active is None or self._active.response_started:
                self.transport.abort()  # it has its answer, or a part of one: a cut connection is all it can be told
                return
            self._drop_active()
        if self._active is not None:
            self.cycle = self.pipeline[0][0] if self.pipeline else self._active
            self._refusal = error
            return
        self._last_word(error)

    def _last_word(self, error: ApiError) -> None:
        request_id = uuid.uuid4().hex
        log.info("request %s from %s was answered with %d: %s", request_id, self.client, error.status, error.message)
        answer = error.response()
        head = [*self.server_state.default_headers, *answer.raw_headers, (b"x-request-id", request_id.encode()), (b"connection", b"close")]
        self.transport.write(STATUS_LINE[error.status] + b"".join(b"%b: %b\r\n" % item for item in head) + b"\r\n" + bytes(answer.body))
        self._linger()

    def _linger(self) -> None:
        """All is said; what still comes is not read any more, but taken."""
        self._refused = True
        self._close_at = time.monotonic() + self._limits.linger_s
        self.flow.resume_reading()
        self.transport.write_eof()

    def close_answered(self) -> None:
        """A cycle closes the connection behind its answer."""
        if self._reading is not Reading.BODY or self._close_at is not None:
            self.transport.close()
            return
        self.pipeline.clear()
        self._linger()

    def give_up(self, error: ApiError) -> None:
        """Answer with `error` what has no answer yet; behind it nothing is answered any more."""
        if self._active is None or self._active.response_started:
            return
        self.pipeline.clear()
        self._read(Reading.NOTHING)
        self._drop_active()
        self._refuse(error)

    def _drop_active(self) -> None:
        """Its handler takes it that the client has gone."""
        assert self._active is not None
        self._active.disconnected = True
        self._active.waiting_for_100_continue = False  # nothing can be written any more when it asks for its body
        self._active.message_event.set()
        self._active = None
        self._watchers.gone()

    # --- time ---

    def sweep(self, now: float) -> None:
        """Every SWEEP_EVERY_S: end what takes too long."""
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
        if self.flow.read_paused:
            self._since, self._progress = now, 0  # it is we who keep the client waiting
            state = _state(self.transport)
            if state == _TCP_CLOSE:
                self.transport.abort()
                return
            if state == _TCP_CLOSE_WAIT and self._active is not None and self._probe_at is None:
                self._half_closed()  # behind what is not read yet, such as a large request that waits for this one's answer
        taken = now - self._since
        if self._refused:
            return
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
        elif self._active is None and taken > (limits.crowded_idle_s if self._http.crowded else limits.idle_s):
            self.transport.close()

    def probe(self, now: float) -> None:
        """Every PROBE_EVERY_S on a half-closed connection: is the client gone?

        A client that closes altogether and one that only has no more to say look the same until something is sent. Gone,
        its machine answers with a reset. What can be sent at any time before an answer is an interim response.
        """
        if self.transport.is_closing():
            return
        if _state(self.transport) == _TCP_CLOSE:
            self.transport.abort()
            return
        cycle = self._active
        if cycle is None or self._probe_at is None or now < self._probe_at:
            return
        self._probe_at = now + self._limits.probe_again_s
        if not cycle.response_started and cycle.scope["http_version"] == "1.1":
            self.transport.write(_CONTINUE)


def _state(transport: asyncio.Transport) -> int:
    """Of its socket, as the system knows it; 0 where it does not tell."""
    connection: socket.socket = transport.get_extra_info("socket")
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[0]
    except OSError:
        return 0
