"""What follows from a step that the device had no memory for.

Its requests fail: one of them may be what takes too much, and would again. Then there is less of what was too much, tokens of a step with
prompts or rows of decode steps, for a while, since whoever has the memory may give it back. Who was in a step that cannot be made smaller
is told to come again after WINDOW_S; where another such step comes sooner, nothing helps here, and a server that fails its requests is
worth less than one that starts anew and measures what there is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from banyan_runtime.engine.chunk import SMALLEST_CHUNK
from banyan_runtime.step import Step

WINDOW_S: Final = 60.0  # clients wait no longer for what they are told to wait for (OpenAI's)
SOON_S: Final = 1.0
KEPT_S: Final = 3600.0  # after so long without a shortage there may be twice as much again


@dataclass(slots=True)
class _Bound:
    """Half of what was too much, whole units."""

    unit: int
    least: int
    most: int | None = None
    too_much: int = 0  # the most that was since there was no bound
    since: float = 0.0

    def halve(self, number: int, now: float) -> bool:
        """There was no memory for such a number. Whether there will be less from now on."""
        self.too_much = max(number, self.too_much if self.at(now) is not None else 0)
        self.most = max(number // 2 - number // 2 % self.unit, self.least)
        self.since = now
        return self.most < number

    def at(self, now: float) -> int | None:
        """None: there is no bound."""
        if self.most is None:
            return None
        most = self.most << min(int((now - self.since) / KEPT_S), 64)
        return most if most < self.too_much else None


class Shortage:
    """Times are seconds on the engine's clock."""

    def __init__(self, page_size: int, least: int = SMALLEST_CHUNK) -> None:
        self._tokens = _Bound(page_size, -(-least // page_size) * page_size)
        self._rows = _Bound(1, 1)
        self._helpless_at = float("-inf")

    def met(self, step: Step, now: float) -> float | None:
        """There was no memory for a step. In how many seconds those in it may come again; None: nothing helps."""
        if step.mode != "decode" and self._tokens.halve(len(step.token_ids), now):
            return SOON_S
        if step.mode != "prefill" and self._rows.halve(len(step.rows), now):
            return SOON_S
        again, self._helpless_at = now - self._helpless_at <= WINDOW_S, now
        return None if again else WINDOW_S

    def most_tokens(self, now: float) -> int | None:
        """How many tokens a step with prompts may have, whole pages; None: as many as without any shortage."""
        return self._tokens.at(now)

    def most_rows(self, now: float) -> int | None:
        """How many requests may run; None likewise."""
        return self._rows.at(now)
