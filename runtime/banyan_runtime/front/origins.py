"""Which web pages may use the server: none but its own, unless --cors-allow-origins names them.

A browser sends requests of any page to any address that it reaches, this machine included, and asks for leave only for some
of them (a POST of text/plain needs none). So it is not enough to keep answers from foreign pages; what changes or costs
something is refused. With a key there is nothing to refuse: pages do not have it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from banyan_runtime.front.errors import foreign_origin

_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})


class Origins:
    """ASGI middleware: 403 for requests with effects that a page of another origin makes."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in _SAFE:
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if origin is not None and not self._may(origin, headers.get("host", "")):
                await foreign_origin(origin).response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _may(self, origin: str, host: str) -> bool:
        return "*" in self._allowed or origin in self._allowed or (origin == f"http://{host}" and _is_fixed(origin))


def _is_fixed(origin: str) -> bool:
    """Whether an origin's host always means the same machine. A page's own name can be made to point here (DNS rebinding),
    so a page of this server's is known only by an address, or as localhost."""
    try:
        host = urlsplit(origin).hostname or ""
        if host == "localhost" or host.endswith(".localhost"):
            return True
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
