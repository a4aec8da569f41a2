"""What running pods say of themselves over HTTP, asked again and again in the background: /readyz and /progress."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

EVERY_S = 1.0
SETTLED_EVERY_S = 10.0
TIMEOUT_S = 2.0


class Asking:
    """The newest answer of every URL that somebody wants to know."""

    def __init__(self, clock: Callable[[], float], wake: Callable[[], None]) -> None:
        self._clock = clock
        self._wake = wake
        self._answers: dict[str, Mapping[str, Any]] = {}
        self._asked: dict[str, float] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._session: aiohttp.ClientSession | None = None

    def answer(self, url: str) -> Mapping[str, Any] | None:
        """The last JSON object that `url` gave, and ask again if that was a while ago. None until it has answered."""
        known = self._answers.get(url)
        every = SETTLED_EVERY_S if known is not None and known.get("state") == "ready" else EVERY_S
        if url not in self._tasks and self._clock() - self._asked.get(url, 0.0) >= every:
            self._asked[url] = self._clock()
            self._tasks[url] = asyncio.ensure_future(self._ask(url))
        return known

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _ask(self, url: str) -> None:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        try:
            async with self._session.get(url, allow_redirects=False) as response:
                body = json.loads(await response.read())
            if isinstance(body, dict) and body != self._answers.get(url):
                self._answers[url] = body
                self._wake()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            pass  # the pod's own probes tell whether that matters
        finally:
            del self._tasks[url]
