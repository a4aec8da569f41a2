"""The operator's own HTTP: /livez, /readyz and /metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from aiohttp import web

from banyan_operator.cluster.metrics import Metrics

LAG_LIMIT_S: Final = 10.0
TICK_S: Final = 1.0


class Health:
    """Serves on one address. `trouble` tells why this process should be restarted, `unready` what it waits for, if anything."""

    def __init__(self, metrics: Metrics, trouble: Callable[[], str | None], unready: Callable[[], str | None]) -> None:
        self._metrics, self._trouble, self._unready = metrics, trouble, unready
        self.lag_s = 0.0  # of the event loop, as last measured
        self._runner: web.AppRunner | None = None
        self._ticker: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port (a free one for 0)."""
        app = web.Application()
        app.router.add_get("/livez", self._livez)
        app.router.add_get("/healthz", self._livez)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics_page)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        self._ticker = asyncio.create_task(self._tick())
        bound: int = self._runner.addresses[0][1]
        return bound

    async def stop(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _tick(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(TICK_S)
            self.lag_s = time.monotonic() - began - TICK_S

    def trouble(self) -> str | None:
        """Why this process should be restarted, or None."""
        if self.lag_s > LAG_LIMIT_S:
            return f"the event loop was stuck for {self.lag_s:.0f} s"
        return self._trouble()

    async def _livez(self, _: web.Request) -> web.Response:
        trouble = self.trouble()
        return web.Response(text=trouble or "ok", status=200 if trouble is None else 503)

    async def _readyz(self, _: web.Request) -> web.Response:
        unready = self._unready()
        return web.Response(text=unready or "ok", status=200 if unready is None else 503)

    async def _metrics_page(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})
