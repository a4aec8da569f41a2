"""Between handlers and the socket: noticing that the client has gone, and ending what a request holds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from banyan_runtime.front.errors import ClientGone

T = TypeVar("T")

WATCH: Final = "banyan.watch"
"""In scope["extensions"]: the server's `(gone) -> forget`, which calls `gone` once when the client is gone, unless `forget` is called
before. Never from within. A task that waits for it costs much more."""
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


def watch(scope: Scope, receive: Receive, gone: Callable[[], None]) -> Callable[[], None]:
    """As the server does it (`WATCH`), also where a server does not. The body must have been read."""
    told: Callable[[Callable[[], None]], Callable[[], None]] | None = scope.get("extensions", {}).get(WATCH)
    if told is not None:
        return told(gone)
    left, forgotten = asyncio.ensure_future(_disconnected(receive)), False

    def tell(ended: asyncio.Future[None]) -> None:
        if not ended.cancelled() and not forgotten:
            gone()

    def forget() -> None:
        nonlocal forgotten
        forgotten = True  # it may have heard of it by now, and is about to tell
        left.cancel()

    left.add_done_callback(tell)
    return forget


async def _disconnected(receive: Receive) -> None:
    with contextlib.suppress(Exception):  # whatever it is, nothing more is heard
        while (await receive())["type"] != "http.disconnect":
            pass


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Do `work` as long as the client waits for it. Raises ClientGone, with the work cancelled, when it does not. As the work runs in the
    caller's own task, this may also interrupt it where it cleans up behind another cancellation."""
    task = asyncio.current_task()
    assert task is not None
    cancelled_before, left = task.cancelling(), False

    def leave() -> None:
        nonlocal left
        left = True
        task.cancel()

    forget = watch(request.scope, request.receive, leave)
    try:
        result = await work
    except (asyncio.CancelledError, Exception) as error:
        if not left or (task.uncancel() > cancelled_before and isinstance(error, asyncio.CancelledError)):
            raise  # others cancel it, too
        raise ClientGone from None
    finally:
        forget()
    if left:  # the work made something else of being cancelled
        task.uncancel()
        raise ClientGone
    return result
