"""Calls written as JSON objects: {"name": …, "arguments": {…}}. `parameters` means the same as `arguments`."""

from __future__ import annotations

from typing import Final

from banyan_runtime.front.chat.reader import Emit, Malformed, Markers, Reader, Wait
from banyan_runtime.front.chat.tools import json_scan
from banyan_runtime.front.chat.tools.events import CallSink

_ARGUMENTS: Final = ("arguments", "parameters")
KNOWN: Final = frozenset({"name", "type", "id", *_ARGUMENTS})
"""The keys of a call."""
_COLON: Final = Markers(":")


class _Call:
    """What is known of one object. `certain`: its being one is enough for a call, so the name starts it."""

    def __init__(self, sink: CallSink, *, certain: bool) -> None:
        self._sink = sink
        self._certain = certain
        self._name: str | None = None
        self._early: list[str] = []  # arguments that came before the name
        self._started = self._complete = False

    @property
    def has_name(self) -> bool:
        return self._name is not None

    @property
    def told(self) -> bool:
        """All that a call needs."""
        return self._started and self._complete

    def name(self, name: str) -> None:
        self._name = name
        if self._certain:
            self._start()

    def arguments_begin(self) -> None:
        self._certain = True
        if self._name is not None:
            self._start()

    def arguments(self, piece: str) -> None:
        if self._started:
            self._sink.args(piece)
        else:
            self._early.append(piece)

    def arguments_end(self) -> None:
        self._complete = True
        if self._started:
            self._sink.end()

    def end(self) -> None:
        """The object is closed. Raises Malformed if it was no call."""
        if not self._started:
            raise Malformed
        if not self._complete:
            self._sink.end()

    def _start(self) -> None:
        if self._started:
            return
        assert self._name is not None
        self._sink.start(self._name)
        self._started = True
        for piece in self._early:
            self._sink.args(piece)
        if self._complete:
            self._sink.end()


def call(reader: Reader, sink: CallSink, *, marked: bool = True) -> Wait[None]:
    """Read the object that stands here. Raises Malformed where it cannot be a call.

    Without a marker before it, it may as well be an answer in JSON: then only an object with a name and arguments and the
    few other keys that calls have is a call.
    """
    if (yield from reader.peek()) != "{":
        raise Malformed
    reader.take(reader.at + 1)
    found = _Call(sink, certain=marked)
    seen_arguments = False
    while True:
        yield from reader.space()
        char = yield from reader.peek()
        if char in "},":
            reader.take(reader.at + 1)
            if char == "}":
                found.end()
                return
            continue
        if marked and found.told and char != '"':  # the brace that closes it was forgotten
            return
        key = yield from json_scan.key(reader)
        if not marked and key not in KNOWN:
            raise Malformed
        yield from reader.space()
        yield from reader.expect(_COLON)
        yield from reader.space()
        if key in _ARGUMENTS and not seen_arguments:
            seen_arguments = True
            found.arguments_begin()
            yield from _arguments(reader, found)
        elif key == "name" and not found.has_name:
            found.name((yield from json_scan.key(reader)))
        else:
            yield from value(reader, _drop)


def _arguments(reader: Reader, found: _Call) -> Wait[None]:
    """An object as it is; a string is what it says; null is no arguments."""
    char = yield from reader.peek()
    if char in "{[":
        yield from json_scan.container(reader, found.arguments)
    elif char == '"':
        found.arguments((yield from json_scan.string(reader)))
    elif (text := (yield from json_scan.scalar(reader))) != "null":
        found.arguments(text)
    found.arguments_end()


def arguments(reader: Reader, sink: CallSink, ends: Markers) -> Wait[None]:
    """The arguments of the open call, up to one of `ends` if there are none. Raises Malformed for anything but an object."""
    yield from reader.space()
    if (yield from reader.accept(ends, take=False)) is None:
        if (yield from reader.peek()) != "{":
            raise Malformed
        yield from json_scan.container(reader, sink.args)
    sink.end()


def value(reader: Reader, emit: Emit) -> Wait[None]:
    """Pass on any value. Raises Malformed where none begins."""
    char = yield from reader.peek()
    if char in "{[":
        yield from json_scan.container(reader, emit)
    elif char == '"':
        emit((yield from json_scan.string(reader)))
    else:
        emit((yield from json_scan.scalar(reader)))


def _drop(piece: str) -> None:
    """What a call has besides its name and arguments is of no use."""


def calls(reader: Reader, sink: CallSink, *, marked: bool = True) -> Wait[None]:
    """One object, or an array of at least one. Raises Malformed where something else stands; calls before it remain."""
    if (yield from reader.peek()) != "[":
        yield from call(reader, sink, marked=marked)
        return
    reader.take(reader.at + 1)
    begun = False
    while True:
        yield from reader.space()
        char = yield from reader.peek()
        if char in "],":
            reader.take(reader.at + 1)
            if char == ",":
                continue
            if not begun:
                raise Malformed
            return
        yield from call(reader, sink, marked=marked)
        reader.record()  # the next one may be none
        begun = True
