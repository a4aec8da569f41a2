"""What follows from a step that the device had no memory for.

Its requests fail: one of them may be what takes too much, and would again. Steps with prompts, which take most, are made smaller, for a
while, since whoever has the memory may give it back. Where it is missing again within a minute, that was no help, and a server that fails
its requests is worth less than one that starts anew and measures what there is.
"""

from __future__ import annotations

from typing import Final

from banyan_runtime.engine.chunk import SMALLEST_CHUNK
from banyan_runtime.step import Step

WINDOW_S: Final = 60.0  # twice within it are too much
KEPT_S: Final = 3600.0  # after so long without a shortage steps may be twice as large again


class Shortage:
    """Times are seconds on the engine's clock."""

    def __init__(self, page_size: int, least: int = SMALLEST_CHUNK) -> None:
        self._page = page_size
        self._least = -(-least // page_size) * page_size
        self._met_at = float("-inf")
        self._tokens: int | None = None  # of a step with prompts, at most
        self._too_many = 0  # the most that there was no memory for since all were allowed

    def met(self, step: Step, now: float) -> bool:
        """There was no memory for a step. False: it was so before, within WINDOW_S."""
        if now - self._met_at <= WINDOW_S:
            return False
        if step.mode == "prefill":
            tokens = len(step.token_ids)
            self._too_many = max(tokens, self._too_many if self.most_tokens(now) else 0)
            self._tokens = max(tokens // 2 - tokens // 2 % self._page, self._least)
        self._met_at = now
        return True

    def most_tokens(self, now: float) -> int | None:
        """How many tokens a step with prompts may have, whole pages; None: as many as without any shortage."""
        if self._tokens is None:
            return None
        tokens = self._tokens << min(int((now - self._met_at) / KEPT_S), 64)
        return tokens if tokens < self._too_many else None
