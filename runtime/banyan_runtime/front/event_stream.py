"""Server-sent events, written the moment they are made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.transport import EXCHANGE, HALF_CLOSED, gone

KEEP_ALIVE_S: Final = 15.0  # proxies cut connections that are silent for 30 to 60 s
FIRST_EVENT_S: Final = 0.05  # a refusal by the engine comes within moments, and is worth a status of its own
DIRECT_WRITE: Final = "banyan.write"
"""In scope["extensions"]: the server's `(bytes) -> bool`, which writes a part of a response's body at once, past all middleware (that
looks at the head of a response only); False where that cannot be, and `send` must be awaited. Several times cheaper than `send`."""
_COMMENT: Final = b": keep-alive\n\n"


class EventStream(Response):
    """Events that are pushed from callbacks, with no task in between: while the client takes what it is sent, `push` writes to
    the connection before it returns; otherwise events gather, and leave together.

    The headers leave at once, and comments keep a silent connection open. However it ends (`end`, `fail`, the client gone, never
    called at all) `on_close` is called, once.
    """

    media_type = "text/event-stream"

    def __init__(self, opening: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        """`opening`: events that leave with the headers."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self.on_close: Callable[[], None] = lambda: None
        self.begun = False  # the status is decided: from now on an error is an event
        self._loop = asyncio.get_running_loop()
        self._first: asyncio.Future[ApiError | None] = self._loop.create_future()  # the first event, or a failure in its place
        self._over: asyncio.Future[None] = self._loop.create_future()  # everything is written, or cannot be
        self._unsent = [opening] if opening else []
        self._last = False  # nothing more will be pushed
        self._send: Send | None = None  # while events may be written
        self._write: Callable[[bytes], bool] | None = None
        self._sending: asyncio.Task[None] | None = None  # a write that may wait for the client
        self._scheduled = False  # a write of what several pushes bring
        self._written = self._loop.time()
        self._closed = False

    # --- for who makes the events ---

    def push(self, events: bytes) -> None:
        """Write events, or keep them until the client takes them. Never waits, never raises."""
        if events:
            self._unsent.append(events)
            if self._send is not None:
                self._flush()
            elif not self._first.done():
                self._first.set_result(None)

    def push_soon(self, events: bytes) -> None:
        """As `push`, in one write with everything else that comes in this turn of the loop."""
        if events:
            self._unsent.append(events)
            if not self._first.done():
                self._first.set_result(None)
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
        self._unsent.append(events)
        if self._send is not None:
            self._flush()
        elif not self._first.done():
            self._first.set_result(None)

    def fail(self, error: ApiError, events: bytes) -> None:
        """The end by an error: `begin` raises it, or if that is over, `events` tell of it."""
        if self.begun:
            self.end(events)
        elif not self._first.done():
            self._first.set_result(error)
        else:
            self.end(events)

    # --- for the handler and the server ---

    async def begin(self, request: Request) -> EventStream:
        """Wait a moment for the first event. Raises the error that comes in its place: the status is still open."""
        request.scope[EXCHANGE].callback(self.close)
        try:
            await asyncio.wait({self._first}, timeout=FIRST_EVENT_S)
            if self._first.done() and (error := self._first.result()) is not None:
                raise error
        except BaseException:
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
            self._send = None
            if self._sending is not None:
                self._sending.cancel()
            self.close()

    def close(self) -> None:
        """End what the events come from. Safe to call again."""
        if not self._closed:
            self._closed = True
            self.on_close()

    async def _watch(self, scope: Scope, receive: Receive) -> None:
        """Returns when everything is written or the client is gone; meanwhile keeps an idle connection open.

        A client that has ended its side gets a comment at once: if it is gone altogether, this makes it known.
        """
        watcher = asyncio.ensure_future(gone(receive))
        half_closed: asyncio.Event | None = scope.get("extensions", {}).get(HALF_CLOSED)
        signals: set[asyncio.Future[Any]] = {watcher, self._over}
        if half_closed is not None:
            signals.add(asyncio.ensure_future(half_closed.wait()))
        waiting = signals
        try:
            while True:
                idle = self._loop.time() - self._written
                limit = max(KEEP_ALIVE_S - idle, 0.01)
                done, waiting = await asyncio.wait(waiting, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                if self._over in done:
                    self._over.result()
                    return
                if watcher in done:
                    return
                silent = self._loop.time() - self._written >= KEEP_ALIVE_S
                if (done or silent) and self._sending is None and not self._last:
                    self.push(_COMMENT)
        finally:
            for signal in signals:
                signal.cancel()

    # --- writing ---

    def _flush(self) -> None:
        """Write everything that waits, unless the client keeps an earlier write waiting."""
        if self._sending is not None or self._over.done():
            return
        if self._write is not None and not self._last:
            body = self._unsent[0] if len(self._unsent) == 1 else b"".join(self._unsent)
            if self._write(body):
                self._unsent.clear()
                self._written = self._loop.time()
                return
        self._sending = self._loop.create_task(self._send_all())

    async def _send_all(self) -> None:
        """The way that may wait: for a client that is slow, and for the end."""
        try:
            while self._unsent and self._send is not None:
                body = b"".join(self._unsent)
                self._unsent.clear()
                self._written = self._loop.time()
                over = self._last
                await self._send({"type": "http.response.body", "body": body, "more_body": not over})
                if over:
                    self._end()
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
