"""The one place that makes OpenAI's error objects: `{"error": {"message", "type", "param", "code"}}`, for every status.

Handlers raise ApiError; what is no ApiError is a bug and becomes a 500 without detail. The functions below are the rows of
the error table; clients match on their wording (LangChain looks for `context_length_exceeded` in the message).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, Literal

import msgspec
from starlette.responses import Response

from banyan_runtime.front.submission import EngineError

ErrorType = Literal["invalid_request_error", "rate_limit_error", "server_error"]
NO_RETRY: Final = {"x-should-retry": "false"}  # it would end the same way; OpenAI's clients try again what is 500 and above
_ECHOED: Final = 200  # characters of a client's input that an error may repeat


class ApiError(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        beside: Sequence[str] = (),
    ) -> None:
        """`beside`: the other fields that the message names."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        self.beside = beside
        self.taken_on = False  # the request was: its end is counted, and it is no rejection

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


def too_many_bodies() -> ApiError:
    headers = {"Retry-After": "5", "Connection": "close"}
    return ApiError(503, "Too many large requests are being received.", code="server_overloaded", headers=headers)


def foreign_origin(origin: str) -> ApiError:
    message = f"Web pages of origin '{origin[:_ECHOED]}' may not use this server. Start it with --cors-allow-origins to let them."
    return ApiError(403, message, code="origin_not_allowed")


# --- the request itself ---


def malformed_json(reason: str) -> ApiError:
    return ApiError(400, f"We could not parse the JSON body of your request: {reason}")


def media_type() -> ApiError:
    return ApiError(400, "Unsupported Media Type: Only 'application/json' is allowed")


def content_encoding(given: str) -> ApiError:
    message = f"Content-Encoding '{given[:_ECHOED]}' is not supported: send the body as it is."
    return ApiError(415, message, code="unsupported_content_encoding", headers={"Accept-Encoding": "identity"})


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"The request body is larger than {limit} bytes.", code="request_too_large")


def missing(param: str) -> ApiError:
    return ApiError(400, f"Missing required parameter: '{param}'.", code="missing_required_parameter", param=param)


def invalid_type(param: str, reason: str) -> ApiError:
    return ApiError(400, f"Invalid type for '{param}': {reason}", code="invalid_type", param=param)


def invalid(param: str, message: str, code: str | None = "invalid_value", beside: Sequence[str] = ()) -> ApiError:
    return ApiError(400, message, code=code, param=param, beside=beside)


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


def no_key() -> ApiError:
    message = "You didn't provide an API key: send it as 'Authorization: Bearer KEY'."
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def bad_key() -> ApiError:
    return ApiError(401, "Incorrect API key provided.", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def forbidden(why: str) -> ApiError:
    return ApiError(403, f"Forbidden: {why}.", code="insufficient_permissions")


# --- the server's state ---


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, code="unavailable", headers={"Retry-After": "5"})


def queue_full() -> ApiError:
    return ApiError(429, "The request queue is full.", code="queue_full", headers={"Retry-After": "1"})


def shutting_down() -> ApiError:
    return unavailable("The server is shutting down.")


def internal() -> ApiError:
    # The message has no detail; the log has the trace under the same request id.
    return ApiError(500, "Internal server error", code="internal_error", headers=NO_RETRY)


def waited_too_long() -> ApiError:
    return ApiError(503, "Request waiting timeout reached.", code="timeout", headers={"Retry-After": "1"})


def ran_too_long() -> ApiError:
    return ApiError(504, "Request running timeout reached.", code="timeout", headers=NO_RETRY)


def bad_tool(index: int, name: str, reason: str) -> ApiError:
    """The arguments of one of a request's tools cannot be held to its schema."""
    reason = " ".join(reason.split())[:1000]
    return invalid(f"tools[{index}].function.parameters", f"Invalid schema for function '{name}': {reason}", "invalid_json_schema")


def bad_grammar(param: str, what: str, name: str, reason: str) -> ApiError:
    """What a client asked its output to be cannot be used. `what` was written in the field `param`; `name`: a schema's, if it has one."""
    reason = " ".join(reason.split())[:1000]
    if what == "schema":
        named = f" '{name}'" if name else ""
        return invalid(param, f"Invalid schema for {param}{named}: {reason}", "invalid_json_schema")
    return invalid(param, f"Invalid {what} in '{param}': {reason}", "invalid_grammar")


def of_engine(error: EngineError, param: str) -> ApiError:
    """The answer for a request that the engine would not or could not go on with."""
    if error.code == "queue_full":
        return queue_full()
    if error.code == "unavailable":
        return unavailable(error.message)
    if error.code in ("kv_exhausted", "out_of_memory"):
        return ApiError(503, error.message, code=error.code, headers={"Retry-After": str(math.ceil(error.again_s) or 1)})
    if error.code == "timeout":
        return ApiError(503, error.message, code="timeout", headers={"Retry-After": "1"})
    if error.code == "context_length_exceeded":
        note = "" if "context_length_exceeded" in error.message else " (context_length_exceeded)"
        return ApiError(400, error.message + note, code="context_length_exceeded", param=param)
    if error.code == "invalid_grammar":
        return ApiError(400, f"Invalid grammar in '{param}': {error.message}", code="invalid_grammar", param=param)
    if error.code == "unsupported":
        return ApiError(400, error.message, code="unsupported", param=param)
    if error.code == "engine_died":
        return ApiError(500, f"The engine has ended: {error.message}", code="internal_error")
    return internal()
