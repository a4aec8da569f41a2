"""Stop regexes, found in the generated text across any border of tokens.

A pattern that says something of the text behind a match (`$`, `\\b`, `(?!...)`) waits until that text is there, or is known to be none:
what is a match only because no more has come yet is none. So `abc$` is found at the end of all text, and `(?m)abc$` where a line ends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import regex

from banyan_runtime.front.text.stops import StopMatcher

MAX_BEHIND: Final = 64  # characters that patterns can look back at
MAX_HELD: Final = 1024  # characters: what a match began further back than that is given out
SEARCH_S: Final = 0.02  # of computing time that a search may take; those of sane patterns take 10 us
SLOW_S: Final = 100e-6  # that each character adds to the time that searches may take; and, for each pattern, as long as
SLOW_PATTERN_S: Final = 30e-6
COMPILE_S: Final = 0.05  # of computing time: the event loop compiles it again

_BORDERS: Final = regex.compile(r"\$|\\[bBZzmMX]")  # what they say depends on the next two characters
_LOOKAHEADS: Final = regex.compile(r"\(\?[=!(]")
MAX_AHEAD: Final = 16  # characters that patterns can look ahead at


class BadRegex(ValueError):
    """A pattern that cannot be looked for. The text is for the client."""


class TooSlow(Exception):
    """A search took too long."""


def check(pattern: str) -> None:
    """Raises BadRegex."""
    began = time.process_time()
    try:
        empty = regex.compile(pattern).search("", timeout=SEARCH_S)
    except regex.error as error:
        raise BadRegex(str(error)) from None
    except (TimeoutError, RecursionError, MemoryError, OverflowError):
        raise BadRegex("it takes too long to look for") from None
    if time.process_time() - began > COMPILE_S:
        raise BadRegex("it takes too long to compile")
    if empty is not None:
        raise BadRegex("it matches the empty text, so nothing could be generated")


class _Pattern:
    def __init__(self, text: str) -> None:
        self.compiled = regex.compile(text)
        self.ahead = MAX_AHEAD if _LOOKAHEADS.search(text) else 2 if _BORDERS.search(text) else 0
        """Characters that must be there behind a match before it is one."""


class RegexMatcher:
    """Cuts the text of one sequence at the first match, looking at it character by character: so the match that ends first wins,
    however the text comes. Holds back only what may still become a match. All searches together have a budget: a pattern that is a
    little slow at every character would hold up everybody as a single endless one does."""

    def __init__(self, patterns: Sequence[str], *, include: bool) -> None:
        self._patterns = [_Pattern(pattern) for pattern in patterns]
        self._earned_s = SLOW_S + SLOW_PATTERN_S * len(patterns)  # with each character
        self._left_s = SEARCH_S
        self._include = include
        self._before = ""  # the end of what was given out, for patterns that look back
        self._held = ""
        self._seen = 0  # characters in all
        self._too_early = 0  # of them: a match that ends in these is none
        self.matched: str | None = None

    def feed(self, text: str, *, allowed: bool = True) -> str:
        """The text that can be given out now. With `allowed` false (min_tokens), what ends in this piece is no match, now or later.
        Raises TooSlow."""
        if self.matched is not None:
            return ""
        sure: list[str] = []
        for character in text:
            self._held += character
            self._seen += 1
            if not allowed:
                self._too_early = self._seen
            self._left_s = min(SEARCH_S, self._left_s + self._earned_s)
            found, ended = self._search()
            if ended:
                return "".join(sure) + self._cut(ended)
            starts = [match.start() - len(self._before) for match in found]
            keep = min(max((len(self._held) - start for start in starts), default=0), MAX_HELD)
            gone = self._held[: len(self._held) - keep]
            sure.append(gone)
            self._before = (self._before + gone)[-MAX_BEHIND:]
            self._held = self._held[len(gone) :]
        return "".join(sure)

    def finish(self, text: str = "") -> str:
        """What was held back, when the sequence ends for another reason, and `text` as the last of all: nothing more comes, and a match
        may be one for that. Raises TooSlow."""
        sure = self.feed(text)
        if self.matched is None and (ended := self._search(over=True)[1]):
            return sure + self._cut(ended)
        held, self._held = self._held, ""
        return sure + held

    def _cut(self, ended: Sequence[Any]) -> str:
        """What is left of the held text before the first of these matches."""
        match = min(ended, key=lambda one: (one.end(), one.start()))
        self.matched = match.group()
        rest, self._held = self._held[: (match.end() if self._include else match.start()) - len(self._before)], ""
        return rest

    def _search(self, *, over: bool = False) -> tuple[list[Any], list[Any]]:
        """What each pattern finds first, complete or not; and those of them that are matches whatever comes next, or, when the text is
        `over`, since nothing does. A match that comes too early is text, and no part of another."""
        text = self._before + self._held
        too_early = self._too_early - (self._seen - len(text))
        found, ended = [], []
        for pattern in self._patterns:
            match = self._find(pattern, text, len(self._before), partial=not over)
            while match is not None and not match.partial and match.end() <= too_early:
                match = self._find(pattern, text, max(match.end(), match.start() + 1), partial=not over)
            if match is None:
                continue
            found.append(match)
            if not match.partial and (over or len(text) - match.end() >= pattern.ahead):
                ended.append(match)
        return found, ended

    def _find(self, pattern: _Pattern, text: str, start: int, *, partial: bool) -> Any:
        began = time.thread_time()
        try:
            match = pattern.compiled.search(text, start, partial=partial, timeout=self._left_s)
        except TimeoutError:
            raise TooSlow from None
        self._left_s -= time.thread_time() - began
        if self._left_s <= 0:
            raise TooSlow
        return match


class Stops:
    """Stop strings and stop regexes of one sequence."""

    def __init__(self, stops: Sequence[str], patterns: Sequence[str], *, include: bool) -> None:
        self._strings = StopMatcher(stops, include=include) if stops else None
        self._regexes = RegexMatcher(patterns, include=include) if patterns else None
        self._held = 0  # characters that the regexes have not seen yet
        self._too_early = 0  # the first of these, which no match may end in

    @property
    def matched(self) -> str | None:
        return next((one.matched for one in (self._regexes, self._strings) if one is not None and one.matched is not None), None)

    def feed(self, text: str, *, allowed: bool = True) -> str:
        """As of both. Raises TooSlow."""
        if not allowed:
            self._too_early = self._held + len(text)
        self._held += len(text)
        if self._strings is not None:
            text = self._strings.feed(text, allowed=allowed)
        if self._regexes is None:
            return text
        early, text = self._parted(text)
        text = self._regexes.feed(early, allowed=False) + self._regexes.feed(text)
        over = self._strings is not None and self._strings.matched is not None
        return text + self._regexes.finish() if over else text

    def finish(self) -> str:
        """As of both. Raises TooSlow."""
        rest = "" if self._strings is None or self._strings.matched is not None else self._strings.finish()
        if self._regexes is None:
            return rest
        early, rest = self._parted(rest)
        return self._regexes.feed(early, allowed=False) + self._regexes.finish(rest)

    def _parted(self, text: str) -> tuple[str, str]:
        """The next text that the regexes see: what no match may end in, and what is behind it. The strings may have held it back."""
        number = min(self._too_early, len(text))
        self._too_early -= number
        self._held -= len(text)
        return text[:number], text[number:]
