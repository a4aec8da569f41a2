"""The HTTP application: which path does what, and what surrounds every request (keys, ids, errors, cross-origin use)."""

from __future__ import annotations

import functools
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match, compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from banyan_runtime import __version__
from banyan_runtime.front import docs
from banyan_runtime.front.answers import grammar_failure, rejection
from banyan_runtime.front.anthropic.errors import error_response
from banyan_runtime.front.auth import KEY_NAME, OWNER, Access
from banyan_runtime.front.context import Context
from banyan_runtime.front.current import current
from banyan_runtime.front.errors import ApiError, ClientGone, internal, unknown_url, wrong_method
from banyan_runtime.front.origins import Origins
from banyan_runtime.front.routes import CHAT_FIELDS, MESSAGES, ROUTES, UNSERVED, Route
from banyan_runtime.front.transport import CLIENT_CLOSED, Exchange

log = logging.getLogger("banyan")

_EXPOSED: Final = ("x-request-id", "request-id", "retry-after", "x-banyan-ignored")  # headers that pages may read

_ID: Final = "banyan.request_id"  # in the scope
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def create_app(context: Context) -> FastAPI:
    """The application over one front process."""
    config = context.config
    middleware = [
        Middleware(_Heads),
        Middleware(Exchange),
        Middleware(_HeadAsGet),
    ]
    origins = config.cors_allow_origins
    if origins:
        cors: dict[str, Any] = {"allow_methods": ["*"], "allow_headers": ["*"], "allow_private_network": True}
        middleware.append(Middleware(CORSMiddleware, allow_origins=list(origins), expose_headers=_EXPOSED, **cors))
    if not context.gate.asks_users:
        middleware.append(Middleware(Origins, allowed=origins))
    app = FastAPI(
        title="Banyan",
        version=__version__,
        middleware=middleware,
        openapi_url=None,  # it is a route like others
        redirect_slashes=False,
    )
    app.router.route_class = _Plain
    for route in ROUTES:
        if route.when(config):
            _add(app, context, route)
    app.add_exception_handler(HTTPException, functools.partial(_on_http_exception, context))
    models = [route.body for route in ROUTES if isinstance(route.body, type)]
    app.openapi = functools.cache(functools.partial(docs.describe, app, models, CHAT_FIELDS))  # type: ignore[method-assign]
    return app


class _Plain(APIRoute):
    """A route whose endpoint takes the request as it is: there is nothing to be injected, nor an answer to be made of a value."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return endpoint


def _add(app: FastAPI, context: Context, route: Route) -> None:
    endpoint = _endpoint(context, route)
    _, _, parameters = compile_path(route.path)
    for method in route.methods.split():
        app.add_api_route(
            route.path,
            endpoint,
            methods=[method],
            name=route.handler.__name__,
            operation_id=re.sub(r"\W+", "_", f"{route.handler.__name__}_{method.lower()}{route.path}").strip("_"),
            response_class=Response,
            responses=route.told.answers(list(parameters), context.gate),
            openapi_extra=route.told.operation(list(parameters), context.gate),
        )


def _endpoint(context: Context, route: Route) -> Callable[[Request], Awaitable[Response]]:
    """Bind a handler to its context and its class, and turn what it raises into an answer."""

    @functools.wraps(route.handler, assigned=("__doc__", "__name__"), updated=())
    async def endpoint(request: Request) -> Response:
        refusal = _barred(context, request, route.access)
        if refusal is not None:
            return route.refuse(refusal, request.scope[_ID])
        try:
            return await route.handler(context, request)
        except ApiError as error:
            reason = rejection(context, error)
            if reason is not None:
                context.metrics.rejected(reason)
            if (failure := grammar_failure(error)) is not None:
                context.metrics.grammar_failed(failure)
            if error.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                # Of what failed in the engine it has told; a trace for each request that it took along would bury that.
                trace = None if error.taken_on else error
                words = request.scope[_ID], request.method, request.scope["path"], error.message
                log.error("request %s failed: %s %s: %s", *words, exc_info=trace)
            return route.refuse(error, request.scope[_ID])
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED)  # for the log and the counters: nobody reads it

    del endpoint.__wrapped__  # FastAPI would read the handler's parameters instead
    endpoint.access = route.access  # type: ignore[attr-defined]
    return endpoint


def _barred(context: Context, request: Request, access: Access) -> ApiError | None:
    """The refusal of who may not ask for this; None: go on."""
    refusal = context.gate.check(request.scope, access)
    current().owner = request.scope[OWNER]
    if (name := request.scope[KEY_NAME]) is not None:
        context.metrics.key_used(name)
    if refusal is None:
        return None
    context.metrics.rejected("auth")
    return refusal


async def _on_http_exception(context: Context, request: Request, error: Exception) -> Response:
    """What no route answers. Who has no key does not learn what there is."""
    assert isinstance(error, HTTPException)
    refusal = _barred(context, request, Access.USER) or _unrouted(request, error)
    path = request.scope["path"]
    return error_response(refusal, request.scope[_ID]) if path.startswith(f"{MESSAGES}/") or path == MESSAGES else refusal.response()


def _unrouted(request: Request, error: HTTPException) -> ApiError:
    method, path = request.method, request.url.path
    if error.status_code == 404 or request.scope["path"] in UNSERVED:
        return unknown_url(method, path)
    if error.status_code == 405:
        return wrong_method(method, path, _allowed(request))
    return ApiError(error.status_code, str(error.detail), headers=error.headers)


def _allowed(request: Request) -> str:
    """The methods of a path, each of which may be a route of its own."""
    methods: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return ", ".join(sorted(methods))


class _HeadAsGet:
    """ASGI middleware: HEAD is answered wherever GET is. The server leaves the body away, as its own scope still says HEAD."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        get = {**scope, "method": "GET"}
        await self._app(get, receive, send)
        scope["route"] = get.get("route")  # for the counters


class _Heads:
    """ASGI middleware, the outermost of the application: each request has an id, each answer says it and how long it took, and no
    exception gets past."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        request_id = scope[_ID] = current().id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        started, received = False, time.monotonic()

        # Anthropic's clients read request-id.
        async def named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                taken_ms = str(round((time.monotonic() - received) * 1000))
                own = {b"x-request-id": request_id, b"request-id": request_id, b"openai-processing-ms": taken_ms}
                others = [header for header in message.get("headers", ()) if header[0] not in own]
                message["headers"] = others + [(name, value.encode()) for name, value in own.items()]
            await send(message)

        try:
            await self._app(scope, receive, named)
        except Exception:
            log.exception("request %s failed: %s %s", request_id, scope["method"], scope["path"])
            if started:
                raise
            await internal().response()(scope, receive, named)
