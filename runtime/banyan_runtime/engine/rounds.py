"""Rounds: a decode step that is computed several times at a stretch, each time over the tokens that it gave before.

Between two steps the engine notes tokens, decides and tells the front. That takes some tenths of a millisecond: nothing beside the
step of a large model, more than the step of a very small one. There several rounds are one step, as long as nobody waits and the
step stays so short that neither a reader nor the next request can tell.
"""

from __future__ import annotations

from typing import Final

SECONDS: Final = 0.01  # that a step in rounds may take
MOST: Final = 8
ROWS: Final = 24  # at most: beyond it noting each row's tokens one by one costs more than steps that are noted as a whole
MEMORY: Final = 0.8  # of what earlier steps over as many rows count for


class Rounds:
    """Learns what a round takes, and says how many a step may have."""

    def __init__(self) -> None:
        self._rows = 0
        self._seconds = 0.0  # of a round over so many rows

    def choose(self, rows: int) -> int:
        """At least 1. More rows take longer, at worst each as long as another."""
        if not self._rows or rows > ROWS:
            return 1
        expected = self._seconds * max(1.0, rows / self._rows)
        return MOST if expected * MOST <= SECONDS else max(1, int(SECONDS / expected))

    def learn(self, rows: int, rounds: int, seconds: float) -> None:
        """A step took so long. What takes longer than it did is believed at once."""
        each = seconds / rounds
        self._seconds = max(each, MEMORY * self._seconds + (1 - MEMORY) * each) if rows == self._rows else each
        self._rows = rows

    def forget(self) -> None:
        """Other texts come, that may be far longer."""
        self._rows = 0
