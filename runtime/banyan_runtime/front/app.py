"""The HTTP application: which path does what, and what surrounds every request (keys, ids, errors, cross-origin use)."""

from __future__ import annotations

import functools
import logging
import re
import uuid
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from banyan_runtime import __version__
from banyan_runtime.front.answers import rejection
from banyan_runtime.front.auth import Auth, Keys
from banyan_runtime.front.context import Context
from banyan_runtime.front.errors import ApiError, ClientGone, internal, unknown_url, wrong_method
from banyan_runtime.front.native import control, generate, info, tokenize
from banyan_runtime.front.native.schema import DetokenizeRequest, NativeGenerateRequest, TokenizeRequest
from banyan_runtime.front.openai import chat, completions, models
from banyan_runtime.front.openai.schema import ChatRequest, CompletionRequest
from banyan_runtime.front.ops.routes import router as ops_router
from banyan_runtime.front.origins import Origins
from banyan_runtime.front.parsing import RequestModel
from banyan_runtime.front.transport import CLIENT_CLOSED, Exchange

log = logging.getLogger("banyan")

Handler = Callable[[Context, Request], Awaitable[Response]]
_ID: Final = "banyan.request_id"  # in the scope
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")

_ROUTES: Final[tuple[tuple[str, tuple[str, ...], Handler, type[RequestModel] | None], ...]] = (
    ("/v1/models", ("GET",), models.list_models, None),
    ("/v1/models/{name:path}", ("GET",), models.one_model, None),
    ("/v1/chat/completions", ("POST",), chat.chat_completions, ChatRequest),
    ("/v1/completions", ("POST",), completions.completions, CompletionRequest),
    ("/generate", ("POST", "PUT"), generate.generate, NativeGenerateRequest),
    ("/model_info", ("GET",), info.model_info, None),
    ("/get_model_info", ("GET",), info.model_info, None),
    ("/server_info", ("GET",), info.server_info, None),
    ("/get_server_info", ("GET",), info.server_info, None),
    ("/version", ("GET",), info.version, None),
    ("/flush_cache", ("POST",), control.flush_cache, None),
    ("/abort_request", ("POST",), control.abort_request, control.AbortRequest),
    ("/tokenize", ("POST",), tokenize.tokenize, TokenizeRequest),
    ("/v1/tokenize", ("POST",), tokenize.tokenize, TokenizeRequest),
    ("/detokenize", ("POST",), tokenize.detokenize, DetokenizeRequest),
    ("/v1/detokenize", ("POST",), tokenize.detokenize, DetokenizeRequest),
)
_REFERENCE: Final = "#/components/schemas/{model}"


def create_app(context: Context) -> FastAPI:
    """The application over one front process. Raises ConfigError when the API keys cannot be read."""
    keys = Keys.of(context.config)
    middleware = [
        Middleware(_RequestIds),
        Middleware(Exchange),
        Middleware(_HeadAsGet),
    ]
    origins = context.config.cors_allow_origins
    if origins:
        cors: dict[str, Any] = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": ["x-request-id"]}
        middleware.append(Middleware(CORSMiddleware, allow_origins=list(origins), **cors))
    if keys is not None:
        middleware.append(Middleware(Auth, keys=keys, metrics=context.metrics))
    else:
        middleware.append(Middleware(Origins, allowed=origins))
    app = FastAPI(title="Banyan", version=__version__, middleware=middleware, redirect_slashes=False)
    for path, methods, handler, model in _ROUTES:
        app.add_api_route(
            path,
            _endpoint(context, handler),
            methods=list(methods),
            name=handler.__name__,
            operation_id=f"{handler.__name__}{path.replace('/', '_').replace('{name:path}', 'name')}",
            response_class=Response,
            openapi_extra=None if model is None else _body_schema(model),
        )
    app.include_router(ops_router(context))
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.openapi = functools.cache(functools.partial(_describe, app))  # type: ignore[method-assign]
    return app


def _endpoint(context: Context, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Bind a handler to its context, and turn what it raises into an answer."""

    @functools.wraps(handler, assigned=("__doc__", "__name__"), updated=())
    async def endpoint(request: Request) -> Response:
        try:
            return await handler(context, request)
        except ApiError as error:
            reason = rejection(context, error)
            if reason is not None:
                context.metrics.rejected(reason)
            if error.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                log.error("request %s failed: %s %s", request.scope[_ID], request.method, request.scope["path"], exc_info=error)
            return error.response()
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED)  # for the log and the counters: nobody reads it

    del endpoint.__wrapped__  # FastAPI would read the handler's parameters instead
    return endpoint


def _body_schema(model: type[RequestModel]) -> dict[str, Any]:
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": {"$ref": _REFERENCE.format(model=model.__name__)}}}}
    }


def _describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document. Handlers read their bodies themselves, so their schemas are put in here."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    models = [(model, "validation") for *_, model in _ROUTES if model is not None]
    _, schemas = models_json_schema(list(dict.fromkeys(models)), ref_template=_REFERENCE)  # type: ignore[arg-type]
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
    return document


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return unknown_url(request.method, request.url.path).response()
    if error.status_code == 405:
        return wrong_method(request.method, request.url.path, (error.headers or {}).get("Allow", "")).response()
    return ApiError(error.status_code, str(error.detail), headers=error.headers).response()


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


class _RequestIds:
    """ASGI middleware, the outermost of the application: gives each request an id, and no exception gets past it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = scope[_ID] = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        started = False

        async def named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, named)
        except Exception:
            log.exception("request %s failed: %s %s", request_id, scope["method"], scope["path"])
            if started:
                raise
            await internal().response()(scope, receive, named)
