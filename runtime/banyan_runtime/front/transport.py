"""Between handlers and the socket: noticing that the client has gone, and ending what a request holds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from banyan_runtime.front.errors import ClientGone

T = TypeVar("T")

HALF_CLOSED: Final = "banyan.half_closed"  # in scope["extensions"]: an asyncio.Event, set when the client has ended its side
CLIENT_CLOSED: Final = 499  # the status of an answer that nobody waits for any more
EXCHANGE: Final = "banyan.exchange"  # in the scope: the AsyncExitStack of the request


class Exchange:
    """ASGI middleware: whatever way a request ends, what was entrusted to it is closed then, even if its response never ran."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        async with contextlib.AsyncExitStack() as stack:
            scope[EXCHANGE] = stack
            await self._app(scope, receive, send)


async def gone(receive: Receive) -> None:
    """Returns when the client has closed the connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do `work` as long as the client waits for it. Raises ClientGone, with the work cancelled, when it does not."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(gone(request.receive))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        left.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
        elif not task.cancelled():
            task.exception()  # taken note of, where this was cancelled in the moment in which the work failed
        # An exception's traceback holds this frame, and the task the exception: together with all that the work held, such as
        # a request's body, they would stay until the garbage collector comes by.
        del task, left
