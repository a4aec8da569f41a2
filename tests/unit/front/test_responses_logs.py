"""What is kept of the events of responses that run in the background."""

from __future__ import annotations

import pytest

from banyan_runtime.front.openai.responses import events
from banyan_runtime.front.openai.responses.events import EndedLogs
from tests.unit.front.kept import log_of


def test_a_log_tells_the_events_behind_a_number() -> None:
    log = log_of(3)
    assert log.after(0) == b"event: x\ndata: 1\n\nevent: x\ndata: 2\n\n"
    assert log.after(-1) == b"event: x\ndata: 0\n\n" + (log.after(0) or b"")
    assert log.after(2) == b""


def test_a_log_that_grows_too_long_is_given_up_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LOG_BYTES", 100)
    log = log_of(50)
    assert (log.after(-1), log.size) == (None, 0)


def test_the_latest_logs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "ENDED_BYTES", 100)
    logs = EndedLogs()
    for name in "abcd":
        logs.keep(name, log_of(2))  # 36 bytes
    assert [name for name in "abcd" if logs.find(name) is not None] == ["c", "d"]
