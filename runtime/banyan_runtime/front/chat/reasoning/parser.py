"""One parser for all reasoning that stands between a start and an end marker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from banyan_runtime.front.chat.events import Content, Event, Reasoning
from banyan_runtime.front.chat.reader import EndOfText, Markers, Reader, Wait
from banyan_runtime.front.chat.reasoning.format import ReasoningFormat, Start
from banyan_runtime.front.chat.reasoning.thoughts import RawThoughts, Thoughts, TokenCount, TrimmedThoughts

_NONE: Final[Mapping[str, bool]] = MappingProxyType({})


class ReasoningParser:
    """`end_is_token`: the end marker is one token of the vocabulary, so a second one cannot be meant as text.

    `also_ends`: texts that end reasoning too, and stay content: the beginnings of tool calls. Those that are one token (true) do
    so anywhere, others only at the start of a line. With `stream` false the reasoning comes as one event, at its end; `raw`: it
    comes as generated, with its markers. Tokens are counted right when they come one by one.
    """

    def __init__(
        self,
        form: ReasoningFormat,
        start: Start,
        *,
        end_is_token: bool,
        stream: bool = True,
        raw: bool = False,
        also_ends: Mapping[str, bool] = _NONE,
    ) -> None:
        self.reasoning_tokens = 0
        self._start = start
        self._opens = Markers(form.start)
        self._closes = Markers(form.end)
        self._also_ends = also_ends
        self._ends = Markers(form.end, *also_ends)
        self._end_is_token = end_is_token
        self._raw = raw
        self._reader = Reader()
        self._events: list[Event] = []
        self._thoughts: Thoughts = RawThoughts(self._events.append) if raw else TrimmedThoughts(self._events.append, stream=stream)
        self._count = TokenCount()
        self._inside = start is Start.REASONING
        self._ended = False
        self._opened = False  # this feed brought the start marker
        self._run: Wait[None] | None = None if start is Start.CONTENT else self._read()
        if self._run is not None:
            next(self._run)

    def keeps(self, text: str) -> bool:
        """Whether a token of this text would be none of the content, if it came now: it were one of the reasoning, or of the empty line
        behind it."""
        return self._run is not None and (self._inside or (self._ended and bool(text) and not text.strip("\n")))

    @property
    def over(self) -> bool:
        """Everything that follows is content."""
        return self._run is None

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Event]:
        if self._run is None:
            return [Content(text)] if text else []
        before, self._opened = self._inside, False
        self._reader.push(text)
        events = self._advance()
        reasoning = before and self._inside and not self._opened
        self._count.add(len(token_ids), reasoning=reasoning, undecided=bool(self._reader.unread))
        self.reasoning_tokens = self._count.tokens
        return events

    def finish(self) -> list[Event]:
        if self._run is None:
            return []
        self._reader.ended = True
        self._count.finish()
        self.reasoning_tokens = self._count.tokens
        return self._advance()

    def rescue(self) -> list[Event]:
        """After a failure of `feed` or `finish`: everything that was fed and not given out."""
        events = self._drain()
        if held := self._thoughts.held():
            events.append(Reasoning(held))
        if rest := self._reader.rest():
            events.append(Content(rest))
        self._run = None
        return events

    def _advance(self) -> list[Event]:
        assert self._run is not None
        try:
            next(self._run)
        except StopIteration:
            self._run = None
            rest = self._reader.rest()
        except EndOfText:
            self._run = None
            self._thoughts.end()
            rest = "" if self._inside else self._reader.rest()
        else:
            rest = ""
        return [*self._drain(), *([Content(rest)] if rest else [])]

    def _drain(self) -> list[Event]:
        events = self._events[:]
        self._events.clear()
        return events

    def _read(self) -> Wait[None]:
        """Up to where only content follows; that is left unread or recorded."""
        reader, thoughts = self._reader, self._thoughts
        reader.record()
        try:
            yield from reader.space()
            opened = yield from reader.accept(self._opens)
        except EndOfText:
            opened = None
        if opened is not None:
            self._inside = self._opened = True
            thoughts.marker(reader.release())
        elif self._start is Start.OPTIONAL:
            return
        else:
            thoughts.add(reader.release())
        if (yield from self._think()):
            yield from self._close()

    def _think(self) -> Wait[bool]:
        """Up to the end of the reasoning: whether its own marker ended it."""
        reader, thoughts = self._reader, self._thoughts
        last = "\n"

        def add(text: str) -> None:
            nonlocal last
            last = text[-1]
            thoughts.add(text)

        while True:
            marker = yield from reader.until(self._ends, add, take=False)
            if marker not in self._also_ends or self._also_ends[marker] or last == "\n":
                break
            add(reader.take(reader.at + len(marker)))
        self._inside, self._ended = False, True
        own = marker not in self._also_ends
        if own:
            thoughts.marker(reader.take(reader.at + len(marker)))
        thoughts.end()
        return own

    def _close(self) -> Wait[None]:
        """Behind the end marker: drop line breaks, and a second marker where it can only be a slip."""
        if self._raw:
            return
        reader = self._reader
        while True:
            reader.record()
            try:
                yield from reader.space()
            except EndOfText:
                break
            if not self._end_is_token or (yield from reader.accept(self._closes)) is None:
                break
        reader.record(reader.release().lstrip("\n"))
