"""Waiting for a storage that is away: for how long, how visibly, and how the wait is ended. The same for every call."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from banyan_runtime.storage.store import Full, Stopped, StoreError, Throttled, Unreachable

LIMIT_S: Final = 120.0  # a server that is restarted or moved to another node is back by then
FIRST_NOTICE_S: Final = 5.0
NEXT_NOTICE_S: Final = 15.0
WAITING: Final = "waiting for "  # so begins a notice that the storage is away; another one tells that it is back
IDLE_S: Final = 60.0  # the thread behind the notices ends when there was no call for so long
UNREACHABLE_DELAYS_S: Final = (0.1, 5.0)  # first and longest
THROTTLED_DELAYS_S: Final = (0.5, 20.0)

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Wait:
    """One call that has not been answered yet."""

    where: str
    since: float  # monotonic seconds; when it began, or the last sign of life
    reason: str = "no answer yet"
    alive: float | None = None  # the last sign of life
    full: bool = False  # it was answered, that there is no room

    def progress(self) -> None:
        """Bytes came: whoever is slow is not away."""
        self.since = self.alive = time.monotonic()


class Patience:
    """How the calls of a run wait. Safe to share between threads and stores.

    `limit_s`: how long a storage may be away before a call fails with what it met last; one that hangs may take the network's own
    time limit (20 s) longer. `notice` is called, from a thread of its
    own, with words for people: 5 s after a call began that has no answer, every 15 s from then on, and when it is over; calls that
    wait for one storage are told as one. `stop`: once set, every wait ends with Stopped and no new one begins; a call that blocks
    in the network comes back when the network's own time limit is over.
    """

    def __init__(
        self,
        limit_s: float = LIMIT_S,
        notice: Callable[[str], None] | None = None,
        stop: threading.Event | None = None,
        *,
        first_notice_s: float = FIRST_NOTICE_S,
        next_notice_s: float = NEXT_NOTICE_S,
    ) -> None:
        self.limit_s = limit_s
        self.stop = stop or threading.Event()
        self._notices = _Notices(notice, first_notice_s, next_notice_s) if notice else None

    def retry(self, where: str, call: Callable[[Wait], T], *, limit_s: float | None = None) -> T:
        """Carry out `call`; again and again while it fails with Throttled or Unreachable. `where` names the storage for people.

        Raises what `call` met last when the storage showed no sign of life for `limit_s`, Stopped when `stop` is set.
        """
        limit_s = self.limit_s if limit_s is None else limit_s
        failures = 0
        with self.watch(where) as wait:
            while True:
                alive = wait.alive
                try:
                    return call(wait)
                except (Throttled, Unreachable) as error:
                    failures = 1 if wait.alive != alive else failures + 1
                    left_s = wait.since + limit_s - time.monotonic()
                    if left_s <= 0:
                        raise
                    wait.reason = error.reason
                    wait.full |= isinstance(error, Full)
                    first_s, longest_s = THROTTLED_DELAYS_S if isinstance(error, Throttled) else UNREACHABLE_DELAYS_S
                    delay_s = min(first_s * 2 ** min(failures - 1, 10), longest_s) * random.uniform(0.5, 1.0)
                    self.pause(min(delay_s, left_s), error)

    def pause(self, delay_s: float, because: StoreError) -> None:
        """Sleep before another try. Raises Stopped at once when `stop` is set."""
        if self.stop.wait(delay_s):
            raise Stopped(because.key, f"stopped while waiting for the storage ({because.reason})") from because

    @contextlib.contextmanager
    def watch(self, where: str) -> Iterator[Wait]:
        """Tell of what happens inside if it takes long."""
        if self._notices is None:
            yield Wait(where, time.monotonic())
            return
        wait = self._notices.begin(where)
        try:
            yield wait
        except (Throttled, Unreachable, Stopped):
            self._notices.end(wait, answered=False)
            raise
        except BaseException:
            self._notices.end(wait, answered=True)  # any other answer is an answer
            raise
        self._notices.end(wait, answered=True)


@dataclass(slots=True)
class _Told:
    """A storage that people were told to be away."""

    since: float
    last: float
    full: bool  # not away: calls that need no room are answered all the while
    answered: bool = False


class _Notices:
    """Looks at the calls under way from a thread, because a call that hangs cannot tell so itself."""

    def __init__(self, notice: Callable[[str], None], first_s: float, next_s: float) -> None:
        self._notice = notice
        self._first_s = first_s
        self._next_s = next_s
        self._changed = threading.Condition()
        self._waits: set[Wait] = set()
        self._told: dict[str, _Told] = {}
        self._idle = False
        self._thread: threading.Thread | None = None

    def begin(self, where: str) -> Wait:
        wait = Wait(where, time.monotonic())
        with self._changed:
            self._waits.add(wait)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="storage-notices", daemon=True)
                self._thread.start()
            elif self._idle:
                self._changed.notify()
        return wait

    def end(self, wait: Wait, *, answered: bool) -> None:
        with self._changed:
            self._waits.discard(wait)
            if told := self._told.get(wait.where):
                told.answered |= answered and (wait.full or not told.full)
                self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                words, pause_s = self._due(time.monotonic())
                if not words:
                    self._idle = pause_s is None
                    self._changed.wait(IDLE_S if pause_s is None else pause_s)
                    if self._idle and not self._waits:
                        self._thread = None
                        return
            for text in words:
                self._notice(text)

    def _due(self, now: float) -> tuple[list[str], float | None]:
        """What is to be told now, and after how many seconds to look again; None: when a call begins."""
        oldest: dict[str, Wait] = {}
        for wait in self._waits:
            if wait.where not in oldest or wait.since < oldest[wait.where].since:
                oldest[wait.where] = wait
        words: list[str] = []
        due: list[float] = []
        for where, told in list(self._told.items()):
            longest = oldest.get(where)
            if longest is None or now - longest.since < self._first_s:
                del self._told[where]
                if told.answered or (longest is not None and longest.alive is not None and longest.alive > told.last):
                    words.append(f"{where} {'has room' if told.full else 'answers'} again, after {now - told.since:.0f} s")
        for where, wait in oldest.items():
            was_told = self._told.get(where)
            when = wait.since + self._first_s if was_told is None else was_told.last + self._next_s
            if now >= when:
                words.append(f"{WAITING}{where} ({wait.reason}), {now - wait.since:.0f} s")
                self._told[where] = _Told(was_told.since if was_told else wait.since, now, wait.full)
                when = now + self._next_s
            due.append(when)
        return words, max(0.0, min(due) - now) if due else None
