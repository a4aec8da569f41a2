"""What the engine says about itself: log lines in SGLang's words, and counters for /metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

from banyan_runtime.engine.limits import EngineLimits
from banyan_runtime.step import RunnerInfo
from banyan_runtime.wire import LATENCY_BUCKETS, STEP_SECONDS_BUCKETS, STEP_TOKENS_BUCKETS, HistogramCounts, Stats, StepStats

GIB = 1 << 30
BROKEN_ROWS_EVERY_S = 10.0  # a model that is broken breaks every row


def startup_line(limits: EngineLimits, info: RunnerInfo) -> str:
    """The line that sums up the limits once the pool is allocated."""
    return (
        f"max_total_num_tokens={limits.pool_tokens}, chunked_prefill_size={-1 if limits.chunk is None else limits.chunk}, "
        f"max_prefill_tokens={limits.max_prefill_tokens}, max_running_requests={limits.max_running}, "
        f"context_len={limits.context_len}, available_gpu_mem={info.available_bytes / GIB:.2f} GB"
    )


class Drafted(NamedTuple):
    """Tokens that were guessed."""

    tokens: int
    right: int  # of them, with all before them


class Report:
    """Log lines and counters of one engine. Times are seconds on the engine's clock."""

    def __init__(self, log: Callable[[str], None], limits: EngineLimits, now: float) -> None:
        self._log = log
        self._total = limits.pool_tokens
        self._interval = limits.decode_log_interval
        self._drafts = limits.draft_tokens > 0
        self._window_start = now  # of the decode throughput; idle time is moved out of it
        self._window_tokens = 0
        self._window_rows = 0  # in the steps of the window
        self._window_drafted = Drafted(0, 0)
        self.draft_tokens = 0
        self.draft_tokens_accepted = 0
        self._idle_since: float | None = now
        self._prefill = _StepCounts()
        self._decode = _StepCounts()
        self._grammars = HistogramCounts(counts=[0] * (len(LATENCY_BUCKETS) + 1))
        self._last_step = now
        self._throughput = 0.0
        self.prompt_tokens_computed = 0
        self.prompt_tokens_cached = 0
        self.generation_tokens = 0
        self.preemptions = 0
        self.preempted_tokens = 0
        self.out_of_memory_steps = 0
        self._broken_rows = 0  # that no line has told of
        self._broken_told: float | None = None

    def prompt_tokens(self, cached: int, computed: int) -> None:
        """So many tokens of a prompt are computed, or need not be. Each token of a prompt is counted once."""
        self.prompt_tokens_cached += cached
        self.prompt_tokens_computed += computed

    def prefill_batch(self, *, requests: int, computed: int, cached: int, used: int, running: int, queued: int) -> None:
        """A prefill step is launched; `computed` in whole pages, as SGLang writes it."""
        self._log(
            f"Prefill batch. #new-seq: {requests}, #new-token: {computed}, #cached-token: {cached}, "
            f"token usage: {used / self._total:.2f}, #running-req: {running}, #queue-req: {queued}"
        )

    def retraction(self, *, requests: int, old_ratio: float, new_ratio: float) -> None:
        self._log(
            f"KV cache pool is full. Retract requests. #retracted_reqs: {requests}, #new_token_ratio: {old_ratio:.4f} -> {new_ratio:.4f}"
        )

    def preemption(self, *, requests: int) -> None:
        self._log(f"Requests of lower priority give way. #preempted_reqs: {requests}")

    def prefill_done(self, tokens: int, beside: int, started: float, now: float, *, replayed: bool = False) -> float:
        """`beside`: how many of its tokens were of those who run. Returns the seconds it took, without those it waited for the step
        before."""
        seconds = now - max(started, self._last_step)
        self._prefill.add(tokens, seconds, replayed=replayed)
        self._window_tokens += beside
        self._window_rows += beside
        self._last_step = now
        return seconds

    def decode_done(
        self, requests: int, drafts: Drafted, started: float, now: float, *, used: int, queued: int, replayed: bool = False
    ) -> float:
        """One decode step is through; every `decode_log_interval` of them there is a line. Returns as `prefill_done`."""
        seconds = now - max(started, self._last_step)
        self._decode.add(requests + drafts.tokens, seconds, replayed=replayed)
        self._last_step = now
        self._window_tokens += requests + drafts.right
        self._window_rows += requests
        self._window_drafted = Drafted(self._window_drafted.tokens + drafts.tokens, self._window_drafted.right + drafts.right)
        self.draft_tokens += drafts.tokens
        self.draft_tokens_accepted += drafts.right
        if self._decode.steps % self._interval:
            return seconds
        elapsed = now - self._window_start
        self._throughput = self._window_tokens / elapsed if elapsed > 0 else 0.0
        accept_len = self._window_tokens / max(self._window_rows, 1)
        accept_rate = self._window_drafted.right / max(self._window_drafted.tokens, 1)
        self._window_start = now
        self._window_tokens = self._window_rows = 0
        self._window_drafted = Drafted(0, 0)
        accepted = f"accept len: {accept_len:.2f}, accept rate: {accept_rate:.2f}, " if self._drafts else ""
        self._log(
            f"Decode batch. #running-req: {requests}, #token: {used}, token usage: {used / self._total:.2f}, {accepted}"
            f"cuda graph: {replayed}, gen throughput (token/s): {self._throughput:.2f}, #queue-req: {queued}"
        )
        return seconds

    def grammar_decided(self, seconds: float) -> None:
        """A request has waited so long for its grammar, which is there or never will be."""
        _observe(self._grammars, LATENCY_BUCKETS, seconds)

    def out_of_memory(self, mode: str, tokens: int, *, lost: int, bounds: tuple[int | None, int | None], said: str) -> None:
        """There was no memory for a step; `lost` requests have failed. `bounds`: of tokens and rows, from now on."""
        self.out_of_memory_steps += 1
        names = "chunked_prefill_size", "max_running_requests"
        smaller = "".join(f", {name}: {most}" for name, most in zip(names, bounds, strict=True) if most is not None)
        self._log(f"Out of memory in a {mode} step. #new-token: {tokens}, #failed_reqs: {lost}{smaller}. {said}")

    def broken_row(self, now: float) -> None:
        """A request has failed for NaN, or for logits of which none is admissible."""
        self._broken_rows += 1
        if self._broken_told is None or now - self._broken_told >= BROKEN_ROWS_EVERY_S:
            self._log(
                f"The model computed NaN. #failed_reqs: {self._broken_rows}. Its weights are damaged, its numbers do not fit into --dtype, "
                "the device fails, or a request admits no token."
            )
            self._broken_rows, self._broken_told = 0, now

    def trouble(self, line: str) -> None:
        self._log(line)

    def idle(self, now: float) -> None:
        self._idle_since = now
        self._throughput = 0.0

    def busy(self, now: float) -> None:
        """Work has come; time spent idle does not count into the throughput."""
        if self._idle_since is not None:
            self._window_start += now - self._idle_since
            self._idle_since = None

    def stats(
        self,
        *,
        running: int,
        waiting: int,
        background_running: int,
        background_waiting: int,
        retracted: int,
        held: int,
        queued_tokens: int,
        kv_used: int,
        kv_evictable: int,
        kv_free: int,
        evicted_tokens: int,
    ) -> Stats:
        """A snapshot. The process that owns the engine adds what needs the system: `last_step_unix` is still on the
        engine's clock, `cpu_seconds` and `resident_bytes` are 0."""
        return Stats(
            running=running,
            waiting=waiting,
            background_running=background_running,
            background_waiting=background_waiting,
            retracted=retracted,
            held=held,
            queued_tokens=queued_tokens,
            kv_used=kv_used,
            kv_evictable=kv_evictable,
            kv_free=kv_free,
            last_step_unix=self._last_step,
            prompt_tokens_computed=self.prompt_tokens_computed,
            prompt_tokens_cached=self.prompt_tokens_cached,
            generation_tokens=self.generation_tokens,
            preemptions=self.preemptions,
            preempted_tokens=self.preempted_tokens,
            out_of_memory_steps=self.out_of_memory_steps,
            evicted_tokens=evicted_tokens,
            gen_throughput=self._throughput,
            draft_tokens=self.draft_tokens,
            draft_tokens_accepted=self.draft_tokens_accepted,
            prefill=self._prefill.snapshot(),
            decode=self._decode.snapshot(),
            cpu_seconds=0.0,
            resident_bytes=0,
            grammar_seconds=_copy(self._grammars),
        )


class _StepCounts:
    """Counters of one kind of step."""

    def __init__(self) -> None:
        self.steps = self._replayed = 0
        self._seconds = HistogramCounts(counts=[0] * (len(STEP_SECONDS_BUCKETS) + 1))
        self._tokens = HistogramCounts(counts=[0] * (len(STEP_TOKENS_BUCKETS) + 1))

    def add(self, tokens: int, seconds: float, *, replayed: bool = False) -> None:
        self.steps += 1
        self._replayed += replayed
        _observe(self._seconds, STEP_SECONDS_BUCKETS, seconds)
        _observe(self._tokens, STEP_TOKENS_BUCKETS, tokens)

    def snapshot(self) -> StepStats:
        return StepStats(
            steps=self.steps,
            seconds=_copy(self._seconds),
            tokens=_copy(self._tokens),
            replayed=self._replayed,
        )


def _copy(histogram: HistogramCounts) -> HistogramCounts:
    return HistogramCounts(counts=[*histogram.counts], sum=histogram.sum)


def _observe(histogram: HistogramCounts, buckets: Sequence[float], value: float) -> None:
    histogram.counts[bisect_left(buckets, value)] += 1
    histogram.sum += value
