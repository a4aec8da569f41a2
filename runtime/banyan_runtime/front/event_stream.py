"""Server-sent events, written the moment they are made."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.transport import EXCHANGE, watch, while_connected
from banyan_runtime.front.turns import Turn
from banyan_runtime.json_text import uncut

log = logging.getLogger("banyan.requests")

KEEP_ALIVE_S: Final = 15.0  # proxies cut connections that are silent for 30 to 60 s
FIRST_EVENT_S: Final = 0.05  # a refusal by the engine comes within moments, and is worth a status of its own
DIRECT_WRITE: Final = "banyan.write"
"""In scope["extensions"]: the server's `(bytes) -> bool`, which writes a part of a response's body at once, past all middleware (that
looks at the head of a response only); False where that cannot be, and `send` must be awaited. Several times cheaper than `send`."""
PART_BYTES: Final = 64 << 10
"""What is made and written at a time of an answer that is made while it is sent."""
MAX_UNSENT: Final = 16 << 20  # bytes that wait for a client; the engine does not wait for it
_UNMADE: Final = 1024  # bytes that events which are not made yet count for
_COMMENT: Final = b": keep-alive\n\n"


def named(kind: str, data: bytes) -> bytes:
    """One event with a name; `data` is one line."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


class EventStream(Response):
    """Events that are pushed from callbacks, with no task in between: while the client takes what it is sent, `push` writes to
    the connection before it returns; otherwise events gather, and leave together.

    Events are bytes, or parts that are made only when the client takes them, in turns. A client that leaves more than
    `MAX_UNSENT` waiting is given up. In what is written stands no character at which a client would cut a line but line ends.

    The headers leave at once, and comments keep a silent connection open. However it ends (`end`, `fail`, the client gone, never
    called at all) `on_close` is called, once.
    """

    media_type = "text/event-stream"

    def __init__(self, opening: bytes | Iterator[bytes] = b"", headers: Mapping[str, str] | None = None) -> None:
        """`opening`: events that leave with the headers."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self.on_close: Callable[[], None] | None = None
        self.begun = False  # the status is decided: from now on an error is an event
        self._loop = asyncio.get_running_loop()
        self._first: asyncio.Future[None] = self._loop.create_future()  # the first event, or a failure in its place
        self._refusal: ApiError | None = None  # a failure while the status is open
        self._over: asyncio.Future[None] = self._loop.create_future()  # everything is written, or cannot be
        self._unsent: deque[bytes | Iterator[bytes]] = deque([opening] if opening else [])
        self._unsent_bytes = _size(opening)
        self._last = False  # nothing more will be pushed
        self._send: Send | None = None  # while events may be written
        self._write: Callable[[bytes], bool] | None = None
        self._sending: asyncio.Task[None] | None = None  # a write that may wait for the client
        self._scheduled = False  # a write of what several pushes bring
        self._written = self._loop.time()
        self._keeping: asyncio.TimerHandle | None = None  # until the next comment is due

    # --- for who makes the events ---

    def push(self, events: bytes | Iterator[bytes]) -> None:
        """Write events, or keep them until the client takes them. Never waits."""
        if not events:
            return
        free = not self._unsent and self._sending is None and not self._over.done()
        if free and self._write is not None and isinstance(events, bytes) and self._write(uncut(events)):  # the frequent case
            self._written = self._loop.time()
            return
        self._keep(events)
        if self._send is not None:
            self._flush()
        else:
            self._decide()

    def push_soon(self, events: bytes | Iterator[bytes]) -> None:
        """As `push`, in one write with everything else that comes in this turn of the loop."""
        if events:
            self._keep(events)
            self._decide()
            if not self._scheduled:
                self._scheduled = True
                self._loop.call_soon(self._push_scheduled)

    def _push_scheduled(self) -> None:
        self._scheduled = False
        if self._unsent and self._send is not None:
            self._flush()

    def end(self, events: bytes) -> None:
        """The last events."""
        self._last = True
        self._keep(events)
        if self._send is not None:
            self._flush()
        else:
            self._decide()

    def fail(self, error: ApiError, events: bytes) -> None:
        """The end by an error: `begin` raises it, or if that is over, `events` tell of it."""
        if self.begun:
            self.end(events)
            return
        self._refusal = error  # also behind the first events, which nobody has seen: one of several sequences may have begun
        self._decide()

    def _decide(self) -> None:
        """`begin` has waited long enough."""
        if not self._first.done():
            self._first.set_result(None)

    # --- for the handler and the server ---

    async def begin(self, request: Request, *, patient: bool = False) -> EventStream:
        """Wait a moment for the first event, `patient`: until it comes. Raises an error that comes in its place or with it: the
        status is still open. Raises ClientGone."""
        request.scope[EXCHANGE].callback(self.close)
        try:
            if patient:
                await while_connected(request, self._first)
            elif not self._first.done():
                waited = self._loop.call_later(FIRST_EVENT_S, self._decide)
                try:
                    await self._first
                finally:
                    waited.cancel()
            if self._refusal is not None:
                raise self._refusal
        except BaseException:
            self._refusal = None  # its traceback holds this frame: no cycle for the garbage collector
            self.close()
            raise
        self.begun = True
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._send, self._write = send, scope.get("extensions", {}).get(DIRECT_WRITE)
            if self._unsent:
                self._flush()
            await self._watch(scope, receive)
        finally:
            self._send = self._write = None
            if self._sending is not None:
                self._sending.cancel()
            self.close()

    def close(self) -> None:
        """End what the events come from. Safe to call again."""
        on_close, self.on_close = self.on_close, None  # who is told holds this stream: no cycle for the garbage collector
        if on_close is not None:
            on_close()

    async def _watch(self, scope: Scope, receive: Receive) -> None:
        """Returns when everything is written or the client is gone; meanwhile keeps an idle connection open."""
        forget = watch(scope, receive, self._end)
        self._keep_alive()
        try:
            await self._over
        finally:
            assert self._keeping is not None
            self._keeping.cancel()
            forget()

    def _keep_alive(self) -> None:
        """Comment where it is time to; and see to it that it will be looked at again."""
        silent = self._loop.time() - self._written
        if silent >= KEEP_ALIVE_S:
            self._comment()
            silent = 0.0
        self._keeping = self._loop.call_later(max(KEEP_ALIVE_S - silent, 0.01), self._keep_alive)  # timers may be early by a moment

    def _comment(self) -> None:
        if self._sending is None and not self._last:
            self.push(_COMMENT)

    # --- writing ---

    def _keep(self, events: bytes | Iterator[bytes]) -> None:
        if self._over.done():
            return
        self._unsent.append(events)
        self._unsent_bytes += _size(events)
        if self._unsent_bytes > MAX_UNSENT:
            log.warning("a stream was cut off: its client left more than %d MiB unread", MAX_UNSENT >> 20)
            self._unsent.clear()
            self._end()

    def _flush(self) -> None:
        """Write everything that waits, unless the client keeps an earlier write waiting."""
        if self._sending is not None or self._over.done():
            return
        if self._write is not None and not self._last:
            body = self._next()
            if not body or self._write(body):
                self._written = self._loop.time()
            else:
                self._unsent.appendleft(body)
                self._unsent_bytes += len(body)
            if not self._unsent:
                return
        self._sending = self._loop.create_task(self._send_all())

    def _next(self) -> bytes:
        """Take what is written next; perhaps nothing, where what was made in one turn is empty."""
        unsent = self._unsent
        if len(unsent) == 1 and isinstance(unsent[0], bytes):  # the frequent case
            self._unsent_bytes = 0
            return uncut(unsent.popleft())  # type: ignore[arg-type]
        taken: list[bytes] = []
        size, turn = 0, Turn()
        while unsent and size < PART_BYTES:
            events = unsent[0]
            if isinstance(events, bytes):
                taken.append(events)
                unsent.popleft()
                self._unsent_bytes -= len(events)
            elif (part := next(events, None)) is not None:
                taken.append(part)
            else:
                unsent.popleft()
                self._unsent_bytes -= _UNMADE
                continue
            size += len(taken[-1])
            if turn.over:
                break
        return uncut(b"".join(taken))  # no part ends within a character

    async def _send_all(self) -> None:
        """The way that may wait: for a client that is slow, for the turns of others, and for the end."""
        try:
            while self._unsent and self._send is not None:
                body = self._next()
                over = self._last and not self._unsent
                if body or over:
                    self._written = self._loop.time()
                    await self._send({"type": "http.response.body", "body": body, "more_body": not over})
                if over:
                    self._end()
                elif self._unsent:
                    await asyncio.sleep(0)
        except Exception as error:
            self._end(error)
        finally:
            self._sending = None

    def _end(self, error: Exception | None = None) -> None:
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)


def _size(events: bytes | Iterator[bytes]) -> int:
    return len(events) if isinstance(events, bytes) else _UNMADE
