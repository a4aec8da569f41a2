"""A question to the server that many may want answered: asked once at a time, and not too often."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod

from banyan_runtime.batch.client import Client
from banyan_runtime.batch.retries import Health


class Asker(ABC):
    """`every_s`: between two questions; `after_yes_s`: behind a yes."""

    def __init__(self, every_s: float, after_yes_s: float) -> None:
        self._every_s = every_s
        self._after_yes_s = after_yes_s
        self._asked_at = float("-inf")
        self._yes = False
        self._running: asyncio.Task[None] | None = None

    @abstractmethod
    async def _answer(self, now: float) -> bool:
        """Ask. `now`: monotonic seconds."""

    async def ask(self, *, since: float) -> bool:
        """What was answered when it was asked after `since`."""
        while self._asked_at <= since:
            if self._running is None:
                self._running = asyncio.create_task(self._ask())
            await asyncio.shield(self._running)
        return self._yes

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._running

    async def _ask(self) -> None:
        try:
            pause = self._after_yes_s if self._yes else self._every_s
            await asyncio.sleep(self._asked_at + pause - time.monotonic())
            now = time.monotonic()
            self._yes = await self._answer(now)
            self._asked_at = now
        finally:
            self._running = None


class Welfare(Asker):
    """Whether the server says that it is well."""

    def __init__(self, client: Client, health: Health, *, every_s: float) -> None:
        super().__init__(every_s, after_yes_s=every_s)
        self._client = client
        self._health = health

    async def _answer(self, now: float) -> bool:
        well = await self._client.well()
        self._health.said(well, now)
        return well
