"""Kimi K2: a section of calls, each headed by its id functions.name:number, which counts over the whole conversation."""

from __future__ import annotations

from typing import Final

from banyan_runtime.front.chat.reader import Malformed, Markers, Reader, Wait
from banyan_runtime.front.chat.tools import json_calls
from banyan_runtime.front.chat.tools.events import CallSink
from banyan_runtime.front.chat.tools.format import ToolFormat
from banyan_runtime.front.chat.tools.ids import kimi_id
from banyan_runtime.front.chat.tools.parser import Schemas, close, salvage
from banyan_runtime.front.chat.tools.tags import NAME, NUMBER, ToolTag

_SECTION_BEGIN: Final = "<|tool_calls_section_begin|>"
_SECTION_END: Final = "<|tool_calls_section_end|>"
_BEGIN: Final = "<|tool_call_begin|>"
_ARGUMENTS: Final = "<|tool_call_argument_begin|>"
_END: Final = "<|tool_call_end|>"

_OPEN: Final = Markers(_SECTION_BEGIN, _BEGIN)
_CALL: Final = Markers(_BEGIN)
_HEADER_END: Final = Markers(_ARGUMENTS, _BEGIN, _END, _SECTION_END)
_ENDS: Final = Markers(_BEGIN, _END, _SECTION_END)
_CLOSERS: Final = Markers(_END, _SECTION_END)


def _read(reader: Reader, sink: CallSink, tools: Schemas) -> Wait[None]:
    while True:
        marker = yield from reader.until(_OPEN, sink.text)
        reader.record(marker)
        try:
            if marker == _SECTION_BEGIN:
                yield from reader.space()
                yield from reader.expect(_CALL)
            yield from _call(reader, sink, tools)
            yield from close(reader, sink, _CLOSERS)
        except Malformed:
            yield from salvage(reader, sink, _ENDS, _CLOSERS)


def _call(reader: Reader, sink: CallSink, tools: Schemas) -> Wait[None]:
    header, end = yield from reader.word(_HEADER_END, take=False)
    while end == _BEGIN:  # the model began anew
        yield from reader.accept(_HEADER_END)
        header, end = yield from reader.word(_HEADER_END, take=False)
    header = header.strip()
    name, id = _identified(header, tools)
    if end == _SECTION_END:
        raise Malformed
    if end == _ARGUMENTS:
        yield from reader.accept(_HEADER_END)
    sink.start(name, id)
    yield from json_calls.arguments(reader, sink, _ENDS)


def _identified(header: str, tools: Schemas) -> tuple[str, str | None]:
    """The tool's name, and the id if the header is one. A bare number names the only tool there is. Raises Malformed."""
    if header.isdigit():
        if len(tools) != 1:
            raise Malformed
        return next(iter(tools)), None
    prefix, dot, rest = header.partition(".")
    named = rest if dot and prefix == "functions" else header
    name, colon, number = named.rpartition(":")
    if not colon or not number.isdigit():
        name = named
    if not name or not set(name).isdisjoint(" \t\r\n"):
        raise Malformed
    return name, header if named != header and name != named else None


KIMI_K2: Final = ToolFormat(
    names=("kimi_k2",),
    grammar=_read,
    openers=(_SECTION_BEGIN, _BEGIN),
    markers=(_SECTION_BEGIN, _SECTION_END, _BEGIN, _ARGUMENTS, _END),
    tag=ToolTag(
        trigger=_SECTION_BEGIN,
        opening=_SECTION_BEGIN,
        begin=(f"{_BEGIN}functions.", NAME, ":", NUMBER, _ARGUMENTS),
        end=_END,
        separator="",
        closing=_SECTION_END,
    ),
    make_id=kimi_id,
)
