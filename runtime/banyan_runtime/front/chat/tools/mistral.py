"""Mistral: [TOOL_CALLS] and a JSON array of calls, or since tokenizer v11 [TOOL_CALLS]name[ARGS]{…} for each call."""

from __future__ import annotations

import re
from typing import Final

from banyan_runtime.front.chat.reader import Malformed, Markers, Reader, Wait
from banyan_runtime.front.chat.tools import json_calls
from banyan_runtime.front.chat.tools.events import CallSink
from banyan_runtime.front.chat.tools.format import ToolFormat
from banyan_runtime.front.chat.tools.ids import mistral_id
from banyan_runtime.front.chat.tools.parser import Schemas, salvage
from banyan_runtime.front.chat.tools.tags import NAME, ToolTag

_CALL: Final = "[TOOL_CALLS]"
_OPEN: Final = Markers(_CALL)
_AFTER_NAME: Final = Markers("[ARGS]", "[CALL_ID]", "{", _CALL)  # a tokenizer may have dropped [ARGS]
_AFTER_ID: Final = Markers("[ARGS]", "{", _CALL)
_ID: Final = re.compile("[A-Za-z0-9]{9}")


def _read(reader: Reader, sink: CallSink, tools: Schemas) -> Wait[None]:
    while True:
        reader.record((yield from reader.until(_OPEN, sink.text)))
        try:
            yield from reader.space()
            if (yield from reader.peek()) in "[{":
                yield from json_calls.calls(reader, sink)
                reader.commit()
            else:
                yield from _named(reader, sink)
        except Malformed:
            yield from salvage(reader, sink, _OPEN)


def _named(reader: Reader, sink: CallSink) -> Wait[None]:
    name, end = yield from reader.word(_AFTER_NAME, take=False)
    id = None
    if end == "[CALL_ID]":
        yield from reader.accept(_AFTER_NAME)
        written, end = yield from reader.word(_AFTER_ID, take=False)
        id = written.strip() if _ID.fullmatch(written.strip()) else None
    if end == _CALL:
        raise Malformed
    if end == "[ARGS]":
        yield from reader.accept(_AFTER_ID)
    sink.start(name.strip(), id)
    yield from json_calls.arguments(reader, sink, _OPEN)


MISTRAL: Final = ToolFormat(
    names=("mistral",),
    grammar=_read,
    openers=(_CALL,),
    markers=(_CALL, "[ARGS]", "[CALL_ID]"),
    tag=ToolTag(trigger=_CALL, begin=(_CALL, NAME, "[ARGS]"), end="", separator=""),
    plain_tag=ToolTag(
        trigger=_CALL,
        opening=f"{_CALL} [",
        begin=('{"name": "', NAME, '", "arguments": '),
        end="}",
        separator=", ",
        closing="]",
    ),
    tag_marker="[ARGS]",
    make_id=mistral_id,
)
