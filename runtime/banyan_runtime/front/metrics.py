"""The server's metric series: their names, types, labels and buckets, and where each number comes from.

The names are an interface that dashboards and alerts rely on; tests/server/metrics.golden freezes them. Requests report
themselves once, when they end; gauges of the engine are read from its newest snapshot when somebody scrapes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from banyan_runtime import __version__, wire
from banyan_runtime.exposition import Page
from banyan_runtime.front.state import STATES, ServerState

LATENCY_BUCKETS: Final = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
TOKEN_BUCKETS: Final = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000,
)  # fmt: skip

ENDPOINTS: Final = ("chat", "completions", "embeddings", "other")
FINISH_REASONS: Final = ("stop", "length", "tool_calls", "abort", "error")
REJECTIONS: Final = ("queue_full", "too_long", "draining", "loading", "auth", "invalid", "other")
STARTUP_PHASES: Final = ("download", "load_weights", "kv_alloc", "graph_capture", "warmup", "total")
METHODS: Final = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS")
MAX_HTTP_SERIES: Final = 200  # handlers are route templates, so this is reached only by a mistake of ours
REWRITE_EVERY_S: Final = 0.25  # endpoint pickers scrape 20 times a second, each replica of them, but read the load gauges alone


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One finished request, as its handler saw it. Times are monotonic seconds, durations seconds; None is what nobody knows."""

    endpoint: str  # one of ENDPOINTS
    streaming: bool
    finish_reason: str  # one of FINISH_REASONS
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    received: float
    first_token: float | None  # None: it ended before
    finished: float
    queue_s: float | None  # None: it was not admitted, or ended without the engine's word
    prefill_s: float | None  # None: as `queue_s`, or it ended before its first token


def _known(value: str, values: tuple[str, ...], fallback: str) -> str:
    return value if value in values else fallback


class Metrics:
    """Counts what happens in the front and renders it with the engine's snapshot. For the event loop only."""

    def __init__(self, model_name: str, state: ServerState, *, queue_limit: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._state = state
        self._clock = clock
        self._written = b""
        self._written_at = float("-inf")
        self._writing = asyncio.Lock()
        self.load_page = Page({"model_name": model_name})
        self.page = Page({"model_name": model_name})  # all but what is on the load page
        self._declare(self.load_page, self.page)
        self._build_info.cell(__version__).value = 1
        self._queue_limit.value = queue_limit
        self.log_dropped: Callable[[], int] = lambda: 0  # lines since the start
        self.resident_bytes: Callable[[], int] = lambda: 0  # of this process

    # --- what happened ---

    def request_finished(self, record: RequestRecord) -> None:
        """Count one request that was admitted, however it ended."""
        endpoint = _known(record.endpoint, ENDPOINTS, "other")
        self._requests[endpoint, _known(record.finish_reason, FINISH_REASONS, "error")].value += 1
        streaming = ("true" if record.streaming else "false",)
        self._duration[streaming].observe(record.finished - record.received)
        self._request_prompt_tokens.observe(record.prompt_tokens)
        self._request_generation_tokens.observe(record.completion_tokens)
        if record.queue_s is not None:
            self._queue.observe(record.queue_s)
        if record.prefill_s is not None:
            self._prefill.observe(record.prefill_s)
        if record.first_token is None:
            return
        self._first_token[streaming].observe(record.first_token - record.received)
        decode_s = record.finished - record.first_token
        self._decode.observe(decode_s)
        if record.completion_tokens > 1:
            self._per_token.observe(decode_s / (record.completion_tokens - 1))

    def rejected(self, reason: str) -> None:
        """Count one request that was not admitted; `reason` is one of REJECTIONS."""
        self._rejections[(_known(reason, REJECTIONS, "other"),)].value += 1

    def inter_token_latency(self, seconds: float, requests: int) -> None:
        """Count the time between two tokens, of so many requests at once."""
        self._inter_token.observe(seconds, requests)

    def http_started(self) -> None:
        self._in_flight.value += 1

    def http_finished(self, handler: str, method: str, code: int) -> None:
        """Count one HTTP exchange; `handler` is the route's template, 'unmatched' where there is none."""
        self._in_flight.value -= 1
        if self._http_series >= MAX_HTTP_SERIES:
            handler = "other"
        cell = self._http.cell(handler, _known(method, METHODS, "other"), str(code))
        self._http_series += cell.value == 0
        cell.value += 1

    def engine_ready(self, info: wire.EngineInfo, *, kv_cache_dtype: str = "auto") -> None:
        """Take over what is constant from now on."""
        self._model_info.cell(
            self._state.model_uri, info.architecture, info.dtype, kv_cache_dtype, info.attention_backend, info.device
        ).value = 1
        self._running_limit.value = info.max_running_requests
        self._capacity.value = info.max_total_tokens
        self._kv_tokens[("free",)].value = info.max_total_tokens
        self._page_size.value = info.page_size
        self._context_length.value = info.context_len
        self._memory[("weights",)].value = info.weights_bytes
        self._memory[("kv_cache",)].value = info.kv_bytes
        for phase, seconds in info.phase_seconds.items():
            self.startup_phase(phase, seconds)

    def startup_phase(self, phase: str, seconds: float) -> None:
        """Note how long a phase of STARTUP_PHASES took; others are not published."""
        if phase in STARTUP_PHASES:
            self._startup[(phase,)].value = seconds

    # --- the text ---

    async def render(self, stats: wire.Stats | None) -> bytes:
        """The text of /metrics: load gauges as they are, all else at most 250 ms old.

        `stats` is the engine's newest snapshot, None before the first.
        """
        async with self._writing:  # who comes while the page is being written waits for it
            now = self._clock()
            if now - self._written_at >= REWRITE_EVERY_S:
                self._take_own()
                if stats is not None:
                    self._take(stats)
                self._written = await self.page.text_by_turns()
                self._written_at = now
            return self.render_load(stats) + self._written

    def render_load(self, stats: wire.Stats | None) -> bytes:
        """The text of /metrics/load: the load gauges alone, for pickers that poll many times a second."""
        if stats is not None:
            self._take_load(stats)
        return self.load_page.text()

    def _take_own(self) -> None:
        for (state,), cell in self._engine_state.items():
            cell.value = int(state == self._state.shown)
        self._cpu[("api",)].value = time.process_time()
        self._resident[("api",)].value = self.resident_bytes()
        self._dropped.value = self.log_dropped()

    def _take_load(self, stats: wire.Stats) -> None:
        self._running.value = stats.running
        self._waiting.value = stats.waiting
        self._usage.value = stats.kv_used / self._capacity.value if self._capacity.value else 0.0

    def _take(self, stats: wire.Stats) -> None:
        self._waiting_by_reason[("capacity",)].value = stats.waiting
        self._last_step.value = stats.last_step_unix
        for state, tokens in (("used", stats.kv_used), ("evictable", stats.kv_evictable), ("free", stats.kv_free)):
            self._kv_tokens[(state,)].value = tokens
        self._prompt_tokens[("computed",)].value = stats.prompt_tokens_computed
        self._prompt_tokens[("cached",)].value = stats.prompt_tokens_cached
        self._generation_tokens.value = stats.generation_tokens
        self._preemptions.value = stats.preemptions
        self._preempted_tokens.value = stats.preempted_tokens
        self._evicted_tokens.value = stats.evicted_tokens
        for name, phase in (("prefill", stats.prefill), ("decode", stats.decode)):
            self._steps[name, "false"].value = phase.steps
            self._step_duration[(name,)].replace(phase.seconds.counts, phase.seconds.sum)
            self._step_tokens[(name,)].replace(phase.tokens.counts, phase.tokens.sum)
        self._cpu[("engine",)].value = stats.cpu_seconds
        self._resident[("engine",)].value = stats.resident_bytes

    def _declare(self, load: Page, to: Page) -> None:
        """Every series, in the order of the text."""
        self._running = load.cell("banyan_requests_running", "gauge", "Requests in the running batch.")
        self._waiting = load.cell("banyan_requests_waiting", "gauge", "Requests that wait for admission.")
        self._usage = load.cell("banyan_kv_cache_usage_ratio", "gauge", "Locked tokens over capacity, 0 to 1; evictable ones are free.")
        self._page_size = load.cell("banyan_kv_cache_page_size_tokens", "gauge", "Tokens per KV page.")
        self._capacity = load.cell("banyan_kv_cache_capacity_tokens", "gauge", "Tokens that the KV pool holds.")
        self._build_info = to.open_family("banyan_build_info", "gauge", "The software that runs.", "version")
        model = ("model", "architecture", "dtype", "kv_cache_dtype", "attention_backend", "device")
        self._model_info = to.open_family("banyan_model_info", "gauge", "The model that is served.", *model)
        self._engine_state = to.cells("banyan_engine_state", "gauge", "1 for the state the server is in.", state=STATES)
        self._last_step = to.cell("banyan_engine_last_step_timestamp_seconds", "gauge", "Unix time of the last finished step.")
        self._startup = to.cells("banyan_startup_phase_seconds", "gauge", "How long each phase of the start took.", phase=STARTUP_PHASES)
        self._waiting_by_reason = to.cells(
            "banyan_requests_waiting_by_reason", "gauge", "Waiting requests by what they wait for.", reason=("capacity",)
        )
        self._queue_limit = to.cell("banyan_queue_limit_requests", "gauge", "Requests that may wait.")
        self._running_limit = to.cell("banyan_running_limit_requests", "gauge", "Requests that may run at once.")
        self._kv_tokens = to.cells("banyan_kv_cache_tokens", "gauge", "KV pool by state.", state=("used", "evictable", "free"))
        self._context_length = to.cell("banyan_context_length_tokens", "gauge", "Longest sequence, prompt and output together.")
        self._memory = to.cells("banyan_device_memory_bytes", "gauge", "Memory of the device by use.", kind=("weights", "kv_cache"))
        self._prompt_tokens = to.cells("banyan_prompt_tokens_total", "counter", "Prompt tokens by source.", source=("computed", "cached"))
        self._generation_tokens = to.cell("banyan_generation_tokens_total", "counter", "Tokens generated.")
        self._evicted_tokens = to.cell("banyan_prefix_cache_evicted_tokens_total", "counter", "Tokens evicted from the prefix cache.")
        self._requests = to.cells(
            "banyan_requests_total", "counter", "Admitted requests by how they ended.", endpoint=ENDPOINTS, finish_reason=FINISH_REASONS
        )
        self._rejections = to.cells("banyan_admission_rejections_total", "counter", "Requests not admitted.", reason=REJECTIONS)
        self._preemptions = to.cell("banyan_preemptions_total", "counter", "Requests retracted because the KV pool was full.")
        self._preempted_tokens = to.cell("banyan_preempted_tokens_total", "counter", "Tokens that retracted requests held.")
        streaming = ("true", "false")
        self._first_token = to.histograms(
            "banyan_time_to_first_token_seconds", "From receipt to the first token.", LATENCY_BUCKETS, streaming=streaming
        )
        self._duration = to.histograms("banyan_request_duration_seconds", "From receipt to the end.", LATENCY_BUCKETS, streaming=streaming)
        steps = wire.STEP_SECONDS_BUCKETS
        self._inter_token = to.histogram("banyan_inter_token_latency_seconds", "Between two tokens of a request.", steps)
        self._per_token = to.histogram("banyan_time_per_output_token_seconds", "Mean time per token of a request, after the first.", steps)
        self._queue = to.histogram("banyan_queue_duration_seconds", "From receipt by the engine to admission.", LATENCY_BUCKETS)
        self._prefill = to.histogram("banyan_prefill_duration_seconds", "From admission to the first token.", LATENCY_BUCKETS)
        self._decode = to.histogram("banyan_decode_duration_seconds", "From the first token to the end.", LATENCY_BUCKETS)
        self._request_prompt_tokens = to.histogram("banyan_request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS)
        self._request_generation_tokens = to.histogram("banyan_request_generation_tokens", "Tokens a request generated.", TOKEN_BUCKETS)
        phases = ("prefill", "decode")
        self._step_duration = to.histograms("banyan_step_duration_seconds", "Duration of a step.", steps, phase=phases)
        self._step_tokens = to.histograms("banyan_step_tokens", "Tokens computed by a step.", wire.STEP_TOKENS_BUCKETS, phase=phases)
        self._steps = to.cells("banyan_steps_total", "counter", "Steps computed.", phase=phases, graph=("true", "false"))
        http = ("handler", "method", "code")
        self._http = to.open_family("banyan_http_requests_total", "counter", "HTTP requests by route, method and status.", *http)
        self._http_series = 0
        self._in_flight = to.cell("banyan_http_requests_in_flight", "gauge", "HTTP requests being answered.")
        components = ("api", "engine")
        self._cpu = to.cells("banyan_process_cpu_seconds_total", "counter", "CPU time of the processes.", component=components)
        self._resident = to.cells(
            "banyan_process_resident_memory_bytes", "gauge", "Resident memory of the processes.", component=components
        )
        self._dropped = to.cell("banyan_log_dropped_total", "counter", "Log lines dropped because the log could not keep up.")
