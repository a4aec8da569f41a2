"""State of one API process as the first one tracks it. Pure: callers pass the time."""

from __future__ import annotations

from typing import Final

from banyan_runtime.server.api_processes.messages import Report

HUNG_S: Final = 60.0  # without a report
OPEN_S: Final = 120.0  # from its start until it is there


class Status:
    """Of one process, from its start to its end. Times are monotonic seconds."""

    def __init__(self, begun: float) -> None:
        self.open = False  # it answers requests
        self.report: Report | None = None  # the newest
        self.hung = False  # it was silent for too long when somebody looked last
        self._heard_at = begun  # of its newest report, or when it began

    def reported(self, report: Report, now: float) -> None:
        self.report, self._heard_at = report, now

    def under_way(self, since: int) -> int:
        """Requests that are not over there, by a report of the `Tell` of this number or a later one; until there is one: at least one."""
        told = 0 if self.report is None else self.report.under_way
        return told if self.told(since) else max(told, 1)

    def sought(self, since: int) -> bool:
        """Whether some client may still ask there, likewise."""
        return not self.told(since) or (self.report is not None and self.report.sought)

    def look(self, now: float) -> bool:
        """Whether it is to be ended: it was too long silent, and also when somebody looked before. Of a pause of this process itself it
        has told by then."""
        again = self.hung
        self.hung = now - self._heard_at > (HUNG_S if self.open else OPEN_S)
        return again and self.hung

    def told(self, since: int) -> bool:
        """Whether it has answered the `Tell` of this number, or a later one."""
        return self.report is not None and self.report.seq >= since
