"""Whether lines are sent at all: a server that fails everything is away, and is asked now and then with one line."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

OPENS_AFTER: Final = 5  # troubles in a row without one answer between them


class State(Enum):
    CLOSED = "closed"  # all is well, lines are sent
    OPEN = "open"  # the server is away, no line is sent
    HALF_OPEN = "half-open"  # one line is on its way, to see


@dataclass(slots=True)
class Breaker:
    """Has no clock: `now` is in seconds of any monotonic one."""

    first_s: float = 1.0  # from opening to the first probe
    most_s: float = 30.0  # between probes: the wait doubles after each that fails
    state: State = State.CLOSED
    openings: int = 0
    _troubles: int = 0  # since the last answer
    _interval_s: float = 0.0
    _probe_at: float = 0.0
    _asked_until: float = float("-inf")  # the server's own Retry-After, from the troubles in a row

    def troubled(self, now: float, *, asked_s: float = 0.0, probe: bool = False) -> None:
        """A line met what may mean that the server is away; `asked_s` is its Retry-After. `probe`: it was the one line sent."""
        self._asked_until = max(self._asked_until, now + asked_s)
        if self.state is State.CLOSED:
            self._troubles += 1
            if self._troubles >= OPENS_AFTER:
                self.state = State.OPEN
                self.openings += 1
                self._wait(now, self.first_s)
        elif self.state is State.HALF_OPEN and probe:
            self.state = State.OPEN
            self._wait(now, min(self.most_s, 2 * self._interval_s))

    def passed(self) -> None:
        """Some line was answered, or is served for so long that the server must be well."""
        self.state = State.CLOSED
        self._troubles = 0
        self._asked_until = float("-inf")

    def healthy(self, now: float) -> None:
        """The server says that it is well, though lines fail: they are tried one by one, but not ever more slowly."""
        self._interval_s = min(self._interval_s, self.first_s)
        self._probe_at = max(min(self._probe_at, now + self._interval_s), self._asked_until)

    def probe(self, now: float) -> bool:
        """Whether one line may be sent now, which is then on its way."""
        if self.state is not State.OPEN or now < self._probe_at:
            return False
        self.state = State.HALF_OPEN
        return True

    def probe_lost(self) -> None:
        """The probe ended without telling anything: the next may go at once."""
        if self.state is State.HALF_OPEN:
            self.state = State.OPEN

    def probe_again(self, now: float) -> None:
        """The probe was answered, and another line shall be tried alone at once."""
        self.state = State.OPEN
        self._interval_s, self._probe_at, self._asked_until = self.first_s, now, float("-inf")

    def wait_s(self, now: float) -> float:
        """Seconds to the next probe."""
        return max(0.0, self._probe_at - now)

    def _wait(self, now: float, interval_s: float) -> None:
        self._interval_s = interval_s
        self._probe_at = max(now + interval_s, self._asked_until)
