"""Reading the bytes of a request. What those of a prompt mean is found out beside the event loop (`prepare/`); a short command
is read at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final, Self

import msgspec
from starlette.requests import ClientDisconnect, Request

from banyan_runtime import halves, nesting
from banyan_runtime.front.errors import (
    ApiError,
    ClientGone,
    content_encoding,
    invalid,
    malformed_json,
    media_type,
    too_large,
    too_many_bodies,
)
from banyan_runtime.json_text import no_number

MAX_BODY_BYTES: Final = 32 * 1024 * 1024
MAX_COMMAND_BYTES: Final = 64 * 1024
MAX_UNPREPARED_BYTES: Final = 256 << 20  # of all bodies together
FREE_BYTES: Final = 64 << 10  # of each body; as much as its connection holds unread anyway
_BOM: Final = b"\xef\xbb\xbf"  # some programs put it before UTF-8
_ECHOED: Final = 64  # characters of a client's input that an error repeats
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_DEEP: Final = f"it is nested more than {nesting.MOST} deep"


class BodyShare:
    """What one body takes of the budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._taken = 0

    def check(self, size: int) -> None:
        """Raises ApiError where there is no room just now for a body of so many bytes."""
        if size - FREE_BYTES - self._taken > self._budget.left:
            raise too_many_bodies()

    def grow(self, size: int) -> None:
        """The body has so many bytes by now. Raises ApiError where there is no room for them."""
        self.check(size)
        self._take(max(0, size - FREE_BYTES))

    def give_back(self) -> None:
        self._take(0)

    def _take(self, taken: int) -> None:
        self._budget.left -= taken - self._taken
        self._taken = taken


class BodyBudget:
    """The memory that all bodies together may take while they come, and until they are prepared. What is only announced takes none.
    The beginning of each is free, so that large ones keep no small one out."""

    def __init__(self, limit: int = MAX_UNPREPARED_BYTES) -> None:
        self.left = limit

    @classmethod
    def shared(cls, processes: int) -> Self:
        """One of so many processes' part: as much as one large body takes at least, so that many together may take more."""
        return cls(max(MAX_BODY_BYTES, MAX_UNPREPARED_BYTES // processes))

    @contextlib.contextmanager
    def share(self) -> Iterator[BodyShare]:
        share = BodyShare(self)
        try:
            yield share
        finally:
            share.give_back()


async def read_body(request: Request, limit: int = MAX_BODY_BYTES, share: BodyShare | None = None) -> bytearray:
    """The body of a request for a JSON route. Raises ApiError for another media type, too many bytes or no room, ClientGone."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise media_type()
    if (encoding := request.headers.get("content-encoding", "identity").strip().lower()) not in ("", "identity"):
        raise content_encoding(encoding)
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise too_large(limit)
    if share is not None and announced.isdigit():
        share.check(int(announced))
    body = bytearray()
    try:
        async for chunk in request.stream():
            size = len(body) + len(chunk)
            if size > limit:
                raise too_large(limit)
            if share is not None:
                share.grow(size)
            body += chunk  # grows in place: a large block is moved by the kernel, not copied
    except ClientDisconnect:
        raise ClientGone from None
    if body.startswith(_BOM):
        del body[: len(_BOM)]
    return body


async def read_command(request: Request) -> dict[str, Any]:
    """A short body as a JSON object. Raises ApiError, also for one that would take long to read, ClientGone."""
    return decode_object(await read_body(request, MAX_COMMAND_BYTES))


def decode_object(body: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Raises ApiError for anything but a JSON object."""
    if not body:
        raise malformed_json("it is empty")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _unreadable(body, error) from None
    except RecursionError:
        raise malformed_json(_DEEP) from None
    if nesting.too_deep(bytes(body) if isinstance(body, memoryview) else body):
        raise malformed_json(_DEEP)
    if not isinstance(value, dict):
        raise malformed_json("it must be an object")
    return value


def _unreadable(body: bytes | bytearray | memoryview, error: Exception) -> ApiError:
    """What is wrong with a body that cannot be decoded."""
    if isinstance(error, msgspec.ValidationError) and (found := _beyond(body)) is not None:
        return found
    if (words := no_number(body, error)) is not None:
        return malformed_json(words)
    return malformed_json(str(error) if halves.read(body) is None else halves.WORDS)


def _beyond(body: bytes | bytearray | memoryview) -> ApiError | None:
    """Of a body that is JSON but for a number which is larger than any that is read: the field that has it."""
    try:
        fields = _fields.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    for name, value in fields.items():
        try:
            msgspec.json.decode(value)
        except msgspec.ValidationError:
            text, param = bytes(value), name[:_ECHOED]
            got = f", got {text.decode()}" if len(text) <= _ECHOED and text[:1] not in (b"[", b"{") else ""
            return invalid(param, f"Invalid '{param}': a number there is too large{got}.")
    return None
