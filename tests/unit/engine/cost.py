"""Cost as a count, so that a test of it gives the same answer on every machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable


def lines_run(function: Callable[[], object]) -> int:
    """How many lines of Python `function` executes."""
    lines = 0

    def trace(frame: object, event: str, argument: object) -> object:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    collects = gc.isenabled()
    gc.disable()  # what other tests left behind may run some lines when it is collected
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        function()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return lines
