"""What the engine tells of its steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from banyan_runtime.engine.report import Drafted, Report


def test_replayed_steps_are_told_in_the_line_and_counted() -> None:
    lines: list[str] = []
    limits: Any = SimpleNamespace(pool_tokens=1000, decode_log_interval=2, draft_tokens=0)
    report = Report(lines.append, limits, 0.0)
    for number, replayed in enumerate((True, False, True, True)):
        report.decode_done(3, Drafted(0, 0), number, number + 0.5, used=10, queued=0, replayed=replayed)
    assert [line.partition("cuda graph: ")[2].partition(",")[0] for line in lines] == ["False", "True"]
    counts = report._decode.snapshot()
    assert (counts.steps, counts.replayed) == (4, 3)
