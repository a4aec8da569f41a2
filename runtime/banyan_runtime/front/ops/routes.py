"""Probes and metrics. All but /health_generate answer from what the front knows; none waits for the engine."""

from __future__ import annotations

import json
import time
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from banyan_runtime.exposition import CONTENT_TYPE
from banyan_runtime.front.context import Context
from banyan_runtime.front.transport import while_connected

RETRY_AFTER: Final = {"Retry-After": "5"}


async def banner(context: Context, request: Request) -> Response:
    """Says what this is."""
    return Response("This is Banyan, a server of the OpenAI API; /docs describes it.\n", media_type="text/plain")


async def livez(context: Context, request: Request) -> Response:
    """Whether the process is worth keeping."""
    return Response(status_code=200 if context.state.alive else 503)


async def health(context: Context, request: Request) -> Response:
    """Whether requests are served: scripts wait for it before they send the first one."""
    serving = context.state.serving
    return Response(status_code=200 if serving else 503, headers={} if serving else RETRY_AFTER)


async def readyz(context: Context, request: Request) -> Response:
    """Whether requests are asked for, and how far a start is."""
    state = context.state
    body = json.dumps(state.payload(time.monotonic() - context.client.last_heard)).encode()
    return Response(body, 200 if state.ready else 503, {} if state.ready else RETRY_AFTER, "application/json")


async def health_generate(context: Context, request: Request) -> Response:
    """Whether the engine generates a token within 20 s."""
    return Response(status_code=200 if context.state.ready and await while_connected(request, context.probe.generates()) else 503)


async def metrics_page(context: Context, request: Request) -> Response:
    """All metrics, as Prometheus reads them."""
    return Response(await context.metrics.render(context.client.stats), headers={"Content-Type": CONTENT_TYPE})


async def load_page(context: Context, request: Request) -> Response:
    """The load gauges alone, for endpoint pickers."""
    return Response(context.metrics.render_load(context.client.stats), headers={"Content-Type": CONTENT_TYPE})
