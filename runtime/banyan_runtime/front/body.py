"""Reading the bytes of a request; what they mean is found out elsewhere (`prepare/`)."""

from __future__ import annotations

from typing import Final

from starlette.requests import ClientDisconnect, Request

from banyan_runtime.front.errors import ClientGone, media_type, too_large

MAX_BODY_BYTES: Final = 32 * 1024 * 1024


async def read_body(request: Request) -> bytearray:
    """The body of a request for a JSON route. Raises ApiError for another media type or too many bytes, ClientGone."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise media_type()
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > MAX_BODY_BYTES:
        raise too_large(MAX_BODY_BYTES)
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk  # grows in place: a large block is moved by the kernel, not copied
            if len(body) > MAX_BODY_BYTES:
                raise too_large(MAX_BODY_BYTES)
    except ClientDisconnect:
        raise ClientGone from None
    return body
