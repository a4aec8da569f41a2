"""vLLM's series."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from prometheus_client.utils import floatToGoString

from banyan_runtime import wire
from banyan_runtime.exposition import Cell, Page
from banyan_runtime.front.metrics import RequestRecord

FIRST_TOKEN_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
TOKEN_TIME_BUCKETS: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_BUCKETS: Final = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
REASONS: Final = ("stop", "length", "abort", "error", "repetition")
REASON_OF: Final = {"tool_calls": "stop"}  # the others are called alike
SLEEP_STATES: Final = ("awake", "weights_offloaded", "discard_all")
LONGEST_DIGITS: Final = 9


def token_buckets(longest: int) -> list[int]:
    """1, 2, 5, 10 … as far as they are no more than `longest`."""
    return [bound for digits in range(LONGEST_DIGITS) for step in (1, 2, 5) if (bound := step * 10**digits) <= longest]


class VllmNames:
    """One engine, numbered 0. Histograms of sizes have buckets up to the longest sequence, so they stand here once that is known."""

    def __init__(self, model_name: str) -> None:
        labels = {"model_name": model_name, "engine": "0"}
        self._load = Page(labels)
        self._config = Page({"engine": "0"})
        self._main = Page(labels, floatToGoString)
        self._sizes = Page(labels, floatToGoString)
        self._http = Page({})
        self.load_pages: Sequence[Page] = (self._load, self._config)
        self.pages: Sequence[Page] = (self._main, self._sizes, self._http)
        self._pool = 0
        self._declare_load(self._load)
        self._declare_main(self._main)
        self._declare_sizes(self._sizes, 1)
        names = ("handler", "method", "status")
        self._http_requests = self._http.open_family("http_requests_total", "counter", "HTTP requests by status group.", *names)

    def engine_ready(self, info: wire.EngineInfo) -> None:
        self._pool = info.max_total_tokens
        facts = {"block_size": info.page_size, "num_gpu_blocks": info.max_total_tokens // info.page_size}
        config = self._config.open_family("vllm:cache_config_info", "gauge", "The form of the KV pool.", *facts)
        config.cell(*map(str, facts.values())).value = 1
        self._sizes.families.clear()
        self._declare_sizes(self._sizes, info.max_model_len)

    def first_token(self, seconds: float, *, streaming: bool) -> None:
        self._first_token.observe(seconds)

    def request_finished(self, record: RequestRecord) -> None:
        reason = REASON_OF.get(record.finish_reason, record.finish_reason)
        self._success[(reason if reason in REASONS else "error",)].value += 1
        self._duration.observe(record.total_s)
        self._prompt_sizes.observe(record.prompt_tokens)
        self._computed_sizes.observe(record.prompt_tokens - record.cached_tokens)
        self._generation_sizes.observe(record.completion_tokens)
        self._longest_sizes.observe(record.completion_tokens)
        if record.waited_s is not None:
            self._queue.observe(record.waited_s)
        if record.prefill_s is not None:
            self._prefill.observe(record.prefill_s)
        if record.decode_s is not None:
            self._decode.observe(record.decode_s)
            self._inference.observe(record.decode_s + (record.prefill_s or 0.0))
        if record.per_token_s is not None:
            self._per_token.observe(record.per_token_s)

    def inter_token_latency(self, seconds: float, requests: int) -> None:
        self._inter_token.observe(seconds, requests)

    def take_load(self, stats: wire.Stats) -> None:
        self._running.value = stats.running
        self._waiting.value = stats.waiting
        self._usage.value = stats.kv_used / self._pool if self._pool else 0.0

    def take(self, stats: wire.Stats) -> None:
        prompt = stats.prompt_tokens_computed + stats.prompt_tokens_cached
        for cell, value in (
            (self._by_reason[("capacity",)], stats.waiting - stats.background_waiting),
            (self._by_reason[("deferred",)], stats.background_waiting),
            (self._queries, prompt),
            (self._hits, stats.prompt_tokens_cached),
            (self._prompt, prompt),
            (self._prompt_cached, stats.prompt_tokens_cached),
            (self._by_source[("local_compute",)], stats.prompt_tokens_computed),
            (self._by_source[("local_cache_hit",)], stats.prompt_tokens_cached),
            (self._generation, stats.generation_tokens),
            (self._preemptions, stats.preemptions),
            (self._drafts, stats.draft_tokens),
            (self._accepted, stats.draft_tokens_accepted),
        ):
            cell.value = value

    def take_http(self, cells: Mapping[tuple[str, ...], Cell]) -> None:
        for cell in self._http_requests.cells.values():
            cell.value = 0
        for (handler, method, code), cell in cells.items():
            self._http_requests.cell(handler, method, f"{code[0]}xx").value += cell.value

    def _declare_load(self, to: Page) -> None:
        self._running = to.cell("vllm:num_requests_running", "gauge", "Number of requests in model execution batches.")
        self._waiting = to.cell("vllm:num_requests_waiting", "gauge", "Number of requests waiting to be processed.")
        self._usage = to.cell("vllm:kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.")

    def _declare_main(self, to: Page) -> None:
        reasons = ("capacity", "deferred")
        self._by_reason = to.cells("vllm:num_requests_waiting_by_reason", "gauge", "Waiting requests by reason.", reason=reasons)
        awake = to.cells("vllm:engine_sleep_state", "gauge", "1 for the state the engine is in.", sleep_state=SLEEP_STATES)
        awake[("awake",)].value = 1
        self._queries = to.cell("vllm:prefix_cache_queries_total", "counter", "Prefix cache queries, in tokens.")
        self._hits = to.cell("vllm:prefix_cache_hits_total", "counter", "Prefix cache hits, in tokens.")
        self._preemptions = to.cell("vllm:num_preemptions_total", "counter", "Cumulative number of preemptions.")
        self._prompt = to.cell("vllm:prompt_tokens_total", "counter", "Number of prefill tokens processed.")
        self._prompt_cached = to.cell("vllm:prompt_tokens_cached_total", "counter", "Number of cached prompt tokens.")
        sources = ("local_compute", "local_cache_hit")
        self._by_source = to.cells("vllm:prompt_tokens_by_source_total", "counter", "Prompt tokens by source.", source=sources)
        self._generation = to.cell("vllm:generation_tokens_total", "counter", "Number of generation tokens processed.")
        self._drafts = to.cell("vllm:spec_decode_num_draft_tokens_total", "counter", "Number of draft tokens.")
        self._accepted = to.cell("vllm:spec_decode_num_accepted_tokens_total", "counter", "Number of accepted draft tokens.")
        self._success = to.cells("vllm:request_success_total", "counter", "Requests by how they ended.", finished_reason=REASONS)
        self._first_token = to.histogram("vllm:time_to_first_token_seconds", "Time to first token.", FIRST_TOKEN_BUCKETS)
        self._inter_token = to.histogram("vllm:inter_token_latency_seconds", "Inter-token latency.", TOKEN_TIME_BUCKETS)
        mean = "vllm:request_time_per_output_token_seconds"
        self._per_token = to.histogram(mean, "Mean time per output token of a request.", TOKEN_TIME_BUCKETS)
        self._duration = to.histogram("vllm:e2e_request_latency_seconds", "End-to-end request latency.", REQUEST_BUCKETS)
        self._queue = to.histogram("vllm:request_queue_time_seconds", "Time spent waiting.", REQUEST_BUCKETS)
        self._inference = to.histogram("vllm:request_inference_time_seconds", "Time spent running.", REQUEST_BUCKETS)
        self._prefill = to.histogram("vllm:request_prefill_time_seconds", "Time spent in prefill.", REQUEST_BUCKETS)
        self._decode = to.histogram("vllm:request_decode_time_seconds", "Time spent in decode.", REQUEST_BUCKETS)

    def _declare_sizes(self, to: Page, longest: int) -> None:
        bounds = token_buckets(longest)
        self._prompt_sizes = to.histogram("vllm:request_prompt_tokens", "Prefill tokens of a request.", bounds)
        computed = "vllm:request_prefill_kv_computed_tokens"
        self._computed_sizes = to.histogram(computed, "Prefill tokens of a request that were computed.", bounds)
        self._generation_sizes = to.histogram("vllm:request_generation_tokens", "Generation tokens of a request.", bounds)
        most = "vllm:request_max_num_generation_tokens"
        self._longest_sizes = to.histogram(most, "Most generation tokens of a request's sequences.", bounds)
