"""What a batch run decides about single tries, without I/O, clock or chance: whether a line is tried again and when,
whether the server is gone or the job is set up wrongly, and how many requests may be in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class Trouble(Enum):
    """What one try met, if not an answer that ends the line."""

    UNREACHABLE = "unreachable"  # no connection: says nothing about the line
    BUSY = "busy"  # 429, 503: the server wants less, or is not ready
    BROKEN = "broken"  # connected, then cut, timed out, or answered nonsense
    FAILED = "failed"  # 5xx and the other statuses worth another try


_BUSY: Final = frozenset({429, 503})
_RETRIED: Final = frozenset({408, 409, 425, 500, 502, 504, 507, 508, 529})
_MISCONFIGURED: Final = frozenset({301, 302, 307, 308, 401, 403, 404, 405})
MISCONFIGURED_LINES: Final = 8  # so many first lines, all refused this way: the job is wrong, not its lines
POISON_CUTS: Final = 3
FAILING_LINES: Final = 8  # so many lines given up in a row: not the lines' fault


def trouble_of(status: int) -> Trouble | None:
    """Whether an answer with this status is worth another try."""
    if status in _BUSY:
        return Trouble.BUSY
    return Trouble.FAILED if status in _RETRIED else None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    max_attempts: int = 5  # counted tries of a line
    max_backoff_s: float = 60.0
    line_budget_s: float = 3600.0  # a line that the server keeps refusing while others pass gives up after this
    silence_s: float = 600.0  # the server counts as gone after serving nothing for so long


@dataclass(slots=True)
class Tries:
    """What a line went through. Times are seconds on the run's monotonic clock."""

    started: float
    others_seen: int  # successes of the whole run at this line's last try
    counted: int = 0
    total: int = 0
    cuts: int = 0


@dataclass(slots=True)
class Health:
    """What the run as a whole went through."""

    successes: int = 0
    refused: int = 0  # lines refused for what all lines share (key, model, path) before anything succeeded
    given_up: int = 0  # lines given up since the last success
    unserved_since: float | None = None  # nothing but UNREACHABLE and BUSY since then
    failing_since: float | None = None  # no success since this trouble

    def passed(self) -> None:
        """A line got an answer that is its own, good or bad."""
        self.successes += 1
        self.given_up = 0
        self.unserved_since = self.failing_since = None

    def met(self, trouble: Trouble, now: float) -> None:
        self.failing_since = now if self.failing_since is None else self.failing_since
        if trouble in (Trouble.BROKEN, Trouble.FAILED):
            self.unserved_since = None
        elif self.unserved_since is None:
            self.unserved_since = now

    def answered(self, status: int, total_lines: int) -> bool:
        """Note a line's last status; whether the job cannot work at all: all first lines were refused as a whole."""
        if status not in _MISCONFIGURED:
            self.passed()
        elif not self.successes:
            self.refused += 1
            return self.refused >= min(MISCONFIGURED_LINES, total_lines)
        return False


@dataclass(frozen=True, slots=True)
class Again:
    after_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    reason: str


@dataclass(frozen=True, slots=True)
class ServerLost:
    """Not the line's fault: nothing has been served for too long."""

    silent_s: float


def next_try(
    tries: Tries,
    trouble: Trouble,
    health: Health,
    policy: RetryPolicy,
    *,
    now: float,
    jitter: float,
    retry_after_s: float | None = None,
) -> Again | GiveUp | ServerLost:
    """Decide after a try of one line that met `trouble`; `tries` and `health` are brought up to date.

    `jitter` is drawn from [0, 1); `retry_after_s` is what the server asked for.
    """
    others_pass = health.successes > tries.others_seen
    tries.others_seen = health.successes
    tries.total += 1
    health.met(trouble, now)
    if health.unserved_since is not None and now - health.unserved_since > policy.silence_s:
        return ServerLost(now - health.unserved_since)
    if trouble in (Trouble.BROKEN, Trouble.FAILED):
        tries.counted += 1
    if trouble is Trouble.BROKEN and others_pass:
        tries.cuts += 1
    reason = _hopeless(tries, policy, others_pass, now)
    if reason is None:
        backoff = jitter * min(policy.max_backoff_s, 2.0 ** min(tries.total, 30))
        return Again(max(backoff, min(retry_after_s or 0.0, policy.max_backoff_s)))
    health.given_up += 1
    failing = now - (now if health.failing_since is None else health.failing_since)
    if health.given_up >= FAILING_LINES and failing > policy.silence_s:
        return ServerLost(failing)
    return GiveUp(reason)


def _hopeless(tries: Tries, policy: RetryPolicy, others_pass: bool, now: float) -> str | None:
    """Why another try of this line makes no sense."""
    if tries.cuts >= POISON_CUTS:
        return f"the connection broke {tries.cuts} times on this line while other lines passed"
    if tries.counted >= policy.max_attempts:
        return f"gave up after {tries.counted} attempts"
    if others_pass and now - tries.started > policy.line_budget_s:
        return f"the server refused this line for {now - tries.started:.0f} s"
    return None


class Concurrency:
    """How many requests may be in flight: grows by 5 % a round of answers, shrinks to 70 % when the server is busy.

    One decrease per cohort: refusals of requests sent before the last decrease are old news.
    """

    def __init__(self, *, maximum: int, start: int = 32) -> None:
        self.maximum = maximum
        self.limit = min(start, maximum)
        self._healthy = 0
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """Note it when a request is sent, and hand it back with the outcome."""
        return self._epoch

    def passed(self) -> None:
        self._healthy += 1
        if self._healthy >= self.limit:
            self._healthy = 0
            self.limit = min(self.maximum, self.limit + max(1, self.limit // 20))

    def refused(self, epoch: int) -> None:
        if epoch == self._epoch:
            self._epoch += 1
            self._healthy = 0
            self.limit = max(1, int(self.limit * 0.7))
