"""What the engine's loop spends its time on, for /metrics. Each point that the loop passes ends a stage, so that nothing is
missed and nothing counted twice."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from banyan_runtime.step import Handle, StepResult, TokenMask
from banyan_runtime.wire import SCHEDULER_STAGES

RECV: Final = SCHEDULER_STAGES.index("recv")
SCHEDULE: Final = SCHEDULER_STAGES.index("schedule")
LAUNCH: Final = SCHEDULER_STAGES.index("launch")
WAIT_DEVICE: Final = SCHEDULER_STAGES.index("wait_device")
OUTPUT: Final = SCHEDULER_STAGES.index("output")
IDLE: Final = SCHEDULER_STAGES.index("idle")


class Stages:
    """Seconds by stage since the start, in the order of SCHEDULER_STAGES."""

    __slots__ = ("_clock", "_since", "seconds")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self.seconds = [0.0] * len(SCHEDULER_STAGES)

    def begin(self) -> None:
        """What was before is nobody's stage."""
        self._since = self._clock()

    def end(self, stage: int) -> None:
        """What was done since the last call was `stage`."""
        now = self._clock()
        self.seconds[stage] += now - self._since
        self._since = now


class TimedHandle:
    """A launched step whose wait is counted."""

    __slots__ = ("_handle", "_stages")

    def __init__(self, handle: Handle, stages: Stages) -> None:
        self._handle = handle
        self._stages = stages

    def draw(self, mask: TokenMask | None) -> None:
        self._stages.end(SCHEDULE)
        self._handle.draw(mask)
        self._stages.end(LAUNCH)

    def result(self) -> StepResult:
        self._stages.end(SCHEDULE)
        result = self._handle.result()
        self._stages.end(WAIT_DEVICE)
        return result
