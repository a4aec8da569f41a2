"""Which step runs next: turn order, admission, chunks, memory check and retraction.

Decides over requests, rows and slots; launches nothing, knows no clock. The rules are SGLang 0.4.7's, prefill before
decode, except where `rules.FairRules` makes them kinder; under `SglangRules` they are the same to the letter, so schedules
that SGLang logged can be replayed line by line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from banyan_runtime.engine.admission import Budget, PrefillChunk, Selection, Verdict
from banyan_runtime.engine.batch import StepBuilder
from banyan_runtime.engine.limits import EngineLimits
from banyan_runtime.engine.memory.kv import KvMemory
from banyan_runtime.engine.memory.prefixes import ID_BYTES
from banyan_runtime.engine.policy import Policy
from banyan_runtime.engine.queue import WaitingQueue, level_of
from banyan_runtime.engine.report import Report
from banyan_runtime.engine.request import Request, State
from banyan_runtime.engine.retraction import CLIP_MAX_NEW, RETRACT_DECODE_STEPS, NewTokenRatio, keep_order
from banyan_runtime.engine.rules import SchedulingRules
from banyan_runtime.step import I32, Step

HOLD_BACK_FROM: Final = 64
"""Uncached tokens that a request must share with one being computed right now to wait for it.

Waiting costs a request one step, about what a decode step takes; on no device that was measured does computing fewer than
some 64 more prompt tokens beside others take longer than that. A prompt that is wholly contained in the other one is held
back at any length, because then nothing but its last token is left to compute.
"""
HELD_AT_MOST: Final = 128  # requests held back in one turn, so that a long queue of equal prompts is not walked to its end


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step and whose it is; `requests[i]` is row i of the step."""

    step: Step
    requests: list[Request]


class Scheduler:
    """The state of scheduling. `running` holds what decodes, in the order of admission; requests that ended stay in it
    until the next decode step is formed."""

    def __init__(
        self, limits: EngineLimits, memory: KvMemory, builder: StepBuilder, policy: Policy, rules: SchedulingRules, report: Report
    ) -> None:
        self._limits = limits
        self._memory = memory
        self._builder = builder
        self._policy = policy
        self._rules = rules
        self._report = report
        self.queue = WaitingQueue()
        self.running: list[Request] = []
        self.ratio = NewTokenRatio(limits.conservativeness)
        self.chunked: Request | None = None  # the one whose prompt is computed over several steps
        self.failed: list[tuple[Request, str, str]] = []  # (request, code, message), for the loop to report
        self._last: list[Request] = []  # the last step's requests, if it was a prefill; they run from the next turn on
        self._computing: dict[int, Request] = {}  # admitted, and not yet in the tree as a whole
        self._dead = 0  # members of `running` that ended
        self._rows: I32 | None = None  # rows of the living members of `running`
        self._full = False  # admission stopped for tokens or rows, and nobody has left since
        self._batches = 0  # prefill steps so far
        self._prefills_in_a_row = 0
        self._decodes_in_a_row = 0

    def add(self, request: Request) -> None:
        """Queue a new request; a held one is not looked at before `proceed`."""
        request.queued_at_batch = self._batches
        if request.held:
            self.queue.hold(request)
        else:
            self.queue.append(request)

    def proceed(self, request: Request) -> None:
        """What a held request waited for is there."""
        self.queue.proceed(request)

    def schedule(self, now: float) -> ScheduledBatch | None:
        """The next step, with its slots allocated; None when there is nothing to compute."""
        self._take_over_prefill()
        for form in self._order():
            batch = form(now)
            if batch is not None:
                return batch
        return None

    def release(self, request: Request, state: State, *, keep: bool) -> bool:
        """End `request` in whatever phase it is, and take back all it holds; with `keep`, what it computed stays cached.

        The only way out of the engine. False if it had ended before.
        """
        if request.over:
            return False
        if request.row >= 0:
            row, tables = request.row, self._memory.tables
            length = int(tables.length[row])
            request.outputs = length - request.prompt_len
            # a token that was sampled last was not computed yet; of a prompt in chunks only a part was
            computed = length - (request.state is State.RUNNING)
            self._leave_row(request, keep=min(computed, int(tables.allocated[row])) if keep else 0)
            self._full = self._full and request.merged
        else:
            self.queue.remove(request)
        if request.merged:
            self._dead += 1
            self._rows = None
        request.enter(state)
        return True

    def computed(self, request: Request) -> None:
        """All tokens of `request` are computed, and its next one is known: it runs."""
        self._computing.pop(request.id, None)
        if request.state is State.PREFILL:
            request.enter(State.RUNNING)

    def no_batch(self) -> None:
        """A turn found nothing to do and nothing is in flight."""
        self.ratio.reset()

    def rest(self) -> None:
        """Nobody is left: be as on the first turn."""
        assert self.chunked is None
        assert not self.queue
        assert not self._computing
        self.running, self._last, self._dead, self._rows = [], [], 0, None
        self._full = False
        self.ratio.reset()

    @property
    def running_count(self) -> int:
        """Requests that hold memory."""
        return int(np.count_nonzero(self._memory.tables.live))

    def _order(self) -> tuple[Callable[[float], ScheduledBatch | None], ...]:
        """Prefill first, unless running requests have waited long enough for their next token."""
        if len(self.running) > self._dead:
            bound = self._rules.prefills_in_a_row(self.chunked is not None)
            overdue = bound is not None and self._prefills_in_a_row >= bound
            if overdue or 0 < self._decodes_in_a_row < self._limits.continuous_decodes:
                return self._decode, self._prefill
        return self._prefill, self._decode

    def _take_over_prefill(self) -> None:
        """Share what the chunk has computed; let the requests of the last prefill step run."""
        if self.chunked is not None:
            self._memory.store(self.chunked, int(self._memory.tables.allocated[self.chunked.row]))
        if self._last:
            fresh = [request for request in self._last if not request.over and request is not self.chunked and request.max_new]
            if len(fresh) < len(self._last):
                self._full = False
            for request in fresh:
                request.merged = True
            self.running = [*self.running, *fresh]
            self._last = []
            self._rows = None

    def _living_rows(self) -> I32:
        if self._rows is None:
            self._rows = np.array([request.row for request in self.running if not request.over], dtype=np.int32)
        return self._rows

    # --- prefill ---

    def _prefill(self, now: float) -> ScheduledBatch | None:
        if self.chunked is None and (self._full or not self.queue):
            return None
        running = len(self.running)
        room = self._limits.max_running - running
        if self.chunked is None and room <= 0:
            self._full = True
            return None
        chosen = Selection(Budget(self._limits, self._memory, self._expected_output() * self.ratio.value))
        if self.chunked is not None and not self._continue_chunk(self.chunked, chosen):
            return None
        for request in self._computing.values():
            chosen.computing.add(request.key, request.salt)
        for request in self._candidates():
            if len(chosen.chunks) >= room:
                self._full = True
                break
            if self._memory.tables.free_rows == 0 or chosen.held >= HELD_AT_MOST:
                break
            verdict = self._try_admit(request, chosen, now)
            if verdict is not Verdict.ROOM:
                # a request held back fits in the next turn, however full it is now
                self._full = self._full or (verdict is Verdict.NO_TOKEN and not chosen.held)
                break
        if not chosen.chunks:
            return None
        return self._form_prefill(chosen, running)

    def _expected_output(self) -> int:
        """What running requests may still generate, each cut to CLIP_MAX_NEW; those that ended count until they are
        dropped."""
        tables, rows = self._memory.tables, self._living_rows()
        left = tables.max_new[rows] - (tables.length[rows] - tables.prompt[rows])
        total = int(np.minimum(left, CLIP_MAX_NEW).sum())
        if self._dead:
            total += sum(min(request.remaining, CLIP_MAX_NEW) for request in self.running if request.over)
        return total

    def _candidates(self) -> Iterable[Request]:
        """By level; of equals victims first, and no newcomer overtakes one of them."""
        top, batches = self.queue.top, self._batches
        victims = sorted(self.queue.victims.values(), key=lambda victim: -level_of(victim, batches, top))
        asked, overtakable = 0, True
        for newcomer in self._policy.order(self.queue, self._memory.prefixes, batches):
            level = level_of(newcomer, batches, top)
            while asked < len(victims) and level_of(victims[asked], batches, top) >= level:
                yield victims[asked]
                overtakable = overtakable and victims[asked].state is State.PREFILL
                asked += 1
            if not overtakable:
                return
            yield newcomer
        yield from victims[asked:]

    def _continue_chunk(self, request: Request, chosen: Selection) -> bool:
        """Put the next piece of the chunked prompt into the step. False while there is no memory for any of it."""
        budget, memory = chosen.budget, self._memory
        start = int(memory.tables.allocated[request.row])
        rest = int(memory.tables.length[request.row]) - start
        count = budget.part_of(rest)
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

    def _try_admit(self, request: Request, chosen: Selection, now: float) -> Verdict:
        """Admit `request` into the step, or hold it back (ROOM: look at the next one), or say why not."""
        budget, memory, prefixes = chosen.budget, self._memory, self._memory.prefixes
        length = len(request.token_ids)
        if self._pays_to_wait(request, chosen):
            request.held_back = True
            chosen.held += 1
            return Verdict.ROOM
        node, matched = prefixes.match(request.key[: request.matchable * ID_BYTES], request.salt)
        extend = length - matched
        expected = self._rules.charge(request)
        alone = not chosen.chunks and len(self.running) == self._dead
        if alone and length + expected >= budget.total:
            # With nobody else there, what it can still generate is all that counts, or it would wait for ever.
            expected = min(request.remaining, CLIP_MAX_NEW)
        if extend + expected >= budget.total + alone:
            return Verdict.NO_TOKEN
        if chosen.chunks and not budget.input_fits(memory.whole_pages(extend)):
            return Verdict.STEP_FULL
        count = budget.part_of(extend)
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
        request.waited = self._batches - request.queued_at_batch
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

    def _form_prefill(self, chosen: Selection, running: int) -> ScheduledBatch:
        requests = [chunk.request for chunk in chosen.chunks]
        for request in chosen.admitted:
            self.queue.remove(request)
        self._batches += 1
        self._prefills_in_a_row += 1
        self._decodes_in_a_row = 0
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
        return ScheduledBatch(self._builder.prefill(requests, [chunk.start for chunk in chosen.chunks], slots), requests)

    # --- decode ---

    def _decode(self, now: float) -> ScheduledBatch | None:
        if self._dead:
            self.running = [request for request in self.running if not request.over]
            self._dead = 0
            self._full = False
        if not self.running:
            self._full = False
            return None
        memory = self._memory
        need = memory.decode_need(self._living_rows())
        if memory.pages.free_tokens < need:
            memory.evict(need)
        if memory.pages.free_tokens < need:
            self._retract()
            if not self.running:
                return None
        else:
            self.ratio.decay()
        rows = self._living_rows()
        positions, slots = memory.extend_each(rows)
        self._prefills_in_a_row = 0
        self._decodes_in_a_row += 1
        return ScheduledBatch(self._builder.decode(self.running, rows, positions, slots), self.running)

    def _retract(self) -> None:
        """The pool is full: send requests back to the queue until the others have room for some steps."""
        memory, tables = self._memory, self._memory.tables
        rows = self._living_rows()
        outputs = (tables.length[rows] - tables.prompt[rows]).tolist()
        kept = [self.running[index] for index in keep_order(outputs, tables.prompt[rows].tolist())]
        room_each = memory.whole_pages(RETRACT_DECODE_STEPS)
        victims: list[Request] = []
        while len(kept) > 1 and (not victims or memory.pages.free_tokens < room_each * len(kept)):
            victims.append(kept.pop())
            self._preempt(victims[-1])
            memory.make_room(room_each * len(kept))
        self.running = kept
        self._rows = None
        self._full = False
        if len(kept) == 1 and not self._has_room_for(kept[0]):
            if self.chunked is not None:
                victims.append(self.chunked)
                self._preempt(self.chunked)
            if not self._has_room_for(kept[0]):
                self.running = []
                kept[0].merged = False
                self.failed.append((kept[0], "kv_exhausted", "The KV cache is full and nothing can be evicted from it."))
        old = self.ratio.value
        if victims:
            rows = self._living_rows()
            if len(rows):
                outputs_kept = int((tables.length[rows] - tables.prompt[rows]).sum())
                self.ratio.learn(outputs_kept, len(rows), int(tables.max_new[rows].sum()))
            self._rules.put_back(self.queue, victims)
            self._report.preemptions += len(victims)
            self._report.retraction(requests=len(victims), old_ratio=old, new_ratio=self.ratio.value)

    def _has_room_for(self, request: Request) -> bool:
        """Whether the next position of `request` has a slot, evicting for it."""
        need = self._memory.decode_need(np.array([request.row], dtype=np.int32))
        self._memory.make_room(need)
        return self._memory.pages.free_tokens >= need

    def _preempt(self, request: Request) -> None:
        """Take the memory of `request`, and keep its tokens."""
        tables, row = self._memory.tables, request.row
        length = int(tables.length[row])
        request.keep(tables.tokens[row, :length])
        request.retractions += 1
        request.queued_at_batch = self._batches - request.waited
        self._report.preempted_tokens += int(tables.allocated[row] - tables.shared[row])
        self._leave_row(request, keep=0)
        request.merged = False
        request.enter(State.RETRACTED)

    def _leave_row(self, request: Request, *, keep: int) -> None:
        self._memory.release(request, keep)
        self._computing.pop(request.id, None)
        if self.chunked is request:
            self.chunked = None
