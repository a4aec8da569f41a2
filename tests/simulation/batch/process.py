"""A process: one procedure that is carried out call by call, a clock of its own, and an end that may come between any two calls."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from banyan_runtime.batch.documents import Owner, Plan
from banyan_runtime.batch.protocol import Claim
from tests.simulation.batch.store import Line

Run = Generator[Any, Any, str]


# what a process does beside the calls of the protocol


@dataclass(frozen=True, slots=True)
class Sleep:
    seconds: float  # by the process's own clock


@dataclass(frozen=True, slots=True)
class Put:
    """A part. Carried out until it is answered."""

    key: str
    lines: Sequence[Line]


@dataclass(frozen=True, slots=True)
class Append:
    """To a journal; answered when it is durable."""

    key: str
    lines: Sequence[Line]


@dataclass(frozen=True, slots=True)
class Remove:
    """A part that is not needed any more."""

    key: str


@dataclass(frozen=True, slots=True)
class Complete:
    """The last request of an Assemble: what was made of the parts before becomes visible."""

    name: str
    body: bytes
    lines: int
    if_match: str | None


@dataclass(frozen=True, slots=True)
class Delete:
    """A user's."""

    key: str


@dataclass(frozen=True, slots=True)
class Drop:
    """A user's: a file of that name where there is none."""

    key: str
    body: bytes


class Unreachable(Exception):
    """The storage was away for longer than the executor is patient: the procedure ends, the process goes on."""


@dataclass(frozen=True, slots=True)
class Job:
    """What somebody asked for: worked on by several processes, each replaced when it dies."""

    letter: str
    run: str | None
    digest: str
    overwrite: bool
    stops: str | None = None  # a canceller's: why


class Process:
    def __init__(self, name: str, job: Job, rng: random.Random, *, number: int, index: int, gone: Iterable[str]) -> None:
        self.name, self.job, self.rng = name, job, rng
        self.index = index
        self.gone = frozenset(gone)
        self.holder = f"{name}/{number}"  # a process restarted under the same name is another holder
        self.claim = Claim(job.run, f"{job.letter}{number}", job.digest, self.holder, f"n{number}", "", job.overwrite)
        self.owner: Owner | None = None
        self.plan: Plan | None = None
        self.steps: Run
        self.call: Any = None
        self.ready = 0.0
        self.leaves_at = float("inf")  # SIGTERM comes
        self.ended: str | None = None
        self.told: Any = None  # what the protocol answered at its end
        self.wrote: list[str] = []
        self._ahead, self._rate = rng.random() * 1e4, rng.choice((1.0, 1.0, 0.7, 1.4))
        self._nonces = 0

    @property
    def writing(self) -> str:
        """The run for which it writes."""
        return self.owner.run if self.owner is not None else self.claim.run or self.claim.new_run

    def clock(self, now: float) -> float:
        return self._ahead + now * self._rate

    def lasts(self, seconds: float) -> float:
        """True seconds of what are `seconds` by its own clock."""
        return seconds / self._rate

    def nonce(self) -> str:
        self._nonces += 1
        return f"{self.claim.nonce}.{self._nonces}"
