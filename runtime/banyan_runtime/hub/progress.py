"""Progress of something slow, told the same way to a terminal, a log and the server's /readyz."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final

from tqdm import tqdm

from banyan_runtime.logs import as_line

Report = Callable[[str, int, str], None]
"""(phase, percent 0..100, detail)"""


class Download:
    """Bytes of what this process fetches or has fetched, for its metrics."""

    def __init__(self) -> None:
        self.done = 0
        self.size = 0


DOWNLOAD: Final = Download()


def silent(phase: str, percent: int, detail: str) -> None:
    """A `Report` that nobody listens to."""


class Bar:
    """A bar on a terminal, a line every 10 percent or 10 s elsewhere, and `report` for whoever else listens."""

    def __init__(self, title: str, total: int, *, unit: str, phase: str, report: Report = silent) -> None:
        self._title, self._total, self._phase, self._report = title, max(total, 1), phase, report
        self._done = 0
        self._told_percent, self._told_at = -1, 0.0
        self._bar = tqdm(total=total, desc=title, unit=unit, unit_scale=unit == "B", file=sys.stderr) if sys.stderr.isatty() else None

    def __enter__(self) -> Bar:
        self.to(0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()

    def to(self, done: int) -> None:
        """`done` of the total are done now."""
        if self._bar is not None:
            self._bar.update(done - self._done)
        self._done = done
        percent, now = min(100, 100 * done // self._total), time.monotonic()
        if percent // 10 > self._told_percent // 10 or now - self._told_at > 10:
            if self._bar is None:
                print(as_line(f"{self._title}: {percent} %"), file=sys.stderr, flush=True)
            self._told_percent, self._told_at = percent, now
        if self._phase == "downloading":
            DOWNLOAD.done, DOWNLOAD.size = done, self._total
        self._report(self._phase, percent, self._title)

    def advance(self, more: int = 1) -> None:
        self.to(self._done + more)
