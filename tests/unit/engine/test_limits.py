from __future__ import annotations

from dataclasses import replace

import pytest

from banyan_runtime.arguments import parse
from banyan_runtime.engine.limits import EngineLimits
from banyan_runtime.engine.report import startup_line
from banyan_runtime.errors import ConfigError
from banyan_runtime.step import RunnerInfo
from tests.unit.engine.session import Session, limits

INFO = RunnerInfo(
    architecture="Qwen2ForCausalLM", model_type="qwen2", vocab_size=1000, context_len=32_768, pool_tokens=20_480, dtype="bfloat16",
    device="cuda", attention_backend="torch_native", weights_bytes=0, kv_bytes=0, available_bytes=59 << 30,
)  # fmt: skip


def limits_of(*arguments: str, info: RunnerInfo = INFO) -> EngineLimits:
    return EngineLimits.of(parse(["--model-path", "m", *arguments]), info)


def test_the_start_up_line_is_sglangs() -> None:
    limits = limits_of("--max-running-requests", "200", "--chunked-prefill-size", "8192")
    assert startup_line(limits, INFO) == (
        "max_total_num_tokens=20480, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=200, "
        "context_len=32768, available_gpu_mem=59.00 GB"
    )


@pytest.mark.parametrize(
    ("sizes", "blamed"),
    [({"context_len": 15}, "15 .*--context-length"), ({"pool_tokens": 15}, "KV cache .*15 ")],
)
def test_a_context_or_a_pool_in_which_nothing_runs_is_refused_by_its_own_name(sizes: dict[str, int], blamed: str) -> None:
    with pytest.raises(ConfigError, match=blamed):
        limits_of(info=replace(INFO, **sizes))  # type: ignore[arg-type]
    limits_of(info=replace(INFO, **dict.fromkeys(sizes, 16)))  # type: ignore[arg-type]


def test_a_step_stays_in_flight_on_a_gpu_and_never_on_a_cpu() -> None:
    assert limits_of().overlap
    assert not limits_of(info=replace(INFO, device="cpu")).overlap


def test_the_chunk_follows_the_device_and_minus_one_means_whole_prompts() -> None:
    assert limits_of().chunk == 8192
    assert limits_of(info=replace(INFO, device="cpu")).chunk == 2048
    assert limits_of("--chunked-prefill-size", "-1").chunk is None


def test_the_time_of_a_prefill_step_is_bounded_on_a_cpu_unless_it_is_told_otherwise() -> None:
    cpu = replace(INFO, device="cpu")
    assert (limits_of().prefill_step_s, limits_of(info=cpu).prefill_step_s) == (0.0, 2.0)
    assert limits_of("--prefill-step-seconds", "0.5").prefill_step_s == 0.5
    assert limits_of("--prefill-step-seconds", "0", info=cpu).prefill_step_s == 0.0


def test_the_default_number_of_running_requests_follows_the_pool() -> None:
    assert limits_of().max_running == 2048
    assert limits_of(info=replace(INFO, pool_tokens=400_000)).max_running == 4096
    assert limits_of("--page-size", "16", info=replace(INFO, pool_tokens=320)).max_running == 20


def test_options_reach_the_engine() -> None:
    limits = limits_of(
        "--schedule-policy", "lpm", "--disable-radix-cache", "--schedule-conservativeness", "0.5",
        "--max-queued-requests", "7", "--page-size", "16", "--max-prefill-tokens", "99",
    )  # fmt: skip
    assert (limits.policy, limits.radix, limits.conservativeness) == ("lpm", False, 0.5)
    assert (limits.max_queued, limits.page_size, limits.max_prefill_tokens) == (7, 16, 99)


def test_the_tokens_that_may_wait_follow_the_context() -> None:
    assert limits_of().max_queued_tokens == 16 << 20
    assert limits_of(info=replace(INFO, context_len=1 << 20)).max_queued_tokens == 64 << 20


def test_the_front_is_told_the_same_limit_that_the_engine_checks() -> None:
    for pool, longest in ((20_480, 20_480), (32_767, 32_767), (32_768, 32_768), (100_000, 32_768)):
        info = replace(INFO, pool_tokens=pool)
        limits = limits_of(info=info)
        told = limits.engine_info(info)
        assert (told.max_model_len, told.max_req_input_len, told.context_len) == (longest, longest, 32_768)
        assert limits.refusal(longest - 1, 1) is None
        assert limits.refusal(longest - 1, 2) is not None


def test_a_pool_that_cannot_hold_the_context_is_said_with_the_remedy() -> None:
    warning = limits_of().warning
    assert warning is not None
    for word in ("20480", "32768", "--max-total-tokens", "--mem-fraction-static", "--context-length 20480"):
        assert word in warning
    assert limits_of(info=replace(INFO, pool_tokens=32_768)).warning is None


def test_the_front_is_told_what_the_runner_can_do() -> None:
    info = replace(INFO, batch_invariant=False, features=frozenset({"mask", "bias"}))
    told = limits_of(info=info).engine_info(info)
    assert (told.batch_invariant, told.features) == (False, ("bias", "mask"))


@pytest.mark.parametrize("sizes", [{"context_len": 64}, {"pool_tokens": 64}, {"pool_tokens": 64, "page_size": 16, "max_running": 4}])
def test_a_prompt_of_the_longest_length_runs_with_no_output(sizes: dict[str, int]) -> None:
    session = Session(limits(**sizes))
    assert session.limits.max_model_len == 64
    scored = session.submit([token % 50 for token in range(64)], 0)
    session.drain()
    assert session.ended(scored)
    assert not session.failures


def test_a_context_far_beyond_the_pool_takes_no_memory() -> None:
    session = Session(limits(context_len=1 << 24, pool_tokens=64))
    assert session.engine.memory.tables.slots.shape[1] < 100


def test_mixed_steps_and_drafts_exclude_each_other() -> None:
    assert limits_of("--enable-mixed-chunk").mixed
    with pytest.raises(ConfigError, match=r"--enable-mixed-chunk: .*--speculative-algorithm=NGRAM"):
        limits_of("--enable-mixed-chunk", "--speculative-algorithm", "NGRAM", info=replace(INFO, features=frozenset({"drafts"})))
