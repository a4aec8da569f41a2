"""The engine's loop and its time: every moment belongs to one stage."""

from __future__ import annotations

from typing import Any

from banyan_runtime.server.stages import IDLE, LAUNCH, OUTPUT, RECV, SCHEDULE, WAIT_DEVICE, Stages, TimedHandle
from banyan_runtime.wire import SCHEDULER_STAGES


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_lies_between_two_points_belongs_to_the_stage_that_the_second_ends() -> None:
    clock = Clock()
    stages = Stages(clock)
    clock.now += 50  # loading the model
    stages.begin()

    class Step:
        def result(self) -> Any:
            clock.now += 8
            return "tokens"

    for stage, seconds in ((OUTPUT, 1), (IDLE, 16), (RECV, 2), (SCHEDULE, 0.5), (LAUNCH, 4)):
        clock.now += seconds
        stages.end(stage)
    clock.now += 0.25
    assert TimedHandle(Step(), stages).result() == "tokens"
    clock.now += 32
    stages.end(OUTPUT)
    told = dict(zip(SCHEDULER_STAGES, stages.seconds, strict=True))
    assert told == {"recv": 2, "schedule": 0.75, "launch": 4, "wait_device": 8, "output": 33, "idle": 16}
    assert (told["wait_device"], told["schedule"]) == (stages.seconds[WAIT_DEVICE], stages.seconds[SCHEDULE])
