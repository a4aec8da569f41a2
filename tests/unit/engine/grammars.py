"""Grammars without a meaning: what may come next is a hash of what came before, so that a mask of another output, or of another place in
it, changes the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from banyan_runtime.engine.constraints import Matcher
from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.step import U32
from banyan_runtime.wire import Constraint, Grammar

MASK = (1 << 64) - 1
A, B, C = 0xD1342543DE82EF95, 0xAF251AF3B0F025B5, 0xB564EF22EC7AECE5


def _scramble(number: int) -> int:
    number = ((number & MASK) ^ (number & MASK) >> 30) * C & MASK
    return number ^ number >> 29


@dataclass
class Rule:
    """One output that obeys the grammar `key`. Of 25 states one ends it; now and then it fails, as grammars do that grow too large."""

    key: int
    vocabulary: int
    state: int = 0
    accepted: int = 0

    def __post_init__(self) -> None:
        self.state = _scramble(self.key * A)

    @property
    def admits(self) -> set[int]:
        """Raises GrammarError."""
        if self.state % 151 == 7:
            raise GrammarError("what may come next takes too long to find out")
        return {id for id in range(self.vocabulary) if _scramble(self.state + id * B) % 8 < 5}

    def fill(self, words: U32) -> None:
        words[:] = 0
        for id in self.admits:
            words[id // 32] |= 1 << id % 32

    def accept(self, token_id: int) -> bool:
        if _scramble(self.state ^ token_id) % 151 == 7:
            raise GrammarError("it grows too large")
        if token_id not in self.admits:
            return False
        self.state, self.accepted = _scramble(self.state + (token_id + 1) * A), self.accepted + 1
        return True

    @property
    def is_terminated(self) -> bool:
        return self.accepted > 0 and self.state % 25 == 3

    def next_ids(self, kept_back: Sequence[int]) -> set[int]:
        """What may be drawn, without some ids where others are left; nothing, if it fails."""
        try:
            admitted = self.admits
        except GrammarError:
            return set()
        return admitted - set(kept_back) or admitted


@dataclass
class Ticket:
    answer: Matcher

    def ready(self) -> Matcher | GrammarError | None:
        return self.answer


@dataclass
class Rules:
    """Compiles at once."""

    vocabulary: int
    made: list[Rule] = field(default_factory=list)

    def request(self, constraint: Constraint, stop_ids: tuple[int, ...]) -> Ticket:
        return Ticket(Rule(int(constraint.grammar.text), self.vocabulary))

    def fill(self, matchers: Sequence[Matcher], words: U32) -> list[GrammarError | None]:
        return each_filled(matchers, words)


def each_filled(matchers: Sequence[Any], words: U32) -> list[GrammarError | None]:
    """One after another."""
    failed: list[GrammarError | None] = []
    for matcher, row in zip(matchers, words, strict=True):
        try:
            matcher.fill(row)
            failed.append(None)
        except GrammarError as error:
            failed.append(error)
    return failed


def constraint(key: int) -> Constraint:
    return Constraint(Grammar("rule", str(key)))
