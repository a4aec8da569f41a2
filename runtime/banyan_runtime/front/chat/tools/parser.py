"""Runs the grammar of a format over the content of one choice."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from banyan_runtime.front.chat.events import Content, Event
from banyan_runtime.front.chat.reader import EndOfText, Markers, Reader, Wait
from banyan_runtime.front.chat.tools.events import CallSink

Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The JSON Schema of each tool's parameters, by the tool's name."""
Grammar: TypeAlias = Callable[[Reader, CallSink, Schemas], Wait[None]]
"""Reads all of the content. One that returns has found that there is no call in it."""


class ToolParser(Protocol):
    """Tells calls from content. However the text is cut into pieces, the joined events are equal."""

    def feed(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """The end of the output: releases what was held back. A call that it cut off has no ToolEnd."""
        ...

    def rescue(self) -> list[Event]:
        """After a failure of `feed` or `finish`: everything that was fed and not given out."""
        ...


class GrammarParser:
    def __init__(self, grammar: Grammar, tools: Schemas, only: Container[str] | None = None) -> None:
        self._reader = Reader()
        self._sink = CallSink(self._reader, only)
        self._run: Wait[None] | None = grammar(self._reader, self._sink, tools)
        next(self._run)  # up to where it wants text

    @property
    def undecided(self) -> bool:
        """Whether the last text may be the beginning of a marker."""
        return bool(self._reader.unread)

    def feed(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._run is None:
            return [Content(text)]
        self._reader.push(text)
        return self._advance()

    def finish(self) -> list[Event]:
        self._reader.ended = True
        return [] if self._run is None else self._advance()

    def rescue(self) -> list[Event]:
        held = self._sink.held() + self._reader.rest()
        return [*self._sink.drain(), *([Content(held)] if held else [])]

    def _advance(self) -> list[Event]:
        assert self._run is not None
        try:
            next(self._run)
        except (StopIteration, EndOfText):
            self._run = None
            rest = self._reader.rest()
            if not self._sink.open:  # of arguments that were cut off, what is certain has been given out
                self._sink.text(rest)
            self._sink.finish()
        return self._sink.drain()


def calls_among(events: Sequence[Event]) -> list[Event]:
    """Without content: at the end of an output that can only be calls that is a call cut off, or what would have led to one."""
    return [event for event in events if not isinstance(event, Content)]


def salvage(reader: Reader, sink: CallSink, ends: Markers, closers: Markers | None = None) -> Wait[None]:
    """Go on behind something malformed: before a call it is content. Inside one the text up to one of `ends` counts as its
    arguments, which stay incomplete, and one of `closers` is taken."""
    if not sink.open:
        sink.text(reader.release())
        return
    yield from reader.until(ends, sink.args, take=False)
    sink.open = False
    if closers is not None:
        yield from reader.accept(closers)


def close(reader: Reader, sink: CallSink, closers: Markers) -> Wait[None]:
    """Drop what closes calls, as much of it as there is."""
    while True:
        reader.record()
        yield from reader.space()
        if (yield from reader.accept(closers)) is None:
            sink.text(reader.release())
            return
