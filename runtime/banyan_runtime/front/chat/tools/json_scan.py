"""JSON as it is generated: its end is found without reading it, and its text passes through unchanged."""

from __future__ import annotations

import json
import re
from typing import Final

from banyan_runtime.front.chat.reader import NAME_LIMIT, Emit, Malformed, Reader, Wait

_STRUCTURE: Final = re.compile(r'["{}\[\]]')
_STRING: Final = re.compile(r'["\\]')
_SCALAR: Final = re.compile(r"[-+.\w]*")
_CLOSERS: Final = {"{": "}", "[": "]"}
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def container(reader: Reader, emit: Emit) -> Wait[None]:
    """Pass on the object or array that stands here, in the pieces it comes in. Raises Malformed at a bracket that closes
    another one's kind."""
    closers: list[str] = []
    quoted = escaped = False
    while True:
        text, at, size = reader.text, reader.at, len(reader.text)
        while at < size:
            if escaped:
                at, escaped = at + 1, False
                continue
            found = (_STRING if quoted else _STRUCTURE).search(text, at)
            if found is None:
                at = size
                break
            char, at = found.group(), found.end()
            if quoted:
                quoted, escaped = char != '"', char == "\\"
            elif char == '"':
                quoted = True
            elif char in _CLOSERS:
                closers.append(_CLOSERS[char])
            elif closers.pop() != char:
                emit(reader.take(at - 1))
                raise Malformed
            elif not closers:
                emit(reader.take(at))
                return
        emit(reader.take(at))
        yield from reader.more()


def string(reader: Reader, limit: int | None = None) -> Wait[str]:
    """The string that stands here, decoded. Raises Malformed if it is none, or longer than `limit` characters as written."""
    pieces: list[str] = []
    room = limit
    escaped = first = True  # the opening quote counts as escaped
    while True:
        text, at, size = reader.text, reader.at, len(reader.text)
        if room is not None:
            size = min(size, at + room)
        closed = False
        while at < size and not closed:
            if escaped:
                if first and text[at] != '"':
                    raise Malformed
                at, escaped, first = at + 1, False, False
                continue
            found = _STRING.search(text, at, size)
            if found is None:
                at = size
                break
            at, closed, escaped = found.end(), found.group() == '"', found.group() == "\\"
        if room is not None:
            room -= at - reader.at
        pieces.append(reader.take(at))
        if closed:
            return decoded("".join(pieces))
        if room == 0:
            raise Malformed
        yield from reader.more()


def key(reader: Reader) -> Wait[str]:
    """A string that may be a name."""
    return (yield from string(reader, NAME_LIMIT))


def scalar(reader: Reader) -> Wait[str]:
    """A number, true, false or null, as written. Raises Malformed if none stands here or it is too long for one."""
    text = yield from reader.span(_SCALAR)
    if not text:
        raise Malformed
    return text


def decoded(literal: str) -> str:
    """The text of a JSON string. Raises Malformed. Half a surrogate pair, which no encoding can carry, becomes U+FFFD."""
    try:
        text = json.loads(literal, strict=False)
    except ValueError as error:
        raise Malformed from error
    assert isinstance(text, str)
    return _SURROGATE.sub("\ufffd", text)


def encoded(value: object) -> str:
    """JSON in the model's own script. Raises ValueError for what JSON cannot say (NaN, infinity)."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if _SURROGATE.search(text) is None else json.dumps(value, allow_nan=False)
