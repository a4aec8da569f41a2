"""Writes the arguments of a call whose parameters come as text, one after the other."""

from __future__ import annotations

from banyan_runtime.front.chat.reader import Markers, Reader, Wait
from banyan_runtime.front.chat.tools.events import CallSink
from banyan_runtime.front.chat.tools.json_scan import encoded
from banyan_runtime.front.chat.tools.typed import Parameters, Schema


class TextArguments:
    """Makes one JSON object. Strings are given out as they come; other values when they are complete."""

    def __init__(self, sink: CallSink, schema: Schema | None, *, strip_lines: bool) -> None:
        """`strip_lines`: one line break before a value and one behind it belong to the markers."""
        self._sink = sink
        self._parameters = Parameters(schema)
        self._strip = strip_lines
        self._key: str | None = None
        self._streams = False
        self._first = True  # nothing of the value has come yet
        self._line_break = False  # held back: it may be the last
        self._pieces: list[str] = []

    def read(self, reader: Reader, key: str, ends: Markers, closer: str) -> Wait[None]:
        """One parameter, whose value goes up to one of `ends`; `closer` is taken, what belongs to others is left."""
        self.begin(key)
        end = yield from reader.until(ends, self.value, take=False)
        self.close()
        if end == closer:
            yield from reader.accept(ends)

    def begin(self, key: str) -> None:
        """A parameter begins."""
        self._key, self._first, self._line_break, self._pieces = key, True, False, []
        self._streams = self._parameters.is_text(key)
        self._sink.args(("{" if self._sink.silent else ", ") + encoded(key) + ": " + ('"' if self._streams else ""))

    def value(self, text: str) -> None:
        """A piece of its value."""
        if self._first and self._strip:
            text = text.removeprefix("\n")
        self._first = False
        if self._line_break and text:
            text, self._line_break = "\n" + text, False
        if self._strip and text.endswith("\n"):
            text, self._line_break = text[:-1], True
        if self._streams:
            self._sink.args(encoded(text)[1:-1])
        else:
            self._pieces.append(text)

    def close(self) -> None:
        """The parameter is complete."""
        assert self._key is not None
        self._sink.args('"' if self._streams else self._parameters.json(self._key, "".join(self._pieces)))
        self._key = None

    def end(self) -> None:
        """The call is complete."""
        if not self._sink.silent:
            self._sink.args("}")
        self._sink.end()
