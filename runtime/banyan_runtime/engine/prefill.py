"""Which prompts are computed next: who is admitted, in what pieces, and for whom others must go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from banyan_runtime.engine.admission import Budget, PrefillChunk, Selection, Verdict
from banyan_runtime.engine.background import Background
from banyan_runtime.engine.batch import ScheduledBatch, StepBuilder
from banyan_runtime.engine.chunk_size import ChunkSize
from banyan_runtime.engine.in_batch_prefix import InBatchPrefixes
from banyan_runtime.engine.limits import EngineLimits
from banyan_runtime.engine.memory.kv import KvMemory
from banyan_runtime.engine.memory.prefixes import ID_BYTES
from banyan_runtime.engine.out_of_memory import StepBounds
from banyan_runtime.engine.policy import Policy
from banyan_runtime.engine.queue import WaitingQueue
from banyan_runtime.engine.report import Report
from banyan_runtime.engine.request import Request, State
from banyan_runtime.engine.retraction import CLIP_MAX_NEW, NewTokenRatio
from banyan_runtime.engine.rules import SchedulingRules
from banyan_runtime.engine.running import Running
from banyan_runtime.step import I32

HOLD_BACK_FROM: Final = 64
"""Uncached tokens that a request must share with one being computed right now to wait for it.

Waiting costs a request one step, about what a decode step takes; on no device that was measured does computing fewer than
some 64 more prompt tokens beside others take longer than that. A prompt that is wholly contained in the other one is held
back at any length, because then nothing but its last token is left to compute.
"""
HELD_BACK_AT_MOST: Final = 128  # in one turn, so that a long queue of equal prompts is not walked to its end


@dataclass(frozen=True, slots=True)
class Prompts:
    """Request i computes its tokens from position starts[i] on, len(slots[i]) of them."""

    requests: list[Request]
    starts: list[int]
    slots: list[I32]
    size: int | None  # tokens that they could have had; None: whole prompts
    background: bool


class Prefill:
    """`preempt` sends running requests back to the queue."""

    def __init__(
        self,
        limits: EngineLimits,
        memory: KvMemory,
        builder: StepBuilder,
        policy: Policy,
        rules: SchedulingRules,
        report: Report,
        running: Running,
        ratio: NewTokenRatio,
        background: Background,
        preempt: Callable[[Sequence[Request]], None],
    ) -> None:
        self._limits = limits
        self._memory = memory
        self._builder = builder
        self._policy = policy
        self._rules = rules
        self._report = report
        self._running = running
        self._ratio = ratio
        self._background = background
        self._preempt = preempt
        self.queue = WaitingQueue(limits.ageing_batches)
        self.chunked: Request | None = None  # the one whose prompt is computed over several steps
        self.chunk = ChunkSize(limits.chunk, limits.page_size, limits.prefill_step_s)
        self.bounds = StepBounds(limits.page_size)
        self.full = False  # admission stopped for tokens or rows, and nobody has left since
        self.batches = 0  # prefill steps so far
        self._last: list[Request] = []  # the last step's requests, if it was a prefill; they run from the next turn on
        self._computing: dict[int, Request] = {}  # admitted, and not yet in the tree as a whole

    def add(self, request: Request) -> None:
        """Queue a new request; a held one is not looked at before `proceed`."""
        request.queued_at_batch = self.batches
        if request.held:
            self.queue.hold(request)
        else:
            self._arrives(request.priority)
            self.queue.append(request)

    def proceed(self, request: Request) -> None:
        """What a held request waited for is there."""
        self._arrives(request.priority)
        self.queue.proceed(request)
        if self.full and self.queue and next(self._candidates()) is request:
            self.full = False  # it came before those who do not fit

    def put_back(self, requests: Sequence[Request]) -> None:
        """Preempted requests wait again; what they waited before still counts."""
        for request in requests:
            request.queued_at_batch = self.batches - request.waited
        self._rules.put_back(self.queue, requests)

    def computed(self, request: Request) -> None:
        """All tokens of `request` are computed, and its next one is known: it runs."""
        self._computing.pop(request.id, None)
        if request.state is State.PREFILL:
            request.enter(State.RUNNING)

    def leave(self, request: Request) -> None:
        """`request` has lost its row."""
        self._computing.pop(request.id, None)
        if self.chunked is request:
            self.chunked = None

    @property
    def online(self) -> bool:
        """Whether a prompt that is not background waits or is being computed."""
        return self.queue.online > 0 or (self.chunked is not None and not self.chunked.background)

    @property
    def worth_a_step(self) -> bool:
        """Whether the prompts that wait now, as far as there are rows for them, need no others to share a step with. What is cached of
        them counts as well, for nobody has looked yet, and so do those that are held."""
        if self.chunked is not None or self.queue.victims:
            return True
        waiting = self.queue.uninvited(background=not self.online)
        part = min(1.0, self._memory.tables.free_rows / max(1, waiting.requests))
        chunk = self.chunk if self.online else self._background.chunk
        return chunk.worth_a_step(int(waiting.tokens * part), self._limits.max_prefill_tokens)

    def learn(self, batch: ScheduledBatch, seconds: float) -> None:
        """A prefill step took so long."""
        chunk = self._background.chunk if batch.background else self.chunk
        chunk.learn(len(batch.step.token_ids), seconds, batch.chunk)

    def take_over(self) -> None:
        """Share what the chunk has computed; let the requests of the last prefill step run."""
        if self.chunked is not None:
            self._memory.store(self.chunked, int(self._memory.tables.allocated[self.chunked.row]))
        if self._last:
            fresh = [request for request in self._last if not request.over and request is not self.chunked and request.max_new]
            if len(fresh) < len(self._last):
                self.full = False
            self._running.merge(fresh)
            self._last = []
            if self.full and self.queue:
                self._look_again(max(self.queue.priorities))

    def rest(self) -> None:
        """Nobody is left."""
        assert self.chunked is None
        assert not self.queue
        assert not self._computing
        self._last = []
        self.full = False

    def form(self, now: float, beside: int = 0) -> Prompts | None:
        """What a step of prompts computes, with its slots allocated; None when no request can be admitted. `beside`: so many running
        requests are to be in the step, and it has room for them (`has_room_beside`)."""
        if self.chunked is None and (self.full or not self.queue):
            return None
        if self.chunked is not None and self.chunked.background and self.queue.online:
            self._preempt([self.chunked])  # what is computed of it stays cached, so it loses little
        background = not self.online
        if background and self._running.online and not self._background.may_prefill:
            return None
        memory, running = self._memory, len(self._running)
        most_rows = min(self._limits.max_running, self.bounds.rows or self._limits.max_running)
        room = most_rows - running
        rows = self._background.rows(now) if background else None
        spare = None if rows is None else rows - self._running.background
        if spare is not None and spare <= 0:
            return None
        size = self._size(background=background)
        if size is not None and beside:
            size -= beside
            size = max(size - size % self._limits.page_size, self._limits.page_size)
        chosen = Selection(Budget(self._limits, memory, self._running.expected_output() * self._ratio.value, size))
        chosen.computing = self._prefixes_in_computation()
        if self.chunked is not None and self._let_pass(self.chunked, chosen):
            chosen.computing = self._prefixes_in_computation()
        if self.chunked is not None and not self._continue_chunk(self.chunked, chosen):
            return None
        for request in self._candidates():
            if self.queue.aged(request) <= chosen.pushed:
                break  # who was pushed aside comes before it
            if request.background is not background or (spare is not None and spare <= len(chosen.chunks) < room):
                break
            if len(chosen.chunks) >= room:
                self.full = True
                others = 0 if background else min(self.queue.online - len(chosen.admitted), self._running.background)
                if not self._make_way(request, chosen, rows=max(others, 1)):
                    break
                room = most_rows - len(self._running)
            # a row that a step in flight has is free when that is through
            if memory.tables.free_rows == 0 or chosen.held_back >= HELD_BACK_AT_MOST:
                break
            verdict = self._try_admit(request, chosen, now)
            if request.state is not State.PREFILL and verdict is Verdict.NO_TOKEN and self._make_way(request, chosen, rows=0):
                room = most_rows - len(self._running)
                if self._try_admit(request, chosen, now) is Verdict.ROOM:
                    continue
                break
            if verdict is not Verdict.ROOM:
                # a request held back fits in the next turn, however full it is now
                self.full = self.full or (verdict is Verdict.NO_TOKEN and not chosen.held_back)
                break
        if not chosen.chunks:
            return None
        if background:
            self._background.prefilled()
        return self._prompts_of(chosen, running, size, background)

    def has_room_beside(self, rows: int) -> bool:
        """Whether a step of prompts may have so many that run in it, and still half of it for prompts."""
        size = self._size(background=False)
        return size is None or 2 * rows <= size

    def _size(self, *, background: bool) -> int | None:
        """How many tokens a step of prompts may have; None: whole prompts."""
        chunk = self._background.chunk if background else self.chunk
        return min((bound for bound in (chunk.size, self.bounds.tokens) if bound is not None), default=None)

    def _arrives(self, priority: int) -> None:
        """Admission stopped for those who wait, but a request of this priority may stand before them, and fit."""
        if self.full:
            self._look_again(priority)
            self.full = self.full and priority <= max(self.queue.priorities, default=priority)

    def _look_again(self, priority: int) -> None:
        """Admission stopped, but a request of this priority may push others aside."""
        self.full = self.full and not bool((self._memory.tables.level[self._running.rows] < priority).any())

    def _candidates(self) -> Iterator[Request]:
        """By level; of equals victims first, and no newcomer overtakes one of them."""
        top = self.queue.top
        victims = sorted(self.queue.victims.values(), key=lambda victim: -self.queue.level(victim, top))
        asked, overtakable = 0, True
        for newcomer in self._policy.order(self.queue, self._memory.prefixes, self.batches):
            level = self.queue.level(newcomer, top)
            while asked < len(victims) and self.queue.level(victims[asked], top) >= level:
                yield victims[asked]
                overtakable = overtakable and victims[asked].state is State.PREFILL
                asked += 1
            if not overtakable:
                return
            yield newcomer
        yield from victims[asked:]

    def _prefixes_in_computation(self) -> InBatchPrefixes:
        prefixes = InBatchPrefixes()
        for request in self._computing.values():
            prefixes.add(request.key, request.salt)
        return prefixes

    def _let_pass(self, chunked: Request, chosen: Selection) -> bool:
        """Preempt the chunked prompt if it would leave nothing of the step to a more urgent request that can have it. What is
        computed of it stays cached, so it loses little. Whether it was."""
        memory, tables = self._memory, self._memory.tables
        rest = int(tables.length[chunked.row] - tables.allocated[chunked.row])
        ends = chosen.budget.part_of(rest) == rest and memory.whole_pages(rest) <= memory.available
        level = int(tables.level[chunked.row])
        if ends or not self.queue or max(self.queue.priorities) <= level:
            return False
        urgent = next(self._candidates())
        if urgent.priority <= level or self._pays_to_wait(urgent, chosen):
            return False
        return self._make_way(urgent, chosen, rows=1, first=chunked)

    def _continue_chunk(self, request: Request, chosen: Selection) -> bool:
        """Put the next piece of the chunked prompt into the step. False while there is no memory for any of it."""
        budget, memory = chosen.budget, self._memory
        start = int(memory.tables.allocated[request.row])
        rest = int(memory.tables.length[request.row]) - start
        count = budget.part_of(rest)
        if count < rest:
            count -= self._left_to_others(request, count, rest, chosen)
        if memory.whole_pages(count) > memory.available:
            count = memory.available
        if count == 0:
            return False
        chosen.chunks.append(PrefillChunk(request, start, count))
        if count == rest:
            budget.charge(count, self._rules.charge(request))
            self.chunked = None
        else:
            budget.charge(count, 0)
        return True

    def _left_to_others(self, chunked: Request, piece: int, rest: int, chosen: Selection) -> int:
        """What the next in order need of a step that a piece of a longer prompt would fill, in whole pages: of those whose prompts end in
        it and who leave the rest of the long one, and what it says, its room; and of nobody behind one who does not."""
        most, needed = self._rules.left_to_others(piece), 0
        if self.full or not most or not self.queue:
            return 0
        memory, level = self._memory, int(self._memory.tables.level[chunked.row])
        room = chosen.budget.total - memory.whole_pages(rest) - self._rules.charge(chunked)
        beside = InBatchPrefixes()
        for request in islice(self._candidates(), memory.tables.free_rows):
            if request.background is not chunked.background or self.queue.aged(request) < level:
                break
            if beside.longest(request.key, request.salt) >= HOLD_BACK_FROM or self._pays_to_wait(request, chosen):
                break
            beside.add(request.key, request.salt)
            cached = memory.prefixes.longest(request.key[: request.matchable * ID_BYTES], request.salt)
            more = memory.whole_pages(len(request.token_ids) - cached)
            room -= more + self._rules.charge(request)
            if needed + more > most or room <= 0:
                break
            needed += more
        return needed

    def _try_admit(self, request: Request, chosen: Selection, now: float) -> Verdict:
        """Admit `request` into the step, or hold it back (ROOM: look at the next one), or say why not."""
        budget, memory, prefixes = chosen.budget, self._memory, self._memory.prefixes
        length = len(request.token_ids)
        if self._pays_to_wait(request, chosen):
            request.held_back = True
            chosen.held_back += 1
            return Verdict.ROOM
        node, matched = prefixes.match(request.key[: request.matchable * ID_BYTES], request.salt)
        extend = length - matched
        expected = self._rules.charge(request)
        alone = not chosen.chunks and not self._running.living
        if alone and length + expected >= budget.total:
            # With nobody else there, what it can still generate is all that counts, or it would wait for ever.
            expected = min(request.remaining, CLIP_MAX_NEW)
        if extend + expected >= budget.total + alone:
            return Verdict.NO_TOKEN
        count = self._part_of(extend, chosen)
        if count <= 0:
            return Verdict.STEP_FULL
        prefixes.lock(node)
        if extend + expected > budget.total:
            prefixes.unlock(node)
            return Verdict.NO_TOKEN
        memory.admit(request, node, matched)
        self._builder.set_row(request)
        if request.admitted_at is None:
            request.admitted_at = now
            request.cached_tokens = matched
        request.waited = self.batches - request.queued_at_batch
        memory.tables.level[request.row] = self.queue.aged(request)
        request.enter(State.PREFILL)
        self._computing[request.id] = request
        chosen.computing.add(request.key, request.salt)
        chosen.cached += matched
        chosen.admitted.append(request)
        chosen.chunks.append(PrefillChunk(request, matched, count))
        if count < extend:
            assert self.chunked is None
            self.chunked = request
            budget.charge(count, 0)
        else:
            budget.charge(count, expected)
        return budget.verdict()

    def _part_of(self, extend: int, chosen: Selection) -> int:
        """How many of the `extend` tokens that a prompt needs computed go into this step; a second chunked prompt there is not."""
        if chosen.chunks and not chosen.budget.input_fits(self._memory.whole_pages(extend)):
            return 0
        count = chosen.budget.part_of(extend)
        return 0 if count < extend and self.chunked is not None else count

    def _pays_to_wait(self, request: Request, chosen: Selection) -> bool:
        """Whether enough of its prefix is being computed right now for another request, so that it will be cached."""
        shared = chosen.computing.longest(request.key, request.salt)
        if not shared:
            return False
        prefixes, length = self._memory.prefixes, len(request.token_ids)
        most = request.matchable
        gain = prefixes.accepts(min(shared, most)) - prefixes.longest(request.key[: most * ID_BYTES], request.salt)
        # who waits already does so to the end, though the tree holds more of it with each chunk
        return gain >= HOLD_BACK_FROM or (gain > 0 and (request.held_back or shared >= length))

    def _make_way(self, request: Request, chosen: Selection, *, rows: int, first: Request | None = None) -> bool:
        """Preempt running requests of lower levels, the lowest and newest first, until `request` has the tokens and rows that
        it needs; nobody, if all of them together do not free enough or the step has no part for it. Whether somebody was.
        `first`: a chunked prompt that goes before them."""
        memory, tables, living = self._memory, self._memory.tables, self._running.rows
        lower = living[tables.level[living] < request.priority]
        if not len(lower) and first is None:
            return False
        by_row = {member.row: member for member in self._running.requests if not member.over}
        worst = sorted((by_row[row] for row in lower.tolist()), key=lambda member: (tables.level[member.row], -member.arrival))
        node, matched = memory.prefixes.match(request.key[: request.matchable * ID_BYTES], request.salt)
        if first is not None:
            worst.insert(0, first)
        elif not self._part_of(len(request.token_ids) - matched, chosen):
            return False
        memory.prefixes.lock(node)  # what it needs itself is not freed by anybody
        missing = len(request.token_ids) - matched + self._rules.charge(request) - chosen.budget.total + 1
        victims, promised = list[Request](), 0.0
        for victim, shared in zip(worst, memory.prefixes.freed_by(member.node for member in worst), strict=True):
            if missing <= 0 and len(victims) >= rows:
                break
            victims.append(victim)
            left = int(tables.max_new[victim.row] - (tables.length[victim.row] - tables.prompt[victim.row]))
            output = min(left, CLIP_MAX_NEW) * self._ratio.value if victim is not first else 0.0  # promised when its last chunk is
            promised += output
            missing -= shared + memory.private_of(victim.row) + output
        memory.prefixes.unlock(node)
        if missing > 0 or len(victims) < rows:
            return False
        self._preempt(victims)
        chosen.pushed = max(chosen.pushed, *map(self.queue.aged, victims))
        chosen.budget.withdraw(promised)
        self.full = False
        return True

    def _prompts_of(self, chosen: Selection, running: int, size: int | None, background: bool) -> Prompts:
        requests = [chunk.request for chunk in chosen.chunks]
        self.queue.admit(chosen.admitted)
        self.batches += 1
        for chunk in chosen.chunks:
            self._report.prompt_tokens(*chunk.request.tell(chunk.start, chunk.start + chunk.count))
        self._report.prefill_batch(
            requests=len(requests),
            computed=sum(self._memory.whole_pages(chunk.count) for chunk in chosen.chunks),
            cached=chosen.cached,
            used=self._memory.used,
            running=running,
            queued=len(self.queue),
        )
        slots = [self._memory.extend(chunk.request, chunk.start + chunk.count) for chunk in chosen.chunks]
        self._last = requests
        return Prompts(requests, [chunk.start for chunk in chosen.chunks], slots, size, background)
