"""The work queue: each key at most once in it, never worked on twice at a time, delayed adds, a back-off per key.

Time comes from the clock it is given, so that a test can run it without waiting; the decisions are in `Backlog`, which never
sleeps, and `WorkQueue` only adds the waiting.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from banyan_operator.kube.objects import Key

BACKOFF_FIRST_S: Final = 1.0
BACKOFF_CAP_S: Final = 300.0
CONFLICT_DELAY_S: Final = 1.0
CONFLICTS_FREE: Final = 5  # a conflict on our own write is news, not failure; after so many in a row it is
OUTDATED: Final = 1024  # times that no longer count, beside those that do: more are swept out


def half_to_whole() -> float:
    return random.uniform(0.5, 1.0)


@dataclass
class Backlog:
    """What waits, what is in work, what waits for its time."""

    jitter: Callable[[], float] = half_to_whole
    ready: dict[Key, float] = field(default_factory=dict)  # key -> since when; insertion order is the order of work
    working: dict[Key, float] = field(default_factory=dict)  # key -> since when
    dirty: set[Key] = field(default_factory=set)  # added while in work: once more afterwards
    delayed: list[tuple[float, Key]] = field(default_factory=list)  # heap
    due: dict[Key, float] = field(default_factory=dict)  # key -> its earliest time in `delayed`
    held: dict[Key, float] = field(default_factory=dict)  # key -> the server asked not to come back before
    failures: dict[Key, int] = field(default_factory=dict)
    conflicts: dict[Key, int] = field(default_factory=dict)

    def add(self, key: Key, now: float) -> None:
        if self.held.get(key, now) > now:
            self.add_at(key, self.held[key])
        elif key in self.working:
            self.dirty.add(key)
        elif key not in self.ready:
            self.ready[key] = now

    def add_at(self, key: Key, when: float) -> None:
        """Add later; of several times the earliest counts, but none before what the server asked for."""
        when = max(when, self.held.get(key, when))
        if key in self.due and self.due[key] <= when:
            return
        self.due[key] = when
        heapq.heappush(self.delayed, (when, key))

    def hold(self, key: Key, until: float) -> None:
        """Begin nothing with this key before then, whatever is heard of it."""
        self.held[key] = until
        asked = key in self.dirty or key in self.ready or self.due.get(key, until) < until
        self.dirty.discard(key)
        self.ready.pop(key, None)
        if asked:
            self.due.pop(key, None)
            self.add_at(key, until)

    def advance(self, now: float) -> None:
        while self.delayed and self.delayed[0][0] <= now:
            when, key = heapq.heappop(self.delayed)
            if self.due.get(key) == when:  # else another time was set after this one, or none
                del self.due[key]
                if self.held.get(key, now + 1) <= now:
                    del self.held[key]
                self.add(key, now)

    def next_due(self) -> float | None:
        while self.delayed and self.due.get(self.delayed[0][1]) != self.delayed[0][0]:
            heapq.heappop(self.delayed)
        return self.delayed[0][0] if self.delayed else None

    def take(self, now: float) -> tuple[Key, float] | None:
        """The next key and how long it waited, s."""
        if not self.ready:
            return None
        key = next(iter(self.ready))
        since = self.ready.pop(key)
        self.working[key] = now
        return key, now - since

    def done(self, key: Key, now: float) -> None:
        del self.working[key]
        if key in self.dirty:
            self.dirty.discard(key)
            self.add(key, now)

    def succeeded(self, key: Key) -> None:
        """Its newest look says when the next one is due, if any: what earlier ones asked for no longer counts."""
        for memory in (self.failures, self.conflicts, self.held, self.due):
            memory.pop(key, None)
        if len(self.delayed) > 2 * len(self.due) + OUTDATED:
            self.delayed = [(when, due) for due, when in self.due.items()]
            heapq.heapify(self.delayed)

    def retry_delay(self, key: Key, conflict: bool) -> float:
        """How long to wait after a failure, s."""
        if conflict and self.conflicts.get(key, 0) < CONFLICTS_FREE:
            self.conflicts[key] = self.conflicts.get(key, 0) + 1
            return CONFLICT_DELAY_S
        count = self.failures.get(key, 0)
        self.failures[key] = count + 1
        return float(min(BACKOFF_CAP_S, BACKOFF_FIRST_S * 2 ** min(count, 16)) * self.jitter())


class WorkQueue:
    """A Backlog that one can wait for."""

    def __init__(self, clock: Callable[[], float], jitter: Callable[[], float] = half_to_whole) -> None:
        """`jitter`: the part of a back-off that is waited."""
        self.backlog = Backlog(jitter)
        self.adds = 0
        self.retries = 0
        self._clock = clock
        self._news = asyncio.Event()
        self._idle = asyncio.Event()  # nothing is in work
        self._idle.set()

    def add(self, key: Key) -> None:
        self.adds += 1
        self.backlog.add(key, self._clock())
        self._news.set()

    def add_after(self, key: Key, delay_s: float) -> None:
        self.backlog.add_at(key, self._clock() + delay_s)
        self._news.set()

    async def get(self) -> tuple[Key, float]:
        """The next key, now in work until `done`, and how long it waited, s."""
        while True:
            now = self._clock()
            self.backlog.advance(now)
            taken = self.backlog.take(now)
            if taken is not None:
                self._idle.clear()
                return taken
            due = self.backlog.next_due()
            self._news.clear()
            try:
                async with asyncio.timeout(None if due is None else max(0.0, due - now)):
                    await self._news.wait()
            except TimeoutError:
                pass

    def done(self, key: Key) -> None:
        self.backlog.done(key, self._clock())
        self._news.set()
        if not self.backlog.working:
            self._idle.set()

    def succeeded(self, key: Key) -> None:
        self.backlog.succeeded(key)

    async def idle(self) -> None:
        """Wait until nothing is in work."""
        await self._idle.wait()

    def oldest_work_s(self) -> float:
        """For how long the oldest key in work has been that, s; 0: none is."""
        now = self._clock()
        return max((now - since for since in self.backlog.working.values()), default=0.0)

    def retry(self, key: Key, conflict: bool = False, not_before_s: float | None = None) -> float:
        """Add the key again after its back-off, or when the server said (Retry-After); returns the delay, s."""
        self.retries += 1
        delay = self.backlog.retry_delay(key, conflict)
        if not_before_s is not None:
            delay = max(delay, not_before_s)
            self.backlog.hold(key, self._clock() + delay)
        self.add_after(key, delay)
        return delay
