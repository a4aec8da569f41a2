"""Writes the arguments of a call whose parameters come as text, one after the other."""

from __future__ import annotations

import re
from typing import Final

from banyan_runtime.front.chat.reader import Markers, Reader, Wait
from banyan_runtime.front.chat.tools.events import CallSink
from banyan_runtime.front.chat.tools.json_scan import encoded
from banyan_runtime.front.chat.tools.typed import Parameters, Schema

_QUOTE: Final = re.compile('"')
_IN_STRING: Final = re.compile(r'["\\\n]')


class TextArguments:
    """Makes one JSON object. Strings are given out as they come; other values when they are complete. Of parameters of one name the
    first one counts: what has been given out cannot be taken back."""

    def __init__(self, sink: CallSink, schema: Schema | None, *, strip_lines: bool) -> None:
        """`strip_lines`: one line break before a value and one behind it belong to the markers."""
        self._sink = sink
        self._parameters = Parameters(schema)
        self._strip = strip_lines
        self._keys: set[str] = set()
        self._key: str | None = None
        self._repeated = False  # the name has come before: nothing is given out
        self._streams = False
        self._first = True  # nothing of the value has come yet
        self._line_break = False  # held back: it may be the last
        self._pieces: list[str] = []
        self._quotes = Quotes()

    def read(self, reader: Reader, key: str, ends: Markers, closer: str) -> Wait[None]:
        """One parameter, whose value goes up to one of `ends`; `closer` is taken, what belongs to others is left. In a string within
        JSON they are text."""
        self.begin(key)
        while True:
            end = yield from reader.until(ends, self.value, take=False)
            if not self._quotes.open or (yield from _before_line_break(reader, len(end))):
                break
            self.value(reader.take(reader.at + len(end)))
        self.close()
        if end == closer:
            yield from reader.accept(ends)

    def begin(self, key: str) -> None:
        """A parameter begins."""
        self._key, self._first, self._line_break, self._pieces = key, True, False, []
        self._streams, self._quotes = self._parameters.is_text(key), Quotes()
        self._repeated = key in self._keys
        self._keys.add(key)
        self._args(("{" if self._sink.silent else ", ") + encoded(key) + ": " + ('"' if self._streams else ""))

    def value(self, text: str) -> None:
        """A piece of its value."""
        if not self._streams:
            self._quotes.feed(text)
        if self._first and self._strip:
            text = text.removeprefix("\n")
        self._first = False
        if self._line_break and text:
            text, self._line_break = "\n" + text, False
        if self._strip and text.endswith("\n"):
            text, self._line_break = text[:-1], True
        if self._streams:
            self._args(encoded(text)[1:-1])
        else:
            self._pieces.append(text)

    def close(self) -> None:
        """The parameter is complete."""
        assert self._key is not None
        self._args('"' if self._streams else self._parameters.json(self._key, "".join(self._pieces)))
        self._key = None

    def _args(self, fragment: str) -> None:
        if not self._repeated:
            self._sink.args(fragment)

    def end(self) -> None:
        """The call is complete."""
        if not self._sink.silent:
            self._sink.args("}")
        self._sink.end()


class Quotes:
    """Whether a string is open in a text that looks like an object or array. No string of JSON has a line break in it: with one, the
    text is something else."""

    def __init__(self) -> None:
        self.open = False
        self._json: bool | None = None  # None: nothing visible has come
        self._escaped = False

    def feed(self, text: str) -> None:
        """More text."""
        at = 0
        if self._json is None and (visible := text.lstrip()):
            at, self._json = len(text) - len(visible), visible[0] in "{["
        while self._json and at < len(text):
            if self._escaped:
                at, self._escaped = at + (text[at] != "\n"), False
                continue
            found = (_IN_STRING if self.open else _QUOTE).search(text, at)
            if found is None:
                return
            at, sign = found.end(), found[0]
            if sign == "\n":
                self.open = self._json = False
            elif sign == "\\":
                self._escaped = True
            else:
                self.open = not self.open


def _before_line_break(reader: Reader, ahead: int) -> Wait[bool]:
    """Whether a line break, or the end of the output, comes so many characters further on."""
    while len(reader.text) <= reader.at + ahead:
        if reader.ended:
            return True
        yield
    return reader.text[reader.at + ahead] == "\n"
