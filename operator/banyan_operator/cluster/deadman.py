"""Ends the process whatever its tasks do: a thread that waits for a time that is moved on while all is well."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

TICK_S: Final = 0.25


class Deadman:
    """`arm`: the process ends after so long. `watch`: it ends when that moment (monotonic, s) is past."""

    def __init__(self, end: Callable[[int], None] = os._exit) -> None:
        self._end = end
        self._lock = threading.Lock()
        self._armed: tuple[float, str] | None = None
        self._deadline: Callable[[], float] | None = None
        threading.Thread(target=self._run, name="deadman", daemon=True).start()

    def arm(self, after_s: float, why: str) -> None:
        """Of several the earliest counts."""
        with self._lock:
            at = time.monotonic() + after_s
            if self._armed is None or at < self._armed[0]:
                self._armed = (at, why)

    def watch(self, deadline: Callable[[], float]) -> None:
        with self._lock:
            self._deadline = deadline

    def _run(self) -> None:
        while True:
            time.sleep(TICK_S)
            if (why := self._overdue(time.monotonic())) is not None:
                teller = threading.Thread(target=log.error, args=("%s; ending at once", why), daemon=True)
                teller.start()
                teller.join(TICK_S)  # who is stuck may be stuck in writing its log
                self._end(1)
                return

    def _overdue(self, now: float) -> str | None:
        with self._lock:
            if self._armed is not None and now >= self._armed[0]:
                return self._armed[1]
            if self._deadline is not None and now >= self._deadline():
                return "the lease has run out unrenewed"
            return None
