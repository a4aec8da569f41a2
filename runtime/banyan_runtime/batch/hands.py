"""Threads for calls that block. They are daemons: a call that hangs in the network does not keep the process from ending."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")
M_ARENA_MAX: Final = -8  # of malloc.h
_Work = tuple[Callable[[], Any], asyncio.Future[Any], asyncio.AbstractEventLoop]


class Hands:
    """`count` threads that take up work in the order in which it comes."""

    def __init__(self, count: int, name: str) -> None:
        _share_one_heap()
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True) for number in range(count)]
        for thread in self._threads:
            thread.start()

    async def do(self, work: Callable[[], T]) -> T:
        """The result of `work`. Who is cancelled meanwhile gets none, but the work goes on to its end."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._work.put((work, future, loop))
        return await future

    def close(self, within_s: float = 0.5) -> None:
        """Let the threads end when they have done what they were given, and wait a moment for those that can.

        To be called before the event loop is closed: a thread that has just handed over its result may still be inside the loop's
        own code, which then works on freed memory.
        """
        for _ in self._threads:
            self._work.put(None)
        until = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, future, loop = item
            try:
                result, error = work(), None
            except BaseException as raised:
                result, error = None, raised
            try:
                loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:
                return  # the loop is closed: nobody waits
            del item, work, future, loop, result, error  # what this thread waits with for its next work would stay in memory


def _share_one_heap() -> None:
    """Have all threads of this process allocate from one heap.

    glibc gives every thread its own, and what was freed in one serves no other: as many megabytes of results as one thread ever held
    stay with each of them. Under Python's lock they would hardly ever allocate at the same time. Other C libraries have no such thing.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


async def to_its_end(work: asyncio.Future[T]) -> T:
    """Await `work` even if this task is cancelled meanwhile; then the cancellation comes through."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:
            break
    if cancelled is not None:
        raise cancelled
    return work.result()
