"""The events of responses in the background, kept so that a reader who was cut off can go on where it stopped."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

LOG_BYTES: Final = 8 << 20  # of one response: some 30,000 tokens
ENDED_BYTES: Final = 64 << 20  # of all that have ended


class EventLog:
    """The events of one response, by their number. One that grows too long is given up as a whole."""

    def __init__(self) -> None:
        self.size = 0  # bytes
        self._events: list[bytes] | None = []

    def add(self, events: bytes) -> None:
        if self._events is None:
            return
        self.size += len(events)
        if self.size > LOG_BYTES:
            self._events, self.size = None, 0
        else:
            self._events += [event + b"\n\n" for event in events.split(b"\n\n") if event]

    def after(self, number: int) -> bytes | None:
        """The events behind number `number`; -1: all. None: they were given up."""
        return None if self._events is None else b"".join(self._events[number + 1 :])


class EndedLogs:
    """Logs of responses that have ended, the latest ones."""

    def __init__(self) -> None:
        self._logs: OrderedDict[str, EventLog] = OrderedDict()
        self._bytes = 0

    def keep(self, response_id: str, log: EventLog) -> None:
        self.remove(response_id)
        self._logs[response_id] = log
        self._bytes += log.size
        while self._bytes > ENDED_BYTES:
            _, oldest = self._logs.popitem(last=False)
            self._bytes -= oldest.size

    def find(self, response_id: str) -> EventLog | None:
        return self._logs.get(response_id)

    def remove(self, response_id: str) -> None:
        log = self._logs.pop(response_id, None)
        if log is not None:
            self._bytes -= log.size
