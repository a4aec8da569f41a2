"""The time that everything in local mode goes by."""

from __future__ import annotations

import time


class SteadyClock:
    """Unix time as it was when this was made, and from then on what has passed, while the machine slept too.

    Somebody sets the machine's clock: put back an hour, it would hold everything that falls due for an hour, probes first; put ahead, it
    would end what has a time to start in.
    """

    def __init__(self) -> None:
        self._began = time.time() - _passed()

    def __call__(self) -> float:
        return self._began + _passed()


def _passed() -> float:
    """Seconds that nobody can set. Elsewhere than on Linux a sleeping machine's may be left out."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
