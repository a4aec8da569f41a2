"""GLM 4.5 to 4.7: <tool_call>name, then pairs of <arg_key> and <arg_value>, with line breaks between them or without."""

from __future__ import annotations

import re
from typing import Final

from banyan_runtime.front.chat.reader import Malformed, Markers, Reader, Wait
from banyan_runtime.front.chat.tools.events import CallSink
from banyan_runtime.front.chat.tools.format import ToolFormat
from banyan_runtime.front.chat.tools.parser import Schemas
from banyan_runtime.front.chat.tools.tags import NAME, ToolTag
from banyan_runtime.front.chat.tools.tags import TextArguments as TextForm
from banyan_runtime.front.chat.tools.text_parameters import TextArguments

_OPEN: Final = Markers("<tool_call>")
_LINE_BREAK: Final = Markers(r"\n")  # some write it as two characters
_NAME_END: Final = Markers("\n", r"\n", "<arg_key>", "</tool_call>", "<tool_call>")
_NAME: Final = re.compile(r"""[^\s<>{}"']+""")
_INSIDE: Final = Markers("<arg_key>", "</tool_call>", "<tool_call>")
_KEY_END: Final = Markers("</arg_key>")
_VALUE: Final = Markers("<arg_value>")
_VALUE_END: Final = Markers("</arg_value>", "<arg_key>")


def _read(reader: Reader, sink: CallSink, tools: Schemas) -> Wait[None]:
    while True:
        reader.record((yield from reader.until(_OPEN, sink.text)))
        try:
            yield from _call(reader, sink, tools)
        except Malformed:
            sink.text(reader.release())


def _call(reader: Reader, sink: CallSink, tools: Schemas) -> Wait[None]:
    """Nothing but arguments or the end may follow the name: without JSON, any text could be one."""
    yield from reader.space()
    name, _ = yield from reader.word(_NAME_END, take=False)
    name = name.strip()
    inside = yield from _next(reader)
    if _NAME.fullmatch(name) is None or inside is None or inside == "<tool_call>":
        raise Malformed
    sink.start(name)
    arguments = TextArguments(sink, tools.get(name), strip_lines=False)
    while inside is None or inside == "<arg_key>":
        if inside is None:
            yield from reader.until(_INSIDE, sink.text, take=False)
        else:
            yield from _pair(reader, sink, arguments)
        inside = yield from _next(reader)
    if inside == "</tool_call>":
        yield from reader.accept(_INSIDE)
    arguments.end()


def _next(reader: Reader) -> Wait[str | None]:
    """The marker behind white space, left where it is."""
    yield from _blank(reader)
    return (yield from reader.accept(_INSIDE, take=False))


def _blank(reader: Reader) -> Wait[None]:
    while True:
        yield from reader.space()
        if (yield from reader.accept(_LINE_BREAK)) is None:
            return


def _pair(reader: Reader, sink: CallSink, arguments: TextArguments) -> Wait[None]:
    reader.record()
    try:
        yield from reader.expect(_INSIDE)
        key, _ = yield from reader.word(_KEY_END)
        yield from _blank(reader)
        yield from reader.expect(_VALUE)
    except Malformed:
        sink.text(reader.release())
        return
    reader.commit()
    yield from arguments.read(reader, key.strip(), _VALUE_END, "</arg_value>")


GLM45: Final = ToolFormat(
    names=("glm45", "glm", "glm47"),
    grammar=_read,
    openers=("<tool_call>",),
    markers=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    tag=ToolTag(
        trigger="<tool_call>",
        begin=("<tool_call>", NAME, "\n"),
        end="</tool_call>",
        separator="\n",
        arguments=TextForm(begin=("<arg_key>", NAME, "</arg_key>\n<arg_value>"), end="</arg_value>\n", excludes=_VALUE_END.texts),
    ),
)
