"""The text of reasoning, as it is given out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from banyan_runtime.front.chat.events import Event, Reasoning


class Thoughts(Protocol):
    def add(self, text: str) -> None: ...

    def marker(self, text: str) -> None:
        """A marker around the reasoning."""
        ...

    def end(self) -> None:
        """The reasoning is over; another one may follow."""
        ...

    def held(self) -> str:
        """What would still be given out if the reasoning went on."""
        ...


class TrimmedThoughts:
    """Without line breaks before and white space behind, so white space waits for what follows. With `stream` false everything
    waits for the end. A second reasoning is set apart by a line break."""

    def __init__(self, emit: Callable[[Event], None], *, stream: bool) -> None:
        self._emit = emit
        self._stream = stream
        self._begun = False
        self._again = False
        self._space: list[str] = []
        self._unsent: list[str] = []

    def add(self, text: str) -> None:
        if not self._begun:
            text = text.lstrip("\n")
            self._begun = bool(text)
        solid = text.rstrip()
        if solid:
            self._give("\n" * self._again + "".join(self._space) + solid)
            self._space, self._again = [], False
        if len(solid) < len(text):
            self._space.append(text[len(solid) :])

    def marker(self, text: str) -> None:
        pass

    def end(self) -> None:
        self._again |= self._begun
        self._space, self._begun = [], False
        if self._unsent:
            self._emit(Reasoning("".join(self._unsent)))
            self._unsent = []

    def held(self) -> str:
        return "".join([*self._unsent, *self._space])

    def _give(self, text: str) -> None:
        if self._stream:
            self._emit(Reasoning(text))
        else:
            self._unsent.append(text)


class RawThoughts:
    """As generated, markers and all."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit

    def add(self, text: str) -> None:
        if text:
            self._emit(Reasoning(text))

    marker = add

    def end(self) -> None:
        pass

    def held(self) -> str:
        return ""


class TokenCount:
    """Counts the tokens of reasoning without its markers. Right when tokens come one by one."""

    def __init__(self) -> None:
        self.tokens = 0
        self._undecided = 0  # tokens of what may become a marker

    def add(self, tokens: int, *, reasoning: bool, undecided: bool) -> None:
        """`reasoning`: these tokens are part of it; `undecided`: or of the marker that ends it."""
        if not reasoning:
            self._undecided = 0
        elif undecided:
            self._undecided += tokens
        else:
            self.tokens += self._undecided + tokens
            self._undecided = 0

    def finish(self) -> None:
        """What was undecided was no marker."""
        self.tokens += self._undecided
        self._undecided = 0
