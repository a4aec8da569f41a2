"""How long nothing is taken in from the engine behind a telling of streams: decided here, the timers are the caller's.

As long as the telling took, so that telling takes half of the time at most. Then for as long as the loop has no idle time, since what
it is busy with, such as new requests, goes first, and what comes meanwhile is told together and costs less. Never beyond LONGEST_S, and
where the loop has time to spare nothing waits longer than the telling took.

Whether there was idle time, the thread's own processor time says. A thread that wants a processor and is given none looks idle: its streams
are told sooner then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

LONGEST_S: Final = 0.02  # what nobody who reads along sees
_AT_ONCE_S: Final = 0.0005  # telling that took less is followed by no rest
_SLICE_S: Final = 0.001  # after which a busy loop is looked at again; event loops' timers know no less
_BUSY: Final = 0.8  # of the time since the last look; what a busy thread lacks goes to others of the machine


class Rest:
    """The rest behind one telling after another."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, worked: Callable[[], float] = time.thread_time) -> None:
        """Both tell seconds: of the wall, and those that the calling thread has computed."""
        self._clock = clock
        self._worked = worked
        self._end = 0.0
        self._looked = 0.0  # by the clock
        self._had_worked = 0.0  # at that time

    def begin(self, spent: float) -> float:
        """Listeners were told, which took `spent` seconds: how long to wait before `more` is asked. 0: not at all."""
        if spent < _AT_ONCE_S:
            return 0.0
        self._looked, self._had_worked = self._clock(), self._worked()
        self._end = self._looked + LONGEST_S
        return min(spent, LONGEST_S)

    def more(self) -> float:
        """That time is over: how much longer to wait before it is asked again. 0: the rest is over."""
        now, worked = self._clock(), self._worked()
        busy = worked - self._had_worked > _BUSY * (now - self._looked)
        self._looked, self._had_worked = now, worked
        left = self._end - now
        return _SLICE_S if busy and left >= _SLICE_S else 0.0
