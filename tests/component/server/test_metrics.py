"""The metrics page: what series there are, and that each number comes from where it should."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from banyan_runtime import __version__, exposition, wire
from banyan_runtime.front.metrics import Metrics, RequestRecord
from banyan_runtime.front.state import PhaseName, ServerState

GOLDEN = Path(__file__).parent / "metrics.golden"

INFO = wire.EngineInfo(
    architecture="Qwen3ForCausalLM", model_type="qwen3", dtype="float32", device="cpu", attention_backend="torch_native", vocab_size=896,
    context_len=2048, max_model_len=2048, page_size=16, max_total_tokens=8192, max_req_input_len=2042,
    max_running_requests=64, weights_bytes=1000, kv_bytes=2000, available_bytes=3000, phase_seconds={"load_weights": 1.5},
    software={"torch": "2.13.0", "cuda": "13.0", "flashinfer": "0.7.1"},
)  # fmt: skip


def step_stats(steps: int) -> wire.StepStats:
    seconds = [0] * (len(wire.STEP_SECONDS_BUCKETS) + 1)
    seconds[3] = steps
    tokens = [0] * (len(wire.STEP_TOKENS_BUCKETS) + 1)
    tokens[-1] = steps
    return wire.StepStats(steps, wire.HistogramCounts(seconds, 0.25), wire.HistogramCounts(tokens, 99.0), replayed=2)


STATS = wire.Stats(
    running=3, waiting=5, held=2, kv_used=2048, kv_evictable=1024, kv_free=5120, last_step_unix=1_750_000_000.5, prompt_tokens_computed=11,
    prompt_tokens_cached=22, generation_tokens=33, preemptions=1, preempted_tokens=44, evicted_tokens=55,
    gen_throughput=6.25, prefill=step_stats(7), decode=step_stats(8), cpu_seconds=9.5, resident_bytes=4096, background_waiting=1,
    scheduler_seconds=[0.5, 1.5, 2.5, 3.5, 4.5, 5.5],
)  # fmt: skip


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def metrics(clock: Clock | None = None) -> Metrics:
    return Metrics("tiny", ServerState("file:///tiny"), queue_limit=10, clock=clock or Clock())


def rendered(page: Metrics, stats: wire.Stats | None = None) -> bytes:
    return asyncio.run(page.render(stats))


def samples(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of the page as Prometheus' own parser reads it, without the label that all share."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name", "tiny") == "tiny"
            key = (sample.name, frozenset(labels.items()))
            assert key not in found, f"{key} stands there twice"
            found[key] = sample.value
    return found


def record(**changed: object) -> RequestRecord:
    values: dict[str, object] = {
        "endpoint": "chat", "streaming": True, "finish_reason": "stop", "prompt_tokens": 37, "cached_tokens": 5, "completion_tokens": 11,
        "received": 10.0, "first_token": 10.5, "finished": 12.5, "queue_s": 0.1, "prefill_s": 0.3,
    }  # fmt: skip
    return RequestRecord(**(values | changed))  # type: ignore[arg-type]


def test_names_types_labels_and_buckets_are_those_of_the_golden_file() -> None:
    page = metrics()
    page.engine_ready(INFO)
    page.http_started()
    page.http_finished("/v1/models", "GET", 200)
    lines = []
    for family in text_string_to_metric_families(rendered(page, STATS).decode()):
        labels: dict[str, set[str]] = {}
        for sample in family.samples:
            for name, value in sample.labels.items():
                if name not in ("model_name", "version", "model"):
                    labels.setdefault(name, set()).add(value)
        shown = ["model_name"] * ("model_name" in family.samples[0].labels) + [
            f"{name}={'|'.join(sorted(values, key=edge))}" for name, values in sorted(labels.items())
        ]
        lines.append(f"{family.name}{'_total' if family.type == 'counter' else ''} {family.type} {' '.join(shown)}")
    assert "\n".join(lines) + "\n" == GOLDEN.read_text(), "the names are an interface: change the golden file by hand, and keep old names"


def edge(value: str) -> tuple[float, str]:
    try:
        return (float(value), value)
    except ValueError:
        return (-1.0, value)


def test_every_series_exists_from_the_start_at_zero_so_that_rates_see_the_first_event() -> None:
    before = samples(rendered(metrics()))
    page = metrics()
    page.engine_ready(INFO)
    page.request_finished(record())
    page.first_token(0.5, streaming=True)
    page.rejected("queue_full")
    page.inter_token_latency(0.01, 4)
    page.grammar_failed("timeout")
    after = samples(rendered(page, STATS))
    constant = {"banyan_model_info", "banyan_build_info", "vllm:cache_config_info"}
    assert {key for key in after if key[0] not in constant} == {key for key in before if key[0] not in constant}
    events = [
        value for (name, _), value in before.items() if name.endswith(("_total", "_count", "_bucket", "_sum")) and "process" not in name
    ]
    assert len(events) > 300
    assert set(events) == {0}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian's package prometheus) is not installed")
def test_promtool_finds_nothing_wrong_with_our_names() -> None:
    page = metrics()
    page.engine_ready(INFO)
    page.key_names(["ann"])
    own = b"".join(line for line in rendered(page, STATS).splitlines(keepends=True) if b"vllm:" not in line)
    checked = subprocess.run(["promtool", "check", "metrics"], input=own, capture_output=True, timeout=60)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_a_page_stays_below_700_series() -> None:
    page = metrics()
    page.engine_ready(INFO)
    assert 300 < len(samples(rendered(page, STATS))) < 700


def test_an_engine_snapshot_fills_gauges_counters_and_step_histograms() -> None:
    page = metrics()
    page.resident_bytes = lambda: 12_345_678
    page.log_dropped = lambda: 3
    page.downloaded = lambda: (5, 7)
    page.engine_ready(INFO)
    seen = samples(rendered(page, STATS))

    def value(name: str, **labels: str) -> float:
        return seen[name, frozenset(labels.items())]

    assert value("banyan_requests_running") == 3
    assert value("banyan_requests_waiting") == 5
    assert value("banyan_kv_cache_usage_ratio") == 0.25
    assert [value("banyan_kv_cache_tokens", state=state) for state in ("used", "evictable", "free")] == [2048, 1024, 5120]
    assert value("banyan_kv_cache_capacity_tokens") == 8192
    assert value("banyan_prompt_tokens_total", source="cached") == 22
    assert value("banyan_generation_tokens_total") == 33
    waiting = [value("banyan_requests_waiting_by_reason", reason=reason) for reason in ("capacity", "deferred", "grammar")]
    assert waiting == [4, 1, 2]
    assert [value("banyan_scheduler_seconds_total", stage=stage) for stage in ("recv", "schedule", "idle")] == [0.5, 1.5, 5.5]
    assert [value("banyan_device_memory_bytes", kind=kind) for kind in ("weights", "kv_cache", "free")] == [1000, 2000, 3000]
    assert value("banyan_build_info", version=__version__, torch="2.13.0", cuda="13.0", flashinfer="0.7.1") == 1
    assert value("banyan_engine_last_step_timestamp_seconds") == 1_750_000_000.5
    assert value("banyan_steps_total", phase="decode", graph="false") == 6
    assert value("banyan_steps_total", phase="decode", graph="true") == 2
    assert value("banyan_step_duration_seconds_bucket", phase="prefill", le="0.002") == 0
    assert value("banyan_step_duration_seconds_bucket", phase="prefill", le="0.004") == 7
    assert value("banyan_step_tokens_bucket", phase="decode", le="20000.0") == 0
    assert value("banyan_step_tokens_count", phase="decode") == 8
    assert value("banyan_process_cpu_seconds_total", component="engine") == 9.5
    assert value("banyan_process_resident_memory_bytes", component="engine") == 4096
    assert value("banyan_process_resident_memory_bytes", component="api") == 12_345_678
    assert value("banyan_log_dropped_total") == 3
    assert (value("banyan_download_bytes"), value("banyan_download_size_bytes")) == (5, 7)
    assert value("banyan_startup_phase_seconds", phase="load_weights") == 1.5


@pytest.mark.parametrize(
    ("phase", "hung", "impaired", "shown"),
    [
        ("ready", False, "", "ready"),
        ("ready", True, "", "hung"),
        ("draining", True, "", "hung"),
        ("dead", True, "", "dead"),
        ("ready", False, "no workers", "impaired"),
        ("ready", True, "no workers", "hung"),
        ("draining", False, "no workers", "draining"),
        ("loading", False, "no workers", "loading"),
    ],
)
def test_the_server_is_in_one_state_the_one_that_readyz_tells(phase: PhaseName, hung: bool, impaired: str, shown: str) -> None:
    state = ServerState("x", phase=phase, hung=hung, impaired=impaired)
    seen = samples(rendered(Metrics("tiny", state)))
    states = {dict(labels)["state"]: value for (name, labels), value in seen.items() if name == "banyan_engine_state"}
    assert [name for name, value in states.items() if value] == [shown] == [state.payload()["state"]]


def test_a_finished_request_is_counted_once_in_each_of_its_series() -> None:
    page = metrics()
    page.request_finished(record())
    page.request_finished(record(endpoint="/v2/unheard-of", streaming=False, finish_reason="abort", first_token=None, completion_tokens=0))
    seen = samples(rendered(page))

    def value(name: str, **labels: str) -> float:
        return seen[name, frozenset(labels.items())]

    assert value("banyan_requests_total", endpoint="chat", finish_reason="stop") == 1
    assert value("banyan_requests_total", endpoint="other", finish_reason="abort") == 1
    assert value("banyan_request_duration_seconds_sum", streaming="true") == 2.5
    assert value("banyan_time_per_output_token_seconds_sum") == 0.2
    assert value("banyan_decode_duration_seconds_sum") == 2.0
    assert value("banyan_request_prompt_tokens_bucket", le="20.0") == 0
    assert value("banyan_request_prompt_tokens_bucket", le="50.0") == 2


def test_background_is_counted_but_how_long_it_waits_is_not_what_readers_wait() -> None:
    page = metrics()
    page.request_finished(record(background=True))
    seen = samples(rendered(page))
    counted = {name for (name, _), value in seen.items() if name.endswith(("_count", "_total")) and value}
    assert {"banyan_requests_total", "banyan_request_duration_seconds_count", "banyan_decode_duration_seconds_count"} <= counted
    assert "banyan_queue_duration_seconds_count" not in counted


def test_the_time_to_the_first_token_is_told_when_it_comes() -> None:
    page = metrics()
    page.first_token(0.5, streaming=True)
    page.first_token(0.25, streaming=False)
    seen = samples(rendered(page))
    sums = {dict(labels)["streaming"]: value for (name, labels), value in seen.items() if name == "banyan_time_to_first_token_seconds_sum"}
    assert sums == {"true": 0.5, "false": 0.25}


def test_a_duration_that_nobody_knows_is_not_counted_as_zero() -> None:
    page = metrics()
    page.request_finished(record(finish_reason="abort", queue_s=None, prefill_s=None))
    page.request_finished(record(finish_reason="abort", queue_s=0.25, prefill_s=None, first_token=None, completion_tokens=0))
    page.request_finished(record(queue_s=0.5, prefill_s=0.75))
    seen = samples(rendered(page))

    def counted(name: str) -> tuple[float, float]:
        return seen[f"{name}_count", frozenset()], seen[f"{name}_sum", frozenset()]

    assert counted("banyan_queue_duration_seconds") == (2, 0.75)
    assert counted("banyan_prefill_duration_seconds") == (1, 0.75)
    assert counted("banyan_decode_duration_seconds") == (2, 4.0)


def test_a_request_of_one_token_has_no_time_per_token() -> None:
    page = metrics()
    page.request_finished(record(completion_tokens=1))
    assert samples(rendered(page))["banyan_time_per_output_token_seconds_count", frozenset()] == 0


def test_grammars_are_counted_by_how_long_they_took_and_why_they_failed() -> None:
    page = metrics()
    page.grammar_failed("timeout")
    page.grammar_failed("a reason nobody knows")
    counts = [0] * (len(wire.LATENCY_BUCKETS) + 1)
    counts[4] = 3
    seen = samples(rendered(page, msgspec.structs.replace(STATS, grammar_seconds=wire.HistogramCounts(counts, 0.25))))
    assert seen["banyan_grammar_compile_seconds_sum", frozenset()] == 0.25
    assert seen["banyan_grammar_compile_seconds_bucket", frozenset({("le", "0.01")})] == 0
    assert seen["banyan_grammar_compile_seconds_bucket", frozenset({("le", "0.02")})] == 3
    assert seen["banyan_grammar_failures_total", frozenset({("reason", "timeout")})] == 1
    assert seen["banyan_grammar_failures_total", frozenset({("reason", "invalid")})] == 1


def test_requests_and_tokens_are_counted_by_the_name_of_the_key() -> None:
    page = metrics()
    page.key_names(["ann", "bob"])
    page.key_used("ann")
    page.key_used("")
    page.request_finished(record(key="ann"))
    page.request_finished(record(key="ann", told_tokens=0, completion_tokens=2))  # another choice of the same prompt
    page.request_finished(record(key=None))
    seen = samples(rendered(page))

    def counted(name: str) -> dict[tuple[str, ...], float]:
        return {tuple(value for _, value in sorted(labels)): value for (series, labels), value in seen.items() if series == name}

    assert counted("banyan_api_key_requests_total") == {("ann",): 1, ("bob",): 0, ("other",): 1}
    assert counted("banyan_api_key_tokens_total") == {
        ("ann", "prompt"): 37, ("ann", "generation"): 13, ("bob", "prompt"): 0, ("bob", "generation"): 0,
        ("other", "prompt"): 0, ("other", "generation"): 0,
    }  # fmt: skip


def test_without_keys_there_are_no_series_of_keys() -> None:
    page = metrics()
    page.request_finished(record())
    assert "api_key" not in rendered(page).decode()


def test_at_most_100_names_of_keys_have_series_of_their_own() -> None:
    page = metrics()
    page.key_names(f"name-{number}" for number in range(1000))
    for number in range(1000):
        page.key_used(f"name-{number}")
    seen = samples(rendered(page))
    requests = {dict(labels)["key"]: value for (name, labels), value in seen.items() if name == "banyan_api_key_requests_total"}
    assert len(requests) == 101
    assert requests["name-99"] == 1
    assert requests["other"] == 900


def test_expected_answers_of_a_route_are_counted_from_0() -> None:
    page = metrics()
    page.http_expected("/v1/chat/completions", "POST", (200, 500))
    page.http_started()
    page.http_finished("/v1/chat/completions", "POST", 500)
    seen = samples(rendered(page))
    http = {dict(labels)["code"]: value for (name, labels), value in seen.items() if name == "banyan_http_requests_total"}
    assert http == {"200": 0, "500": 1}


def test_an_unknown_path_or_method_opens_no_series_of_its_own() -> None:
    page = metrics()
    for code in range(1000):
        page.http_started()
        page.http_finished(f"/made/up/{code}", "BREW", 404)
    seen = samples(rendered(page))
    http = {key: value for key, value in seen.items() if key[0] == "banyan_http_requests_total"}
    assert sum(http.values()) == 1000
    assert len(http) <= 201
    assert seen["banyan_http_requests_in_flight", frozenset()] == 0


def test_load_gauges_are_of_now_and_all_else_is_written_at_most_every_250_ms() -> None:
    clock = Clock()
    page = metrics(clock)
    refused = ("banyan_admission_rejections_total", frozenset({("reason", "auth")}))
    rendered(page)
    page.rejected("auth")
    clock.now += 0.249
    seen = samples(rendered(page, STATS))
    assert (seen[refused], seen["banyan_requests_waiting", frozenset()]) == (0, 5)
    clock.now += 0.002
    assert samples(rendered(page, STATS))[refused] == 1


def test_while_a_page_is_written_the_loop_does_other_work_and_a_second_scrape_waits_for_the_same_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exposition, "HOLD_S", 0.0)
    page = metrics()
    turns = written = 0

    def rss() -> int:
        nonlocal written
        written += 1
        return 0

    page.resident_bytes = rss

    async def scrape_twice_beside_other_work() -> tuple[bytes, bytes]:
        nonlocal turns
        scrapes = asyncio.gather(page.render(STATS), page.render(STATS))
        while not scrapes.done():
            turns += 1
            await asyncio.sleep(0)
        return await scrapes

    first, second = asyncio.run(scrape_twice_beside_other_work())
    assert first == second
    assert written == 1
    assert turns > 30
    assert len(samples(first)) > 300


def test_label_values_are_escaped_as_prometheus_reads_them() -> None:
    name = 'a "model"\\of\nmine'
    page = rendered(Metrics(name, ServerState("x"))).decode()
    assert {sample.labels.get("model_name", name) for family in text_string_to_metric_families(page) for sample in family.samples} == {name}


def test_the_load_page_holds_each_load_gauge_once() -> None:
    page = metrics()
    page.engine_ready(INFO)
    engine = frozenset({("engine", "0")})
    assert samples(page.render_load(STATS)) == {
        ("banyan_requests_running", frozenset()): 3,
        ("banyan_requests_waiting", frozenset()): 5,
        ("banyan_kv_cache_usage_ratio", frozenset()): 0.25,
        ("banyan_kv_cache_page_size_tokens", frozenset()): 16,
        ("banyan_kv_cache_capacity_tokens", frozenset()): 8192,
        ("vllm:num_requests_running", engine): 3,
        ("vllm:num_requests_waiting", engine): 5,
        ("vllm:kv_cache_usage_perc", engine): 0.25,
        ("vllm:cache_config_info", frozenset({("block_size", "16"), ("num_gpu_blocks", "512"), ("engine", "0")})): 1,
        ("vllm:lora_requests_info", frozenset({("max_lora", "0"), *((f"{kind}_lora_adapters", "") for kind in ("waiting", "running"))})): 0,
    }
    assert page.render_load(STATS).count(b"# TYPE vllm:") == 5
