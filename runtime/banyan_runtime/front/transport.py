"""Between handlers and the socket: event streams, noticing that the client has gone, and ending what a request holds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from banyan_runtime.front.errors import ApiError, ClientGone, internal

T = TypeVar("T")

KEEP_ALIVE_S: Final = 15.0  # proxies cut connections that are silent for 30 to 60 s
FIRST_EVENT_S: Final = 0.05  # a refusal by the engine comes within moments, and is worth a status of its own
HALF_CLOSED: Final = "banyan.half_closed"  # in scope["extensions"]: an asyncio.Event, set when the client has ended its side
_EXCHANGE: Final = "banyan.exchange"
_COMMENT: Final = b": keep-alive\n\n"
log = logging.getLogger("banyan.requests")


class Exchange:
    """ASGI middleware: whatever way a request ends, what was entrusted to it is closed then, even if its response never ran."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        async with contextlib.AsyncExitStack() as stack:
            scope[_EXCHANGE] = stack
            await self._app(scope, receive, send)


async def _gone(receive: Receive) -> None:
    """Returns when the client has closed the connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do `work` as long as the client waits for it. Raises ClientGone, with the work cancelled, when it does not."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


def error_event(error: ApiError) -> bytes:
    """How OpenAI's streams end in an error."""
    return b"data: " + msgspec.json.encode(error.body()) + b"\n\ndata: [DONE]\n\n"


class EventStream(Response):
    """Server-sent events from a generator of prepared bytes; each item is one write. Made by `begin`.

    The headers leave at once and comments keep the connection alive until the first event, and between events. However it
    ends (the last event, an error, the client gone, never called at all) the generator is closed, then `close` is called,
    once. A generator that never started does not run its `finally`, so what must end belongs into `close`.

    What the generator raises becomes the stream's last event: the status has been sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str] | None = None,
        *,
        close: Callable[[], None] = lambda: None,
        on_error: Callable[[ApiError], bytes] = error_event,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._close: Callable[[], None] | None = close
        self._on_error = on_error
        self._first: asyncio.Future[bytes | None] | None = None  # the first event, while nobody has taken it
        self._idle = False  # nothing is being written
        self._written = 0.0  # monotonic seconds of the last write

    @classmethod
    async def begin(
        cls,
        request: Request,
        events: AsyncGenerator[bytes, None],
        *,
        close: Callable[[], None],
        headers: Mapping[str, str] | None = None,
        on_error: Callable[[ApiError], bytes] = error_event,
    ) -> EventStream:
        """Start `events`, and wait a moment for the first: raises what is raised until then, as the status is still open."""
        stream = cls(events, headers, close=close, on_error=on_error)
        request.scope[_EXCHANGE].push_async_callback(stream.aclose)
        stream._first = asyncio.ensure_future(anext(events, None))
        await asyncio.wait({stream._first}, timeout=FIRST_EVENT_S)
        if stream._first.done() and (error := stream._first.exception()) is not None:
            raise error
        return stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.ensure_future(self._write(send))
        watcher = asyncio.ensure_future(self._watch(scope, receive, send))
        try:
            await asyncio.wait({writer, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (watcher, writer):
                task.cancel()
            await asyncio.wait({watcher, writer})
            await self.aclose()
        for task in (writer, watcher):
            if not task.cancelled():
                task.result()

    async def aclose(self) -> None:
        """End the generator and what it read from. Safe to call again."""
        close, self._close = self._close, None
        if close is None:
            return
        try:
            if self._first is not None:
                self._first.cancel()
                await asyncio.wait({self._first})
                if not self._first.cancelled():
                    self._first.exception()  # nobody is left to hear of it
            await self._events.aclose()
        finally:
            close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while (chunk := await self._chunk()) is not None:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _chunk(self) -> bytes | None:
        """The next event, an error in its place; None at the end."""
        first, self._first = self._first, None
        self._written = time.monotonic()
        self._idle = True
        try:
            return await (anext(self._events, None) if first is None else first)
        except ApiError as error:
            return self._on_error(error)
        except Exception:
            log.exception("a stream failed")
            return self._on_error(internal())
        finally:
            self._idle = False

    async def _watch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Returns when the client is gone; meanwhile keeps an idle connection open.

        A client that has ended its side gets a comment at once: if it is gone altogether, this makes it known.
        """
        gone = asyncio.ensure_future(_gone(receive))
        half_closed: asyncio.Event | None = scope.get("extensions", {}).get(HALF_CLOSED)
        signals = {gone} if half_closed is None else {gone, asyncio.ensure_future(half_closed.wait())}
        self._written = time.monotonic()
        try:
            while True:
                idle = time.monotonic() - self._written
                done, waiting = await asyncio.wait(signals, timeout=max(KEEP_ALIVE_S - idle, 0.01), return_when=asyncio.FIRST_COMPLETED)
                if gone in done:
                    return
                signals = waiting
                if self._idle and (done or time.monotonic() - self._written >= KEEP_ALIVE_S):
                    self._written = time.monotonic()
                    await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
        finally:
            for signal in signals:
                signal.cancel()
