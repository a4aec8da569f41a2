"""GET /progress and /metrics of a running batch, for the operator and for Prometheus."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

import msgspec
from aiohttp import web

from banyan_runtime.batch.errors import InvalidSpec
from banyan_runtime.batch.metrics import Metrics
from banyan_runtime.batch.progress import Progress
from banyan_runtime.exposition import CONTENT_TYPE


@contextlib.asynccontextmanager
async def serve_status(progress: Progress, host: str, port: int) -> AsyncIterator[int]:
    """Serve while the context lasts; gives the port (0 takes a free one). Raises InvalidSpec if it cannot listen."""
    page = Metrics(progress)

    async def report(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(progress.report(time.monotonic())), content_type="application/json")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=page.text(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.add_routes([web.get("/progress", report), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise InvalidSpec(f"cannot listen there on {host} ({error.strerror})", field="--progress-port", value=port) from error
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
