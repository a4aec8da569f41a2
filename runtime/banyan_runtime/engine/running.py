"""The requests that decode."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from banyan_runtime.engine.memory.tables import Tables
from banyan_runtime.engine.request import Request
from banyan_runtime.engine.retraction import CLIP_MAX_NEW
from banyan_runtime.step import I32


class Running:
    """In the order of admission. Those that ended stay among `requests` until they are swept, when a decode step is formed.

    `requests` is replaced, never edited: steps in flight hold it.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self.requests: list[Request] = []
        self._dead = 0
        self._rows: I32 | None = None
        self._online: tuple[I32, int] | None = None  # rows, and how many of them are online
        self._part: tuple[I32, int, list[Request], I32] | None = None

    def __len__(self) -> int:
        """With those that ended."""
        return len(self.requests)

    @property
    def living(self) -> int:
        return len(self.requests) - self._dead

    @property
    def rows(self) -> I32:
        """Rows of those that live; the same object as long as they are the same in the same order."""
        if self._rows is None:
            self._rows = np.array([request.row for request in self.requests if not request.over], dtype=np.int32)
        return self._rows

    @property
    def online(self) -> int:
        """Those that live and are not background."""
        rows = self.rows
        if self._online is None or self._online[0] is not rows:
            self._online = rows, int(np.count_nonzero(self._tables.level[rows] >= 0))
        return self._online[1]

    @property
    def background(self) -> int:
        """Those that live and are background."""
        return self.living - self.online

    def part(self, background: int | None) -> tuple[list[Request], I32]:
        """Those online and so many of background, the first ones; None: everybody. Everybody among `requests` lives.

        Their rows are the same object as long as they are the same in the same order.
        """
        rows = self.rows
        if background is None or self.background <= background:
            return self.requests, rows
        if self._part is None or self._part[0] is not rows or self._part[1] != background:
            behind = self._tables.level[rows] < 0
            index = np.flatnonzero(~behind | (np.cumsum(behind) <= background))
            self._part = rows, background, [self.requests[place] for place in index.tolist()], rows[index]
        return self._part[2], self._part[3]

    def merge(self, fresh: Iterable[Request]) -> None:
        """These run, too."""
        fresh = list(fresh)
        for request in fresh:
            request.merged = True
        self.keep([*self.requests, *fresh], dead=self._dead)

    def ended(self) -> None:
        """One of them is over."""
        self._dead += 1
        self._rows = None

    def sweep(self) -> bool:
        """Drop those that ended; whether there were any."""
        if not self._dead:
            return False
        self.keep([request for request in self.requests if not request.over])
        return True

    def keep(self, requests: list[Request], dead: int = 0) -> None:
        """Only these run; `dead` of them ended."""
        self.requests, self._dead, self._rows = requests, dead, None

    def expected_output(self) -> int:
        """What they may still generate, each cut to CLIP_MAX_NEW; those that ended count until they are swept."""
        tables, rows = self._tables, self.rows
        left = tables.max_new[rows] - (tables.length[rows] - tables.prompt[rows])
        total = int(np.minimum(left, CLIP_MAX_NEW).sum())
        if self._dead:
            total += sum(min(request.remaining, CLIP_MAX_NEW) for request in self.requests if request.over)
        return total
