"""The body of an upload, read as it comes: small fields are kept, the file goes on to storage block by block."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from banyan_runtime.batch.host.refusals import Refusal, invalid, missing

READ_BYTES: Final = 256 << 10
MAX_FIELDS: Final = 16
MAX_FIELD_BYTES: Final = 4096
MAX_NAME: Final = 512  # characters of a file's name

Take = Callable[[bytes, "Form"], Awaitable[None]]


@dataclass(slots=True)
class Form:
    """The fields so far. `filename` is None until the file came."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None


async def read_form(request: web.Request, take: Take) -> Form:
    """Hand the file to `take`. Raises Refusal for what is no such form, ConnectionError when the client has gone."""
    if request.content_type != "multipart/form-data":
        raise Refusal(400, "An upload must be multipart/form-data with the fields 'purpose' and 'file'.", code="invalid_content_type")
    form = Form()
    with _reading():
        reader = await request.multipart()
    for _ in range(MAX_FIELDS):
        with _reading():
            part = await reader.next()
        if part is None:
            break
        if not isinstance(part, BodyPartReader):
            raise Refusal(400, "A part of the form is a form itself.", code="malformed_request")
        if part.name == "file":
            await _take_file(part, form, take)
        else:
            form.fields[part.name or ""] = await _text(part)
    else:
        raise Refusal(400, f"The form has more than {MAX_FIELDS} fields.", code="malformed_request")
    if form.filename is None:
        raise missing("file")
    return form


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """What the reader of forms raises, as a Refusal. What storage raises is not its."""
    try:
        yield
    except (ValueError, AssertionError, LookupError, RuntimeError, HttpProcessingError) as error:
        raise Refusal(400, "The multipart body is malformed.", code="malformed_request") from error


async def _take_file(part: BodyPartReader, form: Form, take: Take) -> None:
    if form.filename is not None:
        raise invalid("file", "The form has more than one 'file'.")
    name = part.filename or "file"
    if len(name) > MAX_NAME:
        raise invalid("file", f"The file's name has {len(name)} characters, at most {MAX_NAME} are taken: send it under a shorter one.")
    form.filename = name.encode(errors="replace").decode()
    while block := await _block(part):
        await take(block, form)


async def _text(part: BodyPartReader) -> str:
    text = b""
    while block := await _block(part):
        text += block
        if len(text) > MAX_FIELD_BYTES:
            raise Refusal(400, f"A field of the form is longer than {MAX_FIELD_BYTES} bytes.", code="malformed_request")
    with _reading():
        return text.decode()


async def _block(part: BodyPartReader) -> bytes:
    with _reading():
        return bytes(await part.read_chunk(READ_BYTES))
