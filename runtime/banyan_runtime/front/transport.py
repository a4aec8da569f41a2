"""Between handlers and the socket: event streams, and noticing that the client has gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, Final, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from banyan_runtime.front.errors import ClientGone

T = TypeVar("T")

KEEP_ALIVE_S: Final = 15.0  # proxies cut connections that are silent for 30 to 60 s
_COMMENT: Final = b": keep-alive\n\n"
log = logging.getLogger("banyan.requests")


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


class EventStream(Response):
    """Server-sent events from a generator of prepared bytes; each item is one write.

    The generator is closed when the client goes away, so what it holds (generations in the engine) ends then. It must turn
    errors into events itself: the status has been sent.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str] | None = None) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._written = 0.0  # monotonic seconds of the last write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.ensure_future(self._write(send))
        watcher = asyncio.ensure_future(self._watch(receive, send))
        try:
            await asyncio.wait({writer, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        finally:
            for task in (watcher, writer):
                task.cancel()
            await asyncio.wait({watcher, writer})
            await self._events.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._events:
            self._written = time.monotonic()
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Returns when the client is gone; meanwhile keeps an idle connection open."""
        gone = asyncio.ensure_future(_gone(receive))
        self._written = time.monotonic()
        try:
            while True:
                idle = time.monotonic() - self._written
                done, _ = await asyncio.wait({gone}, timeout=max(KEEP_ALIVE_S - idle, 0.01))
                if done:
                    return
                if time.monotonic() - self._written >= KEEP_ALIVE_S:
                    self._written = time.monotonic()
                    await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
        finally:
            gone.cancel()
