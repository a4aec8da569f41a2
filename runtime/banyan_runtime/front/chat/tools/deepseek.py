"""DeepSeek V3, R1 and V3.1: calls between markers of their own, the name before the separator (V3.1) or behind it (V3)."""

from __future__ import annotations

from typing import Final

from banyan_runtime.front.chat.reader import Malformed, Markers, Reader, Wait
from banyan_runtime.front.chat.tools import json_calls
from banyan_runtime.front.chat.tools.events import CallSink
from banyan_runtime.front.chat.tools.format import ToolFormat
from banyan_runtime.front.chat.tools.parser import Grammar, Schemas, close, salvage
from banyan_runtime.front.chat.tools.tags import NAME, ToolTag

_ALL_BEGIN: Final = "<｜tool▁calls▁begin｜>"
_ALL_END: Final = "<｜tool▁calls▁end｜>"
_BEGIN: Final = "<｜tool▁call▁begin｜>"
_END: Final = "<｜tool▁call▁end｜>"
_SEPARATOR: Final = "<｜tool▁sep｜>"
_MARKERS: Final = (_ALL_BEGIN, _ALL_END, _BEGIN, _END, _SEPARATOR)

_OPEN: Final = Markers(_ALL_BEGIN, _BEGIN)
_CALL: Final = Markers(_BEGIN)
_HEADER_END: Final = Markers(_SEPARATOR, _ALL_BEGIN, _BEGIN, _END, _ALL_END)
_NAME_END: Final = Markers("\n", "```", "{", _END, _ALL_END)
_FENCE: Final = Markers("```json", "```\n")
_ENDS: Final = Markers(_ALL_BEGIN, _ALL_END, _BEGIN, _END)
_CLOSERS: Final = Markers("```", _END, _ALL_END)


def _grammar(*, name_last: bool) -> Grammar:
    """`name_last`: the kind of tool stands before the separator and its name behind it."""

    def read(reader: Reader, sink: CallSink, tools: Schemas) -> Wait[None]:
        while True:
            marker = yield from reader.until(_OPEN, sink.text)
            reader.record(marker)
            try:
                if marker == _ALL_BEGIN:
                    yield from reader.space()
                    yield from reader.expect(_CALL)
                yield from call(reader, sink)
                yield from close(reader, sink, _CLOSERS)
            except Malformed:
                yield from salvage(reader, sink, _ENDS, _CLOSERS)

    def call(reader: Reader, sink: CallSink) -> Wait[None]:
        name, end = yield from reader.word(_HEADER_END, take=False)
        if end != _SEPARATOR:
            raise Malformed
        yield from reader.accept(_HEADER_END)
        if name_last:
            yield from reader.space()
            name, _ = yield from reader.word(_NAME_END, take=False)
        sink.start(name.strip())
        yield from reader.space()
        if (yield from reader.peek()) == "`" and (yield from reader.accept(_FENCE)) is None:
            raise Malformed
        yield from json_calls.arguments(reader, sink, _ENDS)

    return read


DEEPSEEK_V3: Final = ToolFormat(
    names=("deepseekv3", "deepseek_v3"),
    grammar=_grammar(name_last=True),
    openers=(_ALL_BEGIN, _BEGIN),
    markers=_MARKERS,
    tag=ToolTag(
        trigger=_ALL_BEGIN,
        opening=_ALL_BEGIN,
        begin=(f"{_BEGIN}function{_SEPARATOR}", NAME, "\n```json\n"),
        end=f"\n```{_END}",
        separator="\n",
        closing=_ALL_END,
    ),
)
DEEPSEEK_V31: Final = ToolFormat(
    names=("deepseekv31", "deepseek_v31"),
    grammar=_grammar(name_last=False),
    openers=(_ALL_BEGIN, _BEGIN),
    markers=_MARKERS,
    tag=ToolTag(
        trigger=_ALL_BEGIN,
        opening=_ALL_BEGIN,
        begin=(_BEGIN, NAME, _SEPARATOR),
        end=_END,
        separator="",
        closing=_ALL_END,
    ),
)
