"""A grammar for what comes after reasoning: until the reasoning has ended everything may come, but no end of the output."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.matcher import Matcher, Words


class _Place(enum.Enum):
    OPENING = "opening"  # nothing has come, and reasoning may begin
    THINKING = "thinking"
    CLOSED = "closed"  # the token that ends it has just come
    BLANK = "blank"  # and the empty line behind it


class ReasoningGate:
    """The token `closes` ends the reasoning. That has begun already (`opens` -1), or an output may begin with the token `opens` and then
    has some; one that begins otherwise obeys from its first token. `ends` may not come in it: an output that ends there would not be of
    the grammar. One of `blanks` may come behind it. (Markers of several tokens are part of the grammar: `front/prepare/output.py`.)"""

    def __init__(self, matcher: Matcher, opens: int, closes: int, ends: frozenset[int], blanks: frozenset[int]) -> None:
        self._matcher = matcher
        self._opens = opens
        self._closes = closes
        self._ends = ends
        self._blanks = blanks
        self._places = [_Place.OPENING if opens >= 0 else _Place.THINKING]  # one more for each token accepted here
        self._passed = 0  # tokens that the matcher accepted, all of them later

    @property
    def library(self) -> Any:
        return self._matcher.library if self._obeys else None

    def fill(self, words: Words, *, computed: bool = False) -> None:
        if self._obeys:
            self._matcher.fill(words, computed=computed)
            for token_id in self._beside:
                words[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        else:
            words[:] = 0xFFFFFFFF
            for token_id in self._ends:
                words[token_id >> 5] &= np.uint32(~(1 << (token_id & 31)) & 0xFFFFFFFF)

    def accept(self, token_id: int) -> bool:
        if self._obeys and self._matcher.accept(token_id):
            self._passed += 1
            return True
        place = self._next(token_id)
        if place is None:
            return False
        self._places.append(place)
        return True

    def _next(self, token_id: int) -> _Place | None:
        """Where the gate is after a token that the grammar does not take; None: it may not come."""
        place = self._places[-1]
        if self._passed:
            return None
        if place is _Place.OPENING and token_id == self._opens:
            return _Place.THINKING
        if place is _Place.THINKING and token_id not in self._ends:
            return _Place.CLOSED if token_id == self._closes else place
        if place is _Place.CLOSED and token_id in self._blanks:
            return _Place.BLANK
        return None

    def rollback(self, tokens: int) -> None:
        here = len(self._places) - 1
        if tokens > self._passed + here:
            raise GrammarError(f"{tokens} tokens cannot be taken back: there were {self._passed + here}.")
        inner = min(tokens, self._passed)
        self._matcher.rollback(inner)
        self._passed -= inner
        if tokens > inner:
            del self._places[inner - tokens :]

    @property
    def is_completed(self) -> bool:
        return self._obeys and self._matcher.is_completed

    @property
    def is_terminated(self) -> bool:
        return self._obeys and self._matcher.is_terminated

    @property
    def _obeys(self) -> bool:
        """Whether the next token may be the grammar's."""
        return self._places[-1] is not _Place.THINKING

    @property
    def _beside(self) -> frozenset[int]:
        """What may come here beside what the grammar admits."""
        place = self._places[-1]
        if self._passed or place is _Place.BLANK:
            return frozenset()
        return frozenset({self._opens}) if place is _Place.OPENING else self._blanks

    def copy(self) -> ReasoningGate:
        other = ReasoningGate(self._matcher.copy(), self._opens, self._closes, self._ends, self._blanks)
        other._places, other._passed = list(self._places), self._passed
        return other
