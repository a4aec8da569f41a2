"""/openapi.json and /docs: what there is, as the table of routes and the models of the bodies say it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from banyan_runtime.front.answers import to_json
from banyan_runtime.front.auth import Access, Gate
from banyan_runtime.front.context import Context
from banyan_runtime.front.deadline import HEADER, LONGEST_S
from banyan_runtime.front.parsing import RequestModel

Content = Mapping[str, Any]
"""Schemas of a body by media type, as OpenAPI has them."""
REFERENCE: Final = "#/components/schemas/{model}"
JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
TEXT: Final = "text/plain"
_KEYS: Final[Mapping[str, Mapping[str, Any]]] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "api-key": {"type": "apiKey", "in": "header", "name": "api-key"},
}
"""Where a key may stand, which is the same for users and for admins."""
_INTEGER: Final = {"type": "integer"}
_QUERY: Final[Mapping[str, Any]] = {
    "limit": _INTEGER,
    "starting_after": _INTEGER,
    "stream": {"type": "boolean"},
    "timeout": {"type": "number", "minimum": 0},
    "order": {"type": "string", "enum": ["asc", "desc"]},
    "format": {"type": "string", "enum": ["json", "prometheus"]},
}
"""Parameters of queries that are no text."""
_TIMEOUT: Final = {
    "name": HEADER,
    "in": "header",
    "description": "Seconds after which the request is ended.",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": LONGEST_S},
}
_RETRY: Final = {"Retry-After": {"description": "Seconds.", "schema": _INTEGER}}
_IGNORED: Final = {
    "X-Banyan-Ignored": {
        "description": "The request's fields that have no effect, or that the chat template shows the model nothing of.",
        "schema": {"type": "string"},
    }
}
_SAID: Final[Mapping[int, str]] = {
    400: "The request is not understood, or asks for what is not served; `param` names the field.",
    401: "There is no valid key.",
    403: "Who asks is no admin: the key is not one of theirs, or, without such keys, the address is not of this machine.",
    404: "There is no such model, file, batch or response.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "The queue is full.",
    500: "The server failed.",
    503: "The server takes no requests just now, or the request's time was over before it ran.",
    504: "The request's time was over while it ran.",
}
_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string", "enum": ["invalid_request_error", "rate_limit_error", "server_error"]},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_MESSAGES_ERROR: Final = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"type": "string", "const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": ["string", "null"]},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a route's description says. `gives`: the media types of its answer, none for one without a body; `query`: the parameters
    that it reads; `planned`: its body is planned and may take its time; `queued`: the engine works for it."""

    body: type[RequestModel] | Content | None
    query: Sequence[str]
    gives: Sequence[str]
    access: Access
    planned: bool
    queued: bool
    error: str  # the model of its errors

    def operation(self, path: Sequence[str], gate: Gate) -> dict[str, Any]:
        """What FastAPI cannot know of a handler that reads its request itself: the body, the parameters, and which key it takes, if
        any is asked for. `path`: the names in it."""
        told: dict[str, Any] = {}
        if self.body is not None:
            told["requestBody"] = {"required": True, "content": _content(self.body) if isinstance(self.body, type) else self.body}
        parameters: list[Mapping[str, Any]] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in path
        ]
        parameters += [{"name": name, "in": "query", "schema": _QUERY.get(name, {"type": "string"})} for name in self.query]
        parameters += [_TIMEOUT] if self.planned else []
        if parameters:
            told["parameters"] = parameters
        if self._asks_for_a_key(gate):
            told["security"] = [{name: []} for name in _KEYS]
        return told

    def answers(self, path: Sequence[str], gate: Gate) -> dict[int | str, dict[str, Any]]:
        """What it answers with, by status."""
        told: dict[int | str, dict[str, Any]] = {200: self._answer("What was asked for.", self.gives)}
        if self.planned:
            told[200]["headers"] = _IGNORED
        if self.access is Access.OPEN and tuple(self.gives) in ((), (JSON,)):
            told[503] = self._answer("It is not so.", self.gives)  # a probe
        for status in sorted(self._refusals(path, gate)):
            told[status] = self._failure(_SAID[status])
            if status in (429, 503):
                told[status]["headers"] = _RETRY
        told["default"] = self._failure("An error.")
        return told

    def _asks_for_a_key(self, gate: Gate) -> bool:
        return (gate.asks_users and self.access is not Access.OPEN) or (gate.asks_admins and self.access is Access.ADMIN)

    def _refusals(self, path: Sequence[str], gate: Gate) -> Iterator[int]:
        if self._asks_for_a_key(gate):
            yield 401
        if self.access is Access.ADMIN:
            yield 403
        if self.body is not None or self.query:
            yield 400
        if self.body is not None:
            yield 413
            yield 415
        if path or self.planned:
            yield 404
        if self.planned:
            yield from (500, 503)
        if self.queued:
            yield from (429, 504)

    def _answer(self, said: str, gives: Sequence[str]) -> dict[str, Any]:
        made: dict[str, Any] = {"description": said}
        if gives:
            made["content"] = {kind: {"schema": {"type": "object" if kind == JSON else "string"}} for kind in gives}
        return made

    def _failure(self, said: str) -> dict[str, Any]:
        return {"description": said, "content": {JSON: {"schema": {"$ref": REFERENCE.format(model=self.error)}}}}


async def openapi(context: Context, request: Request) -> Response:
    """This description."""
    return Response(to_json(request.app.openapi()), media_type="application/json")


async def docs(context: Context, request: Request) -> Response:
    """This description, for reading."""
    return get_swagger_ui_html(openapi_url="/openapi.json", title="Banyan")


def _content(model: type[RequestModel]) -> Content:
    return {"application/json": {"schema": {"$ref": REFERENCE.format(model=model.__name__)}}}


def describe(app: FastAPI, models: Sequence[type[RequestModel]], also_chat: Mapping[str, Set[str]]) -> dict[str, Any]:
    """The OpenAPI document. `also_chat`: by the name of a model, the fields of chat completions that it takes too."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, schemas = models_json_schema([(model, "validation") for model in dict.fromkeys(models)], ref_template=REFERENCE)
    components = document.setdefault("components", {})
    described: dict[str, Any] = {**schemas.get("$defs", {}), "Error": _ERROR, "MessagesError": _MESSAGES_ERROR}
    chat = described["ChatRequest"]["properties"]
    for model, names in also_chat.items():
        fields = described[model]["properties"]
        fields.update({name: chat[name] for name in sorted(names) if name in chat and name not in fields})
    components.setdefault("schemas", {}).update(described)
    components["securitySchemes"] = _KEYS
    return document
