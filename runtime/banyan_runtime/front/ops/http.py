"""Counts HTTP exchanges around the whole application, and knows how many are open (for draining)."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from banyan_runtime.front.metrics import Metrics

PROBES = frozenset({"/livez", "/health", "/readyz", "/ready", "/health_generate", "/metrics", "/metrics/load", "/v1/loads"})


class HttpCounter:
    """ASGI middleware, the outermost. `open` is the number of exchanges in progress, probes left aside."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics
        self.open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        code = 500  # what a client gets when the application raises before it answers

        async def counted(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
            await send(message)

        work = scope["path"] not in PROBES
        self.open += work
        self._metrics.http_started()
        try:
            await self._app(scope, receive, counted)
        finally:
            self.open -= work
            self._metrics.http_finished(_handler(scope), scope["method"], code)


def _handler(scope: Scope) -> str:
    route: Any = scope.get("route")
    path = getattr(route, "path", None)
    return path if isinstance(path, str) else "unmatched"
