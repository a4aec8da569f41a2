"""Text that arrives in pieces, read by code that looks as if all of it were there.

A grammar is a generator: it takes text from a `Reader`, and yields where the text so far does not decide how to go on. So
nothing depends on how the text was cut, and all work is linear in it: no text is looked at twice, but for a marker's length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Final, TypeAlias, TypeVar

from banyan_runtime.front.text.stops import longest_partial

T = TypeVar("T")
Wait: TypeAlias = Generator[None, None, T]
Emit: TypeAlias = Callable[[str], object]

_SPACE: Final = re.compile(r"\s*")
NAME_LIMIT: Final = 256
"""Characters of a name, a key or a header. What is longer is none: it would only be held back."""


class EndOfText(Exception):
    """The output ended where a grammar wanted more."""


class Malformed(Exception):
    """The text is not what it looked like; what was read of it is content."""


class Markers:
    """Texts that a grammar looks for. None may be part of another, so the first that is complete is the one that is meant."""

    def __init__(self, *texts: str) -> None:
        assert not any(one in other for one in texts for other in texts if one is not other), texts
        self.texts = texts
        self._pattern = re.compile("|".join(map(re.escape, texts)))
        self._firsts = frozenset(text[0] for text in texts)
        self._longest = max(map(len, texts))

    def search(self, text: str, at: int) -> re.Match[str] | None:
        return self._pattern.search(text, at)

    def match(self, text: str, at: int) -> str | None:
        """The marker that stands here."""
        found = self._pattern.match(text, at)
        return None if found is None else found.group()

    def may_begin(self, text: str, at: int) -> bool:
        """Whether a marker may stand here, of which the text has no more than the beginning."""
        piece = text[at : at + self._longest]
        return any(marker.startswith(piece) for marker in self.texts)

    def partial(self, text: str, at: int) -> int:
        """Length of the longest suffix of the text from here on that is a proper prefix of a marker."""
        tail = text[max(at, len(text) - self._longest + 1) :]
        if self._firsts.isdisjoint(tail):
            return 0
        return max([longest_partial(tail, marker) for marker in self.texts])


class Reader:
    """The unread text. While it records, what is taken is kept too, until it is certain what it means."""

    __slots__ = ("_record", "at", "ended", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._record: list[str] | None = None

    def push(self, text: str) -> None:
        """More text. A grammar leaves at most the beginning of a marker unread."""
        self.text = self.text[self.at :] + text
        self.at = 0

    @property
    def unread(self) -> str:
        return self.text[self.at :]

    # --- the record ---

    def rest(self) -> str:
        """Give up reading: everything that was not made certain, and what is unread."""
        text = self.release() + self.unread
        self.text, self.at = "", 0
        return text

    def record(self, before: str = "") -> None:
        """Keep what is taken from here on, and this."""
        self._record = [before]

    def commit(self) -> None:
        """It is certain what the text meant: forget it."""
        self._record = None

    def release(self) -> str:
        """What was taken without becoming certain. The record ends."""
        record, self._record = self._record, None
        return "" if record is None else "".join(record)

    # --- what grammars read with ---

    def take(self, end: int) -> str:
        """The text up to this position. It has been looked at."""
        piece, self.at = self.text[self.at : end], end
        if self._record is not None:
            self._record.append(piece)
        return piece

    def more(self) -> Wait[None]:
        """Wait for text. Raises EndOfText when there will be none."""
        if self.ended:
            raise EndOfText
        yield

    def peek(self) -> Wait[str]:
        """The next character, left where it is."""
        while self.at >= len(self.text):
            yield from self.more()
        return self.text[self.at]

    def space(self) -> Wait[str]:
        """Take white space up to a visible character."""
        taken: list[str] = []
        while True:
            found = _SPACE.match(self.text, self.at)
            assert found is not None
            taken.append(self.take(found.end()))
            if self.at < len(self.text):
                return "".join(taken)
            yield from self.more()

    def span(self, pattern: re.Pattern[str]) -> Wait[str]:
        """Take the characters that `pattern`, one class of them repeated, matches. Raises Malformed for `NAME_LIMIT` of them."""
        pieces: list[str] = []
        room = NAME_LIMIT
        while True:
            found = pattern.match(self.text, self.at, self.at + room)
            assert found is not None
            room -= len(found.group())
            pieces.append(self.take(found.end()))
            if not room:
                raise Malformed
            if self.at < len(self.text):
                return "".join(pieces)
            yield from self.more()

    def accept(self, markers: Markers, *, take: bool = True) -> Wait[str | None]:
        """Take the marker that stands here, if one does; or leave it where it is."""
        while True:
            found = markers.match(self.text, self.at)
            if found is not None:
                return self.take(self.at + len(found)) if take else found
            if self.ended or not markers.may_begin(self.text, self.at):
                return None
            yield

    def expect(self, markers: Markers) -> Wait[str]:
        """Take the marker that has to stand here. Raises Malformed, or EndOfText in the midst of it."""
        found = yield from self.accept(markers)
        if found is None:
            raise EndOfText if self.ended and markers.may_begin(self.text, self.at) else Malformed
        return found

    def until(self, markers: Markers, emit: Emit, *, take: bool = True) -> Wait[str]:
        """Pass on the text before the next marker, and take the marker unless told not to. At the end of the output everything
        is passed on, and EndOfText raised."""
        while True:
            found = markers.search(self.text, self.at)
            if found is not None:
                if found.start() > self.at:
                    emit(self.take(found.start()))
                return self.take(found.end()) if take else found.group()
            end = len(self.text)
            if not self.ended:
                end -= markers.partial(self.text, self.at)
            if end > self.at:
                emit(self.take(end))
            if self.ended:
                raise EndOfText
            yield  # as `more` does; this is where most tokens pass

    def word(self, ends: Markers, *, take: bool = True) -> Wait[tuple[str, str]]:
        """A short text, and the marker that ends it, which is taken unless told not to. Raises Malformed behind `NAME_LIMIT`
        characters without one."""
        pieces: list[str] = []
        room = NAME_LIMIT
        while True:
            found = ends.search(self.text, self.at)
            end = found.start() if found is not None else len(self.text) - ends.partial(self.text, self.at)
            if end - self.at > room:
                self.take(self.at + room)
                raise Malformed
            room -= end - self.at
            pieces.append(self.take(end))
            if found is not None:
                return "".join(pieces), self.take(found.end()) if take else found.group()
            yield from self.more()
