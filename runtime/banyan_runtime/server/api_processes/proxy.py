"""Proxies requests to the first process of a server: those for what it alone has."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Final

import aiohttp
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from yarl import URL

from banyan_runtime.config import ServerConfig
from banyan_runtime.front import errors
from banyan_runtime.front.errors import ClientGone
from banyan_runtime.front.routes import spread_paths
from banyan_runtime.front.transport import while_connected
from banyan_runtime.server.http import FORWARDED

_HOP_BY_HOP: Final = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"expect", b"date", FORWARDED})


class Proxy:
    """ASGI middleware. POST requests to the paths of `spread_paths` stay here; all others go to the first process."""

    def __init__(self, app: ASGIApp, config: ServerConfig, address: str) -> None:
        """`address`: path of the first process's Unix socket."""
        self._app = app
        self._paths = spread_paths(config)
        self._address = address
        self._client: aiohttp.ClientSession | None = None
        logging.getLogger("uvicorn.access").addFilter(self._answered_here)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_ours(scope["method"], scope["path"]) or not scope["raw_path"].startswith(b"/"):
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            await while_connected(request, self._pass_on(request, send))
        except (ClientGone, aiohttp.ClientPayloadError):  # the latter: the answer broke off
            return
        except aiohttp.ClientError:
            await errors.unavailable("The first process of the server does not answer.").response()(scope, receive, send)

    def _is_ours(self, method: str, path: str) -> bool:
        return method == "POST" and path in self._paths

    def _answered_here(self, record: logging.LogRecord) -> bool:
        """A logging filter: the first process writes the access lines of its requests."""
        return not isinstance(record.args, tuple) or self._is_ours(str(record.args[1]), str(record.args[2]))

    async def _pass_on(self, request: Request, send: Send) -> None:
        if self._client is None:
            connector = aiohttp.UnixConnector(path=self._address, limit=0, force_close=True)
            timeout = aiohttp.ClientTimeout(total=None)
            self._client = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        scope = request.scope
        headers = [(name.decode(), value.decode(errors="replace")) for name, value in scope["headers"] if name not in _HOP_BY_HOP]
        host, port = scope["client"]
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        url = URL("http://first" + (scope["raw_path"] + query).decode(errors="replace"), encoded=True)
        has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
        async with self._client.request(
            scope["method"],
            url,
            headers=[*headers, (FORWARDED.decode(), f"{host} {port}")],
            data=_body(request) if has_body else None,
            allow_redirects=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        ) as answer:
            told = [item for item in answer.raw_headers if item[0].lower() not in _HOP_BY_HOP]
            await send({"type": "http.response.start", "status": answer.status, "headers": told})
            async for part in answer.content.iter_any():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


async def _body(request: Request) -> AsyncIterator[bytes]:
    async for part in request.stream():
        if part:
            yield part
