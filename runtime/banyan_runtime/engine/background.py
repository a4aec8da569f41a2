"""Background work: requests of a priority below 0, such as the lines of a batch. They run in what online requests leave.

| online requests | background gets |
|---|---|
| wait | nothing of their prefill steps, and none of its own |
| run | `rows_beside` rows of their decode steps; to fill these, a short prefill step of its own after `prefill_every` of those |
| came within `lately_s` | every step, but none longer than `step_s`, since the next one may come while it runs |
| none | everything; its prefill steps take `alone_step_s` at most, for the first that comes |

So background is slow beside online requests, and waits for as long as some of them wait for memory. Who has been admitted keeps
its memory meanwhile, unless somebody online needs it, and goes on where it stopped.
"""

from __future__ import annotations

from typing import Final

from banyan_runtime.engine.chunk_size import SMALLEST_CHUNK, WELL_UNDER, ChunkSize
from banyan_runtime.engine.limits import EngineLimits

FEWEST_ROWS: Final = 4  # of a step that is kept short; with fewer a step costs about the same, for it reads all weights
FEWEST_TOKENS: Final = 64  # likewise, of a prompt
BACK_OFF: Final = 0.8  # of its rows are left to a step that took too long


class Background:
    """What background may have of the next step. Times are seconds on the engine's clock."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits.background
        self.chunk = ChunkSize(limits.chunk, limits.page_size, limits.background.alone_step_s)
        self._short_rows = limits.max_running
        self._most_rows = limits.max_running
        self._online = False  # whether such a request runs or waits
        self._online_at = float("-inf")  # when there was one last
        self._decodes = 0  # steps with online rows since background's last prefill

    def look(self, *, online: bool, now: float) -> None:
        """A step is going to be chosen; `online`: there is such a request that could be in it, now or soon."""
        self._online = online
        if online:
            self._online_at = now
        if self.keeps_short(now):
            self.chunk.aim(self._limits.step_s, FEWEST_TOKENS)
        else:
            self.chunk.aim(self._limits.alone_step_s, SMALLEST_CHUNK)

    def rows(self, now: float) -> int | None:
        """How many rows of a decode step it may have; None: all. At least 1, so while online ones decode, it goes on."""
        if self._online:
            return self._limits.rows_beside
        return self._short_rows if self.keeps_short(now) else None

    def keeps_short(self, now: float) -> bool:
        """Whether somebody online is there, or was a short while ago."""
        return self._online or now - self._online_at <= self._limits.lately_s

    @property
    def may_prefill(self) -> bool:
        """Beside online rows."""
        return self._decodes >= self._limits.prefill_every

    def prefilled(self) -> None:
        """It had a prefill step."""
        self._decodes = 0

    def decoded(self, *, online: bool) -> None:
        """There was a decode step, with or without online rows."""
        self._decodes += online

    def learn(self, rows: int, seconds: float) -> None:
        """A decode step of background alone took so long."""
        if seconds > self._limits.step_s:
            self._short_rows = max(int(BACK_OFF * min(rows, self._short_rows)), min(FEWEST_ROWS, self._most_rows))
        elif rows >= self._short_rows:
            more = self._short_rows if seconds < WELL_UNDER * self._limits.step_s else 1
            self._short_rows = min(self._short_rows + more, self._most_rows)
