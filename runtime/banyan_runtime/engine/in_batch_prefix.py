"""Common prefixes among requests whose pages are not in the tree yet: those that wait, or are being computed right now."""

from __future__ import annotations

from bisect import bisect_left

from banyan_runtime.engine.memory.prefixes import common_tokens


class InBatchPrefixes:
    """A set of texts that can be asked for the longest prefix it shares with another one.

    The texts are kept sorted as bytes: of all texts the one with the longest common prefix is then a direct neighbour.
    """

    def __init__(self) -> None:
        self._texts: dict[str, list[bytes]] = {}  # by salt

    def add(self, key: bytes, salt: str) -> None:
        texts = self._texts.setdefault(salt, [])
        texts.insert(bisect_left(texts, key), key)

    def longest(self, key: bytes, salt: str) -> int:
        """Tokens that `key` shares with the text of the set that is most like it."""
        texts = self._texts.get(salt)
        if not texts:
            return 0
        place = bisect_left(texts, key)
        return max(common_tokens(text, 0, key) for text in texts[max(place - 1, 0) : place + 1])
