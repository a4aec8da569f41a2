"""Peers' metric names beside ours: which there are, with the peers' labels and buckets, and that they tell the same numbers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from banyan_runtime import wire
from banyan_runtime.front.compat import peer_names
from banyan_runtime.front.metrics import Metrics, RequestRecord
from banyan_runtime.front.state import ServerState

HERE = Path(__file__).parent
PEERS = ("sglang", "vllm")
INFO = wire.EngineInfo(
    architecture="Qwen3ForCausalLM", model_type="qwen3", dtype="float32", device="cpu", attention_backend="torch_native", vocab_size=896,
    context_len=2048, max_model_len=2048, page_size=16, max_total_tokens=8192, max_req_input_len=2042,
    max_running_requests=64, weights_bytes=1000, kv_bytes=2000,
)  # fmt: skip
NOTHING = wire.StepStats(
    0,
    wire.HistogramCounts([0] * (len(wire.STEP_SECONDS_BUCKETS) + 1)),
    wire.HistogramCounts([0] * (len(wire.STEP_TOKENS_BUCKETS) + 1)),
)
STATS = wire.Stats(
    running=3, waiting=5, background_waiting=1, held=2, kv_used=2048, kv_evictable=1024, kv_free=5120, last_step_unix=1_750_000_000.5,
    prompt_tokens_computed=30, prompt_tokens_cached=10, generation_tokens=33, preemptions=7, preempted_tokens=44, evicted_tokens=55,
    new_token_ratio=0.5, gen_throughput=6.25, prefill=NOTHING, decode=NOTHING, cpu_seconds=9.5, resident_bytes=4096,
)  # fmt: skip
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def served(compat: str) -> Metrics:
    page = Metrics("tiny", ServerState("file:///tiny"), peer=peer_names(compat, "tiny"), clock=lambda: 100.0)
    page.engine_ready(INFO)
    return page


def rendered(page: Metrics, stats: wire.Stats | None = STATS) -> str:
    return asyncio.run(page.render(stats)).decode()


def samples(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"{key} stands there twice"
            found[key] = sample.value
    return found


def named(found: Samples, name: str) -> dict[str, float]:
    """The samples of this name, by the values of those labels that are no constants."""
    constant = {"model_name", "engine", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank"}
    return {
        ",".join(value for label, value in sorted(labels) if label not in constant): value
        for (series, labels), value in found.items()
        if series == name
    }


def record(**changed: object) -> RequestRecord:
    values: dict[str, object] = {
        "endpoint": "chat", "streaming": True, "finish_reason": "stop", "prompt_tokens": 37, "cached_tokens": 5, "completion_tokens": 11,
        "received": 10.0, "first_token": 10.5, "finished": 12.5, "queue_s": 0.125, "prefill_s": 0.25,
    }  # fmt: skip
    return RequestRecord(**(values | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize("compat", PEERS)
def test_names_types_labels_and_buckets_are_those_of_the_peer(compat: str) -> None:
    page = served(compat)
    page.http_started()
    page.http_finished("/v1/models", "GET", 200)
    lines = []
    for family in text_string_to_metric_families(rendered(page)):
        if family.name.startswith("banyan_"):
            continue
        labels: dict[str, list[str]] = {}
        for sample in family.samples:
            for name, value in sample.labels.items():
                if value not in labels.setdefault(name, []):
                    labels[name].append(value)
        shown = [f"{name}={'|'.join(values)}" for name, values in sorted(labels.items())]
        lines.append(f"{family.name}{'_total' if family.type == 'counter' else ''} {family.type} {' '.join(shown)}")
    assert "\n".join(lines) + "\n" == (HERE / f"metrics.{compat}.golden").read_text(), "others' dashboards and pickers ask for these"


@pytest.mark.parametrize("compat", PEERS)
def test_ours_stay_as_they_are_and_every_series_of_the_peer_is_there_before_the_first_request(compat: str) -> None:
    page = served(compat)
    ours = Metrics("tiny", ServerState("file:///tiny"))
    ours.engine_ready(INFO)
    before = samples(rendered(page))
    assert {key for key in before if key[0].startswith("banyan_")} == set(samples(asyncio.run(ours.render(STATS)).decode()))
    page = served(compat)
    page.request_finished(record())
    page.request_finished(record(streaming=False, finish_reason="abort", first_token=None, queue_s=None, prefill_s=None))
    page.first_token(0.5, streaming=True)
    page.inter_token_latency(0.01, 4)
    assert set(samples(rendered(page))) == set(before)


@pytest.mark.parametrize(
    ("compat", "running", "waiting", "usage"),
    [
        ("sglang", "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"),
        ("vllm", "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    ],
)
def test_each_load_gauge_has_one_series_and_no_time_stamp_on_both_pages(compat: str, running: str, waiting: str, usage: str) -> None:
    page = served(compat)
    for text in (rendered(page), page.render_load(STATS).decode()):
        for name, value in ((running, 3), (waiting, 5), (usage, 0.25)):
            lines = [line for line in text.splitlines() if line.startswith(name + "{")]
            assert len(lines) == 1
            assert len(lines[0].split()) == 2
            assert float(lines[0].split()[1]) == value


def test_the_form_of_the_pool_is_told_in_whole_numbers_in_both_forms_of_sglang() -> None:
    found = samples(rendered(served("sglang")))
    config = [dict(labels) for name, labels in found if name == "sglang:cache_config_info"]
    assert [(each["page_size"], each["num_pages"]) for each in config] == [("16", "512")]
    assert named(found, "sglang:page_size") == {"": 16}
    assert named(found, "sglang:num_pages") == {"": 512}


def test_the_form_of_the_pool_is_told_in_whole_numbers_of_vllm() -> None:
    found = samples(rendered(served("vllm")))
    assert [dict(labels) for name, labels in found if name == "vllm:cache_config_info"] == [
        {"block_size": "16", "num_gpu_blocks": "512", "engine": "0"}
    ]


def test_a_finished_request_tells_sglangs_names_the_same_as_ours() -> None:
    page = served("sglang")
    page.request_finished(record())
    page.request_finished(record(streaming=False, finish_reason="abort"))
    page.first_token(0.5, streaming=True)
    page.first_token(0.25, streaming=False)
    page.inter_token_latency(0.01, 4)
    found = samples(rendered(page))
    assert named(found, "sglang:num_requests_total") == {"true": 1, "false": 1}
    assert named(found, "sglang:num_aborted_requests_total") == {"": 1}
    assert named(found, "sglang:prompt_tokens_total") == {"true": 37, "false": 37}
    assert named(found, "sglang:generation_tokens_total") == {"true": 11, "false": 11}
    assert named(found, "sglang:time_to_first_token_seconds_sum") == {"true": 0.5, "false": 0.25}
    assert named(found, "sglang:e2e_request_latency_seconds_sum") == {"true": 2.5, "false": 2.5}
    assert named(found, "sglang:request_time_per_output_token_seconds_sum") == {"true": 0.2, "false": 0.2}
    assert named(found, "sglang:queue_time_seconds_sum") == {"": 0.25}
    assert named(found, "sglang:inter_token_latency_seconds_count") == {"": 4}
    assert named(found, "sglang:uncached_prompt_tokens_histogram_sum") == {"": 64}
    assert named(found, "sglang:cache_hit_rate") == {"": 0.25}
    assert named(found, "sglang:realtime_tokens_total") == {"prefill_compute": 30, "prefill_cache": 10, "decode": 33}


def test_a_finished_request_tells_vllms_names_the_same_as_ours() -> None:
    page = served("vllm")
    page.request_finished(record(finish_reason="tool_calls"))
    page.request_finished(record(finish_reason="abort", first_token=None, queue_s=None, prefill_s=None))
    page.first_token(0.5, streaming=True)
    page.inter_token_latency(0.01, 4)
    found = samples(rendered(page))
    assert named(found, "vllm:request_success_total") == {"stop": 1, "length": 0, "abort": 1, "error": 0, "repetition": 0}
    assert named(found, "vllm:e2e_request_latency_seconds_count") == {"": 2}
    assert named(found, "vllm:time_to_first_token_seconds_sum") == {"": 0.5}
    assert named(found, "vllm:request_queue_time_seconds_sum") == {"": 0.125}
    assert named(found, "vllm:request_prefill_time_seconds_sum") == {"": 0.25}
    assert named(found, "vllm:request_decode_time_seconds_sum") == {"": 2.0}
    assert named(found, "vllm:request_inference_time_seconds_sum") == {"": 2.25}
    assert named(found, "vllm:inter_token_latency_seconds_count") == {"": 4}
    assert named(found, "vllm:request_prompt_tokens_sum") == {"": 74}
    assert named(found, "vllm:prompt_tokens_total") == {"": 40}
    assert named(found, "vllm:prefix_cache_hits_total") == {"": 10}
    assert named(found, "vllm:generation_tokens_total") == {"": 33}
    assert named(found, "vllm:num_requests_waiting_by_reason") == {"capacity": 4, "deferred": 1}
    assert named(found, "vllm:engine_sleep_state") == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}


@pytest.mark.parametrize("compat", PEERS)
def test_http_requests_are_told_as_the_peer_groups_them_however_often_the_page_is_written(compat: str) -> None:
    now = 0.0
    page = Metrics("tiny", ServerState("x"), peer=peer_names(compat, "tiny"), clock=lambda: now)
    for code in (200, 201, 503):
        page.http_started()
        page.http_finished("/generate", "POST", code)
    for _ in range(3):
        now += 1
        found = samples(rendered(page))
    if compat == "vllm":
        assert named(found, "http_requests_total") == {"/generate,POST,2xx": 2, "/generate,POST,5xx": 1}
    else:
        assert named(found, "sglang:http_requests_total") == {"/generate,POST": 3}
        assert named(found, "sglang:http_responses_total") == {"/generate,POST,200": 1, "/generate,POST,201": 1, "/generate,POST,503": 1}


def test_without_the_option_there_is_no_name_of_a_peer() -> None:
    page = Metrics("tiny", ServerState("x"))
    page.engine_ready(INFO)
    assert {family.name.partition("_")[0] for family in text_string_to_metric_families(rendered(page))} == {"banyan"}


def test_drafts_are_told_in_the_peers_names() -> None:
    drafting = msgspec.structs.replace(STATS, draft_tokens=50, draft_tokens_accepted=30, accept_len=1.85, accept_rate=0.6)
    sglang = samples(asyncio.run(served("sglang").render(drafting)).decode())
    assert named(sglang, "sglang:spec_accept_length") == {"": 1.85}
    assert named(sglang, "sglang:spec_accept_rate") == {"": 0.6}
    vllm = samples(asyncio.run(served("vllm").render(drafting)).decode())
    assert named(vllm, "vllm:spec_decode_num_draft_tokens_total") == {"": 50}
    assert named(vllm, "vllm:spec_decode_num_accepted_tokens_total") == {"": 30}
    ours = {dict(labels)["outcome"]: value for (name, labels), value in sglang.items() if name == "banyan_draft_tokens_total"}
    assert ours == {"accepted": 30, "refused": 20}
