"""Llama 3: {"name": …, "parameters": {…}}, several of them separated by semicolons, behind <|python_tag|> or without any marker."""

from __future__ import annotations

from typing import Final

from banyan_runtime.front.chat.reader import EndOfText, Malformed, Markers, Reader, Wait
from banyan_runtime.front.chat.tools import json_calls
from banyan_runtime.front.chat.tools.events import CallSink
from banyan_runtime.front.chat.tools.format import ToolFormat
from banyan_runtime.front.chat.tools.parser import Schemas, salvage
from banyan_runtime.front.chat.tools.tags import NAME, ToolTag

_TAG: Final = Markers("<|python_tag|>")
_BETWEEN: Final = Markers(";", ",")


def _read(reader: Reader, sink: CallSink, tools: Schemas) -> Wait[None]:
    reader.record()
    yield from reader.space()
    marked = (yield from reader.accept(_TAG)) is not None
    while True:
        try:
            yield from _calls(reader, sink, marked=marked)
        except Malformed:
            yield from salvage(reader, sink, _TAG)
        reader.record((yield from reader.until(_TAG, sink.text)))
        marked = True


def _calls(reader: Reader, sink: CallSink, *, marked: bool) -> Wait[None]:
    """Objects and what stands between them, up to something else."""
    yield from reader.space()
    while True:
        yield from json_calls.call(reader, sink, marked=marked)
        reader.record()
        try:
            yield from reader.space()
            while (yield from reader.accept(_BETWEEN)) is not None:
                yield from reader.space()
        except EndOfText:
            reader.commit()
            raise
        if (yield from reader.accept(_TAG)) is not None:
            yield from reader.space()
            marked = True
        elif (yield from reader.peek()) != "{":
            sink.text(reader.release())
            return


def _other_than(words: frozenset[str]) -> str:
    """A regex of all strings that are none of these, up to the quote that ends them."""
    heads: dict[str, set[str]] = {}
    for word in words - {""}:
        heads.setdefault(word[0], set()).add(word[1:])
    ways = [rf'[^{"".join(sorted(heads))}"\\][^"\\]*"', *(head + _other_than(frozenset(rests)) for head, rests in sorted(heads.items()))]
    return f"({'|'.join(ways if '' in words else [*ways, chr(34)])})"


LLAMA3: Final = ToolFormat(
    names=("llama3", "llama3_json", "llama4_json"),
    grammar=_read,
    openers=("<|python_tag|>",),
    markers=("<|python_tag|>",),
    tag=ToolTag(
        trigger='{"name": "',
        begin=('{"name": "', NAME, '", "parameters": '),
        end="}",
        separator="; ",
        prose=rf'(\s*([^\s{{]|\{{\s*([^\s"]|"{_other_than(json_calls.KNOWN)}))(.|\n)*)?',
        marker="<|python_tag|>",
    ),
)
