"""An asyncio loop whose clock jumps to the next timer: hours of a cluster pass in milliseconds, and each run of a seed is the same."""

from __future__ import annotations

import asyncio
from asyncio import base_events, events
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jump:
    """Stands where a loop has its selector: instead of waiting, time goes by."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing will happen")
        if timeout > 0:
            self._loop.now += timeout
        return []

    def close(self) -> None:
        pass


class VirtualLoop(base_events.BaseEventLoop):
    """Knows tasks, futures and timers, no sockets, no threads. `now`: seconds since its beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._selector = _Jump(self)

    def time(self) -> float:
        return self.now

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def run(main: Coroutine[Any, Any, T], loop: VirtualLoop) -> T:
    """Run `main` on `loop`; what is left of tasks and timers then is dropped."""
    previous = events._get_running_loop()
    assert previous is None
    task = loop.create_task(main)
    try:
        return loop.run_until_complete(task)
    finally:
        loop._ready.clear()  # type: ignore[attr-defined]
        loop._scheduled.clear()  # type: ignore[attr-defined]
        for left in asyncio.all_tasks(loop):
            left._log_destroy_pending = False  # type: ignore[attr-defined]
            left.get_coro().close()  # type: ignore[union-attr]
        loop.close()
