"""The engine: messages in, one scheduling turn at a time, messages out.

`Engine` is driven by its owner: `handle` every message that has come, `turn` as long as `has_work`. A turn decides a step,
launches it, takes the result of the oldest step that is due, and notes its tokens. With `limits.overlap` one step stays in
flight while the next is decided (its input tokens are then not known yet and stand as negative ids in the step); without,
a step is waited for at once. Both are the same functions; only the number of steps that may stay in flight differs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from banyan_runtime.engine.batch import StepBuilder
from banyan_runtime.engine.limits import EngineLimits
from banyan_runtime.engine.memory.kv import KvMemory
from banyan_runtime.engine.memory.tables import STOP_COLUMNS
from banyan_runtime.engine.policy import POLICIES
from banyan_runtime.engine.report import Report
from banyan_runtime.engine.request import Request, State
from banyan_runtime.engine.rules import RULES
from banyan_runtime.engine.scheduler import ScheduledBatch, Scheduler
from banyan_runtime.step import Handle, Runner, StepResult
from banyan_runtime.wire import (
    Abort,
    EngineMessage,
    Failed,
    Finish,
    FinishCode,
    Flush,
    Flushed,
    FrontMessage,
    Ping,
    Pong,
    Stats,
    StepOutput,
    Submit,
    pack_ids,
)

STATS_INTERVAL_S: Final = 0.1


@dataclass(slots=True)
class _Launched:
    batch: ScheduledBatch
    handle: Handle
    started: float
    retired: list[int] = field(default_factory=list)  # rows released while the step may still read them


class Engine:
    """Every request that is submitted ends in exactly one Finish or Failed. `clock` gives seconds and never goes back."""

    def __init__(self, runner: Runner, limits: EngineLimits, clock: Callable[[], float], log: Callable[[str], None]) -> None:
        self._runner = runner
        self._limits = limits
        self._clock = clock
        self.memory = KvMemory(
            pool_tokens=limits.pool_tokens,
            page_size=limits.page_size,
            rows=limits.max_running,
            context_len=limits.context_len,
            radix=limits.radix,
        )
        now = clock()
        self._report = Report(log, limits, now)
        self.scheduler = Scheduler(
            limits,
            self.memory,
            StepBuilder(self.memory.tables, limits.page_size),
            POLICIES[limits.policy](),
            RULES[limits.scheduling_rules](),
            self._report,
        )
        self.requests: dict[int, Request] = {}  # by id, all that have not ended
        self._many_stops: set[int] = set()  # ids of requests with more stop ids than a row has columns
        self._in_flight: deque[_Launched] = deque()
        self._busy = False  # from the first request until a turn finds everything done
        self._depth = 1 if limits.overlap else 0
        self._out: list[EngineMessage] = []
        self._arrivals = 0
        self._stats_at = now
        self._off_balance = 0

    @property
    def has_work(self) -> bool:
        return self._busy or bool(self._out)

    def handle(self, message: FrontMessage) -> None:
        """Take one message; answers come with the next turn. Shutdown is for the owner of the loop, not for the engine."""
        match message:
            case Submit():
                self._submit(message)
            case Abort(id=id):
                if id in self.requests:
                    self._end(self.requests[id], FinishCode.ABORT, self._clock(), self._aborted)
            case Flush(seq=seq):
                idle = not self.requests
                if idle:
                    self.memory.evict(self.memory.prefixes.evictable)
                self._out.append(Flushed(seq=seq, ok=idle))
            case Ping(seq=seq):
                self._out.append(Pong(seq=seq))

    def turn(self) -> list[EngineMessage]:
        """Decide, launch and settle: at most one step is launched. Returns what the front must know."""
        if self._busy:
            self._step()
            self._check_balance()
            now = self._clock()
            if not self.requests and not self._in_flight:
                self._go_idle(now)
            elif now - self._stats_at >= STATS_INTERVAL_S:
                self._out.append(self.stats(now))
        out, self._out = self._out, []
        return out

    def stats(self, now: float) -> Stats:
        """A snapshot of the counters, taken at `now`."""
        self._stats_at = now
        memory = self.memory
        return self._report.stats(
            running=self.scheduler.running_count,
            waiting=len(self.scheduler.queue),
            kv_used=memory.used,
            kv_evictable=memory.prefixes.evictable,
            kv_free=memory.pages.free_tokens,
            evicted_tokens=memory.evicted_tokens,
            ratio=self.scheduler.ratio.value,
        )

    def _submit(self, submit: Submit) -> None:
        now = self._clock()
        assert submit.id not in self.requests, f"request {submit.id} is there already"
        prompt_len = len(submit.token_ids) // 4
        refusal = self._limits.check(prompt_len)
        if refusal is None and len(self.scheduler.queue.newcomers) >= self._limits.max_queued:
            refusal = "queue_full", "The request queue is full."
        max_new = self._limits.max_new(prompt_len, submit.sampling.max_new_tokens)
        request = Request(submit, max_new=max_new, arrival=self._arrivals, received_at=now)
        if refusal is None and not self._known_ids(request):
            refusal = "invalid_value", f"Token ids must be in [0, {self._limits.vocab_size})."
        if refusal is not None:
            self._out.append(Failed(id=submit.id, code=refusal[0], message=refusal[1]))
            return
        self._arrivals += 1
        if not self._busy:
            self._busy = True
            self._report.busy(now)
        self.requests[submit.id] = request
        if len(request.stop_ids) > STOP_COLUMNS:
            self._many_stops.add(request.id)
        self.scheduler.add(request)

    def _known_ids(self, request: Request) -> bool:
        """An id outside the vocabulary would fail the whole step, with everybody in it."""
        ids = request.token_ids
        return len(ids) > 0 and int(ids.min()) >= 0 and int(ids.max()) < self._limits.vocab_size

    def _step(self) -> None:
        if self.scheduler.penalised:
            # the step to come counts tokens that the one in flight is still sampling
            while self._in_flight:
                self._settle()
        pending = bool(self._in_flight)
        now = self._clock()
        batch = self.scheduler.schedule(now)
        for request, code, message in self.scheduler.failed:
            self._fail(request, code, message)
        self.scheduler.failed.clear()
        if batch is not None:
            launched = _Launched(batch, self._runner.launch(batch.step), now)
            self._in_flight.append(launched)
            self.memory.tables.retire_into(launched.retired)
        elif not pending:
            self.scheduler.no_batch()
        while len(self._in_flight) > (self._depth if batch is not None else 0):
            self._settle()

    def _settle(self) -> None:
        """Wait for the oldest step in flight and note what it gave."""
        launched = self._in_flight.popleft()
        result = launched.handle.result()
        self.memory.tables.retire_into(self._in_flight[-1].retired if self._in_flight else None)
        self.memory.tables.reuse(launched.retired)
        now = self._clock()
        step = launched.batch.step
        if step.mode == "prefill":
            self._note_prefill(launched.batch, result, now)
            self._report.prefill_done(len(step.token_ids), launched.started, now)
        else:
            self._note_decode(launched.batch, result, now)
            self._report.decode_done(len(step.rows), launched.started, now, used=self.memory.used, queued=len(self.scheduler.queue))

    def _note_prefill(self, batch: ScheduledBatch, result: StepResult, now: float) -> None:
        tables, ids, tokens, ended = self.memory.tables, list[int](), list[int](), list[Finish]()
        rows, kv_lens = batch.step.rows.tolist(), batch.step.kv_lens.tolist()
        samples, failed = batch.step.samples.tolist(), result.failed.tolist()
        for index, (request, token) in enumerate(zip(batch.requests, result.token_ids.tolist(), strict=True)):
            row = rows[index]
            if not samples[index] or not tables.live[row]:
                continue  # a chunk before the last, or a request that was released meanwhile
            if failed[index]:
                self._fail_row(request)
                continue
            self.scheduler.computed(request)
            if request.first_token_at is None:
                request.first_token_at = now
            tables.tokens[row, kv_lens[index]] = token
            tables.length[row] = kv_lens[index] + 1
            ids.append(request.id)
            tokens.append(token)
            code = self._finish_code(request, token, kv_lens[index] + 1)
            if code is None:
                self.memory.store(request, kv_lens[index])
            else:
                self._end(request, code, now, ended.append)
        self._emit(ids, pack_ids(tokens), ended)

    def _note_decode(self, batch: ScheduledBatch, result: StepResult, now: float) -> None:
        tables, requests, rows, token_ids = self.memory.tables, batch.requests, batch.step.rows, result.token_ids
        live = tables.live[rows]
        failed = result.failed & live
        if failed.any():
            for index in np.flatnonzero(failed).tolist():
                self._fail_row(requests[index])
            live &= ~failed
        if not live.all():
            chosen = np.flatnonzero(live)
            rows, token_ids = rows[chosen], token_ids[chosen]
            requests = [requests[index] for index in chosen.tolist()]
        lengths = tables.length[rows]
        tables.tokens[rows, lengths] = token_ids
        lengths += 1
        tables.length[rows] = lengths
        ids: list[int] = tables.ids[rows].tolist()
        ending = (lengths - tables.prompt[rows] >= tables.max_new[rows]) | (tables.stops[rows] == token_ids[:, None]).any(axis=1)
        if self._many_stops:
            ending |= np.array([id in self._many_stops for id in ids], dtype=np.bool_)
        ended: list[Finish] = []
        for index in np.flatnonzero(ending).tolist():
            code = self._finish_code(requests[index], int(token_ids[index]), int(lengths[index]))
            if code is not None:
                self._end(requests[index], code, now, ended.append)
        self._emit(ids, pack_ids(token_ids), ended)

    def _finish_code(self, request: Request, token: int, length: int) -> FinishCode | None:
        """Whether the request ends with this token. A stop id as the last allowed token is a stop: the model was done."""
        if token in request.sampling.stop_token_ids:
            return FinishCode.STOP
        return FinishCode.LENGTH if length - request.prompt_len >= request.max_new else None

    def _end(self, request: Request, code: FinishCode, now: float, tell: Callable[[Finish], None]) -> None:
        state = State.ABORTED if code is FinishCode.ABORT else State.FINISHED
        if not self.scheduler.release(request, state, keep=True):
            return
        self._forget(request)
        admitted = now if request.admitted_at is None else request.admitted_at
        first = admitted if request.first_token_at is None else request.first_token_at
        tell(
            Finish(
                id=request.id,
                code=code,
                cached_tokens=request.cached_tokens,
                queue_s=admitted - request.received_at,
                prefill_s=first - admitted,
                retractions=request.retractions,
            )
        )

    def _aborted(self, finish: Finish) -> None:
        self._emit([], b"", [finish])

    def _fail_row(self, request: Request) -> None:
        self._fail(request, "internal_error", "The model computed no valid probabilities for this request (NaN).")

    def _fail(self, request: Request, code: str, message: str) -> None:
        """End one request with an error; what it computed is not to be trusted, so it is not cached."""
        if self.scheduler.release(request, State.ABORTED, keep=False):
            self._forget(request)
            self._out.append(Failed(id=request.id, code=code, message=message))

    def _forget(self, request: Request) -> None:
        del self.requests[request.id]
        self._many_stops.discard(request.id)

    def _emit(self, ids: list[int], token_ids: bytes, finished: list[Finish]) -> None:
        self._report.generation_tokens += len(ids)
        if ids or finished:
            self._out.append(StepOutput(ids=ids, token_ids=token_ids, finished=finished))

    def _check_balance(self) -> None:
        """Lost KV memory is a bug that tests must find; in production it is said once and repaired at idle."""
        off = self.memory.imbalance()
        if off != self._off_balance:
            self._off_balance = off
            self._report.trouble(f"KV memory is off balance by {off} tokens: this is a bug in Banyan, please report it. Serving goes on.")

    def _go_idle(self, now: float) -> None:
        self.scheduler.rest()
        if self._off_balance or self.memory.prefixes.protected or self.memory.tables.live.any():
            self._report.trouble("KV memory is rebuilt; the prefix cache starts empty.")
            self.memory.reset()
            self._off_balance = 0
        self._busy = False
        self._report.idle(now)
        self._out.append(self.stats(now))
