"""SGLang's series."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from prometheus_client.utils import floatToGoString

from banyan_runtime import wire
from banyan_runtime.exposition import Cell, Page
from banyan_runtime.front.metrics import RequestRecord

FIRST_TOKEN_BUCKETS: Final = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
REQUEST_BUCKETS: Final = (*FIRST_TOKEN_BUCKETS, 600, 1200, 1800, 2400)
INTER_TOKEN_BUCKETS: Final = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8,
)  # fmt: skip
QUEUE_BUCKETS: Final = (
    0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 15, *range(20, 100, 10), *range(100, 1000, 100), 1000, 1200, 1400,
    1600, 1800, 2000, 2500, 3000,
)  # fmt: skip
TOKEN_BUCKETS: Final = (
    100, 300, 500, 700, 1000, 1500, *range(2000, 10_000, 1000), *range(10_000, 30_000, 2500), 30_000, 35_000, 40_000, 60_000, 80_000,
    100_000, 200_000, 300_000, 400_000, 600_000, 800_000, 1_000_000, 1_100_000,
)  # fmt: skip
STREAMING: Final = ("true", "false")


class SglangNames:
    """Series of its scheduler process carry ranks, of which there is one here; those of its tokenizer process do not."""

    def __init__(self, model_name: str) -> None:
        tokenizer = {"model_name": model_name, "engine_type": "unified"}
        scheduler = {**tokenizer, "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
        self._load = Page(scheduler)
        self._scheduler = Page(scheduler, floatToGoString)
        self._tokenizer = Page(tokenizer, floatToGoString)
        self._http = Page({})
        self.load_pages: Sequence[Page] = (self._load,)
        self.pages: Sequence[Page] = (self._scheduler, self._tokenizer, self._http)
        self._pool = 0
        self._limit = 0
        self._declare_load(self._load)
        self._declare_scheduler(self._scheduler)
        self._declare_tokenizer(self._tokenizer)
        http = self._http
        self._http_requests = http.open_family("sglang:http_requests_total", "counter", "HTTP requests.", "endpoint", "method")
        names = ("endpoint", "status_code", "method")
        self._http_responses = http.open_family("sglang:http_responses_total", "counter", "HTTP responses.", *names)

    def engine_ready(self, info: wire.EngineInfo) -> None:
        self._pool, self._limit = info.max_total_tokens, info.max_running_requests
        pages = info.max_total_tokens // info.page_size
        self._page_size.value, self._num_pages.value = info.page_size, pages
        # Of the two forms of the same fact pickers ask for the older one.
        self._cache_config.cell(str(info.page_size), str(pages)).value = 1
        self._capacity.value = info.max_total_tokens
        self._context.value = info.context_len

    def first_token(self, seconds: float, *, streaming: bool) -> None:
        self._first_token["true" if streaming else "false",].observe(seconds)

    def request_finished(self, record: RequestRecord) -> None:
        streaming = ("true" if record.streaming else "false",)
        self._requests[streaming].value += 1
        if record.finish_reason == "abort":
            self._aborted.value += 1
        self._prompt[streaming].value += record.prompt_tokens
        self._generation[streaming].value += record.completion_tokens
        self._duration[streaming].observe(record.total_s)
        self._prompt_sizes.observe(record.prompt_tokens)
        self._uncached_sizes.observe(record.prompt_tokens - record.cached_tokens)
        self._generation_sizes.observe(record.completion_tokens)
        if record.waited_s is not None:
            self._queue.observe(record.waited_s)
        if record.per_token_s is not None:
            self._per_token[streaming].observe(record.per_token_s)

    def inter_token_latency(self, seconds: float, requests: int) -> None:
        self._inter_token.observe(seconds, requests)

    def take_load(self, stats: wire.Stats) -> None:
        self._running.value = stats.running
        self._waiting.value = stats.waiting
        self._usage.value = stats.kv_used / self._pool if self._pool else 0.0

    def take(self, stats: wire.Stats) -> None:
        usage = stats.kv_used / self._pool if self._pool else 0.0
        for cell, value in (
            (self._full_usage, usage),
            (self._used, stats.kv_used),
            (self._kv_used, stats.kv_used),
            (self._kv_evictable, stats.kv_evictable),
            (self._kv_available, stats.kv_free),
            (self._throughput, stats.gen_throughput),
            (self._accept_length, stats.accept_len),
            (self._accept_rate, stats.accept_rate),
            (self._utilization, stats.running / self._limit if self._limit else 0.0),
            (self._ratio, stats.new_token_ratio),
            (self._grammar_queue, stats.held),
            (self._retracted, stats.preemptions),
            (self._computed[("prefill_compute",)], stats.prompt_tokens_computed),
            (self._computed[("prefill_cache",)], stats.prompt_tokens_cached),
            (self._computed[("decode",)], stats.generation_tokens),
            (self._cached[("device",)], stats.prompt_tokens_cached),
        ):
            cell.value = value
        prompt = stats.prompt_tokens_computed + stats.prompt_tokens_cached
        self._hit_rate.value = stats.prompt_tokens_cached / prompt if prompt else 0.0

    def take_http(self, cells: Mapping[tuple[str, ...], Cell]) -> None:
        for cell in self._http_requests.cells.values():
            cell.value = 0
        for (handler, method, code), cell in cells.items():
            self._http_requests.cell(handler, method).value += cell.value
            self._http_responses.cell(handler, code, method).value = cell.value

    def _declare_load(self, to: Page) -> None:
        self._running = to.cell("sglang:num_running_reqs", "gauge", "The number of running requests.")
        self._waiting = to.cell("sglang:num_queue_reqs", "gauge", "The number of requests in the waiting queue.")
        self._usage = to.cell("sglang:token_usage", "gauge", "The token usage, 0 to 1.")
        self._cache_config = to.open_family("sglang:cache_config_info", "gauge", "The form of the KV pool.", "page_size", "num_pages")
        self._page_size = to.cell("sglang:page_size", "gauge", "Tokens per KV page.")
        self._num_pages = to.cell("sglang:num_pages", "gauge", "Pages of the KV pool.")

    def _declare_scheduler(self, to: Page) -> None:
        self._full_usage = to.cell("sglang:full_token_usage", "gauge", "The token usage of full attention, 0 to 1.")
        self._used = to.cell("sglang:num_used_tokens", "gauge", "The number of used tokens.")
        self._kv_used = to.cell("sglang:kv_used_tokens", "gauge", "Tokens of running requests in the KV pool.")
        self._kv_evictable = to.cell("sglang:kv_evictable_tokens", "gauge", "Cached tokens that may be evicted.")
        self._kv_available = to.cell("sglang:kv_available_tokens", "gauge", "Free tokens of the KV pool.")
        self._capacity = to.cell("sglang:max_total_num_tokens", "gauge", "Tokens that the KV pool holds.")
        self._context = to.cell("sglang:context_len", "gauge", "The longest sequence in tokens.")
        self._throughput = to.cell("sglang:gen_throughput", "gauge", "The generation throughput (token/s).")
        self._accept_length = to.cell("sglang:spec_accept_length", "gauge", "Tokens of a request in a decode step, on average.")
        self._accept_rate = to.cell("sglang:spec_accept_rate", "gauge", "Accepted draft tokens over draft tokens, 0 to 1.")
        self._hit_rate = to.cell("sglang:cache_hit_rate", "gauge", "The prefix cache hit rate, 0 to 1.")
        self._utilization = to.cell("sglang:utilization", "gauge", "Running requests over those that may run.")
        self._ratio = to.cell("sglang:new_token_ratio", "gauge", "The new token ratio.")
        self._grammar_queue = to.cell("sglang:num_grammar_queue_reqs", "gauge", "Requests that wait for their grammar.")
        self._retracted = to.cell("sglang:num_retracted_requests_total", "counter", "Requests retracted.")
        modes = ("prefill_compute", "prefill_cache", "decode")
        self._computed = to.cells("sglang:realtime_tokens_total", "counter", "Tokens processed, as they are.", mode=modes)
        self._queue = to.histogram("sglang:queue_time_seconds", "Histogram of queueing time in seconds.", QUEUE_BUCKETS)

    def _declare_tokenizer(self, to: Page) -> None:
        self._requests = to.cells("sglang:num_requests_total", "counter", "Number of requests processed.", is_streaming=STREAMING)
        self._aborted = to.cell("sglang:num_aborted_requests_total", "counter", "Number of requests aborted.")
        self._prompt = to.cells("sglang:prompt_tokens_total", "counter", "Number of prefill tokens processed.", is_streaming=STREAMING)
        generation = "sglang:generation_tokens_total"
        self._generation = to.cells(generation, "counter", "Number of generation tokens processed.", is_streaming=STREAMING)
        self._cached = to.cells("sglang:cached_tokens_total", "counter", "Number of cached prompt tokens.", cache_source=("device",))
        first, whole = "sglang:time_to_first_token_seconds", "sglang:e2e_request_latency_seconds"
        self._first_token = to.histograms(first, "Histogram of time to first token.", FIRST_TOKEN_BUCKETS, is_streaming=STREAMING)
        self._duration = to.histograms(whole, "Histogram of end-to-end request latency.", REQUEST_BUCKETS, is_streaming=STREAMING)
        self._inter_token = to.histogram("sglang:inter_token_latency_seconds", "Histogram of inter-token latency.", INTER_TOKEN_BUCKETS)
        mean = "sglang:request_time_per_output_token_seconds"
        self._per_token = to.histograms(mean, "Histogram of mean time per token.", INTER_TOKEN_BUCKETS, is_streaming=STREAMING)
        self._prompt_sizes = to.histogram("sglang:prompt_tokens_histogram", "Histogram of prompt token length.", TOKEN_BUCKETS)
        uncached = "sglang:uncached_prompt_tokens_histogram"
        self._uncached_sizes = to.histogram(uncached, "Histogram of computed prompt token length.", TOKEN_BUCKETS)
        self._generation_sizes = to.histogram("sglang:generation_tokens_histogram", "Histogram of generation token length.", TOKEN_BUCKETS)
