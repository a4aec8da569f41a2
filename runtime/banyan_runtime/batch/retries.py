"""Decision table: what happens to a line after one try. No I/O, clock or chance."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class Kind(Enum):
    """Class of one reply."""

    ANSWERED = "answered"  # 2xx, or an error of the line itself, such as 400
    BUSY = "busy"  # 429, or 503 for want of room
    AWAY = "away"  # no connection, or 503
    FAILED = "failed"  # 5xx, timeout, broken connection, or a body that is no answer
    REFUSED = "refused"  # key, path or method, which all lines share
    MODEL_MISSING = "model missing"  # 404 for the model that the line names


class Decision(Enum):
    """What happens to the line."""

    ANSWER = "answer"  # the reply is the line's outcome
    RETRY_FREE = "retry free"  # the server's fault
    RETRY_CHARGED = "retry charged"  # one of the line's attempts is used up
    FAIL_JOB = "fail job"  # no line of the job can be answered


_ANSWER, _FREE, _CHARGED, _FAIL = Decision.ANSWER, Decision.RETRY_FREE, Decision.RETRY_CHARGED, Decision.FAIL_JOB
_TABLE: Final = {
    #                    nothing succeeded yet   something succeeded
    #                    not ready  ready        not ready  ready
    Kind.ANSWERED: (_ANSWER, _ANSWER, _ANSWER, _ANSWER),
    Kind.BUSY: (_FREE, _FREE, _FREE, _FREE),
    Kind.AWAY: (_FREE, _FREE, _FREE, _FREE),
    Kind.FAILED: (_FREE, _CHARGED, _FREE, _CHARGED),
    Kind.REFUSED: (_FREE, _FAIL, _FREE, _CHARGED),
    Kind.MODEL_MISSING: (_FREE, _FAIL, _ANSWER, _ANSWER),
}
_REFUSED: Final = frozenset({301, 302, 307, 308, 401, 403, 404, 405})
_FAILED: Final = frozenset({408, 409, 425, 500, 502, 504, 507, 508, 529})
_NO_ROOM: Final = frozenset({"queue_full", "kv_exhausted", "timeout", "rate_limit_exceeded", "server_overloaded", "overloaded"})
_SUSPECT: Final = 3


def decide(kind: Kind, *, succeeded: bool, ready: bool) -> Decision:
    """Look up a reply. `succeeded`: the server has answered a line of this run; `ready`: its health path says that it is ready."""
    return _TABLE[kind][2 * succeeded + ready]


def needs_readiness(kind: Kind, *, succeeded: bool) -> bool:
    """Whether the decision depends on the server's readiness."""
    return decide(kind, succeeded=succeeded, ready=False) is not decide(kind, succeeded=succeeded, ready=True)


def classify(status: int, code: str = "", param: str = "", *, missing_model: bool = False) -> Kind:
    """Class of an HTTP answer. `code` and `param` of OpenAI's error; `missing_model`: it says that there is no such model."""
    if status == 429 or (status == 503 and code in _NO_ROOM):
        return Kind.BUSY
    if status == 503:
        return Kind.FAILED if code == "out_of_memory" else Kind.AWAY
    if missing_model:
        return Kind.MODEL_MISSING
    if status == 404 and param:  # what the line names, such as previous_response_id
        return Kind.ANSWERED
    return Kind.REFUSED if status in _REFUSED else Kind.FAILED if status in _FAILED else Kind.ANSWERED


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits of retries."""

    max_attempts: int = 5  # charged tries of a line
    max_backoff_s: float = 60.0
    busy_s: float = 3600.0  # for which the server may keep answering a line that it is busy
    silence_s: float = 600.0  # the run ends after so long without an answer


@dataclass(slots=True)
class Tries:
    """Tries of one line."""

    total: int = 0
    charged: int = 0
    crashes: int = 0  # failures after which the server was not ready
    busy_since: float | None = None

    @property
    def suspect(self) -> bool:
        """Whether the line may take the server down, so that it is sent alone after an outage."""
        return self.crashes >= _SUSPECT

    def add(self, kind: Kind, decision: Decision, now: float) -> None:
        """Count one failed try."""
        self.total += 1
        self.charged += decision is Decision.RETRY_CHARGED
        self.crashes += kind is Kind.FAILED and decision is Decision.RETRY_FREE
        if kind is not Kind.BUSY:
            self.busy_since = None
        elif self.busy_since is None:
            self.busy_since = now

    def exhausted(self, policy: RetryPolicy, now: float) -> str | None:
        """Why the line is not sent again."""
        if self.charged >= policy.max_attempts:
            return f"gave up after {self.charged} attempts"
        if self.busy_since is not None and now - self.busy_since > policy.busy_s:
            return f"the server has been too busy for this line for {now - self.busy_since:.0f} s"
        return None

    def backoff_s(self, policy: RetryPolicy, *, jitter: float, asked_s: float = 0.0) -> float:
        """Seconds until the next try. `jitter`: drawn from [0, 1); `asked_s`: the server's Retry-After."""
        longest = min(policy.max_backoff_s, 2.0 ** min(self.total, 30))
        return max(longest * (1 + jitter) / 2, min(asked_s, policy.max_backoff_s))
