"""Errors as Anthropic's clients read them."""

from __future__ import annotations

from typing import Final

import msgspec
from starlette.responses import Response

from banyan_runtime.front.errors import ApiError

THREADS: Final = "thread_unsupported_request"
"""The code by which clients learn that they must send a conversation whole."""
_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: ApiError, request_id: str | None = None) -> bytes:
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    details = {"details": {"error_code": THREADS, "unsupported": ["thread"]}} if error.code == THREADS else {}
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": error.message, **details}, "request_id": request_id})


def error_response(error: ApiError, request_id: str) -> Response:
    headers = {**error.headers, "request-id": request_id}
    return Response(error_body(error, request_id), error.status, headers=headers, media_type="application/json")
