"""How many prompt tokens a step may have, so that no step takes long on a slow device."""

from __future__ import annotations

from typing import Final

from banyan_runtime.engine.step_cost import StepCost

SMALLEST_CHUNK: Final = 256  # tokens; smaller steps read all weights for too little: half as many tokens a second were measured at 64
WELL_UNDER: Final = 0.5  # of the target: a step twice as large would still meet it
SPREAD: Final = 0.1  # prompts are often of much the same length
WORTH: Final = 2  # so that a third of such a step, at most, is what others could have shared


class ChunkSize:
    """`size` is `most` (None: whole prompts, and it stays so) or less, whole pages, as earlier steps took their time.

    A step should take `target_s` seconds at most (0: any time), but none is cut below `least` tokens. It begins there: nothing is known
    of the device yet, and the first long prompt could take any time.
    """

    def __init__(self, most: int | None, page_size: int, target_s: float, least: int = SMALLEST_CHUNK) -> None:
        self.size = most
        self._least = least
        self._most = most
        self._page = page_size
        self._target_s = target_s
        self._cost = StepCost(SPREAD)
        if most is not None and target_s:
            self._set(least)

    def aim(self, target_s: float, least: int) -> None:
        """Change the target, which is above 0, and the floor."""
        if self.size is not None and (target_s, least) != (self._target_s, self._least):
            size = int(self.size * min(1.0, target_s / self._target_s))
            self._target_s, self._least = target_s, least
            self._set(size)

    def learn(self, tokens: int, seconds: float, size: int | None) -> None:
        """A step with so many prompt tokens, formed under the chunk `size`, took so long."""
        self._cost.learn(tokens, seconds)
        if self.size is None or size is None or not self._target_s:
            return
        fitting = int(tokens * self._target_s / max(seconds, 1e-9))
        if seconds > self._target_s:
            self._set(min(self.size, fitting))
        elif seconds < WELL_UNDER * self._target_s and tokens > size - self._page:
            # the chunk was what bound it; a step that was shorter for want of prompts tells nothing about longer ones
            self._set(max(self.size, min(2 * size, fitting)))

    def worth_a_step(self, tokens: int, most: int) -> bool:
        """Whether so many tokens cost WORTH times what a step costs beside them, or fill a chunk, of `most` where prompts are whole."""
        return not self._cost.known or tokens >= min(WORTH * self._cost.weights_worth(), self.size or most)

    def _set(self, size: int) -> None:
        assert self._most is not None
        least = -(-self._least // self._page) * self._page
        self.size = min(max(size - size % self._page, least), self._most)
