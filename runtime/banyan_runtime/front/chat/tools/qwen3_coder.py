"""Qwen3-Coder: <function=name> with a <parameter=key> for each argument, whose value is text as it is."""

from __future__ import annotations

from typing import Final

from banyan_runtime.front.chat.reader import Malformed, Markers, Reader, Wait
from banyan_runtime.front.chat.tools.events import CallSink
from banyan_runtime.front.chat.tools.format import ToolFormat
from banyan_runtime.front.chat.tools.parser import Schemas, close
from banyan_runtime.front.chat.tools.tags import NAME, ToolTag
from banyan_runtime.front.chat.tools.tags import TextArguments as TextForm
from banyan_runtime.front.chat.tools.text_parameters import TextArguments

_OPEN: Final = Markers("<tool_call>", "<function=")
_CLOSE: Final = Markers("</tool_call>")
_FUNCTION: Final = Markers("<function=")
_NAME_END: Final = Markers(">", "\n", "<")  # models forget the bracket
_KEY_END: Final = Markers(">", "\n", "<")
_INSIDE: Final = Markers("<parameter=", "</function>", "</tool_call>", "<function=", "<tool_call>")
_VALUE_END: Final = Markers("</parameter>", "<parameter=", "</function>", "<function=")  # models forget to close values


def _read(reader: Reader, sink: CallSink, tools: Schemas) -> Wait[None]:
    while True:
        marker = yield from reader.until(_OPEN, sink.text)
        reader.record(marker)
        try:
            if marker == "<tool_call>":
                yield from reader.space()
                yield from reader.expect(_FUNCTION)
            yield from _function(reader, sink, tools)
        except Malformed:
            sink.text(reader.release())


def _function(reader: Reader, sink: CallSink, tools: Schemas) -> Wait[None]:
    name, end = yield from reader.word(_NAME_END, take=False)
    if end != "<":
        yield from reader.accept(_NAME_END)
    sink.start(name.strip())
    arguments = TextArguments(sink, tools.get(name.strip()), strip_lines=True)
    while True:
        yield from reader.space()
        inside = yield from reader.accept(_INSIDE, take=False)
        if inside is None:
            yield from reader.until(_INSIDE, sink.text, take=False)
        elif inside == "<parameter=":
            yield from _parameter(reader, sink, arguments)
        else:
            break
    arguments.end()
    if inside == "</function>":
        yield from reader.accept(_INSIDE)
    yield from close(reader, sink, _CLOSE)


def _parameter(reader: Reader, sink: CallSink, arguments: TextArguments) -> Wait[None]:
    reader.record()
    try:
        yield from reader.expect(_INSIDE)
        key, end = yield from reader.word(_KEY_END, take=False)
        if end != ">" or not key.strip():
            raise Malformed
    except Malformed:
        sink.text(reader.release())
        return
    yield from reader.accept(_KEY_END)
    reader.commit()
    yield from arguments.read(reader, key.strip(), _VALUE_END, "</parameter>")


QWEN3_CODER: Final = ToolFormat(
    names=("qwen3_coder", "qwen3_xml", "step3p5", "nanbeige"),
    grammar=_read,
    openers=("<tool_call>", "<function="),
    markers=("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>"),
    tag=ToolTag(
        trigger="<tool_call>",
        begin=("<tool_call>\n<function=", NAME, ">\n"),
        end="</function>\n</tool_call>",
        separator="\n",
        arguments=TextForm(begin=("<parameter=", NAME, ">\n"), end="\n</parameter>\n", excludes=_VALUE_END.texts),
    ),
)
