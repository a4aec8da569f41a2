"""Who is admitted before whom, who gives way to whom, and what background may have beside online requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np

from banyan_runtime.engine.admission import Selection, Verdict
from banyan_runtime.engine.limits import EngineLimits
from banyan_runtime.engine.loop import Engine
from banyan_runtime.engine.policy import OVERDUE_BATCHES
from banyan_runtime.engine.request import Request
from banyan_runtime.engine.retraction import CLIP_MAX_NEW
from banyan_runtime.engine.rules import GATHERING_STEPS
from banyan_runtime.step import Step

LOOKED_AT_WITHIN: Final = 12  # turns: decode steps have theirs between prefills


class Order:
    """Priorities: who was admitted was the most urgent, and none is passed by for ever. Ages are counted anew here."""

    def __init__(self, engine: Engine, limits: EngineLimits, top: int) -> None:
        self.engine = engine
        self.limits = limits
        self.top = top
        self.passed = Counter[int]()  # by request id: prefill batches in which a later and more urgent one was admitted
        self._passes = Counter[int]()  # likewise, whoever it was: what ages count
        self._passed_by: dict[int, int] = {}  # by priority: the highest one admitted while such requests waited
        self._levels: dict[int, int] = {}  # by request id, as of its last admission
        self._batches = 0
        self._rows: dict[int, int] = {}  # of those that had one at the last launch, by id
        prefill = engine.scheduler.prefill
        self._preempt, prefill._preempt = prefill._preempt, self._gives_way
        self._try_admit, prefill._try_admit = prefill._try_admit, self._asked  # type: ignore[method-assign]
        self._has_room, prefill.has_room_beside = prefill.has_room_beside, self._asked_for_room  # type: ignore[method-assign]
        self._room = True  # for those who run, in the step of prompts that was asked for last
        self._were_asked = set[int]()  # by request id; the answer holds until somebody leaves
        self._first: tuple[int, int] | None = None  # who is next in order, and in how many turns nobody looked at it
        self._barred: tuple[int, int] | None = None  # who is online, next, and has room but for background; and for how many turns
        self._online_decodes = 0  # since background's last prefill
        self._online_prefill = False  # in this turn
        self._stepped = False  # whether this turn had a step
        self.online_turns = 0  # turns in which somebody online was there; what background waits in them is no starving
        self.beside = 0  # rows of background in steps with online ones
        self.short = 0  # steps that were kept short

    def check(self) -> None:
        requests = self.engine.requests
        had, self._rows = self._rows, {id: request.row for id, request in requests.items() if request.row >= 0}
        batches, self._batches = self._batches, self.engine.scheduler.prefill.batches
        if self._batches == batches:
            return
        admitted = [requests[id] for id in self._rows if id not in had]
        waiting = [request for request in requests.values() if request.row < 0 and request.id not in self.engine.scheduler.queue.held]
        top = max((request.priority for request in [*waiting, *admitted]), default=0)
        for late in admitted:
            for request in waiting:
                if not request.held_back:
                    assert self._level(request, top) <= self._level(late, top), f"{late.id} was admitted before {request.id}"
        self._count(admitted, waiting)
        for late in admitted:
            self._levels[late.id] = self._aged(late)
        for id, row in self._rows.items():
            assert int(self.engine.memory.tables.level[row]) == self._levels[id], f"{id} is not of the level that it has come up to"
        if admitted:
            highest = max(late.priority for late in admitted)
            for request in [*waiting, *self.engine.scheduler.queue.held.values()]:
                if request.priority < highest:
                    self._passes[request.id] += 1
                    self._passed_by[request.priority] = max(self._passed_by.get(request.priority, highest), highest)

    def check_class(self, step: Step) -> None:
        """What background has of a step that is being launched."""
        engine, limits = self.engine, self.limits.background
        behind = engine.memory.tables.level[step.rows] < 0
        waits = [request for request in engine.requests.values() if request.row < 0 and not request.background]
        waits = [request for request in waits if request.id not in engine.scheduler.queue.held]
        assert engine.scheduler.queue.online == len(waits)
        online_rows = engine.scheduler.running.online
        self._stepped = True
        if step.mode == "mixed":
            runs = np.isin(step.rows, engine.scheduler.running.rows)
            assert online_rows
            assert not behind[~runs].any(), "online prompts are computed without background's"
            behind = behind[runs]
        elif self.limits.mixed and step.mode == "prefill" and online_rows and not behind.any():
            memory, rows = engine.memory, engine.scheduler.running.part(limits.rows_beside)[1]
            tight = memory.pages.free_tokens + memory.prefixes.evictable < memory.decode_need(rows)
            assert tight or not self._room, "who runs could have come along"
        self._online_prefill = self._online_prefill or step.mode == "mixed" or (step.mode == "prefill" and not behind.any())
        if step.mode != "prefill":
            self._online_decodes += online_rows > 0
            assert np.count_nonzero(~behind) == online_rows, "all online rows run"
            if online_rows or waits:
                assert np.count_nonzero(behind) <= limits.rows_beside
                self.beside += int(np.count_nonzero(behind))
        elif behind.any():
            assert behind.all(), "online prompts are computed without background's"
            assert not waits, "background was admitted before somebody online"
            assert not online_rows or self._online_decodes >= limits.prefill_every
            self._online_decodes = 0
        self.short += engine.scheduler.background.keeps_short(engine._clock()) and bool(behind.all())

    def check_gives_way(self) -> None:
        """After a turn: who is online and next in order waits no longer than for a turn of decoding, and for the steps in flight,
        if all that it lacks is with background."""
        engine, limits, scheduler = self.engine, self.limits, self.engine.scheduler
        self.online_turns += any(not request.background and not request.held for request in engine.requests.values())
        barred = None
        if scheduler.queue.online and not scheduler.prefill.chunked and limits.policy == "fcfs":
            request = next(scheduler.prefill._candidates())
            tables, whole = engine.memory.tables, engine.memory.whole_pages
            others = [other for other in engine.requests.values() if other.row >= 0 and not other.background]
            held = sum(
                whole(int(tables.length[other.row])) + limits.page_size
                + min(other.max_new - int(tables.length[other.row] - tables.prompt[other.row]), CLIP_MAX_NEW)
                for other in others
            )  # fmt: skip
            need = whole(len(request.token_ids)) + request.max_new + limits.page_size
            if not request.background and not request.held_back and held + need < limits.pool_tokens and len(others) < self._most_rows:
                barred = request.id
        turns = 0
        if barred is not None and self._barred is not None and self._barred[0] == barred:
            # others may have been released that came before it; a turn that only saw that somebody ended is no waiting
            turns = 0 if self._online_prefill else self._barred[1] + self._stepped
        self._online_prefill = self._stepped = False
        self._barred = None if barred is None else (barred, turns)
        bound = GATHERING_STEPS + 2 * limits.overlap
        assert turns <= bound, f"{barred} is online, and background has what it needs"

    @property
    def _most_rows(self) -> int:
        """That may run, after shortages of memory."""
        most = self.engine.scheduler.prefill.bounds.rows
        return self.limits.max_running if most is None else min(most, self.limits.max_running)

    def check_first(self) -> None:
        """After a turn: who comes to stand first is soon asked, if there is a row for it and memory for everybody's whole output."""
        scheduler, prefill = self.engine.scheduler, self.engine.scheduler.prefill
        if self.limits.policy != "fcfs" or not scheduler.queue or len(scheduler.running) >= self._most_rows or prefill.chunked:
            self._first = None
            return
        request = next(prefill._candidates())
        if request.background and scheduler.background.keeps_short(self.engine._clock()):
            self._first = None  # it may have to wait
            return
        first, memory = request.id, self.engine.memory
        if len(request.token_ids) + request.max_new + scheduler.running.expected_output() >= memory.available:
            self._first = None
            return
        turns = self._first[1] + 1 if self._first is not None and self._first[0] == first else 0
        self._first = first, turns
        assert first in self._were_asked or turns <= LOOKED_AT_WITHIN, f"{first} is next in order, and nobody looks at it"

    def _asked(self, request: Request, chosen: Selection, now: float) -> Verdict:
        self._were_asked.add(request.id)
        verdict = self._try_admit(request, chosen, now)
        if verdict is Verdict.NO_TOKEN and request.row >= 0:
            self._were_asked.update(self.engine.requests)  # it took the rest: that answers all
        return verdict

    def _asked_for_room(self, rows: int) -> bool:
        self._room = self._has_room(rows)
        return self._room

    def _gives_way(self, victims: Sequence[Request]) -> None:
        """Only to somebody more urgent than they were when they were admitted."""
        most = max(request.priority for request in self.engine.requests.values() if request.row < 0)
        for victim in victims:
            assert self._levels[victim.id] < most, f"{victim.id} was pushed aside"
        self._preempt(victims)

    def _count(self, admitted: list[Request], waiting: list[Request]) -> None:
        for request in waiting:
            # background may be passed by for as long as there are online requests
            fair = [late for late in admitted if late.background is request.background]
            if any(late.arrival > request.arrival and late.priority > request.priority and not late.retractions for late in fair):
                if request.held_back:
                    continue
                self.passed[request.id] += 1
                bound = self.limits.ageing_batches * (self.top - request.priority).bit_length()
                bound += OVERDUE_BATCHES if self.limits.policy == "lpm" else 0
                assert self.passed[request.id] <= bound, f"request {request.id} is passed by for ever"

    def _level(self, request: Request, top: int) -> int:
        return min(top, self._aged(request))

    def _aged(self, request: Request) -> int:
        raised = request.priority + 2 ** (self._passes[request.id] // self.limits.ageing_batches) - 1
        most = self._passed_by.get(request.priority, request.priority)
        return min(raised, most if request.priority >= 0 else min(most, -1))
