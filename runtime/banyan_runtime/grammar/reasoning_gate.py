"""A grammar for what comes after reasoning: until the reasoning has ended everything may come, but no end of the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from banyan_runtime.grammar.backend import Matcher, Words
from banyan_runtime.grammar.errors import GrammarError

_OPENING: Final = "opening"  # nothing has come, and reasoning may begin
_THINKING: Final = "thinking"
_CLOSED: Final = "closed"  # the marker that ends it has just come
_BLANK: Final = "blank"  # and the empty line behind it

_Place = tuple[str, int]  # and how much of the marker has been seen


class Marker:
    """Token ids that end something, found one by one (Knuth, Morris and Pratt)."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = tuple(ids)
        self._borders = [0]
        for token_id in self._ids[1:]:
            self._borders.append(self.step(self._borders[-1], token_id))

    def __len__(self) -> int:
        return len(self._ids)

    def step(self, seen: int, token_id: int) -> int:
        """How many of the marker's ids have been seen now, after `seen` of them and this one."""
        while seen and token_id != self._ids[seen]:
            seen = self._borders[seen - 1]
        return seen + (token_id == self._ids[seen])


class ReasoningGate:
    """`marker` ends the reasoning. That has begun already, or an output may begin with one of `opens` and then has some; one that
    begins otherwise obeys from its first token. `ends` may not come in it: an output that ends there would not be of the
    grammar. One of `blanks` may come behind it."""

    def __init__(self, matcher: Matcher, opens: frozenset[int], marker: Marker, ends: frozenset[int], blanks: frozenset[int]) -> None:
        self._matcher = matcher
        self._opens = opens
        self._marker = marker
        self._ends = ends
        self._blanks = blanks
        self._places: list[_Place] = [(_OPENING, 0) if opens else (_THINKING, 0)]  # one more for each token accepted here
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
        phase, seen = self._places[-1]
        if self._passed:
            return None
        if phase == _OPENING and token_id in self._opens:
            return _THINKING, 0
        if phase == _THINKING and token_id not in self._ends:
            seen = self._marker.step(seen, token_id)
            return (_THINKING, seen) if seen < len(self._marker) else (_CLOSED, 0)
        if phase == _CLOSED and token_id in self._blanks:
            return _BLANK, 0
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
        return self._places[-1][0] != _THINKING

    @property
    def _beside(self) -> frozenset[int]:
        """What may come here beside what the grammar admits."""
        phase = self._places[-1][0]
        if self._passed or phase == _BLANK:
            return frozenset()
        return self._opens if phase == _OPENING else self._blanks

    def copy(self) -> ReasoningGate:
        other = ReasoningGate(self._matcher.copy(), self._opens, self._marker, self._ends, self._blanks)
        other._places, other._passed = list(self._places), self._passed
        return other
