"""Who may send: as many requests at once as the concurrency limit says, the oldest line first."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import AsyncIterator

from banyan_runtime.batch.retries import Concurrency


class ConcurrencyLimiter:
    """Slots for requests in flight. The limit may move at any time; old lines go first, so that the window moves on."""

    def __init__(self, concurrency: Concurrency) -> None:
        self.concurrency = concurrency
        self.in_flight = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    @contextlib.asynccontextmanager
    async def slot(self, ordinal: int) -> AsyncIterator[int]:
        """Hold a slot; gives the concurrency epoch in which the request is sent."""
        if self.in_flight >= self.concurrency.limit:
            future = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (ordinal, future))
            try:
                await future
            except asyncio.CancelledError:
                if future.done() and not future.cancelled():
                    self._release()
                raise
        else:
            self.in_flight += 1
        try:
            yield self.concurrency.epoch
        finally:
            self._release()

    def _release(self) -> None:
        self.in_flight -= 1
        while self._waiting and self.in_flight < self.concurrency.limit:
            _, future = heapq.heappop(self._waiting)
            if not future.done():
                self.in_flight += 1
                future.set_result(None)
