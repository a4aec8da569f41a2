"""The requests that wait: victims of retraction, newcomers in the order of arrival, and those that are held.

Higher priorities go first. A request that waits counts as one level higher after each `ageing_batches` prefill batches, up to
the highest priority that waits beside it; so requests that come later with a priority p higher than its own pass it by for
ageing_batches * p prefill batches at most. Among equals nothing ages.

Adding and removing cost a bisection in a list of those of equal priority, and no turn walks a list further than it admits.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from heapq import merge
from operator import itemgetter

from banyan_runtime.engine.request import Request


class WaitingQueue:
    """`victims` (by arrival) and `held` are by request id; only this class changes them."""

    def __init__(self, ageing_batches: int) -> None:
        self._ageing_batches = ageing_batches
        self.victims: dict[int, Request] = {}
        self.held: dict[int, Request] = {}
        self._newcomers: dict[int, list[tuple[int, Request]]] = {}  # by priority: (place, request), ascending
        self._places = 0
        self.newcomer_count = 0

    def __len__(self) -> int:
        """Those that wait for memory."""
        return len(self.victims) + self.newcomer_count

    @property
    def uninvited(self) -> int:
        """Those that were never admitted: what --max-queued-requests bounds."""
        return self.newcomer_count + len(self.held)

    def append(self, request: Request) -> None:
        """Behind everybody of its priority."""
        self._take_place(request)
        self._insert(request)

    def hold(self, request: Request) -> None:
        """It keeps its place, and is not looked at before `proceed`."""
        self._take_place(request)
        self.held[request.id] = request

    def proceed(self, request: Request) -> None:
        if self.held.pop(request.id, None) is not None:
            self._insert(request)

    def put_first(self, requests: Iterable[Request]) -> None:
        """Before all newcomers of their level; among themselves victims stand by arrival, so that none is passed over again
        and again."""
        waiting = [*self.victims.values(), *requests]
        self.victims = {request.id: request for request in sorted(waiting, key=lambda request: request.arrival)}

    def remove(self, request: Request) -> None:
        if self.victims.pop(request.id, None) is None and self.held.pop(request.id, None) is None:
            level = self._newcomers[request.priority]
            del level[bisect_left(level, (request.place,))]
            if not level:
                del self._newcomers[request.priority]
            self.newcomer_count -= 1

    @property
    def top(self) -> int | None:
        """The highest priority that waits; None, if all that wait are equal."""
        priorities = self.priorities
        return max(priorities) if len(priorities) > 1 else None

    @property
    def priorities(self) -> set[int]:
        return {*self._newcomers, *(victim.priority for victim in self.victims.values())}

    def newcomers(self, batches: int) -> Iterator[Request]:
        """By level, then by arrival. `batches` counts the prefill batches so far."""
        top = self.top
        if top is None:
            return (request for level in self._newcomers.values() for _, request in level)
        return map(itemgetter(2), merge(*(self._ranked(waiting, batches, top) for waiting in self._newcomers.values())))

    def level(self, request: Request, batches: int, top: int | None) -> int:
        """The priority that a waiting request counts as, where `top` is that of the queue."""
        return 0 if top is None else min(top, self.aged(request, batches - request.queued_at_batch))

    def aged(self, request: Request, waited: int) -> int:
        """Its priority after it has waited for so many prefill batches."""
        return request.priority + waited // self._ageing_batches

    def _ranked(self, waiting: list[tuple[int, Request]], batches: int, top: int) -> Iterator[tuple[int, int, Request]]:
        return ((-self.level(request, batches, top), place, request) for place, request in waiting)

    def _take_place(self, request: Request) -> None:
        self._places += 1
        request.place = self._places

    def _insert(self, request: Request) -> None:
        insort(self._newcomers.setdefault(request.priority, []), (request.place, request))
        self.newcomer_count += 1
