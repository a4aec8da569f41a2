"""Around the whole application: where a request begins and ends, how many there were, and how many are open (for draining)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from banyan_runtime.front.current import begin
from banyan_runtime.front.metrics import Metrics

EXPECTED: Final = (200, 500, 503)  # answers of a route that does work which are counted from 0: alerts ask for rates of errors
PROBES = frozenset(
    {"/livez", "/health", "/healthz", "/ping", "/readyz", "/ready", "/health_generate", "/metrics", "/metrics/load", "/v1/loads"}
)


class HttpCounter:
    """ASGI middleware, the outermost. `open` is the number of exchanges in progress, probes left aside."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Iterable[Any] = ()) -> None:
        """`routes`: those of the application."""
        self._app = app
        self._metrics = metrics
        self.open = 0
        for route in routes:
            if "POST" in (getattr(route, "methods", None) or ()):
                metrics.http_expected(route.path, "POST", EXPECTED)

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

        begin()
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
