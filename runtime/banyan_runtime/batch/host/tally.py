"""What a host counts for the server's metrics, which outlive it: it tells how much more there is, a JSON line at a time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections import Counter
from typing import Final

import msgspec

from banyan_runtime.batch.host.documents import BatchDocument, Counts

TELL_S: Final = 1.0
BEAT_TELLS: Final = 2  # at every so many the server hears from us, though there be nothing new: who says nothing for long is ended
STATUSES: Final = ("completed", "failed", "cancelled", "expired")


class News(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was counted since the host told last; nothing, if it only says that it is there."""

    lines: dict[str, int] = {}  # with an outcome, by status
    retries: int = 0
    storage_errors: dict[str, int] = {}  # of S3, by operation
    storage_bytes: dict[str, int] = {}  # of S3, by direction


class Tally:
    """Counts that only grow. Those of the storage are written by its threads, so nothing is ever set back."""

    def __init__(self) -> None:
        self.lines: Counter[str] = Counter()
        self.retries = 0
        self.storage_errors: Counter[str] = Counter()
        self.storage_bytes: Counter[str] = Counter()
        self._told = News()

    def ran(self, before: Counts, now: Counts) -> None:
        """More lines of a batch have had their answer."""
        self.lines["completed"] += max(0, now.completed - before.completed)
        self.lines["failed"] += max(0, now.failed - before.failed)

    def ended(self, batch: BatchDocument) -> None:
        """A batch is over: its other lines are not run any more."""
        if batch.status in ("cancelled", "expired"):
            self.lines[batch.status] += max(0, batch.counts.total - batch.counts.completed - batch.counts.failed)

    def news(self) -> News | None:
        """What came since the last call; None: nothing."""
        now, told = News(dict(self.lines), self.retries, dict(self.storage_errors), dict(self.storage_bytes)), self._told
        self._told = now
        if now == told:
            return None
        return News(
            _more(now.lines, told.lines),
            now.retries - told.retries,
            _more(now.storage_errors, told.storage_errors),
            _more(now.storage_bytes, told.storage_bytes),
        )

    async def tell(self, descriptor: int) -> None:
        """Until cancelled, write to the server's end of a pipe what is new, and that this process gets on: its event loop comes round,
        whatever the storage does."""
        with contextlib.suppress(OSError):  # the server has ended, and so will we
            for tell in itertools.count(1):
                await asyncio.sleep(TELL_S)
                news = self.news()
                if news is not None or tell % BEAT_TELLS == 0:
                    os.write(descriptor, msgspec.json.encode(news or News()) + b"\n")


def _more(now: dict[str, int], told: dict[str, int]) -> dict[str, int]:
    return {name: count - told.get(name, 0) for name, count in now.items()}
