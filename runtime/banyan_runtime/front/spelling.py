"""Which tokens spell the content of an answer, for who tells something of each of them.

Between the tokens and the content stand a detokenizer that leaves tokens out, a parser that takes markers and reasoning away, and stop
strings that hold text back. So what tokens said is kept until pieces of it come out at the other end, and each piece is looked for: right
behind the last one if that was of the same kind, else as near to the end as it stands, since nothing holds much text back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["content", "reasoning"]


class Spelled(NamedTuple):
    """Tokens by their ordinals among those generated, from 0."""

    tokens: list[int]  # of the content, each once
    unsaid: int  # none before this one will be told of any more


@dataclass(slots=True)
class _Token:
    ordinal: int
    start: int  # of its text, in characters of all that was said; one that begins a character has none yet
    end: int
    told: bool = False


class Spelling:
    """Fed beside the parser of one sequence, one token at a time."""

    def __init__(self) -> None:
        self._said = ""  # from `_from` on: what was said and has not come out
        self._from = 0
        self._released = 0  # characters that the parser has been given
        self._tokens: deque[_Token] = deque()  # whose text has not come out whole
        self._last: Kind | None = None
        self._next = 0  # ordinal
        self._spelled: list[int] = []

    def say(self, text: str, *, silent: bool) -> None:
        """The text of the next token; `silent`: it has none by itself, so the text, if any, is not its own."""
        start = self._from + len(self._said)
        self._said += text
        if not silent:
            self._tokens.append(_Token(self._next, start, start + len(text)))
        self._next += 1

    def close(self, text: str) -> None:
        """What the detokenizer held back behind the last token."""
        self._said += text

    def release(self, characters: int) -> None:
        """So many more go to the parser; below 0: so many of those are held back."""
        self._released += characters

    def come_out(self, kind: Kind, text: str) -> None:
        """A piece of what the parser makes of it."""
        limit = self._released - self._from
        look = self._said.find if kind == "reasoning" else self._said.rfind  # what was thought was said first
        at = 0 if self._last == kind and self._said.startswith(text) else look(text, 0, limit)
        if at < 0:  # a parser changed it
            at = max(0, limit - len(text))
        if kind == "content":
            self._tell(self._from + at, self._from + at + len(text))
        self._drop(at + len(text))
        self._last = kind

    def skip(self) -> None:
        """What was released meant something else."""
        self._drop(self._released - self._from)
        self._last = None

    def take(self) -> Spelled:
        """What has become certain since it was last taken."""
        spelled, self._spelled = self._spelled, []
        return Spelled(spelled, self._tokens[0].ordinal if self._tokens else self._next)

    def _tell(self, start: int, end: int) -> None:
        for token in self._tokens:
            if token.start >= end:
                break
            if not token.told and (token.end > start or token.start == token.end >= start):
                token.told = True
                self._spelled.append(token.ordinal)

    def _drop(self, characters: int) -> None:
        self._said = self._said[characters:]
        self._from += characters
        while self._tokens and self._tokens[0].start < self._from and self._tokens[0].end <= self._from:
            self._tokens.popleft()
