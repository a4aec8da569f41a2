"""The server's metric series: their names, types, labels and buckets, and where each number comes from.

The names are an interface that dashboards and alerts rely on; tests/component/server/metrics.golden freezes them. Requests report
themselves once, when they end; gauges of the engine are read from its newest snapshot when somebody scrapes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from banyan_runtime import __version__, wire
from banyan_runtime.exposition import Ledger, Page
from banyan_runtime.front.picker_gauges import PickerGauges
from banyan_runtime.front.state import STATES, ServerState

LATENCY_BUCKETS: Final = wire.LATENCY_BUCKETS
TOKEN_BUCKETS: Final = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000,
)  # fmt: skip

ENDPOINTS: Final = ("chat", "completions", "responses", "messages", "embeddings", "rerank", "score", "other")
FINISH_REASONS: Final = ("stop", "length", "tool_calls", "abort", "error")
REJECTIONS: Final = ("queue_full", "too_long", "draining", "loading", "unavailable", "auth", "invalid", "other")
GRAMMAR_FAILURES: Final = ("invalid", "timeout", "unsupported")
STARTUP_PHASES: Final = ("download", "load_weights", "memory_profiling", "kv_alloc", "graph_capture", "warmup", "total")
METHODS: Final = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS")
MAX_HTTP_SERIES: Final = 200  # handlers are route templates, so this is reached only by a mistake of ours
OTHER_KEYS: Final = "other"  # the label of the names beyond MAX_KEY_NAMES, and of keys without a name
MAX_KEY_NAMES: Final = 100
REWRITE_EVERY_S: Final = 0.25  # endpoint pickers scrape 20 times a second, each replica of them, but read the load gauges alone


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One finished sequence, as its handler saw it. Times are monotonic seconds, durations seconds; None is what nobody knows."""

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
    background: bool = False  # it was to wait for others
    reasoning_tokens: int | None = None  # those of `completion_tokens`; None: nobody looked for reasoning
    key: str | None = None  # whose key it came with, "" for one without a name; None: no key is asked for
    told_tokens: int | None = None  # those of `prompt_tokens` that its client's usage counts for it; None: all

    @property
    def total_s(self) -> float:
        return self.finished - self.received

    @property
    def waited_s(self) -> float | None:
        """`queue_s`, and None for background, which waits by design and for nobody who looks on."""
        return None if self.background else self.queue_s

    @property
    def decode_s(self) -> float | None:
        """From the first token to the end."""
        return None if self.first_token is None else self.finished - self.first_token

    @property
    def per_token_s(self) -> float | None:
        """Of each token but the first; None: there is none."""
        return None if self.decode_s is None or self.completion_tokens < 2 else self.decode_s / (self.completion_tokens - 1)


class Elsewhere(msgspec.Struct, frozen=True):
    """What other API processes tell of themselves, that is no count: their sums, or those of one of them."""

    in_flight: int = 0  # HTTP requests
    cpu_seconds: float = 0.0
    resident_bytes: int = 0
    log_dropped: int = 0  # lines since the start


def _known(value: str, values: tuple[str, ...], fallback: str) -> str:
    return value if value in values else fallback


class Metrics:
    """Counts what happens in the front and renders it with the engine's snapshot. For the event loop only."""

    def __init__(
        self,
        model_name: str,
        state: ServerState,
        *,
        queue_limit: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._picker = PickerGauges(model_name)
        self._clock = clock
        self._written = b""
        self._written_at = float("-inf")
        self._writing = asyncio.Lock()
        self.load_page = Page({"model_name": model_name})
        self.page = Page({"model_name": model_name})  # all but what is on the load page
        self.more_pages: list[Page] = []  # of other parts of the server
        self._declare(self.load_page, self.page)
        self._own_in_flight = 0
        self._build_info.cell(__version__, "", "", "").value = 1
        self._queue_limit.value = queue_limit
        self.log_dropped: Callable[[], int] = lambda: 0  # lines since the start
        self.resident_bytes: Callable[[], int] = lambda: 0  # of this process
        self.elsewhere: Callable[[], Elsewhere] = Elsewhere  # what other API processes say
        self.before: Callable[[], Awaitable[None]] | None = None  # waited for before the page is written: the counts of other API processes
        self.downloaded: Callable[[], tuple[int, int]] = lambda: (0, 0)  # bytes: so many of so many

    # --- what happened ---

    def first_token(self, seconds: float, *, streaming: bool) -> None:
        """Count the time that a sequence, which is not background, took to its first token: now, not when it has ended."""
        self._first_token["true" if streaming else "false",].observe(seconds)

    def request_finished(self, record: RequestRecord) -> None:
        """Count one request that was admitted, however it ended."""
        self._count_key(record)
        endpoint = _known(record.endpoint, ENDPOINTS, "other")
        self._requests[endpoint, _known(record.finish_reason, FINISH_REASONS, "error")].value += 1
        streaming = ("true" if record.streaming else "false",)
        self._duration[streaming].observe(record.total_s)
        self._request_prompt_tokens.observe(record.prompt_tokens)
        self._request_generation_tokens.observe(record.completion_tokens)
        if record.waited_s is not None:
            self._queue.observe(record.waited_s)
        if record.prefill_s is not None:
            self._prefill.observe(record.prefill_s)
        if record.decode_s is not None:
            self._decode.observe(record.decode_s)
        if record.per_token_s is not None:
            self._per_token.observe(record.per_token_s)

    def _count_key(self, record: RequestRecord) -> None:
        if record.key is None:
            return
        key = self._key(record.key)
        told = record.prompt_tokens if record.told_tokens is None else record.told_tokens
        self._key_tokens.cell(key, "prompt").value += told
        self._key_tokens.cell(key, "generation").value += record.completion_tokens

    def key_names(self, names: Iterable[str]) -> None:
        """These keys are valid: their series exist from now on. Names come from the file of keys, never from a client."""
        for name in ("", *names):
            key = self._key(name)
            self._key_requests.cell(key)
            for kind in ("prompt", "generation"):
                self._key_tokens.cell(key, kind)

    def key_used(self, name: str) -> None:
        """Count one HTTP request that came with the key of this name, "" for a key without one."""
        self._key_requests.cell(self._key(name)).value += 1

    def _key(self, name: str) -> str:
        """The label of a name. A name that has left the file keeps its series, and its place among MAX_KEY_NAMES."""
        if name in self._keys:
            return name
        if not name or len(self._keys) >= MAX_KEY_NAMES:
            return OTHER_KEYS
        self._keys.add(name)
        return name

    def grammar_failed(self, reason: str) -> None:
        """Count one grammar that cannot be used; `reason` is one of GRAMMAR_FAILURES."""
        self._grammar_failures[(_known(reason, GRAMMAR_FAILURES, "invalid"),)].value += 1

    def rejected(self, reason: str) -> None:
        """Count one request that was not admitted; `reason` is one of REJECTIONS."""
        self._rejections[(_known(reason, REJECTIONS, "other"),)].value += 1

    def inter_token_latency(self, seconds: float, requests: int) -> None:
        """Count the time between two tokens, of so many requests at once."""
        self._inter_token.observe(seconds, requests)

    def http_started(self) -> None:
        self._own_in_flight += 1

    def http_finished(self, handler: str, method: str, code: int) -> None:
        """Count one HTTP exchange; `handler` is the route's template, 'unmatched' where there is none."""
        self._own_in_flight -= 1
        labels = (handler, _known(method, METHODS, "other"), str(code))
        if labels not in self._http.cells and len(self._http.cells) >= MAX_HTTP_SERIES:
            labels = ("other", *labels[1:])
        self._http.cell(*labels).value += 1

    def http_refused(self, code: int) -> None:
        """Count a request that was refused before it had a method and a path, or because there are too many connections."""
        self.http_started()
        self.http_finished("unmatched", "other", code)

    def http_expected(self, handler: str, method: str, codes: Iterable[int]) -> None:
        """These answers of a route are counted from 0, so that a rate sees the first one."""
        for code in codes:
            if (handler, method, str(code)) not in self._http.cells and len(self._http.cells) < MAX_HTTP_SERIES:
                self._http.cell(handler, method, str(code))

    def engine_ready(
        self, info: wire.EngineInfo, *, kv_cache_dtype: str = "auto", revision: str | None = None, quantization: str = "none"
    ) -> None:
        """Take over what is constant from now on."""
        self._picker.engine_ready(info)
        kv_cache_dtype = info.dtype if kv_cache_dtype == "auto" else kv_cache_dtype
        model = (self._state.model_uri, revision or "", info.architecture, info.dtype, kv_cache_dtype, quantization)
        self._model_info.cell(*model, info.attention_backend, info.device).value = 1
        self._build_info.cells.clear()
        self._build_info.cell(__version__, *(info.software.get(name, "") for name in ("torch", "cuda", "flashinfer"))).value = 1
        self._running_limit.value = info.max_running_requests
        self._capacity.value = info.max_total_tokens
        self._kv_tokens[("free",)].value = info.max_total_tokens
        self._page_size.value = info.page_size
        self._context_length.value = info.context_len
        self._memory[("weights",)].value = info.weights_bytes
        self._memory[("kv_cache",)].value = info.kv_bytes
        self._memory[("graphs",)].value = info.graph_bytes
        self._memory[("free",)].value = info.available_bytes
        for phase, seconds in info.phase_seconds.items():
            self.startup_phase(phase, seconds)

    def startup_phase(self, phase: str, seconds: float) -> None:
        """Note how long a phase of STARTUP_PHASES took; others are not published."""
        if phase in STARTUP_PHASES:
            self._startup[(phase,)].value = seconds

    # --- several processes ---

    @property
    def ledger(self) -> Ledger:
        """Of what is counted here."""
        return Ledger((self.page,))

    def own(self) -> Elsewhere:
        """What this process would tell of itself."""
        return Elsewhere(self._own_in_flight, time.process_time(), self.resident_bytes(), self.log_dropped())

    # --- the text ---

    async def render(self, stats: wire.Stats | None) -> bytes:
        """The text of /metrics: load gauges as they are, all else at most 250 ms old.

        `stats` is the engine's newest snapshot, None before the first.
        """
        async with self._writing:  # who comes while the page is being written waits for it
            now = self._clock()
            if now - self._written_at >= REWRITE_EVERY_S:
                if self.before is not None:
                    await self.before()
                self._take_own()
                if stats is not None:
                    self._take(stats)
                self._written = b"".join([await page.text_by_turns() for page in (self.page, *self.more_pages)])
                self._written_at = now
            return self.render_load(stats) + self._written

    def render_load(self, stats: wire.Stats | None) -> bytes:
        """The text of /metrics/load: the load gauges alone, for pickers that poll many times a second."""
        if stats is not None:
            self._take_load(stats)
        return b"".join(page.text() for page in (self.load_page, *self._picker.pages))

    def _take_own(self) -> None:
        for (state,), cell in self._engine_state.items():
            cell.value = int(state == self._state.shown)
        own, others = self.own(), self.elsewhere()
        self._in_flight.value = own.in_flight + others.in_flight
        self._cpu[("api",)].value = own.cpu_seconds + others.cpu_seconds
        self._resident[("api",)].value = own.resident_bytes + others.resident_bytes
        self._dropped.value = own.log_dropped + others.log_dropped
        self._download.value, self._download_size.value = self.downloaded()

    def _take_load(self, stats: wire.Stats) -> None:
        self._running.value = stats.running
        self._waiting.value = stats.waiting
        self._usage.value = stats.kv_used / self._capacity.value if self._capacity.value else 0.0
        self._picker.take(stats.running, stats.waiting, self._usage.value)

    def _take(self, stats: wire.Stats) -> None:
        self._waiting_by_reason[("capacity",)].value = stats.waiting - stats.background_waiting
        self._waiting_by_reason[("deferred",)].value = stats.background_waiting
        self._waiting_by_reason[("grammar",)].value = stats.held
        self._background[("running",)].value = stats.background_running
        self._background[("waiting",)].value = stats.background_waiting
        self._last_step.value = stats.last_step_unix
        for state, tokens in (("used", stats.kv_used), ("evictable", stats.kv_evictable), ("free", stats.kv_free)):
            self._kv_tokens[(state,)].value = tokens
        self._prompt_tokens[("computed",)].value = stats.prompt_tokens_computed
        self._prompt_tokens[("cached",)].value = stats.prompt_tokens_cached
        self._generation_tokens.value = stats.generation_tokens
        self._preemptions.value = stats.preemptions
        self._preempted_tokens.value = stats.preempted_tokens
        self._out_of_memory.value = stats.out_of_memory_steps
        self._evicted_tokens.value = stats.evicted_tokens
        self._drafts["accepted",].value = stats.draft_tokens_accepted
        self._drafts["refused",].value = stats.draft_tokens - stats.draft_tokens_accepted
        for name, phase in (("prefill", stats.prefill), ("decode", stats.decode)):
            self._steps[name, "true"].value = phase.replayed
            self._steps[name, "false"].value = phase.steps - phase.replayed
            self._step_duration[(name,)].replace(phase.seconds.counts, phase.seconds.sum)
            self._step_tokens[(name,)].replace(phase.tokens.counts, phase.tokens.sum)
        if stats.grammar_seconds is not None:
            self._grammar.replace(stats.grammar_seconds.counts, stats.grammar_seconds.sum)
        for stage, seconds in zip(wire.SCHEDULER_STAGES, stats.scheduler_seconds, strict=False):
            self._scheduler[(stage,)].value = seconds
        self._cpu[("engine",)].value = stats.cpu_seconds
        self._resident[("engine",)].value = stats.resident_bytes

    def _declare(self, load: Page, to: Page) -> None:
        """Every series, in the order of the text."""
        self._running = load.cell("banyan_requests_running", "gauge", "Requests in the running batch.")
        self._waiting = load.cell("banyan_requests_waiting", "gauge", "Requests that wait for room, those of background too.")
        self._usage = load.cell("banyan_kv_cache_usage_ratio", "gauge", "Locked tokens over capacity, 0 to 1; evictable ones are free.")
        self._page_size = load.cell("banyan_kv_cache_page_size_tokens", "gauge", "Tokens per KV page.")
        self._capacity = load.cell("banyan_kv_cache_capacity_tokens", "gauge", "Tokens that the KV pool holds.")
        software = ("version", "torch", "cuda", "flashinfer")
        self._build_info = to.open_family("banyan_build_info", "gauge", "The software that runs.", *software)
        model = ("model", "revision", "architecture", "dtype", "kv_cache_dtype", "quantization", "attention_backend", "device")
        self._model_info = to.open_family("banyan_model_info", "gauge", "The model that is served.", *model)
        self._engine_state = to.cells("banyan_engine_state", "gauge", "1 for the state the server is in.", state=STATES)
        self._last_step = to.cell("banyan_engine_last_step_timestamp_seconds", "gauge", "Unix time of the last finished step.")
        self._startup = to.cells("banyan_startup_phase_seconds", "gauge", "How long each phase of the start took.", phase=STARTUP_PHASES)
        self._download = to.cell("banyan_download_bytes", "gauge", "Bytes of the model that have been fetched at this start.")
        self._download_size = to.cell("banyan_download_size_bytes", "gauge", "Bytes that are to be fetched; 0: nothing was.")
        self._waiting_by_reason = to.cells(
            "banyan_requests_waiting_by_reason",
            "gauge",
            "Requests by what they wait for: room, that online requests leave some (deferred), or their grammar.",
            reason=("capacity", "deferred", "grammar"),
        )
        self._background = to.cells(
            "banyan_requests_background",
            "gauge",
            "Requests of a priority below 0, part of those that run or wait.",
            state=("running", "waiting"),
        )
        self._queue_limit = to.cell("banyan_queue_limit_requests", "gauge", "Requests that may wait, online and background counted apart.")
        self._running_limit = to.cell("banyan_running_limit_requests", "gauge", "Requests that may run at once.")
        self._kv_tokens = to.cells("banyan_kv_cache_tokens", "gauge", "KV pool by state.", state=("used", "evictable", "free"))
        self._context_length = to.cell("banyan_context_length_tokens", "gauge", "Longest sequence, prompt and output together.")
        self._memory = to.cells(
            "banyan_device_memory_bytes",
            "gauge",
            "Memory of the device at the start, by use.",
            kind=("weights", "kv_cache", "graphs", "free"),
        )
        self._prompt_tokens = to.cells(
            "banyan_prompt_tokens_total", "counter", "Prompt tokens by source, each once.", source=("computed", "cached")
        )
        self._generation_tokens = to.cell("banyan_generation_tokens_total", "counter", "Tokens generated, with those behind a stop string.")
        self._evicted_tokens = to.cell("banyan_prefix_cache_evicted_tokens_total", "counter", "Tokens evicted from the prefix cache.")
        self._drafts = to.cells(
            "banyan_draft_tokens_total",
            "counter",
            "Tokens guessed from texts and computed (--speculative-algorithm), by whether they were right.",
            outcome=("accepted", "refused"),
        )
        self._requests = to.cells(
            "banyan_requests_total",
            "counter",
            "Sequences by how they ended; a request that is not refused is one for each prompt and choice.",
            endpoint=ENDPOINTS,
            finish_reason=FINISH_REASONS,
        )
        self._rejections = to.cells("banyan_admission_rejections_total", "counter", "Requests not admitted.", reason=REJECTIONS)
        self._preemptions = to.cell(
            "banyan_preemptions_total", "counter", "Times that a running request gave its room to others and waited again."
        )
        self._preempted_tokens = to.cell("banyan_preempted_tokens_total", "counter", "Tokens that retracted requests held.")
        self._out_of_memory = to.cell("banyan_out_of_memory_steps_total", "counter", "Steps that the device had no memory for.")
        streaming = ("true", "false")
        self._first_token = to.histograms(
            "banyan_time_to_first_token_seconds",
            "From receipt to the first token, without background.",
            LATENCY_BUCKETS,
            streaming=streaming,
        )
        self._duration = to.histograms("banyan_request_duration_seconds", "From receipt to the end.", LATENCY_BUCKETS, streaming=streaming)
        steps = wire.STEP_SECONDS_BUCKETS
        self._inter_token = to.histogram("banyan_inter_token_latency_seconds", "Between two tokens of a request.", steps)
        self._per_token = to.histogram("banyan_time_per_output_token_seconds", "Mean time per token of a request, after the first.", steps)
        self._queue = to.histogram(
            "banyan_queue_duration_seconds", "From receipt by the engine to admission, without background.", LATENCY_BUCKETS
        )
        self._prefill = to.histogram("banyan_prefill_duration_seconds", "From admission to the first token.", LATENCY_BUCKETS)
        self._decode = to.histogram("banyan_decode_duration_seconds", "From the first token to the end.", LATENCY_BUCKETS)
        self._request_prompt_tokens = to.histogram("banyan_request_prompt_tokens", "Prompt tokens of a sequence.", TOKEN_BUCKETS)
        self._request_generation_tokens = to.histogram("banyan_request_generation_tokens", "Tokens of a sequence.", TOKEN_BUCKETS)
        phases = ("prefill", "decode")
        self._step_duration = to.histograms("banyan_step_duration_seconds", "Duration of a step.", steps, phase=phases)
        self._step_tokens = to.histograms("banyan_step_tokens", "Tokens computed by a step.", wire.STEP_TOKENS_BUCKETS, phase=phases)
        self._steps = to.cells(
            "banyan_steps_total",
            "counter",
            "Steps computed. graph: whether a captured CUDA graph was replayed.",
            phase=phases,
            graph=("true", "false"),
        )
        self._scheduler = to.cells(
            "banyan_scheduler_seconds_total", "counter", "What the engine's loop spends its time on.", stage=wire.SCHEDULER_STAGES
        )
        self._grammar = to.histogram("banyan_grammar_compile_seconds", "From a request's grammar to its automaton.", LATENCY_BUCKETS)
        self._grammar_failures = to.cells(
            "banyan_grammar_failures_total", "counter", "Grammars that cannot be used.", reason=GRAMMAR_FAILURES
        )
        http = ("handler", "method", "code")
        self._http = to.open_family("banyan_http_requests_total", "counter", "HTTP requests by route, method and status.", *http)
        self._in_flight = to.cell("banyan_http_requests_in_flight", "gauge", "HTTP requests being answered.")
        components = ("api", "engine")
        self._cpu = to.cells("banyan_process_cpu_seconds_total", "counter", "CPU time of the processes.", component=components)
        self._resident = to.cells(
            "banyan_process_resident_memory_bytes", "gauge", "Resident memory of the processes.", component=components
        )
        self._keys: set[str] = set()
        self._key_requests = to.open_family("banyan_api_key_requests_total", "counter", "HTTP requests by the name of their key.", "key")
        self._key_tokens = to.open_family(
            "banyan_api_key_tokens_total", "counter", "Tokens by the name of the key, as usage has them.", "key", "kind"
        )
        self._dropped = to.cell("banyan_log_dropped_total", "counter", "Log lines of the front dropped because the log could not keep up.")
