"""Which shard a worker takes up next. No clock of its own: `now` is seconds of one monotonic clock, the worker's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Container
from dataclasses import dataclass
from typing import Final

from banyan_runtime.batch.documents import State
from banyan_runtime.batch.protocol import Known
from banyan_runtime.batch.records import Usage

GOLDEN: Final = 0.6180339887  # multiples of it, modulo 1, lie well apart, however many there are


@dataclass(slots=True)
class _Watched:
    known: Known
    since: float  # when it was first seen as it is


class Totals:
    """Sums over the states of shards."""

    def __init__(self) -> None:
        self.completed = self.failed = self.ended = 0
        self.usage = Usage()

    def add(self, state: State, sign: int = 1) -> None:
        self.completed += sign * state.completed
        self.failed += sign * state.failed
        self.ended += sign * (state.term is not None)
        self.usage.add(state.usage, sign)


class Leases:
    """What is known of all shards of a run. No call looks at all of them, since there may be a hundred thousand.

    A shard's owner is given up when its state has not changed for `lease_s` by our own clock: clocks of other machines are never
    compared. An unlucky guess costs repeated work, never a wrong result.
    """

    def __init__(self, count: int, *, lease_s: float, index: int = 0) -> None:
        """`index`: which of the workers this is, so that they do not all begin with the same shard."""
        self._count = count
        self._lease_s = lease_s
        first = int(index * GOLDEN % 1.0 * count)
        self._open: dict[int, None] = dict.fromkeys(
            [*range(first, count), *range(first)]
        )  # that have not ended, in the order in which to take them
        self._owned: dict[int, None] = {}  # of these, those that somebody has
        self._watched: dict[int, _Watched] = {}
        self.totals = Totals()

    @property
    def open(self) -> Collection[int]:
        """Shards that have not ended, as far as is known."""
        return self._open.keys()

    def note(self, known: Known, now: float) -> None:
        """A shard was read, or written by us."""
        before = self._watched.get(known.shard)
        if before is not None and before.known.tag == known.tag:
            return
        if before is not None:
            self.totals.add(before.known.state, -1)
        self.totals.add(known.state)
        self._watched[known.shard] = _Watched(known, now)
        if known.state.term is not None:
            self._open.pop(known.shard, None)
        if known.state.term is None and known.state.owner is not None:
            self._owned[known.shard] = None
        else:
            self._owned.pop(known.shard, None)

    def forgive(self, seconds: float) -> None:
        """For so long nobody could be seen, so nobody's silence counts."""
        for shard in self._owned:
            self._watched[shard].since += seconds

    def known(self, shard: int) -> Known | None:
        watched = self._watched.get(shard)
        return watched.known if watched is not None else None

    def next(self, mine: Container[int], now: float, is_gone: Callable[[str], bool]) -> int | None:
        """The shard to claim: one whose owner is known to have ended, since much of it may be done; one that nobody has; or one whose
        owner is given up. `is_gone(owner)`: known to have ended.
        """
        theirs = [(shard, self._watched[shard]) for shard in self._owned if shard not in mine]
        gone = (shard for shard, watched in theirs if is_gone(watched.known.state.owner or ""))
        free = (shard for shard in self._open if shard not in self._owned and shard not in mine)
        silent = (shard for shard, watched in theirs if now - watched.since >= self._lease_s)
        return next(itertools.chain(gone, free, silent), None)

    def next_expiry(self, mine: Container[int], now: float) -> float | None:
        """Seconds until the first owner is given up; None if none will be."""
        waits = [self._watched[shard].since + self._lease_s - now for shard in self._owned if shard not in mine]
        return max(0.0, min(waits)) if waits else None
