"""The requests that wait: victims of retraction, newcomers in the order of arrival, and those that are held.

Higher priorities go first. A prefill batch that admits a request passes by all that wait with a lower priority. Who was passed by
`ageing_batches` times counts as one level higher, behind as many more as three, then seven and so on, up to the priority of those who
passed it by; so requests that come later with a priority p higher than its own pass it by ageing_batches * (1 + log2 p) times at most,
whatever numbers clients think of. Waiting behind equals makes nobody older, and no age
makes a background request (below 0) an online one: it may be passed by for as long as such requests come.

Adding and removing cost a bisection in a list of those of equal priority, and no turn walks a list further than it admits.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace

from banyan_runtime.engine.request import Request


class Uninvited:
    """How many wait that were never admitted, and their prompt tokens."""

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0

    def join(self, request: Request) -> None:
        self.requests += 1
        self.tokens += request.prompt_len

    def leave(self, request: Request) -> None:
        self.requests -= 1
        self.tokens -= request.prompt_len


def levels(age: int) -> int:
    """By how much who is so old counts as higher."""
    return (1 << min(age, 32)) - 1


class WaitingQueue:
    """`victims` (by arrival) and `held` are by request id; only this class changes them."""

    def __init__(self, ageing_batches: int) -> None:
        self._ageing_batches = ageing_batches
        self.victims: dict[int, Request] = {}
        self.held: dict[int, Request] = {}
        self._newcomers: dict[int, list[tuple[int, Request]]] = {}  # by priority: (place, request), ascending
        self._places = 0
        self._passes = Counter[int]()  # by priority: batches that passed those of it by, ever
        self._passed_by: dict[int, int] = {}  # by priority: the highest one that was admitted in them
        self.newcomer_count = 0
        self.online = 0  # of those that wait for memory: requests that are not background
        self._uninvited = {False: Uninvited(), True: Uninvited()}  # online, background

    def __len__(self) -> int:
        """Those that wait for memory."""
        return len(self.victims) + self.newcomer_count

    def uninvited(self, *, background: bool) -> Uninvited:
        """Those that were never admitted, online or of background, held ones included: what the limits of the
        queue bound, so that neither keeps the other out."""
        return self._uninvited[background]

    def append(self, request: Request) -> None:
        """Behind everybody of its priority."""
        self._take_place(request)
        self._insert(request)

    def hold(self, request: Request) -> None:
        """It keeps its place, grows older, and is not looked at before `proceed`. (If it did not, one that is released would stand before
        equals who have come up to a higher level, and hide them.)"""
        self._take_place(request)
        self._uninvited[request.background].join(request)
        self.held[request.id] = request

    def proceed(self, request: Request) -> None:
        if self.held.pop(request.id, None) is not None:
            self._uninvited[request.background].leave(request)
            self._insert(request)

    def put_first(self, requests: Iterable[Request]) -> None:
        """Before all newcomers of their level; among themselves victims stand by arrival, so that none is passed over again
        and again."""
        requests = list(requests)
        for request in requests:
            self._age_from_now(request)
            self.online += not request.background
        waiting = [*self.victims.values(), *requests]
        self.victims = {request.id: request for request in sorted(waiting, key=lambda request: request.arrival)}

    def remove(self, request: Request) -> None:
        if self.victims.pop(request.id, None) is not None:
            self.online -= not request.background
        elif self.held.pop(request.id, None) is not None:
            self._uninvited[request.background].leave(request)
        else:
            level = self._newcomers[request.priority]
            del level[bisect_left(level, (request.place,))]
            if not level:
                del self._newcomers[request.priority]
            self.newcomer_count -= 1
            self.online -= not request.background
            self._uninvited[request.background].leave(request)

    def admit(self, requests: Sequence[Request]) -> None:
        """One prefill batch takes them; who waits with a lower priority is passed by."""
        for request in requests:
            request.passes = self._passes[request.priority] - request.passes_from
            self.remove(request)
        if not requests:
            return
        highest = max(request.priority for request in requests)
        for priority in self.priorities | {request.priority for request in self.held.values()}:
            if priority < highest:
                self._passes[priority] += 1
                self._passed_by[priority] = max(self._passed_by.get(priority, highest), highest)

    @property
    def top(self) -> int | None:
        """The highest priority that waits; None, if all that wait are equal."""
        priorities = self.priorities
        return max(priorities) if len(priorities) > 1 else None

    @property
    def priorities(self) -> set[int]:
        return {*self._newcomers, *(victim.priority for victim in self.victims.values())}

    def newcomers(self) -> Iterator[Request]:
        """By level, then by arrival. Requests of lower levels may join meanwhile."""
        top = self.top
        if top is None:
            return (request for level in [*self._newcomers.values()] for _, request in level)
        return self._merged(top)

    def level(self, request: Request, top: int | None) -> int:
        """The priority that a waiting request counts as, where `top` is that of the queue: who has come up to the top is served
        in turn."""
        return 0 if top is None else min(top, self.aged(request))

    def aged(self, request: Request) -> int:
        """The priority of a waiting request, raised for the batches that passed it by, and never above theirs, nor out of the
        background."""
        priority = request.priority
        raised = priority + levels((self._passes[priority] - request.passes_from) // self._ageing_batches)
        most = self._passed_by.get(priority, priority)
        return min(raised, most if priority >= 0 else min(most, -1))

    def _age_from_now(self, request: Request) -> None:
        """It waits; what it was passed by before still counts."""
        request.passes_from = self._passes[request.priority] - request.passes

    def _merged(self, top: int) -> Iterator[Request]:
        """Looks at the first newcomer of each priority, and at the next one when that is taken."""
        firsts = [(-self.level(waiting[0][1], top), waiting[0][0], 0, waiting) for waiting in self._newcomers.values()]
        heapify(firsts)
        while firsts:
            _, _, index, waiting = firsts[0]
            yield waiting[index][1]
            if index + 1 < len(waiting):
                place, request = waiting[index + 1]
                heapreplace(firsts, (-self.level(request, top), place, index + 1, waiting))
            else:
                heappop(firsts)

    def _take_place(self, request: Request) -> None:
        self._places += 1
        request.place = self._places
        self._age_from_now(request)

    def _insert(self, request: Request) -> None:
        insort(self._newcomers.setdefault(request.priority, []), (request.place, request))
        self.newcomer_count += 1
        self.online += not request.background
        self._uninvited[request.background].join(request)
