"""The engine's loop: receive messages, decide a step, launch it, process the results that are due, send what the front must know.

With `limits.overlap` one step stays in flight while the next is decided (its input tokens are then not known yet and stand as
negative ids in the step); without, a step is waited for at once. Both are the same functions; only the number of steps that
may stay in flight differs. What grammars admit depends on the tokens in flight: where some are, the step is launched up to its logits,
and its mask is said when the step before it has been noted. Tests drive `handle` and `turn` themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from banyan_runtime.engine.batch import ScheduledBatch, StepBuilder
from banyan_runtime.engine.constraints import Grammars, Pending
from banyan_runtime.engine.limits import EngineLimits
from banyan_runtime.engine.memory.kv import KvMemory
from banyan_runtime.engine.memory.prefixes import ID_BYTES
from banyan_runtime.engine.memory.tables import SLACK
from banyan_runtime.engine.out_of_memory import WINDOW_S
from banyan_runtime.engine.policy import POLICIES
from banyan_runtime.engine.report import Drafted, Report
from banyan_runtime.engine.request import Request, State
from banyan_runtime.engine.results import Results
from banyan_runtime.engine.rules import SchedulingRules
from banyan_runtime.engine.scheduler import Scheduler
from banyan_runtime.errors import DeviceFull
from banyan_runtime.grammar.errors import GrammarBusy, GrammarError
from banyan_runtime.step import I32, Handle, OutOfMemory, Runner, TableShape
from banyan_runtime.wire import (
    Abort,
    EngineMessage,
    Failed,
    Finish,
    FinishCode,
    Flush,
    Flushed,
    FrontMessage,
    Left,
    Ping,
    Pong,
    Proceed,
    Shutdown,
    Stats,
    StepOutput,
    Submit,
    client_of,
    unpack_ids,
)

STATS_INTERVAL_S: Final = 0.1
GRAMMAR: Final = "invalid_grammar"  # the code of a failure that the request's own grammar brings about


@dataclass(slots=True)
class _Launched:
    batch: ScheduledBatch
    handle: Handle
    started: float
    retired: list[int] = field(default_factory=list)  # rows released before the result has come


class Engine:
    """Every request that is submitted ends in exactly one Finish or Failed. `clock` gives seconds and never goes back."""

    def __init__(
        self,
        runner: Runner,
        limits: EngineLimits,
        clock: Callable[[], float],
        log: Callable[[str], None],
        grammars: Grammars | None = None,
        rules: SchedulingRules | None = None,
    ) -> None:
        assert not (limits.overlap and limits.draft_tokens), "what comes next is guessed from what the step in flight gives"
        self._runner = runner
        self._pending = None if grammars is None else Pending(grammars)
        self._limits = limits
        self._clock = clock
        self.memory = KvMemory(
            pool_tokens=limits.pool_tokens,
            page_size=limits.page_size,
            rows=limits.max_running,
            context_len=limits.max_model_len,
            radix=limits.radix,
        )
        runner.prepare(TableShape(limits.max_running, limits.max_model_len + SLACK))
        now = clock()
        self._report = Report(log, limits, now)
        self.scheduler = Scheduler(
            limits,
            self.memory,
            StepBuilder(self.memory.tables, limits.page_size, limits.vocab_size, grammars),
            POLICIES[limits.policy](),
            rules or SchedulingRules(),
            self._report,
        )
        self.requests: dict[int, Request] = {}  # by id, all that have not ended
        self._results = Results(self.memory, self.scheduler.prefill, self._end, self._fail_row)
        self._in_flight: deque[_Launched] = deque()
        self.given_up: DeviceFull | None = None
        self._busy = False  # from the first message about a request until a turn finds nothing to do
        self._depth = 1 if limits.overlap else 0
        self._out: list[EngineMessage] = []
        self._arrivals = 0
        self._stats_at = now
        self._off_balance = 0

    @property
    def has_work(self) -> bool:
        return self._busy or bool(self._out)

    def run(self, receive: Callable[[bool], Iterable[FrontMessage]], send: Callable[[EngineMessage], None]) -> None:
        """Serve until Shutdown. `receive(wait)` gives the messages that have come; with `wait` there is nothing to do before one
        comes. Raises DeviceFull."""
        while True:
            for message in receive(not self.has_work):
                if isinstance(message, Shutdown):
                    return
                if isinstance(message, Ping):
                    send(Pong(message.seq))
                else:
                    self.handle(message)
            for answer in self.turn():
                send(answer)
            if self.given_up is not None:
                raise self.given_up

    def turn(self) -> list[EngineMessage]:
        """Decide, launch and process: at most one step is launched. Returns what the front must know."""
        if self._pending is not None:
            self._proceed_with_grammars(self._pending)
        if self._busy:
            batch = self._decide()
            missed = "" if batch is None else self._launch(batch)
            while len(self._in_flight) > (self._depth if batch is not None and not missed else 0):
                self._process(self._in_flight.popleft())
            if batch is not None and batch.step.mask_later and not missed:
                missed = self._draw(batch)
            if batch is not None and missed:
                self._do_without(batch, missed)
            self._look_around()
        out, self._out = self._out, []
        return out

    def handle(self, message: FrontMessage) -> None:
        """Take one message; answers come with the next turn."""
        match message:
            case Submit():
                self._submit(message)
            case Proceed(id=id):
                if id in self.requests:
                    self._wake(self._clock())
                    self.scheduler.prefill.proceed(self.requests[id])
            case Abort(id=id):
                if id in self.requests:
                    self._abort(self.requests[id])
            case Left(client=client):
                for request in [each for each in self.requests.values() if client_of(each.id) == client]:
                    self._abort(request)
            case Flush(seq=seq):
                idle = not self.requests
                if idle:
                    self.memory.evict(self.memory.prefixes.evictable)
                    self._out.append(self.stats(self._clock()))  # before the answer: who has it sees an empty cache
                self._out.append(Flushed(seq=seq, ok=idle))

    def stats(self, now: float) -> Stats:
        """A snapshot of the counters, taken at `now`."""
        self._stats_at = now
        memory = self.memory
        return self._report.stats(
            running=self.scheduler.running_count,
            waiting=len(self.scheduler.queue),
            background_running=self.scheduler.background_count,
            background_waiting=len(self.scheduler.queue) - self.scheduler.queue.online,
            retracted=len(self.scheduler.queue.victims),
            held=len(self.scheduler.queue.held),
            queued_tokens=sum(self.scheduler.queue.uninvited(background=background).tokens for background in (False, True)),
            kv_used=memory.used,
            kv_evictable=memory.prefixes.evictable,
            kv_free=memory.pages.free_tokens,
            evicted_tokens=memory.evicted_tokens,
        )

    def _submit(self, submit: Submit) -> None:
        now = self._clock()
        assert submit.id not in self.requests, f"request {submit.id} is there already"
        request = Request(submit, arrival=self._arrivals, received_at=now)
        refusal = self._refusal(submit, request)
        if refusal is not None:
            self._out.append(Failed(id=submit.id, code=refusal[0], message=refusal[1]))
            return
        self._arrivals += 1
        self._wake(now)
        self.requests[submit.id] = request
        if submit.constraint is not None:
            assert self._pending is not None, "refused otherwise"
            request.held = True
            self._pending.ask(request, submit.constraint)
        self.scheduler.prefill.add(request)

    def _abort(self, request: Request) -> None:
        now, finished = self._clock(), list[Finish]()
        self._wake(now)
        self._end(request, FinishCode.ABORT, finished)
        self._out.append(StepOutput(ids=[], token_ids=b"", finished=finished))

    def _wake(self, now: float) -> None:
        if not self._busy:
            self._busy = True
            self._report.busy(now)

    def _proceed_with_grammars(self, pending: Pending) -> None:
        for request, answer in pending.decided():
            now = self._clock()
            self._wake(now)
            self._report.grammar_decided(now - request.received_at)
            if isinstance(answer, GrammarBusy):
                self._fail(request, "unavailable", str(answer))
            elif isinstance(answer, GrammarError):
                self._fail(request, GRAMMAR, str(answer))
            else:
                request.matcher = answer
                self.scheduler.prefill.proceed(request)

    def _refusal(self, submit: Submit, request: Request) -> tuple[str, str] | None:
        """The (code, message) with which a new request is turned away, or None."""
        refusal = self._limits.refusal(request.prompt_len, request.max_new)
        missing = self._missing(submit)
        if refusal is None and missing:
            refusal = "unsupported", f"This server cannot compute what the request asks for ({missing})."
        waiting = self.scheduler.queue.uninvited(background=request.background)
        if refusal is None and not self._limits.has_room(waiting.requests, waiting.tokens, request.prompt_len):
            refusal = "queue_full", "The request queue is full."
        if refusal is None and not _all_in(request.token_ids, self._limits.vocab_size):
            refusal = "invalid_value", f"Token ids must be in [0, {self._limits.vocab_size})."
        if refusal is None and not _may_stand_for(unpack_ids(request.prefix_ids), request.token_ids):
            refusal = "invalid_value", "Prefix ids must be as many as token ids, and each the same or negative."
        return refusal

    def _decide(self) -> ScheduledBatch | None:
        batch = self.scheduler.schedule(self._clock())
        for request, code, message in self.scheduler.failed:
            self._fail(request, code, message)
        self.scheduler.failed.clear()
        if batch is None and not self._in_flight:
            self.scheduler.no_batch()
        return batch

    def _launch(self, batch: ScheduledBatch) -> str:
        """What is said of the memory that the device has not; else nothing, and it is in flight."""
        started = self._clock()
        try:
            handle = self._runner.launch(batch.step)
        except OutOfMemory as error:
            return str(error)
        launched = _Launched(batch, handle, started)
        self._in_flight.append(launched)
        self.memory.tables.retire_into(launched.retired)
        return ""

    def _draw(self, batch: ScheduledBatch) -> str:
        """Say the masks of the step in flight, with which its tokens are drawn. Returns as `_launch`."""
        launched = self._in_flight[-1]
        try:
            launched.handle.draw(self.scheduler.late_mask(batch))
        except OutOfMemory as error:
            self._in_flight.pop()
            self._let_go(launched)
            return str(error)
        return ""

    def _let_go(self, launched: _Launched) -> None:
        """It is in flight no more."""
        self.memory.tables.retire_into(self._in_flight[-1].retired if self._in_flight else None)
        self.memory.tables.reuse(launched.retired)

    def _do_without(self, batch: ScheduledBatch, missed: str) -> None:
        """A step that there is no memory for: those in it fail, and nobody else. Where nothing helps, the engine is given up."""
        now, step = self._clock(), batch.step
        bounds = self.scheduler.prefill.bounds
        again_s = bounds.halve(step, now)
        where = "this machine" if self._runner.info.device.startswith("cpu") else "the accelerator"
        lost = [request for request in batch.requests if not request.over]
        for request in lost:
            message = f"{where.capitalize()} ran out of memory while it computed this request."
            self._fail(request, "out_of_memory", message, again_s=again_s or WINDOW_S)
        self._report.out_of_memory(step.mode, len(step.token_ids), lost=len(lost), bounds=(bounds.tokens, bounds.rows), said=missed)
        if again_s is None:
            self.given_up = DeviceFull(
                f"{where} ran out of memory for a second step within {WINDOW_S:.0f} s, and for a small one ({missed}). Set "
                "--chunked-prefill-size or --max-running-requests to less, or leave it more memory: does another process use it?",
                code="out_of_memory" if where == "the accelerator" else "host_out_of_memory",
            )

    def _process(self, launched: _Launched) -> None:
        """Wait for a step and note what it gave."""
        result = launched.handle.result()
        self._let_go(launched)
        now = self._clock()
        step = launched.batch.step
        output = self._results.note(launched.batch, result, now)
        if output is not None:
            self._report.generation_tokens += len(output.token_ids) // ID_BYTES
            self._out.append(output)
        if step.mode != "decode":
            beside = len(step.rows) - launched.batch.prompts
            seconds = self._report.prefill_done(len(step.token_ids), beside, launched.started, now, replayed=result.replayed)
        else:
            used, queued = self.memory.used, len(self.scheduler.queue)
            guessed = len(step.token_ids) - len(step.rows)
            right = int(result.accepted.sum()) - len(step.rows) if guessed and result.accepted is not None else 0
            drafts = Drafted(guessed, right)
            seconds = self._report.decode_done(
                len(step.rows), drafts, launched.started, now, used=used, queued=queued, replayed=result.replayed
            )
        self.scheduler.learn(launched.batch, seconds)

    def _end(self, request: Request, code: FinishCode, finished: list[Finish]) -> None:
        state = State.ABORTED if code is FinishCode.ABORT else State.FINISHED
        if not self.scheduler.release(request, state, keep=True):
            return
        del self.requests[request.id]
        admitted, first = request.admitted_at, request.first_token_at
        finished.append(
            Finish(
                id=request.id,
                code=code,
                cached_tokens=request.cached_tokens,
                queue_s=None if admitted is None else admitted - request.received_at,
                prefill_s=None if admitted is None or first is None else first - admitted,
                retractions=request.retractions,
            )
        )

    def _missing(self, submit: Submit) -> str | None:
        """What a request asks for that is not there."""
        features = self._runner.info.features
        if submit.constraint is not None and (self._pending is None or "mask" not in features):
            return "a grammar"
        if submit.sampling.bias_ids and "bias" not in features:
            return "logit_bias"
        if submit.pooling and "pooling" not in features:
            return "embeddings"
        return None

    def _fail_row(self, request: Request) -> None:
        if request.trouble:
            self._fail(request, GRAMMAR, f"The grammar of the output failed: {request.trouble}")
        else:
            self._report.broken_row(self._clock())
            self._fail(request, "internal_error", "The model computed no valid probabilities for this request (NaN).")

    def _fail(self, request: Request, code: str, message: str, *, again_s: float = 0.0) -> None:
        """End one request with an error; what it computed is not to be trusted, so it is not cached. `again_s`: when it may come again."""
        if self.scheduler.release(request, State.ABORTED, keep=False):
            del self.requests[request.id]
            self._out.append(Failed(id=request.id, code=code, message=message, again_s=again_s))

    def _look_around(self) -> None:
        """What a turn owes beside its step: memory is counted, and the front hears how things are."""
        self._check_balance()
        now = self._clock()
        if len(self.requests) == len(self.scheduler.queue.held) and not self._in_flight:
            self._go_idle(now)
        elif now - self._stats_at >= STATS_INTERVAL_S:
            self._out.append(self.stats(now))

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


def _all_in(ids: I32, vocab_size: int) -> bool:
    """An id outside the vocabulary would fail the whole step, with everybody in it."""
    return len(ids) > 0 and int(ids.min()) >= 0 and int(ids.max()) < vocab_size


def _may_stand_for(prefix_ids: I32, token_ids: I32) -> bool:
    """An id that stands for something else than its token is negative, so no other request has it by accident."""
    if not len(prefix_ids):
        return True
    return len(prefix_ids) == len(token_ids) and bool(((prefix_ids == token_ids) | (prefix_ids < 0)).all())
