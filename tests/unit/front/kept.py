"""Responses that tests keep, and what of them lies in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from banyan_runtime.front.openai.responses.events import EventLog
from banyan_runtime.front.openai.responses.store import Record

NOW = 1_800_000_000.0


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


def record(status: str = "completed", *, background: bool = False, size: int = 0) -> Record:
    response = msgspec.json.encode({"status": status, "text": "x" * size})
    return Record(msgspec.Raw(response), msgspec.Raw(b"[]"), msgspec.Raw(b"[]"), background)


def status(found: Record | None) -> Any:
    return None if found is None else msgspec.json.decode(found.response)["status"]


def files(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.rglob("resp_*.json"))


def log_of(number: int) -> EventLog:
    log = EventLog()
    for one in range(number):
        log.add(b"event: x\ndata: %d\n\n" % one)
    return log
