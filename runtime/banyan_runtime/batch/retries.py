"""Whose fault it is when a line fails: the line's, or the server's. Without I/O, clock or chance.

A line is charged with a failed try only if the server was well: if other lines were answered while this one waited to be tried
again, or, when there are no others, if the server itself says that it is well. Everything else is an outage, which costs no line
anything and ends with the server's return or the run's patience.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from banyan_runtime.batch.problems import error_code


class Trouble(Enum):
    """What one try met, if not an answer that ends the line."""

    UNREACHABLE = "unreachable"  # no connection: says nothing about the line
    AWAY = "away"  # 503: the server is not ready, or ends
    BUSY = "busy"  # 429, or 503 for want of room: the server wants less
    CUT = "cut"  # connected, then cut
    BROKEN = "broken"  # timed out, or answered nonsense
    FAILED = "failed"  # 5xx and the other statuses worth another try
    REFUSED = "refused"  # for what lines share, and it is not known that the line is to blame


_RETRIED: Final = frozenset({408, 409, 425, 500, 502, 504, 507, 508, 529})
_NO_ROOM: Final = frozenset({"queue_full", "kv_exhausted", "timeout", "rate_limit_exceeded", "server_overloaded", "overloaded"})
_OWN_DOING: Final = frozenset({"out_of_memory"})  # of one of the lines in a step
_CHARGED: Final = frozenset({Trouble.CUT, Trouble.BROKEN, Trouble.FAILED, Trouble.REFUSED})
_ILL: Final = frozenset({Trouble.UNREACHABLE, Trouble.AWAY})
POISON_CUTS: Final = 3


def trouble_of(status: int, body: bytes = b"") -> Trouble | None:
    """Whether such an answer is worth another try."""
    if status == 429:
        return Trouble.BUSY
    if status == 503:
        code = error_code(body)
        return Trouble.BUSY if code in _NO_ROOM else Trouble.FAILED if code in _OWN_DOING else Trouble.AWAY
    return Trouble.FAILED if status in _RETRIED else None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    max_attempts: int = 5  # tries of a line that it is charged with
    max_backoff_s: float = 60.0
    line_budget_s: float = 3600.0  # a line that the server keeps refusing while others pass gives up after this
    silence_s: float = 600.0  # the server counts as gone after serving nothing for so long


@dataclass(slots=True)
class Health:
    """What the run as a whole went through. Times are seconds on the run's monotonic clock."""

    passes: int = 0  # lines answered, well or badly
    troubles: int = 0  # tries that failed, those refused for want of room not counted
    unserved_since: float | None = None  # the first trouble since the last line was answered
    refused_since: float | None = None  # the first of the refusals that came since, with nothing else between them
    well_at: float = float("-inf")  # when the server said so
    ill_at: float = float("-inf")  # when it could not be reached, or said that it is not ready
    newest_pass: float = float("-inf")  # when the line was sent that was sent last of those that were answered
    vouched_at: float = float("-inf")  # when a line that had been answered was sent again, and answered again

    def passed(self, sent_at: float = float("-inf")) -> None:
        self.newest_pass = max(self.newest_pass, sent_at)
        self.passes += 1
        self.unserved_since = self.refused_since = None

    def met(self, trouble: Trouble, now: float) -> None:
        if self.unserved_since is None:
            self.unserved_since = now
        if trouble is not Trouble.BUSY:
            self.troubles += 1
            self.refused_since = None if trouble is not Trouble.REFUSED else now if self.refused_since is None else self.refused_since
        if trouble in _ILL:
            self.ill_at = now

    def said(self, well: bool, now: float) -> None:
        """The server was asked, at `now`, how it is."""
        if well:
            self.well_at = now
        else:
            self.ill_at = now

    def silent_s(self, now: float) -> float:
        """For how long lines were tried in vain."""
        return 0.0 if self.unserved_since is None else now - self.unserved_since

    def refused_s(self, now: float) -> float:
        """For how long all that was sent was refused for what lines share."""
        return 0.0 if self.refused_since is None else now - self.refused_since


@dataclass(frozen=True, slots=True)
class Fault:
    """A failed try, and how things stood then."""

    at: float
    cut: bool
    alone: bool  # nothing else was sent, and the server had just said that it is well
    on_word: bool  # that the server says it is well tells against the line
    own: bool  # a refusal that may be for what is in the line: only what was sent later and answered tells
    passes: int
    troubles: int
    openings: int  # of the circuit


@dataclass(slots=True)
class Tries:
    """What a line went through."""

    started: float  # of the line, or of its first try after the last outage
    openings: int = 0  # of the circuit, until then
    total: int = 0
    charged: int = 0
    on_word: int = 0  # of these: on the server's word alone
    cuts: int = 0  # of these: cuts
    all_cuts: int = 0
    first_charge: float = 0.0
    passes_seen: int = 0  # of the run, at the last try
    others_pass: bool = False
    fault: Fault | None = None  # the last try, if it is not yet known whose fault it was

    @property
    def known(self) -> bool:
        """Others passed around one of its failures."""
        return self.charged > self.on_word

    @property
    def suspect(self) -> bool:
        """Its connection broke so often, whoever's fault it was, that it is tried alone when the server comes back."""
        return self.all_cuts >= POISON_CUTS


def note(
    tries: Tries,
    trouble: Trouble,
    health: Health,
    *,
    now: float,
    openings: int,
    alone: bool = False,
    on_word: bool = True,
    own: bool = False,
) -> None:
    """A try of a line met `trouble`; `openings` of the circuit there were before, or by it. `on_word`: if the server says that it is
    well, that tells against the line. `own`: it was refused, perhaps for what is in it.
    """
    if openings > tries.openings:
        tries.openings, tries.started = openings, now
    tries.others_pass = tries.total > 0 and health.passes > tries.passes_seen
    tries.passes_seen = health.passes
    tries.total += 1
    cut = trouble is Trouble.CUT
    tries.all_cuts += cut
    tries.fault = Fault(now, cut, alone, on_word, own, health.passes, health.troubles, openings) if trouble in _CHARGED else None


def backoff_s(tries: Tries, policy: RetryPolicy, *, jitter: float, asked_s: float = 0.0) -> float:
    """Seconds to wait after a failed try. `jitter` is drawn from [0, 1); `asked_s` is what the server asked for."""
    longest = min(policy.max_backoff_s, 2.0 ** min(tries.total, 30))
    return max(longest * (1 + jitter) / 2, min(asked_s, policy.max_backoff_s))


def judge(tries: Tries, health: Health, openings: int) -> bool:
    """Charge the line with its last failed try if that was its fault. False: nothing is known; ask the server."""
    fault = tries.fault
    if fault is None:
        return True
    passes, troubles = health.passes - fault.passes, health.troubles - fault.troubles
    others_pass = openings == fault.openings and passes > 0 and passes >= troubles
    if fault.own:
        others_pass = (others_pass and health.newest_pass > fault.at) or health.vouched_at > fault.at
    on_word = fault.on_word and health.well_at > fault.at > health.ill_at
    certain = others_pass or (fault.alone and fault.cut)
    if not certain and not on_word:
        return False
    tries.fault = None
    tries.first_charge = tries.first_charge if tries.charged else fault.at
    tries.charged += 1
    tries.on_word += not certain
    tries.cuts += certain and fault.cut
    return True


def hopeless(tries: Tries, policy: RetryPolicy, now: float) -> str | None:
    """Why another try of this line makes no sense."""
    if tries.cuts >= POISON_CUTS:
        return f"the connection broke {tries.cuts} times on this line while other lines passed"
    # a server can say that it is well and yet fail everything for a while; that must not cost the last lines of a file
    lasting = now - tries.first_charge >= policy.max_backoff_s
    if tries.charged - tries.on_word >= policy.max_attempts or (tries.charged >= policy.max_attempts and lasting):
        return f"gave up after {tries.charged} attempts"
    if tries.others_pass and now - tries.started > policy.line_budget_s:
        return f"the server refused this line for {now - tries.started:.0f} s"
    return None
