"""The one place that makes OpenAI's error objects: `{"error": {"message", "type", "param", "code"}}`, for every status.

Handlers raise ApiError; what is no ApiError is a bug and becomes a 500 without detail. The functions below are the rows of
the error table; clients match on their wording (LangChain looks for `context_length_exceeded` in the message).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, Literal

import msgspec
from starlette.responses import Response

from banyan_runtime.front.engine_client import EngineError

ErrorType = Literal["invalid_request_error", "rate_limit_error", "server_error"]
_ECHOED: Final = 200  # characters of a client's input that an error may repeat


class ApiError(Exception):
    """A request that is answered with an error."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def type(self) -> ErrorType:
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(msgspec.json.encode(self.body()), self.status, headers=self.headers, media_type="application/json")


class ClientGone(Exception):
    """The client closed the connection before its answer; there is nobody to tell."""


# --- the HTTP protocol ---


def malformed_http(reason: str = "it does not follow HTTP/1.1") -> ApiError:
    return ApiError(400, f"We could not read your request: {reason}.", code="malformed_request")


def head_too_large(limit: int, headers: int) -> ApiError:
    return ApiError(431, f"The request's headers are larger than {limit} bytes, or more than {headers}.", code="headers_too_large")


def request_timeout(what: str) -> ApiError:
    return ApiError(408, f"The request's {what} took too long to arrive.", code="request_timeout")


def too_many_connections() -> ApiError:
    headers = {"Retry-After": "5", "Connection": "close"}
    return ApiError(503, "Too many connections are open.", code="too_many_connections", headers=headers)


def foreign_origin(origin: str) -> ApiError:
    message = f"Web pages of origin '{origin[:_ECHOED]}' may not use this server. Start it with --cors-allow-origins to let them."
    return ApiError(403, message, code="origin_not_allowed")


# --- the request itself ---


def malformed_json(reason: str) -> ApiError:
    return ApiError(400, f"We could not parse the JSON body of your request: {reason}")


def media_type() -> ApiError:
    return ApiError(400, "Unsupported Media Type: Only 'application/json' is allowed")


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"The request body is larger than {limit} bytes.", code="request_too_large")


def missing(param: str) -> ApiError:
    return ApiError(400, f"Missing required parameter: '{param}'.", code="missing_required_parameter", param=param)


def invalid_type(param: str, reason: str) -> ApiError:
    return ApiError(400, f"Invalid type for '{param}': {reason}", code="invalid_type", param=param)


def invalid(param: str, message: str, code: str | None = "invalid_value") -> ApiError:
    return ApiError(400, message, code=code, param=param)


def unsupported(param: str, reason: str = "this server does not have it yet") -> ApiError:
    return ApiError(400, f"Unsupported parameter: '{param}' ({reason}). Remove it.", code="unsupported", param=param)


def unknown_model(name: str, served: Sequence[str]) -> ApiError:
    """`served`: the names there are; who may ask for a model may list them too."""
    names = ", ".join(f"`{one}`" for one in served)
    message = f"The model `{name[:_ECHOED]}` does not exist. This server serves {names}."
    return ApiError(404, message, code="model_not_found", param="model")


def unknown_url(method: str, path: str) -> ApiError:
    return ApiError(404, f"Invalid URL ({method} {path[:_ECHOED]})", code="unknown_url")


def wrong_method(method: str, path: str, allowed: str) -> ApiError:
    hint = f": this path answers {allowed}" if allowed else ""
    return ApiError(405, f"Invalid URL ({method} {path[:_ECHOED]}){hint}", headers={"Allow": allowed} if allowed else None)


def bad_key() -> ApiError:
    return ApiError(401, "Incorrect API key provided.", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


# --- the server's state ---


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, code="unavailable", headers={"Retry-After": "5"})


def shutting_down() -> ApiError:
    return unavailable("The server is shutting down.")


def internal() -> ApiError:
    # The message has no detail; the log has the trace under the same request id.
    return ApiError(500, "Internal server error", code="internal_error")


def of_engine(error: EngineError, param: str) -> ApiError:
    """The answer for a request that the engine would not or could not go on with."""
    if error.code == "queue_full":
        return ApiError(429, "The request queue is full.", code="queue_full", headers={"Retry-After": "1"})
    if error.code == "unavailable":
        return unavailable(error.message)
    if error.code == "kv_exhausted":
        return ApiError(503, error.message, code="kv_exhausted", headers={"Retry-After": "1"})
    if error.code == "timeout":
        return ApiError(503, error.message, code="timeout", headers={"Retry-After": "1"})
    if error.code == "context_length_exceeded":
        note = "" if "context_length_exceeded" in error.message else " (context_length_exceeded)"
        return ApiError(400, error.message + note, code="context_length_exceeded", param=param)
    if error.code == "engine_died":
        return ApiError(500, f"The engine has ended: {error.message}", code="internal_error")
    return internal()
