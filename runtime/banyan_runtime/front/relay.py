"""Passes a request on to another process of this server, and its answer back, in pieces of 64 KiB as each side takes them.

The other process speaks plain HTTP/1.1 on a Unix socket, one request a connection, with a Content-Length on every answer. What it
refuses it says as `{"message", "code", "param"}`; the error object is made here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from banyan_runtime.front.errors import ApiError, ClientGone, internal, invalid, malformed_http, unavailable
from banyan_runtime.front.keys import presented_key
from banyan_runtime.front.transport import EXCHANGE

PIECE_BYTES: Final = 64 << 10
REFUSAL_BYTES: Final = 64 << 10
ANSWER_S: Final = 300.0  # from the end of the request to the head of its answer; the storage may be slow
_SENT: Final = ("content-type", "range", "x-stainless-retry-count")
_KEY: Final = "idempotency-key"
_KEY_CHARACTERS: Final = 255
_RETURNED: Final = ("content-type", "content-length", "content-range", "accept-ranges")


class Backend(Protocol):
    """The other process."""

    async def address(self) -> str:
        """The path of its socket, once it listens. Raises ApiError while it does not."""


class _Refused(msgspec.Struct):
    message: str
    code: str | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class _Head:
    status: int
    headers: dict[str, str]

    @property
    def length(self) -> int:
        return int(self.headers.get("content-length", "0"))


async def relay(backend: Backend | None, request: Request) -> Response:
    """The answer of `backend`. Raises ApiError, and ClientGone."""
    if backend is None:
        raise unavailable("Files and batches are not available here.")
    headers = _sent(request)
    path = await backend.address()
    try:
        reader, writer = await asyncio.open_unix_connection(path, limit=PIECE_BYTES)
    except OSError as error:
        raise _away() from error
    request.scope[EXCHANGE].callback(writer.close)
    try:
        head = await _exchange(request, headers, reader, writer)
        if head.status >= 400 and head.status != 416:
            raise _error(head, await reader.readexactly(min(head.length, REFUSAL_BYTES)))
    except (OSError, EOFError, TimeoutError) as error:
        raise _away() from error
    returned: dict[str, str] = {name: head.headers[name] for name in _RETURNED if name in head.headers}
    return StreamingResponse(_body(reader, head.length), head.status, returned)


def _sent(request: Request) -> dict[str, str]:
    """The headers that are passed on. Raises ApiError."""
    sent = {name: value for name in _SENT if (value := request.headers.get(name)) is not None}
    if given := request.headers.get(_KEY):
        if len(given) > _KEY_CHARACTERS:
            raise invalid("Idempotency-Key", f"The Idempotency-Key has {len(given)} characters, at most {_KEY_CHARACTERS} are taken.")
        # two clients may choose the same one: it is mixed with the API key, which nobody can tell from the result
        asking = presented_key(request.headers) or ""
        sent[_KEY] = hmac.new(asking.encode("latin-1"), given.encode("latin-1"), hashlib.sha256).hexdigest()
    return sent


async def _exchange(request: Request, headers: dict[str, str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Head:
    """Send the request; return the head of the answer, which may come before all is sent."""
    sending = asyncio.ensure_future(_send(request, headers, writer))
    answer = asyncio.ensure_future(_read_head(reader))
    try:
        await asyncio.wait({sending, answer}, return_when=asyncio.FIRST_COMPLETED)
        if sending.done():
            with contextlib.suppress(OSError):  # it takes no more of the body: then it has said why
                sending.result()
            return await asyncio.wait_for(answer, ANSWER_S)
        return answer.result()
    except ClientDisconnect:
        raise ClientGone from None
    finally:
        sending.cancel()
        answer.cancel()
        await asyncio.wait({sending, answer})
        del sending, answer  # a future holds its exception, which holds this frame


async def _send(request: Request, headers: dict[str, str], writer: asyncio.StreamWriter) -> None:
    target = request.scope["raw_path"]
    if query := request.scope["query_string"]:
        target += b"?" + query
    lines = [b"%b %b HTTP/1.1" % (request.method.encode(), target), b"Host: banyan", b"Connection: close"]
    lines += [b"%b: %b" % (name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    length = request.headers.get("content-length")
    chunked = length is None and "transfer-encoding" in request.headers
    lines.append(b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %b" % (length or "0").encode())
    writer.write(b"\r\n".join(lines) + b"\r\n\r\n")
    async for piece in request.stream():
        if piece:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            await writer.drain()
    if chunked:
        writer.write(b"0\r\n\r\n")
    await writer.drain()


async def _read_head(reader: asyncio.StreamReader) -> _Head:
    while True:
        text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = text.split("\r\n")
        status = int(first.split(" ", 2)[1])
        if status >= 200:
            pairs = (line.partition(":") for line in lines if line)
            return _Head(status, {name.strip().lower(): value.strip() for name, _, value in pairs})


async def _body(reader: asyncio.StreamReader, length: int) -> AsyncIterator[bytes]:
    while length:
        piece = await reader.read(min(length, PIECE_BYTES))
        if not piece:
            raise ConnectionError("the batch host ended in the middle of an answer")
        length -= len(piece)
        yield piece


def _error(head: _Head, body: bytes) -> ApiError:
    try:
        said = msgspec.json.decode(body, type=_Refused)
    except msgspec.MsgspecError:  # not from our handlers: it could not read the request's head
        return malformed_http() if head.status == 400 else internal()
    headers = {"Retry-After": head.headers["retry-after"]} if "retry-after" in head.headers else {}
    return ApiError(head.status, said.message, code=said.code, param=said.param, headers=headers)


def _away() -> ApiError:
    return unavailable("Files and batches are not available just now.")
