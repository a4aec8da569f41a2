"""What the runtime's /metrics costs: the page as prometheus-client writes it, beside text joined from prepared lines.

    python benchmarks/metrics.py [--rounds 200] [--seconds 10] [--out FILE.json]

Questions. What a page costs (ways take turns A B C A B C …, medians): `page` is what the server does, families built from plain
cells at scrape time and written by prometheus-client; `lines` joins prepared line beginnings with the numbers, the least that
Python can do; `native` is prometheus-client's own Counter, Gauge and Histogram objects. What counting costs, in cells and in
native objects; what all of it adds to one decode step of 64 requests in the engine and in the front, snapshots included, beside
a step of 2 ms; what traces add to the end of a request. And, with 20 scrapes a second while requests come and
go: how much of the event loop's time they take, and for how long at a time other work waits. Needs no server: the counters are
filled as a server's would be after some traffic.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvloop
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from banyan_runtime import wire
from banyan_runtime.engine.report import Drafted, Report
from banyan_runtime.exposition import CellFamily, HistogramFamily, Page
from banyan_runtime.front.metrics import LATENCY_BUCKETS, Metrics, RequestRecord
from banyan_runtime.front.plan import GenerateRequest
from banyan_runtime.front.state import ServerState
from banyan_runtime.front.tracing import Tracing
from banyan_runtime.server.stages import LAUNCH, OUTPUT, RECV, SCHEDULE, WAIT_DEVICE, Stages

RUNNING = 64
STEP_S = 0.025
SHORT_STEP_S = 0.002  # of a small model on a GPU
SNAPSHOT_S = 0.1
SCRAPE_S = 0.05
HANDLERS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/metrics", "/readyz", "/livez", "/generate", "unmatched")
INFO = wire.EngineInfo(
    architecture="Qwen3ForCausalLM", model_type="qwen3", dtype="bfloat16", device="cuda", attention_backend="flashinfer", vocab_size=151936,
    context_len=32768, max_model_len=32768, page_size=16,
    max_total_tokens=200_000, max_req_input_len=32762, max_running_requests=256, weights_bytes=1 << 30,
    kv_bytes=1 << 33, phase_seconds={"load_weights": 1.5},
)  # fmt: skip


def record(rng: random.Random) -> RequestRecord:
    first = rng.expovariate(2)
    return RequestRecord(
        endpoint=rng.choice(("chat", "completions")), streaming=rng.random() < 0.7, finish_reason=rng.choice(("stop", "length")),
        prompt_tokens=rng.randint(1, 8000), cached_tokens=0, completion_tokens=rng.randint(1, 500), received=0.0, first_token=first,
        finished=first + rng.expovariate(0.3), queue_s=rng.expovariate(20), prefill_s=rng.expovariate(5),
    )  # fmt: skip


class Engine:
    """The engine's counters, as they grow."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._kinds = [
            wire.StepStats(0, wire.HistogramCounts([0] * (len(wire.STEP_SECONDS_BUCKETS) + 1)), wire.HistogramCounts([0] * 15))
            for _ in range(2)
        ]
        self._steps = 0

    def step(self) -> wire.Stats:
        self._steps += 1
        kind = self._kinds[self._steps % 8 != 0]
        kind.steps += 1
        for counts in (kind.seconds, kind.tokens):
            counts.counts[self._rng.randrange(4, 9)] += 1
            counts.sum += self._rng.random()
        steps = self._steps
        return wire.Stats(
            running=RUNNING, waiting=steps % 5, held=0, kv_used=100_000 + steps, kv_evictable=5000, kv_free=95_000 - steps,
            last_step_unix=1.75e9 + steps * STEP_S, prompt_tokens_computed=400 * steps, prompt_tokens_cached=40 * steps,
            generation_tokens=RUNNING * steps, preemptions=steps // 1000, preempted_tokens=steps // 10, evicted_tokens=steps,
            gen_throughput=2000.0, prefill=self._kinds[0], decode=self._kinds[1], cpu_seconds=steps * 0.02,
            resident_bytes=1 << 30,
        )  # fmt: skip


def count(metrics: Metrics, ended: RequestRecord) -> None:
    """All that one request has counted."""
    if ended.first_token is not None:
        metrics.first_token(ended.first_token - ended.received, streaming=ended.streaming)
    metrics.request_finished(ended)


def filled(rng: random.Random) -> Metrics:
    """Metrics of a server that has done some work."""
    metrics, engine = Metrics("Qwen/Qwen3-0.6B", ServerState("hf://Qwen/Qwen3-0.6B"), queue_limit=2048), Engine(rng)
    metrics.engine_ready(INFO)
    for handler in HANDLERS:
        for code in (200, 400, 404):
            metrics.http_started()
            metrics.http_finished(handler, "GET", code)
    for _ in range(5000):
        count(metrics, record(rng))
        metrics.inter_token_latency(rng.expovariate(1 / STEP_S), RUNNING)
    uvloop.run(metrics.render(engine.step()))
    return metrics


def prepared(families: Page) -> Callable[[], bytes]:
    """The same page as lines whose beginnings are built once."""
    heads: list[tuple[str, list[str]]] = []
    for family in families.families:
        lines = generate_latest(family).decode().splitlines()
        heads.append(("\n".join(lines[:2]), [line.rsplit(" ", 1)[0] + " " for line in lines[2:]]))

    def page() -> bytes:
        lines: list[str] = []
        for family, (head, prefixes) in zip(families.families, heads, strict=True):
            values: list[float] = []
            if isinstance(family, CellFamily):
                values += [cell.value for cell in family.cells.values()]
            elif isinstance(family, HistogramFamily):
                for histogram in family.histograms.values():
                    values += accumulate(histogram.counts)
                    values += (values[-1], histogram.sum)
            lines.append(head)
            lines += [prefix + repr(value) for prefix, value in zip(prefixes, values, strict=True)]
        lines.append("")
        return "\n".join(lines).encode()

    return page


def native(families: Page) -> CollectorRegistry:
    """The same series as prometheus-client's own objects."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    for family in families.families:
        names = [*family.constant, *family.names]
        constant = list(family.constant.values())
        if isinstance(family, CellFamily):
            kind = Counter if family.kind == "counter" else Gauge
            metric = kind(family.name, family.help, names, registry=registry)
            for values, cell in family.cells.items():
                metric.labels(*constant, *values).inc(cell.value)
        elif isinstance(family, HistogramFamily):
            histogram = Histogram(family.name, family.help, names, buckets=[float(bound) for bound in family.bounds], registry=registry)
            for values, counts in family.histograms.items():
                child = histogram.labels(*constant, *values)
                for bound, hits in zip((*counts.bounds, 1e9), counts.counts, strict=True):
                    if hits:
                        child.observe(bound)
    return registry


def timed(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds a call, the ways taking turns."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - began)
    return {
        name: {"median_ms": round(statistics.median(found) * 1e3, 4), "p99_ms": round(statistics.quantiles(found, n=100)[98] * 1e3, 4)}
        for name, found in seconds.items()
    }


def counting(rng: random.Random, metrics: Metrics, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds for the end of one request, and for one decode step of 64 requests."""
    requests = [record(rng) for _ in range(rounds)]
    ended = iter(requests)
    objects = [Histogram(f"h{number}", "h", ["model_name"], buckets=LATENCY_BUCKETS, registry=None).labels("m") for number in range(8)]
    counter = Counter("c", "c", ["model_name", "endpoint", "finish_reason"], registry=None)

    def end_native() -> None:
        counter.labels("m", "chat", "stop").inc()
        for histogram in objects:
            histogram.observe(0.2)

    def step_native() -> None:
        for _ in range(RUNNING):
            objects[0].observe(STEP_S)

    return timed(
        {
            "request, cells": lambda: count(metrics, next(ended)),
            "request, native": end_native,
            "step of 64, cells": lambda: metrics.inter_token_latency(STEP_S, RUNNING),
            "step of 64, native": step_native,
        },
        rounds,
    )


def step_cost(steps: int = 20_000) -> dict[str, float]:
    """Microseconds of CPU time that counting adds to one decode step of 64 requests, a snapshot every 100 ms included."""
    limits: Any = SimpleNamespace(pool_tokens=200_000, decode_log_interval=1 << 30, draft_tokens=0)
    report, stages = Report(lambda line: None, limits, 0.0), Stages()
    metrics = Metrics("m", ServerState("m"))
    every = int(SNAPSHOT_S / SHORT_STEP_S)
    raw = b""

    def snapshot() -> bytes:
        stats = report.stats(
            running=RUNNING, waiting=0, queued_tokens=0, background_running=0, background_waiting=0, retracted=0, held=0, kv_used=1,
            kv_evictable=1, kv_free=1, evicted_tokens=0,
        )  # fmt: skip
        stats.scheduler_seconds = stages.seconds
        return wire.encode(stats)

    began = time.process_time()
    for number in range(steps):
        for stage in (OUTPUT, RECV, SCHEDULE, LAUNCH, SCHEDULE, WAIT_DEVICE):
            stages.end(stage)
        report.decode_done(RUNNING, Drafted(0, 0), number * SHORT_STEP_S, number * SHORT_STEP_S + 0.001, used=1000, queued=0)
        if number % every == 0:
            raw = snapshot()
    engine = (time.process_time() - began) / steps * 1e6
    began = time.process_time()
    for number in range(steps):
        metrics.inter_token_latency(SHORT_STEP_S, RUNNING)
        if number % every == 0:
            wire.decode_engine(raw)
    front = (time.process_time() - began) / steps * 1e6
    percent = (engine + front) / (SHORT_STEP_S * 1e6) * 100
    return {"engine_us": round(engine, 2), "front_us": round(front, 2), "percent_of_a_2_ms_step": round(percent, 3)}


def ends_and_traces(rng: random.Random, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds for the end of a request, and for all spans of a request with two sequences."""
    ways: dict[str, Callable[[], object]] = {}
    found = record(rng)
    metrics = Metrics("m", ServerState("m"))
    metrics.engine_ready(INFO)
    ways["request"] = functools.partial(count, metrics, found)
    requests = [GenerateRequest(token_ids=wire.pack_ids([1]), sampling=wire.Sampling(max_new_tokens=7))] * 2
    route = SimpleNamespace(path="/v1/chat/completions")
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "route": route}
    for name, sampler in (("sampled", ALWAYS_ON), ("not sampled", ALWAYS_OFF)):
        provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(InMemorySpanExporter()))
        tracing = Tracing(provider, "m")

        def trace(tracing: Tracing = tracing) -> None:
            request = tracing.begin(scope)
            request.submitted("chat", requests, ["one"], streaming=True)
            for _ in requests:
                request.begun()
            for _ in requests:
                request.ended(found)
            request.answered(scope, 200)

        ways[f"spans, {name}"] = trace
    return timed(ways, rounds)


async def scraped(metrics: Metrics, rng: random.Random, seconds: float, page: Callable[[wire.Stats], Any] | None, *, watch: bool) -> float:
    """A front with 40 steps and 20 ended requests a second, scraped 20 times a second with `page` (None: not at all).

    Returns the process' CPU time in percent of one core; with `watch` instead the longest turn of the event loop in each second, in
    milliseconds of CPU time (so that a busy machine does not count), the median over the seconds.
    """
    engine = Engine(rng)
    stats = engine.step()
    longest: list[float] = []
    until, cpu = time.perf_counter() + seconds, time.process_time()

    async def every(period: float, action: Callable[[], Any]) -> None:
        due = time.perf_counter()
        while (due := due + period) < until:
            await asyncio.sleep(due - time.perf_counter())
            found = action()
            if asyncio.iscoroutine(found):
                await found

    def step() -> None:
        nonlocal stats
        stats = engine.step()
        metrics.inter_token_latency(STEP_S, RUNNING)

    async def look() -> None:
        window, before, most = time.perf_counter(), time.thread_time(), 0.0
        while window < until:
            await asyncio.sleep(0)
            now = time.thread_time()
            most, before = max(most, now - before), now
            if time.perf_counter() - window > 1:
                longest.append(most)
                window, most = window + 1, 0.0

    work = [every(STEP_S, step), every(0.05, lambda: count(metrics, record(rng)))]
    if page is not None:
        work.append(every(SCRAPE_S, lambda: page(stats)))
    if watch:
        work.append(look())
    await asyncio.gather(*work)
    return round(statistics.median(longest) * 1e3 if watch else (time.process_time() - cpu) / seconds * 100, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run with 20 scrapes a second")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rng = random.Random(1)
    metrics = filled(rng)
    page, load = metrics.page, metrics.load_page
    lines = prepared(page)
    registry = native(page)
    text = page.text()
    results: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "prometheus-client": version("prometheus-client")},
        "series": sum(not line.startswith(b"#") for line in text.splitlines()),
        "bytes": len(text),
        "page": timed({"page": page.text, "lines": lines, "native": lambda: generate_latest(registry), "load": load.text}, options.rounds),
        "counting": counting(rng, metrics, options.rounds * 10),
        "step": step_cost(options.rounds * 100),
        "ends and traces": ends_and_traces(rng, options.rounds * 10),
    }
    scrapes: dict[str, Callable[[wire.Stats], Any] | None] = {
        "none": None,
        "as served": metrics.render,
        "always new, by turns": lambda stats: page.text_by_turns(),
        "always new, in one go": lambda stats: page.text(),
        "always new, lines": lambda stats: lines(),
        "load page": metrics.render_load,
    }
    results["20 scrapes a second"] = {
        name: {
            "cpu_percent": uvloop.run(scraped(metrics, rng, options.seconds, scrape, watch=False)),
            "longest_turn_ms": uvloop.run(scraped(metrics, rng, options.seconds, scrape, watch=True)),
        }
        for name, scrape in scrapes.items()
    }
    shown = json.dumps(results, indent=2)
    print(shown)
    if options.out is not None:
        options.out.write_text(shown + "\n")


if __name__ == "__main__":
    main()
