"""Slows the engine process of a server that tests start, while the file BANYAN_TEST_SLOW is there. Python runs this at its start."""

from __future__ import annotations

import os
import sys
import time

STEP_S = 0.01  # more than ten times what a step of the tests' model takes

if "banyan_runtime.server.engine_process" in sys.orig_argv:
    from banyan_runtime.engine.loop import Engine

    turn, slow = Engine.turn, os.environ["BANYAN_TEST_SLOW"]

    def slow_turn(self: Engine):  # type: ignore[no-untyped-def]
        if os.path.exists(slow):  # noqa: PTH110 (for each step)
            time.sleep(STEP_S)
        return turn(self)

    Engine.turn = slow_turn  # type: ignore[method-assign]
