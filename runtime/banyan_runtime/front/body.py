"""Reading the bytes of a request. What those of a prompt mean is found out beside the event loop (`prepare/`); a short command
is read at once."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import msgspec
from starlette.requests import ClientDisconnect, Request

from banyan_runtime.front.errors import ClientGone, content_encoding, malformed_json, media_type, too_large

MAX_BODY_BYTES: Final = 32 * 1024 * 1024
MAX_COMMAND_BYTES: Final = 64 * 1024
_BOM: Final = b"\xef\xbb\xbf"  # some programs put it before UTF-8
_LOOKED_AT: Final = 1 << 20  # bytes of a body that cannot be decoded
_ESCAPED: Final = re.compile(rb"\\u[dD]")
_HALF: Final = "a string has half of a surrogate pair, such as \\ud83d alone, which is no character"


async def read_body(request: Request, limit: int = MAX_BODY_BYTES) -> bytearray:
    """The body of a request for a JSON route. Raises ApiError for another media type or too many bytes, ClientGone."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise media_type()
    if (encoding := request.headers.get("content-encoding", "identity").strip().lower()) not in ("", "identity"):
        raise content_encoding(encoding)
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise too_large(limit)
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk  # grows in place: a large block is moved by the kernel, not copied
            if len(body) > limit:
                raise too_large(limit)
    except ClientDisconnect:
        raise ClientGone from None
    if body.startswith(_BOM):
        del body[: len(_BOM)]
    return body


async def read_command(request: Request) -> dict[str, Any]:
    """A short body as a JSON object. Raises ApiError, also for one that would take long to read, ClientGone."""
    return decode_object(await read_body(request, MAX_COMMAND_BYTES))


def _has_half_a_character(body: bytes | bytearray | memoryview) -> bool:
    """Of what cannot be decoded: whether that is what is wrong with it. JavaScript writes such text where it cuts an emoji in two."""
    told = bytes(body[:_LOOKED_AT])
    if len(body) > _LOOKED_AT or not _ESCAPED.search(told):
        return False
    try:
        json.dumps(json.loads(told), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except (ValueError, RecursionError):
        pass
    return False


def decode_object(body: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Raises ApiError for anything but a JSON object."""
    if not body:
        raise malformed_json("it is empty")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise malformed_json(_HALF if _has_half_a_character(body) else str(error)) from None
    except RecursionError:
        raise malformed_json("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise malformed_json("it must be an object")
    return value
