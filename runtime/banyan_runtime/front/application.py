"""FastAPI's application, without the layers around each request that nothing here uses: its telemetry, its limit of bodies, exits of
dependencies, and the search through all routes for a path that stands there as it is. A lone request spent 0.1 ms in them, which is as
much as in all others, before its body was read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

Endpoint = Callable[[Request], Awaitable[Response]]
_ANSWERED_ELSEWHERE: Final = (500, Exception)  # handlers of these would stand outside of all middleware


class PlainRoute(APIRoute):
    """A route whose endpoint takes the request as it is: there is nothing to be injected, nor an answer to be made of a value."""

    def __init__(self, path: str, endpoint: Endpoint, **options: Any) -> None:
        super().__init__(path, endpoint, **options)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            response = await endpoint(Request(scope, receive, send))
            await response(scope, receive, send)

        self.app = answer


class Application(FastAPI):
    """All routes are `PlainRoute`s. What middleware lets pass of errors is its own affair: nothing stands outside of it."""

    def build_middleware_stack(self) -> ASGIApp:
        handlers = {kind: handler for kind, handler in self.exception_handlers.items() if kind not in _ANSWERED_ELSEWHERE}
        app: ASGIApp = ExceptionMiddleware(_Direct(self), handlers=handlers)
        for layer, arguments, options in reversed(self.user_middleware):
            app = layer(app, *arguments, **options)
        return app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        if self.middleware_stack is None:
            self.middleware_stack = self.build_middleware_stack()
        scope["app"] = self
        await self.middleware_stack(scope, receive, send)


class _Direct:
    """The router, but for paths without parameters, which a table finds."""

    def __init__(self, application: FastAPI) -> None:
        self._router = application.router
        self._routes: dict[tuple[str, str], APIRoute] = {}
        plain = [route for route in self._router.routes if isinstance(route, APIRoute) and "{" not in route.path]
        for route in plain:
            for method in route.methods or ():
                if self._found(route.path, method) is route:  # and no other, which would come first
                    self._routes[method, route.path] = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get((scope["method"], scope["path"])) if scope["type"] == "http" and not scope.get("root_path") else None
        if route is None:
            await self._router(scope, receive, send)
            return
        scope["route"], scope["endpoint"], scope["path_params"] = route, route.endpoint, {}
        await route.app(scope, receive, send)

    def _found(self, path: str, method: str) -> object:
        asked: Scope = {"type": "http", "path": path, "method": method, "root_path": ""}
        return next((route for route in self._router.routes if route.matches(asked)[0] is Match.FULL), None)
