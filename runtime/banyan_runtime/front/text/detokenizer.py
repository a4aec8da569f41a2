"""Text from a growing list of token ids, never splitting a character and never taking back what was given out."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Final, Protocol

_WINDOW_LIMIT: Final = 8  # pending tokens; no character has more tokens than that, so what is there is final


class Detokenizer(Protocol):
    """The state of one sequence. The pieces of `feed` and `finish`, joined, do not depend on how the ids were cut."""

    skip: frozenset[int]
    """Tokens that are left out."""

    def feed(self, ids: Sequence[int]) -> str:
        """The text that is certain after these further ids; "" while a character is incomplete."""
        ...

    def finish(self) -> str:
        """What was held back: an incomplete character as U+FFFD."""
        ...


class ByteDetokenizer:
    """For vocabularies with known bytes: constant work per token, at most three bytes pending."""

    __slots__ = ("_decode", "_table", "skip")

    def __init__(self, table: Sequence[bytes], skip: frozenset[int]) -> None:
        self._table = table
        self.skip = skip
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, ids: Sequence[int]) -> str:
        table, skip, size = self._table, self.skip, len(self._table)
        if len(ids) == 1:
            token_id = ids[0]
            return self._decode(table[token_id]) if 0 <= token_id < size and token_id not in skip else ""
        return self._decode(b"".join(table[token_id] for token_id in ids if 0 <= token_id < size and token_id not in skip))

    def finish(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """For every other vocabulary: decodes a window of the last tokens and gives out the difference.

    `decode` is the library's, without skipping anything; ids to skip are left out here.
    """

    __slots__ = ("_decode", "_ids", "_read", "_start", "skip")

    def __init__(self, decode: Callable[[Sequence[int]], str], skip: frozenset[int]) -> None:
        self._decode = decode
        self.skip = skip
        self._ids: list[int] = []
        self._start = 0  # the window's first token
        self._read = 0  # tokens before this one have been given out

    def feed(self, ids: Sequence[int]) -> str:
        return "".join(self._one(token_id) for token_id in ids if token_id not in self.skip)

    def _one(self, token_id: int) -> str:
        self._ids.append(token_id)
        return self._advance(final=len(self._ids) - self._read > _WINDOW_LIMIT)

    def _advance(self, *, final: bool) -> str:
        given = self._decode(self._ids[self._start : self._read])
        whole = self._decode(self._ids[self._start :])
        if not final and (whole.endswith("�") or len(whole) <= len(given)):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return whole[len(given) :]

    def finish(self) -> str:
        return self._advance(final=True) if self._read < len(self._ids) else ""
