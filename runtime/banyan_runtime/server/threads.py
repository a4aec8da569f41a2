"""Slow work beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable
from typing import TypeVar

from banyan_runtime.process import start_thread

T = TypeVar("T")


async def on_thread(function: Callable[..., T], *arguments: object) -> T:
    """Run something slow on a daemon thread, so that it never holds up the end of the process. Raises what `function` raises, and
    UnavailableError where there is no thread for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(outcome: Callable[[], None]) -> None:
        if not future.done():
            outcome()

    def work() -> None:
        outcome: Callable[[], None]
        try:
            outcome = functools.partial(future.set_result, function(*arguments))
        except BaseException as error:
            outcome = functools.partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, outcome)

    start_thread(work, getattr(function, "__name__", "work"))
    return await future
