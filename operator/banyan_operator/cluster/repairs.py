"""Notices when somebody else keeps changing what the operator puts back, and slows the operator down then."""

from __future__ import annotations

from collections import deque
from typing import Final

from banyan_operator.kube.objects import Key

WINDOW_S: Final = 300.0
LIMIT: Final = 5  # repairs of one object in the window; more is a fight
SLOW_S: Final = 60.0


class Repairs:
    """When each object was put back."""

    def __init__(self) -> None:
        self._times: dict[Key, deque[float]] = {}

    def wait_s(self, key: Key, now: float) -> float:
        """How long to leave the object alone from now on, s; 0: put it back now."""
        times = self._recent(key, now)
        if times is None or len(times) <= LIMIT:
            return 0.0
        return max(0.0, times[-1] + SLOW_S - now)

    def note(self, key: Key, now: float) -> None:
        self._times.setdefault(key, deque(maxlen=LIMIT + 1)).append(now)

    def _recent(self, key: Key, now: float) -> deque[float] | None:
        times = self._times.get(key)
        if times is None:
            return None
        while times and now - times[0] > WINDOW_S:
            times.popleft()
        if not times:
            del self._times[key]
            return None
        return times
