"""Which step runs next: turn order, decode steps with their memory, and who leaves.

Decides over requests, rows and slots; launches nothing, knows no clock. The rules are SGLang 0.4.7's, prefill before
decode, except where `SchedulingRules` makes them kinder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from banyan_runtime.engine.background import Background
from banyan_runtime.engine.batch import ScheduledBatch, StepBuilder, drawing
from banyan_runtime.engine.drafts import Drafts
from banyan_runtime.engine.limits import EngineLimits
from banyan_runtime.engine.memory.kv import KvMemory
from banyan_runtime.engine.policy import Policy
from banyan_runtime.engine.prefill import Prefill
from banyan_runtime.engine.report import Report
from banyan_runtime.engine.request import Request, State
from banyan_runtime.engine.retraction import RETRACT_DECODE_STEPS, NewTokenRatio, keep_order
from banyan_runtime.engine.rules import SchedulingRules
from banyan_runtime.engine.running import Running
from banyan_runtime.step import I32, Step, TokenMask


class Scheduler:
    """Turns of prefill and decode over one memory."""

    def __init__(
        self, limits: EngineLimits, memory: KvMemory, builder: StepBuilder, policy: Policy, rules: SchedulingRules, report: Report
    ) -> None:
        self._limits = limits
        self._memory = memory
        self._builder = builder
        self._rules = rules
        self._report = report
        self.ratio = NewTokenRatio(limits.conservativeness)
        self.running = Running(memory.tables)
        self.background = Background(limits)
        self.prefill = Prefill(
            limits, memory, builder, policy, rules, report, self.running, self.ratio, self.background, self._preempt_for_priority
        )
        self.queue = self.prefill.queue
        self.drafts = Drafts(limits.draft_tokens) if limits.draft_tokens else None
        self.failed: list[tuple[Request, str, str]] = []  # (request, code, message), for the loop to report
        self._decodes_in_a_row = 0  # since the last prefill step that left somebody behind who ran

    def schedule(self, now: float) -> ScheduledBatch | None:
        """The next step, with its slots allocated; None when there is nothing to compute."""
        self.prefill.take_over()
        self.background.look(online=self.prefill.online or self.running.online > 0, now=now)
        for form in self._order():
            batch = form(now)
            if batch is not None:
                return batch
        return None

    def late_mask(self, batch: ScheduledBatch) -> TokenMask | None:
        """The mask of a step with `mask_later`: all that was launched before it has been noted."""
        return self._builder.late_mask(batch)

    def learn(self, batch: ScheduledBatch, seconds: float) -> None:
        """A step took so long."""
        step = batch.step
        if step.mode != "decode":
            self.prefill.learn(batch, seconds)
            return
        if batch.background:
            self.background.learn(len(step.rows), seconds)
        if self.drafts is not None:
            self.drafts.learn(len(step.token_ids), seconds)

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
            if not request.merged:
                self.prefill.full = False
        else:
            self.queue.remove(request)
            self.prefill.full = False  # those behind it may fit
        if request.merged:
            self.running.ended()
        request.enter(state)
        return True

    def no_batch(self) -> None:
        """A turn found nothing to do and nothing is in flight."""
        self.ratio.reset()

    def rest(self) -> None:
        """Nobody is left: be as on the first turn."""
        self.prefill.rest()
        self.running.keep([])
        self.ratio.reset()

    @property
    def running_count(self) -> int:
        """Requests that hold memory."""
        return int(np.count_nonzero(self._memory.tables.live))

    @property
    def background_count(self) -> int:
        """Those of them that are background."""
        tables = self._memory.tables
        return int(np.count_nonzero(tables.live & (tables.level < 0)))

    def _order(self) -> tuple[Callable[[float], ScheduledBatch | None], ...]:
        """Prefill first, unless running requests have waited long enough for their next token, or prompts wait for others to share a step
        with. Background waits for whoever is online."""
        if self.running.online if self.prefill.online else self.running.living:
            decodes = self._decodes_in_a_row
            # prompts that take along who runs need no others to share a step with
            worth = (self._limits.mixed and self.prefill.online) or self.prefill.worth_a_step
            if decodes < self._rules.decodes_between(worth):
                return self._decode, self._prefill
        return self._prefill, self._decode

    def _prefill(self, now: float) -> ScheduledBatch | None:
        running = self.running
        rows = 0
        if self._limits.mixed and self.prefill.online and running.online:
            self._sweep()
            rows = len(running.part(self.background.rows(now))[1])
            rows = rows if self.prefill.has_room_beside(rows) else 0
        prompts = self.prefill.form(now, rows)
        if prompts is None:
            return None
        beside = self._beside(now) if rows and not prompts.background else []
        behind = running.living if prompts.background else running.online
        self._decodes_in_a_row = 0 if not beside and (behind or not self._limits.mixed) else 1
        requests, starts, slots = [*prompts.requests, *beside], prompts.starts, prompts.slots
        if beside:
            positions, taken = self._memory.extend_each(np.array([request.row for request in beside], dtype=np.int32))
            starts = [*starts, *positions.tolist()]
            slots = [*slots, *taken[:, np.newaxis]]
        step = self._builder.prefill(requests, starts, slots, len(beside))
        size = None if prompts.size is None else prompts.size + len(beside)
        return ScheduledBatch(step, requests, len(prompts.requests), size, prompts.background, drawing(requests, step.samples))

    def _beside(self, now: float) -> list[Request]:
        """The running requests that decode in the step of prompts that was just formed: none if there is no room for all of them."""
        running, memory = self.running, self._memory
        self._sweep()
        requests, rows = running.part(self.background.rows(now))
        if not running.online:
            return []
        need = memory.decode_need(rows)
        memory.make_room(need)
        if memory.pages.free_tokens < need:
            return []
        self.ratio.decay()
        self.background.decoded(online=True)
        return requests

    def _sweep(self) -> None:
        if self.running.sweep() or not len(self.running):
            self.prefill.full = False

    def _decode(self, now: float) -> ScheduledBatch | None:
        running, memory = self.running, self._memory
        self._sweep()
        if not len(running):
            return None
        beside = self.background.rows(now)
        requests, rows = running.part(beside)
        need = memory.decode_need(rows)
        if memory.pages.free_tokens < need:
            memory.evict(need)
        full = memory.pages.free_tokens < need
        if full:
            self._retract()
            if not len(running):
                return None
            requests, rows = running.part(beside)
            if memory.pages.free_tokens < memory.decode_need(rows):
                return None
        online = running.online > 0
        step = self._decode_step(requests, rows)
        if not full:
            self.ratio.decay()
        self._decodes_in_a_row += 1
        self.background.decoded(online=online)
        constrained = self._builder.constrained(requests, rows)
        return ScheduledBatch(step, requests, background=not online, constrained=constrained)

    def _decode_step(self, requests: list[Request], rows: I32) -> Step:
        """With guesses, where they are worth it and fit beside what everybody needs; nobody leaves for them."""
        memory = self._memory
        guesses = None if self.drafts is None else self.drafts.propose(requests, rows, memory.tables)
        if guesses is None:
            return self._builder.decode(requests, rows, *memory.extend_each(rows))
        fitting = memory.fitting(rows, [len(guess) for guess in guesses])
        guesses = [guess[:count] for guess, count in zip(guesses, fitting, strict=True)]
        positions = memory.tables.allocated[rows]
        ends = [first + 1 + len(guess) for first, guess in zip(positions.tolist(), guesses, strict=True)]
        slots = [memory.extend(request, end) for request, end in zip(requests, ends, strict=True)]
        return self._builder.decode(requests, rows, positions, np.concatenate(slots), guesses)

    def _retract(self) -> None:
        """The pool is full: send requests back to the queue until the others have room for some steps."""
        running, memory, tables = self.running, self._memory, self._memory.tables
        rows = running.rows
        outputs = (tables.length[rows] - tables.prompt[rows]).tolist()
        order = keep_order(tables.level[rows].tolist(), outputs, tables.prompt[rows].tolist())
        kept = [running.requests[index] for index in order]
        room_each = memory.whole_pages(RETRACT_DECODE_STEPS)
        victims: list[Request] = []
        while len(kept) > 1 and (not victims or memory.pages.free_tokens < room_each * len(kept)):
            victims.append(kept.pop())
            self._preempt(victims[-1])
            memory.make_room(room_each * len(kept))
        running.keep(kept)
        self.prefill.full = False
        if len(kept) == 1 and not self._has_room_for(kept[0]):
            if self.prefill.chunked is not None:
                victims.append(self.prefill.chunked)
                self._preempt(self.prefill.chunked)
            # one that is only scored gives its memory back with the step in flight
            if not self._has_room_for(kept[0]) and self.running_count == 1:
                running.keep([])
                kept[0].merged = False
                self.failed.append((kept[0], "kv_exhausted", "The KV cache is full and nothing can be evicted from it."))
        old = self.ratio.value
        if victims:
            rows = running.rows
            if len(rows):
                outputs_kept = int((tables.length[rows] - tables.prompt[rows]).sum())
                self.ratio.learn(outputs_kept, len(rows), int(tables.max_new[rows].sum()))
            self.prefill.put_back(victims)
            self._report.retraction(requests=len(victims), old_ratio=old, new_ratio=self.ratio.value)

    def _preempt_for_priority(self, victims: Sequence[Request]) -> None:
        """Running requests give way to one that is more urgent."""
        for victim in victims:
            self._preempt(victim)
        self.running.keep([request for request in self.running.requests if request.merged], dead=len(self.running) - self.running.living)
        self.prefill.put_back(victims)
        self._report.preemption(requests=len(victims))

    def _has_room_for(self, request: Request) -> bool:
        """Whether the next position of `request` has a slot, evicting for it."""
        need = self._memory.decode_need(np.array([request.row], dtype=np.int32))
        self._memory.make_room(need)
        return self._memory.pages.free_tokens >= need

    def _preempt(self, request: Request) -> None:
        """Take the memory of `request`, and keep its tokens."""
        tables, row = self._memory.tables, request.row
        request.keep(tables.tokens[row, : tables.length[row]])
        request.retractions += 1
        self._report.preemptions += 1
        self._report.preempted_tokens += int(tables.allocated[row] - tables.shared[row])
        self._leave_row(request, keep=0)
        request.merged = False
        request.enter(State.RETRACTED)

    def _leave_row(self, request: Request, *, keep: int) -> None:
        self._memory.release(request, keep)
        self.prefill.leave(request)
