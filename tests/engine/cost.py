"""Cost as a count, so that a test of it gives the same answer on every machine."""

from __future__ import annotations

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
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        function()
    finally:
        sys.settrace(before)
    return lines
