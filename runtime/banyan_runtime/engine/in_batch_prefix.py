"""Common prefixes among requests whose pages are not in the tree yet: those that wait, or are being computed right now."""

from __future__ import annotations

from bisect import bisect_left

from banyan_runtime.engine.memory.prefixes import common_tokens


class InBatchPrefixes:
    """A set of keys (token ids as bytes) that can be asked for the longest prefix it shares with another one.

    The keys are kept sorted: of all keys the one with the longest common prefix is then a direct neighbour.
    """

    def __init__(self) -> None:
        self._keys: dict[str, list[bytes]] = {}  # by salt

    def add(self, key: bytes, salt: str) -> None:
        keys = self._keys.setdefault(salt, [])
        keys.insert(bisect_left(keys, key), key)

    def longest(self, key: bytes, salt: str) -> int:
        """Tokens that `key` shares with the key of the set that is most like it."""
        keys = self._keys.get(salt)
        if not keys:
            return 0
        place = bisect_left(keys, key)
        return max(common_tokens(other, 0, key) for other in keys[max(place - 1, 0) : place + 1])
