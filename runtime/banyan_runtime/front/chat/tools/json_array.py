"""A bare JSON array of calls: what a grammar forces from models whose own format cannot be forced."""

from __future__ import annotations

from typing import Final

from banyan_runtime.front.chat.reader import Malformed, Markers, Reader, Wait
from banyan_runtime.front.chat.tools import json_calls
from banyan_runtime.front.chat.tools.events import CallSink
from banyan_runtime.front.chat.tools.format import ToolFormat
from banyan_runtime.front.chat.tools.parser import Schemas

_NEVER: Final = Markers("\0")


def _read(reader: Reader, sink: CallSink, tools: Schemas) -> Wait[None]:
    """The array is the whole output."""
    reader.record()
    yield from reader.space()
    try:
        yield from json_calls.calls(reader, sink)
    except Malformed:
        if sink.open:
            yield from reader.until(_NEVER, sink.args)
    else:
        reader.commit()
    if sink.calls:
        yield from reader.until(_NEVER, sink.text)


JSON_ARRAY: Final = ToolFormat(names=(), grammar=_read)
