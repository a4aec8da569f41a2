"""One life of a door as the first process sees it: what it was given and has said. Knows no clock and does nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, TypeVar

from banyan_runtime.server.doors.messages import Report

LATE_S: Final = 1.0  # without a word about a connection: it gets no more of them until it speaks
HUNG_S: Final = 60.0  # without a report
OPEN_S: Final = 120.0  # from its start until it is there


class Seen:
    """Times are monotonic seconds."""

    def __init__(self, begun: float) -> None:
        self.open = False  # connections may go there
        self.lack = ""  # why it can prepare no requests
        self.report: Report | None = None  # the newest
        self.hung = False  # it was silent for too long when somebody looked last
        self._heard_at = begun  # of its newest report, or when it began
        self._untaken: deque[float] = deque()  # when it was given the connections that it has not told of
        self._connections = 0  # when it told of them last

    def given(self, now: float) -> None:
        """A connection went there."""
        self._untaken.append(now)

    def taken(self, connections: int) -> None:
        """It has said so of the oldest that it had not told of."""
        self._untaken.popleft()
        self._connections = connections

    def reported(self, report: Report, now: float) -> None:
        self.report, self._heard_at, self._connections = report, now, report.connections

    def takes(self, now: float) -> bool:
        """Whether it would take a connection at once, for all that is known."""
        late = bool(self._untaken) and now - self._untaken[0] > LATE_S
        return self.open and not self.lack and not late

    @property
    def load(self) -> int:
        """Connections that it has or will have."""
        return self._connections + len(self._untaken)

    def under_way(self, since: int) -> int:
        """Requests that are not over there, by a report of the `Tell` of this number or a later one; until there is one: at least one."""
        told = 0 if self.report is None else self.report.under_way
        return len(self._untaken) + (told if self.told(since) else max(told, 1))

    def sought(self, since: int) -> bool:
        """Whether some client may still ask there, likewise."""
        return not self.told(since) or (self.report is not None and self.report.sought) or bool(self._untaken)

    def look(self, now: float) -> bool:
        """Whether it is to be ended: it was too long silent, and also when somebody looked before. Of a pause of this process itself it
        has told by then."""
        again = self.hung
        self.hung = now - self._heard_at > (HUNG_S if self.open else OPEN_S)
        return again and self.hung

    def told(self, since: int) -> bool:
        """Whether it has answered the `Tell` of this number, or a later one."""
        return self.report is not None and self.report.seq >= since


S = TypeVar("S", bound=Seen)


def least_busy(doors: Iterable[S], now: float) -> S | None:
    """Who gets the next connection; None: nobody takes one."""
    return min((door for door in doors if door.takes(now)), key=lambda door: door.load, default=None)
