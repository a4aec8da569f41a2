"""How many prompt tokens a step may have, so that on a slow device no step takes long."""

from __future__ import annotations

from typing import Final

SMALLEST_CHUNK: Final = 256  # tokens; smaller steps read all weights for too little: half as many tokens a second were measured at 64
WELL_UNDER: Final = 0.5  # of the target: a step twice as large would still meet it


class Chunk:
    """`size` is `most` (None: whole prompts, and it stays so) or less, as the steps before turned out; whole pages.

    `target_s` is how long a prefill step should take, 0: it does not matter; none is cut below `least` tokens for it. So many are where it
    begins: of a device that nothing is known of, the first long prompt could take any time, and everybody would wait for it.
    """

    def __init__(self, most: int | None, page_size: int, target_s: float, least: int = SMALLEST_CHUNK) -> None:
        self.size = most
        self._least = least
        self._most = most
        self._page = page_size
        self.target_s = target_s
        if most is not None and target_s:
            self._set(least)

    def learn(self, tokens: int, seconds: float, size: int | None) -> None:
        """A prefill step of so many tokens, formed under the chunk `size`, took so long."""
        if self.size is None or self._most is None or size is None or not self.target_s:
            return
        fitting = int(tokens * self.target_s / max(seconds, 1e-9))
        if seconds > self.target_s:
            self._set(min(self.size, fitting))
        elif seconds < WELL_UNDER * self.target_s and tokens > size - self._page:
            # the chunk was what bound it; a step that was shorter for want of prompts tells nothing about longer ones
            self._set(max(self.size, min(2 * size, fitting)))

    def _set(self, size: int) -> None:
        assert self._most is not None
        least = -(-self._least // self._page) * self._page
        self.size = min(max(size - size % self._page, least), self._most)
