"""Hermes and Qwen: a JSON object, or an array of them, between <tool_call> and </tool_call>."""

from __future__ import annotations

from typing import Final

from banyan_runtime.front.chat.reader import Malformed, Markers, Reader, Wait
from banyan_runtime.front.chat.tools import json_calls
from banyan_runtime.front.chat.tools.events import CallSink
from banyan_runtime.front.chat.tools.format import ToolFormat
from banyan_runtime.front.chat.tools.parser import Schemas, salvage
from banyan_runtime.front.chat.tools.tags import NAME, ToolTag

_OPEN: Final = Markers("<tool_call>")
_CLOSE: Final = Markers("</tool_call>")
_ENDS: Final = Markers("<tool_call>", "</tool_call>")


def _read(reader: Reader, sink: CallSink, tools: Schemas) -> Wait[None]:
    while True:
        reader.record((yield from reader.until(_OPEN, sink.text)))
        try:
            yield from _block(reader, sink)
        except Malformed:
            yield from salvage(reader, sink, _ENDS, _CLOSE)


def _block(reader: Reader, sink: CallSink) -> Wait[None]:
    """The JSON ends a call, not the closing marker: that may stand inside a string, or be missing."""
    yield from reader.space()
    yield from json_calls.calls(reader, sink)
    while True:
        reader.record()
        yield from reader.space()
        if (yield from reader.accept(_CLOSE)) is not None:
            reader.commit()
            return
        if (yield from reader.peek()) != "{":
            sink.text(reader.release())
            return
        yield from json_calls.call(reader, sink)


HERMES: Final = ToolFormat(
    names=("hermes", "qwen25", "qwen", "qwen3_json"),
    grammar=_read,
    openers=("<tool_call>",),
    markers=("<tool_call>", "</tool_call>"),
    tag=ToolTag(
        trigger="<tool_call>",
        begin=('<tool_call>\n{"name": "', NAME, '", "arguments": '),
        end="}\n</tool_call>",
        separator="\n",
    ),
)
