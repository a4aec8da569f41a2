"""What follows from a step that the device had no memory for.

Its requests fail: one of them may take too much, and would again. Later steps are half as large, in tokens with prompts, else in rows,
until the engine ends. The requests of a step that cannot be smaller may come again after WINDOW_S. A second such step before that ends
the engine: a new one measures the memory that there is.
"""

from __future__ import annotations

from typing import Final

from banyan_runtime.engine.chunk_size import SMALLEST_CHUNK
from banyan_runtime.step import Step

WINDOW_S: Final = 60.0  # clients wait no longer for what they are told to wait for (OpenAI's)
SOON_S: Final = 1.0


class StepBounds:
    """How large steps may be after others had no memory; None: as large as ever."""

    def __init__(self, page_size: int, least: int = SMALLEST_CHUNK) -> None:
        self.tokens: int | None = None  # of a step with prompts, whole pages
        self.rows: int | None = None  # requests that run
        self._page_size = page_size
        self._least = -(-least // page_size) * page_size
        self._smallest_at = float("-inf")

    def halve(self, step: Step, now: float) -> float | None:
        """There was no memory for a step. In how many seconds its requests may come again; None: nothing helps."""
        tokens, rows = len(step.token_ids), len(step.rows)
        if step.mode != "decode" and tokens > self._least:
            self.tokens = max(tokens // 2 - tokens // 2 % self._page_size, self._least)
            return SOON_S
        if step.mode != "prefill" and rows > 1:
            self.rows = rows // 2
            return SOON_S
        again, self._smallest_at = now - self._smallest_at <= WINDOW_S, now
        return None if again else WINDOW_S
