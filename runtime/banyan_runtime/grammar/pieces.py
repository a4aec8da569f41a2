"""Text that is partly tokens of its own: `<tool_call>` written out must be the one token, because parsers look for that."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

Piece = str | int
"""Plain text, or the id of a token."""


class Splitter:
    """Cuts text at the tokens beside the vocabulary proper. Those made of blanks alone are text: how blanks are cut into
    tokens is the model's own business."""

    def __init__(self, added: Mapping[str, int]) -> None:
        self.ids = {text: token_id for text, token_id in added.items() if len(text) > 2 and not text.isspace()}
        self._pattern = _alternatives(tuple(self.ids))

    def split(self, text: str) -> list[Piece]:
        if self._pattern is None:
            return [text] if text else []
        pieces: list[Piece] = []
        end = 0
        for match in self._pattern.finditer(text):
            if match.start() > end:
                pieces.append(text[end : match.start()])
            pieces.append(self.ids[match[0]])
            end = match.end()
        return [*pieces, text[end:]] if end < len(text) else pieces

    def whole(self, text: str, begin: str) -> str:
        """`begin` begins with `text`: as much more of it as belongs to a token that `text` ends within."""
        if self._pattern is not None:
            for match in self._pattern.finditer(begin):
                if match.start() < len(text) < match.end():
                    return begin[: match.end()]
        return text


@lru_cache(maxsize=8)
def _alternatives(texts: tuple[str, ...]) -> re.Pattern[str] | None:
    longest_first: Iterable[str] = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if texts else None
