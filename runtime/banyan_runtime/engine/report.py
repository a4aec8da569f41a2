"""What the engine says about itself: log lines in SGLang's words, and counters for /metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from banyan_runtime.engine.limits import EngineLimits
from banyan_runtime.step import RunnerInfo
from banyan_runtime.wire import STEP_SECONDS_BUCKETS, STEP_TOKENS_BUCKETS, HistogramCounts, Stats, StepStats

GIB = 1 << 30


def startup_line(limits: EngineLimits, info: RunnerInfo) -> str:
    """The line that sums up the limits once the pool is allocated."""
    return (
        f"max_total_num_tokens={limits.pool_tokens}, chunked_prefill_size={-1 if limits.chunk is None else limits.chunk}, "
        f"max_prefill_tokens={limits.max_prefill_tokens}, max_running_requests={limits.max_running}, "
        f"context_len={limits.context_len}, available_gpu_mem={info.available_bytes / GIB:.2f} GB"
    )


class Report:
    """Log lines and counters of one engine. Times are seconds on the engine's clock."""

    def __init__(self, log: Callable[[str], None], limits: EngineLimits, now: float) -> None:
        self._log = log
        self._total = limits.pool_tokens
        self._interval = limits.decode_log_interval
        self._graphs = limits.graphs
        self._window_start = now  # of the decode throughput; idle time is moved out of it
        self._window_tokens = 0
        self._idle_since: float | None = now
        self._prefill = _StepCounts()
        self._decode = _StepCounts()
        self._last_step = now
        self._throughput = 0.0
        self.prompt_tokens_computed = 0
        self.prompt_tokens_cached = 0
        self.generation_tokens = 0
        self.preemptions = 0
        self.preempted_tokens = 0

    def prefill_batch(self, *, requests: int, computed: int, cached: int, used: int, running: int, queued: int) -> None:
        self.prompt_tokens_computed += computed
        self.prompt_tokens_cached += cached
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

    def prefill_done(self, tokens: int, started: float, now: float) -> float:
        """Returns the seconds it took, without those it waited for the step before."""
        seconds = now - max(started, self._last_step)
        self._prefill.add(tokens, seconds)
        self._last_step = now
        return seconds

    def decode_done(self, requests: int, started: float, now: float, *, used: int, queued: int) -> None:
        """One decode step is through; every `decode_log_interval` of them there is a line."""
        self._decode.add(requests, now - max(started, self._last_step))
        self._last_step = now
        self._window_tokens += requests
        if self._decode.steps % self._interval:
            return
        elapsed = now - self._window_start
        self._throughput = self._window_tokens / elapsed if elapsed > 0 else 0.0
        self._window_start = now
        self._window_tokens = 0
        self._log(
            f"Decode batch. #running-req: {requests}, #token: {used}, token usage: {used / self._total:.2f}, "
            f"cuda graph: {self._graphs}, gen throughput (token/s): {self._throughput:.2f}, #queue-req: {queued}"
        )

    def trouble(self, line: str) -> None:
        self._log(line)

    def idle(self, now: float) -> None:
        self._idle_since = now

    def busy(self, now: float) -> None:
        """Work has come; time spent idle does not count into the throughput."""
        if self._idle_since is not None:
            self._window_start += now - self._idle_since
            self._idle_since = None

    def stats(
        self, *, running: int, waiting: int, held: int, kv_used: int, kv_evictable: int, kv_free: int, evicted_tokens: int, ratio: float
    ) -> Stats:
        """A snapshot. The process that owns the engine adds what needs the system: `last_step_unix` is still on the
        engine's clock, `cpu_seconds` and `resident_bytes` are 0."""
        return Stats(
            running=running,
            waiting=waiting,
            held=held,
            kv_used=kv_used,
            kv_evictable=kv_evictable,
            kv_free=kv_free,
            last_step_unix=self._last_step,
            prompt_tokens_computed=self.prompt_tokens_computed,
            prompt_tokens_cached=self.prompt_tokens_cached,
            generation_tokens=self.generation_tokens,
            preemptions=self.preemptions,
            preempted_tokens=self.preempted_tokens,
            evicted_tokens=evicted_tokens,
            new_token_ratio=ratio,
            gen_throughput=self._throughput,
            prefill=self._prefill.snapshot(),
            decode=self._decode.snapshot(),
            cpu_seconds=0.0,
            resident_bytes=0,
        )


class _StepCounts:
    """Counters of one kind of step."""

    def __init__(self) -> None:
        self.steps = 0
        self._seconds = HistogramCounts(counts=[0] * (len(STEP_SECONDS_BUCKETS) + 1))
        self._tokens = HistogramCounts(counts=[0] * (len(STEP_TOKENS_BUCKETS) + 1))

    def add(self, tokens: int, seconds: float) -> None:
        self.steps += 1
        _observe(self._seconds, STEP_SECONDS_BUCKETS, seconds)
        _observe(self._tokens, STEP_TOKENS_BUCKETS, tokens)

    def snapshot(self) -> StepStats:
        return StepStats(
            steps=self.steps,
            seconds=HistogramCounts(counts=[*self._seconds.counts], sum=self._seconds.sum),
            tokens=HistogramCounts(counts=[*self._tokens.counts], sum=self._tokens.sum),
        )


def _observe(histogram: HistogramCounts, buckets: Sequence[float], value: float) -> None:
    histogram.counts[bisect_left(buckets, value)] += 1
    histogram.sum += value
