"""The HTTP server: uvicorn, with bounded connections (`connection.py`). One sweep a second looks at all clocks, so a request costs none."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import resource
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from banyan_runtime.errors import ConfigError
from banyan_runtime.front import errors
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.event_stream import DIRECT_WRITE
from banyan_runtime.front.routes import OPEN_PATHS
from banyan_runtime.front.transport import WATCH
from banyan_runtime.server.connection import CONNECTION, RESERVED_FILES, HttpConnection, Limits

log = logging.getLogger("banyan.http")

BACKLOG: Final = 2048  # connections that may wait to be accepted
CONNECTIONS_CLOSE_S: Final = 2  # at the end, for clients to take their answers
HANDLERS_END_S: Final = 1  # from then on, for handlers to notice that their clients are gone
STILL_SENT_HERE_S: Final = 1.5  # since somebody elsewhere asked last: until whoever spreads the requests seems to know that we go
ASKED_LATELY_S: Final = 30.0  # before we go: somebody elsewhere may have more to ask
FEWEST_CONNECTIONS: Final = 16
FORWARDED: Final = b"x-banyan-client"  # host and port of the client, between processes of one server
SAME_MACHINE: Final = ("127.0.0.1", "::1", "::ffff:127.0.0.1")  # and no other of the loopback's: a mesh's proxy has one of them


def forwarded_client(headers: Iterable[tuple[bytes, bytes]]) -> tuple[str, int] | None:
    """The client that another process of this server answers."""
    host, _, port = dict(headers).get(FORWARDED, b"").decode().rpartition(" ")
    return (host, int(port)) if host else None


class _Connected:
    """ASGI middleware, the outermost: gives each request its connection."""

    def __init__(self, app: ASGIApp, server: HttpServer) -> None:
        self._app = app
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        server, connection = self._server, scope["state"].pop(CONNECTION)
        app = self._app
        if scope["client"] is None:  # another process of this server, over a socket that no other user reaches
            scope["client"] = forwarded_client(scope["headers"])
        probe = scope["path"] in OPEN_PATHS
        connection.only_probed = probe and connection.only_probed is not False
        if not probe and scope["client"] is not None and scope["client"][0] not in SAME_MACHINE:
            connection.from_afar = True
            server.asked_from_afar = time.monotonic()
        if server.crowded and not probe:
            app = errors.too_many_connections().response()
            server.on_refused(HTTPStatus.SERVICE_UNAVAILABLE)
        # Once refused, a client that waits for leave does not send the body, and what follows could not be told from it.
        waits = any(name == b"expect" for name, _ in scope["headers"])

        answered = False

        async def answer(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start" and (waits or server.draining):
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                answered = True  # the next request may begin before the application returns
                connection.answered()

        scope["extensions"] = {WATCH: connection.watch, DIRECT_WRITE: connection.write_part}
        try:
            await app(scope, receive, answer)
        finally:
            scope["extensions"].clear()  # no cycle for the garbage collector
            if not answered:
                connection.answered()


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: when to stop is the business of whoever runs it."""

    def __init__(self, app: ASGIApp, limits: Limits | None = None) -> None:
        """Raises ConfigError where the system grants too few open files."""
        limits = limits or Limits()
        self.limits = replace(limits, connections=min(limits.connections, _room()))
        self.draining = False
        self.connections: set[HttpConnection] = set()
        self.on_refused: Callable[[int], None] = lambda status: None  # the status of an answer that the application did not give
        self.asked_from_afar = float("-inf")  # when a client that is not on this machine was last connected to ask more than how we are
        self._was_crowded = False
        protocol: Any = functools.partial(HttpConnection, http=self)
        super().__init__(
            uvicorn.Config(
                _Connected(app, self),
                log_config=None,
                http=protocol,
                ws="none",
                lifespan="on",
                server_header=False,
                backlog=BACKLOG,
                callback_notify=self._sweep,
                timeout_notify=1,
                timeout_keep_alive=int(self.limits.idle_s),
                timeout_graceful_shutdown=CONNECTIONS_CLOSE_S + HANDLERS_END_S,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield

    @property
    def sought(self) -> bool:
        """Whether some client may still send a request: on a connection that it has, or on new ones, for a load balancer
        (kube-proxy on another node) may learn seconds after us that we go."""
        if time.monotonic() - self.asked_from_afar < STILL_SENT_HERE_S:
            return True
        return any(not each.only_probed and not each.transport.is_closing() for each in self.connections)

    def drain(self) -> None:
        """From now on every answer is the last of its connection, and says so."""
        self.draining = True
        now = time.monotonic()
        if now - self.asked_from_afar < ASKED_LATELY_S:
            self.asked_from_afar = now

    @property
    def crowded(self) -> bool:
        return len(self.connections) > self.limits.connections

    def end(self) -> None:
        """Stop, once the answers that are under way are given. Clients that have not taken theirs after CONNECTIONS_CLOSE_S are cut
        off. uvicorn would cancel what answers them instead, and log each as a failure of the application."""
        self.should_exit = True
        asyncio.get_running_loop().call_later(CONNECTIONS_CLOSE_S, self._cut)

    def _cut(self) -> None:
        for each in list(self.connections):
            each.transport.abort()

    def give_up(self, error: ApiError) -> None:
        """The server ends: every request that has no answer yet gets this one, also where its body is still on the way."""
        for each in list(self.connections):
            each.give_up(error)

    async def _sweep(self) -> None:
        if self.crowded and not self._was_crowded:
            log.warning("more than %d connections are open: until some end only probes are answered", self.limits.connections)
        self._was_crowded = self.crowded
        now = time.monotonic()
        for each in list(self.connections):
            try:
                each.sweep(now)
            except Exception:  # one connection must not end the server
                log.exception("a connection failed and is cut")
                each.transport.abort()


def _room() -> int:
    """How many connections this process may have. Raises ConfigError for too few to serve anybody."""
    files = _open_files()
    if files < RESERVED_FILES + FEWEST_CONNECTIONS:
        raise ConfigError(
            f"this process may open {files} files only (`ulimit -n`, RLIMIT_NOFILE), of which a server needs {RESERVED_FILES} for itself; "
            f"raise the limit to 65536, or at least to {RESERVED_FILES + FEWEST_CONNECTIONS}"
        )
    return files - RESERVED_FILES


def _open_files() -> int:
    """How many descriptors this process may have, after asking for as many as it can get."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return soft if soft != resource.RLIM_INFINITY else 1 << 20
