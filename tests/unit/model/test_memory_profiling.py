"""How many tokens the KV pool holds: by arithmetic, and on a GPU whose memory is counted (`pretended.py`)."""

from __future__ import annotations

import dataclasses
import logging
import random
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan_runtime.config import ServerConfig
from banyan_runtime.engine.limits import EngineLimits
from banyan_runtime.engine.memory.tables import SLACK
from banyan_runtime.errors import ConfigError
from banyan_runtime.model import graphs, memory_profiling
from banyan_runtime.model.memory_profiling import GIB, MIB, LargestSteps, PoolCost, Profile, no_memory, text_step
from banyan_runtime.model.pool import KvPool
from banyan_runtime.model.runner import ModelRunner
from banyan_runtime.model.runners import load_weights
from banyan_runtime.step import Runner, RunnerInfo, Step, TableShape
from tests.support.models.driver import Driver, Request
from tests.support.models.pretended import Memory, PretendedGpu, only_attention, pretended
from tests.support.models.tiny import TinyModel, make

pytestmark = [pytest.mark.matrix(gate=1), pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")]


# --- by arithmetic ---


@dataclasses.dataclass(frozen=True, slots=True)
class Cost(PoolCost):
    cell: int = 1 << 15
    fixed: int = 2 * MIB

    def kv(self, tokens: int) -> int:
        return (tokens + self.config.page_size) * self.cell

    def tables(self, tokens: int) -> int:
        return self.fixed + 8 * tokens


CHOICE: Any = SimpleNamespace(dtype=torch.bfloat16)
STEPS = LargestSteps(8192, 2048)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """In order: other processes, weights, what lasts, and the peak, each of what is left."""
    total = draw(st.integers(1 * GIB, 200 * GIB))

    def part(of: int) -> int:
        return draw(st.integers(0, of))

    free = total - part(total // 2)
    loaded = free - part(free)
    after = loaded - part(min(loaded, GIB))
    peak = part(after)
    pool = part(peak // 3)
    return Profile(total, free, loaded, after - peak, after, pool, part(peak - pool), STEPS, 1.0)


@st.composite
def costs(draw: st.DrawFn) -> Cost:
    fraction, wanted = draw(st.none() | st.floats(0.05, 0.98)), draw(st.none() | st.integers(64, 1 << 22))
    page = draw(st.sampled_from([1, 16, 64]))
    config = ServerConfig(model_path="x", page_size=page, mem_fraction_static=fraction, max_total_tokens=wanted)
    return Cost(config, CHOICE, 1, draw(st.integers(256, 1 << 20)), draw(st.integers(0, 128 * MIB)))


@settings(deadline=None, derandomize=True)
@given(profiles(), costs())
def test_the_pool_is_what_the_largest_steps_and_the_margin_leave(profile: Profile, cost: Cost) -> None:
    config = cost.config
    try:
        tokens = memory_profiling.gpu_tokens(profile, cost)
    except ConfigError as error:
        assert ("--mem-fraction-static" in str(error)) == (cost.fitting(profile.room) >= cost.least)  # noqa: PT017
        return

    def left(tokens: int) -> int:
        return profile.room - cost.kv(tokens) - cost.tables(tokens)

    assert tokens % config.page_size == 0
    assert profile.margin >= max(0.019 * profile.total, 512 * MIB)
    assert left(tokens) >= 0
    assert left(cost.fitting(profile.room) + config.page_size) < 0, "a page more would not fit"
    if config.mem_fraction_static is None and config.max_total_tokens is None:
        assert left(tokens + config.page_size) < 0
    assert config.max_total_tokens is None or tokens <= config.max_total_tokens
    if config.mem_fraction_static is not None:
        assert profile.weights + cost.kv(tokens) <= config.mem_fraction_static * profile.free_before + 1
    shown = sum(size for _, size in memory_profiling.parts(profile, cost, tokens))
    assert profile.total - shown == left(tokens)
    assert re.search(r"unused -?\d", memory_profiling.line(profile, cost, tokens))


@pytest.mark.parametrize(
    ("changes", "dtype", "remedy"),
    [
        ({}, torch.bfloat16, "--chunked-prefill-size below 8192"),
        ({"least_free": 2 * GIB, "graphs": 3 * GIB}, torch.bfloat16, "--disable-cuda-graph"),
        ({"least_free": GIB, "free_after": GIB}, torch.float32, "--dtype=bfloat16"),
        ({"least_free": GIB, "free_after": GIB}, torch.bfloat16, "serve a model that takes"),
    ],
)
def test_a_refusal_says_what_takes_what_and_names_an_option(changes: dict[str, Any], dtype: torch.dtype, remedy: str) -> None:
    profile = Profile(16 * GIB, 15 * GIB, 5 * GIB, GIB // 2, 5 * GIB, 0, 0, STEPS, 1.0)
    cost = Cost(ServerConfig(model_path="x"), SimpleNamespace(dtype=dtype), 1, cell=128 * MIB)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as error:
        memory_profiling.gpu_tokens(dataclasses.replace(profile, **changes), cost)
    for part in (" 16.00 GB", "weights 10.00 GB", "margin 0.50 GB", "CUDA 1.00 GB", remedy):
        assert part in str(error.value)


@pytest.mark.parametrize(("total", "found"), [(24, (2048, 256)), (80, (None, None))])
def test_small_devices_have_smaller_default_steps(total: int, found: tuple[int | None, int | None]) -> None:
    config = memory_profiling.with_defaults(ServerConfig(model_path="x"), total * GIB)
    assert (config.chunked_prefill_size, config.max_running_requests) == found
    asked = ServerConfig(model_path="x", chunked_prefill_size=-1, max_running_requests=5000)
    assert memory_profiling.with_defaults(asked, total * GIB) == asked


@pytest.mark.parametrize("chunk", [None, -1, 512, 2048])
@pytest.mark.parametrize("rows", [None, 3, 5000])
@pytest.mark.parametrize("page_size", [1, 16])
def test_no_limit_of_the_engine_is_above_what_is_profiled(chunk: int | None, rows: int | None, page_size: int) -> None:
    config = ServerConfig(model_path="x", device="cuda", chunked_prefill_size=chunk, max_running_requests=rows, page_size=page_size)
    known = RunnerInfo("A", "a", 1000, 4096, 0, "bfloat16", "cuda", "triton", 0, 0, 0)
    steps = LargestSteps.of(config, known.context_len, 100_000)
    for pool in (16, 640, 4096, 5_000, 99_984, 100_000):
        limits = EngineLimits.of(config, dataclasses.replace(known, pool_tokens=pool // page_size * page_size))
        most = limits.chunk or max(limits.max_prefill_tokens, limits.max_model_len)
        assert steps.rows >= limits.max_running
        assert steps.prompt_tokens >= min(most, pool, limits.max_running * limits.max_model_len)
        assert limits.max_model_len + SLACK <= min(known.context_len, pool) + memory_profiling._SLACK
    assert (steps.rows, steps.prompt_tokens) == (limits.max_running, min(limits.chunk or 16_384, limits.max_running * 4096))


# --- on a pretended GPU ---

SMALL: dict[str, Any] = {"attention_backend": "torch_native", "chunked_prefill_size": 512, "max_running_requests": 64}
GRAPHS: dict[str, Any] = {
    "attention_backend": "triton", "cuda_graph_max_bs": 2, "cuda_graph_max_tokens": 0, "chunked_prefill_size": 32,
    "max_running_requests": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=1)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[PretendedGpu]:
    """Of 64 MiB, of which a start leaves 2 alone. Without kernels of ours, but for attention where it is asked for: they take long here."""
    monkeypatch.setattr(memory_profiling, "MARGIN_LEAST", 2 * MIB)
    only_attention(monkeypatch)
    with pretended(monkeypatch, tmp_path) as found:
        found.memory.total = 64 * MIB
        yield found


class Start:
    """As the engine process starts."""

    def __init__(self, model: TinyModel, **options: Any) -> None:
        settings: dict[str, Any] = {"device": "cuda", "dtype": "float32", "runner": "torch"} | options
        self.told: list[str] = []
        self._config = ServerConfig(model_path=str(model.folder), **settings)
        self._folder = model.folder

    def __call__(self) -> tuple[ModelRunner, EngineLimits]:
        def build(runner: Runner, settled: ServerConfig) -> tuple[ModelRunner, EngineLimits]:
            assert isinstance(runner, ModelRunner)
            limits = EngineLimits.of(settled, runner.info)
            runner.prepare(TableShape(limits.max_running, limits.max_model_len + SLACK))
            return runner, limits

        return load_weights(self._config, self._folder, lambda phase, percent, detail: self.told.append(detail)).serve(build)


def run_largest(runner: ModelRunner, limits: EngineLimits) -> None:
    """The largest steps that the engine may launch."""
    most = min(limits.chunk or max(limits.max_prefill_tokens, limits.max_model_len), limits.pool_tokens)
    whole, rest = divmod(most, limits.max_model_len)
    lens = np.array([limits.max_model_len] * whole + [rest] * bool(rest), np.int32)[: limits.max_running]
    ones, page = np.ones(limits.max_running, np.int32), limits.page_size
    for step in (
        text_step("prefill", lens, lens, page),
        text_step("decode", ones, ones * limits.max_model_len, page),
    ):
        runner.launch(step).result()


@pytest.mark.long
def test_the_largest_prompts_are_profiled_without_graphs(model: TinyModel, gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of as many tokens and more sequences than a graph is for takes memory that the graph's step finds where it was captured."""
    launch, replayed = ModelRunner.launch, {"prefill": list[int](), "decode": list[int]()}

    def watched(self: ModelRunner, step: Step, **how: Any) -> Any:
        before = gpu.replays
        launched = launch(self, step, **how)
        replayed[step.mode].append(gpu.replays - before)
        return launched

    monkeypatch.setattr(ModelRunner, "launch", watched)
    Start(model, **GRAPHS | {"max_running_requests": 2, "cuda_graph_max_tokens": 32})()
    assert replayed["prefill"]
    assert not any(replayed["prefill"])
    assert all(replayed["decode"])


def drawn(seed: int) -> tuple[int, int, dict[str, Any]]:
    """Total and foreign memory, and limits."""
    chance = random.Random(seed)
    total = chance.randrange(9, 96) * MIB
    return total, int(total * chance.uniform(0, 0.6)), {
        "attention_backend": "torch_native",
        "chunked_prefill_size": chance.choice([None, -1, 64, 512, 2048]),
        "max_running_requests": chance.choice([None, 1, 7, 300]),
        "page_size": chance.choice([1, 16]),
        "mem_fraction_static": chance.choice([None, None, 0.3, 0.98]),
        "max_total_tokens": chance.choice([None, None, None, 400]),
        "kv_cache_dtype": chance.choice(["auto", "fp8_e5m2"]),
    }  # fmt: skip


@pytest.mark.matrix(gate=2)
@pytest.mark.parametrize("seed", range(10))
def test_no_start_runs_out_of_memory_and_none_leaves_much(
    model: TinyModel, gpu: PretendedGpu, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    gpu.memory.total, gpu.memory.foreign, options = drawn(seed)
    start = Start(model, **options)
    try:
        runner, limits = start()
    except ConfigError as error:
        assert re.search(r"; .*(--\w|[MG]B)", str(error))  # noqa: PT017
        return
    run_largest(runner, limits)
    limited = options["mem_fraction_static"] == 0.3 or options["max_total_tokens"] or limits.pool_tokens < 4096  # less than a step
    margin = max(gpu.memory.total // 50, 2 * MIB)
    assert gpu.memory.free >= 0.8 * margin
    assert limited or gpu.memory.free <= margin + 0.05 * gpu.memory.total
    assert "ran out" not in caplog.text


@pytest.mark.long
def test_the_log_says_in_one_line_what_takes_what(model: TinyModel, gpu: PretendedGpu, caplog: pytest.LogCaptureFixture) -> None:
    gpu.memory.foreign = 7 * MIB
    start = Start(model, **GRAPHS)
    with caplog.at_level(logging.INFO, "banyan"):
        runner, limits = start()
    (line,) = [message for message in caplog.messages if message.startswith("Memory: ")]
    for part in ("weights", "workspaces", "activations", "graphs", "tables", rf"KV {limits.pool_tokens} tokens"):
        assert re.search(rf"{part} [\d.]+ MB, ", line), line
    for part in (r"margin 2\.00 MB", r" CUDA 7\.00 MB", r"unused -?\d+\.\d\d MB", r" 64\.00 MB"):
        assert re.search(part, line), line
    assert set(runner.info.phase_seconds) == {"load_weights", "memory_profiling", "kv_alloc", "graph_capture"}
    assert any(f" {limits.pool_tokens} tokens" in told for told in start.told)
    assert runner.info.graph_bytes > 0
    run_largest(runner, limits)
    request = Request([5, 6, 7], new_tokens=4, row=0)
    Driver(runner, rows=1, context=16).run([request])
    assert request.output == model.choices(request.prompt, request.output)


@pytest.mark.long
def test_a_fraction_that_does_not_fit_is_cut_with_both_numbers(
    model: TinyModel, gpu: PretendedGpu, caplog: pytest.LogCaptureFixture
) -> None:
    whole = Start(model, **SMALL)()[1].pool_tokens
    assert Start(model, mem_fraction_static=0.97, **SMALL)()[1].pool_tokens == whole
    (told,) = [message for message in caplog.messages if message.startswith("mem_fraction_static")]
    numbers = re.match(r"mem_fraction_static=0\.97 \D*(\d+)\D*(\d+)", told)
    assert numbers is not None, told
    assert int(numbers[1]) > int(numbers[2]) == whole
    caplog.clear()
    assert Start(model, mem_fraction_static=0.5, **SMALL)()[1].pool_tokens < 0.7 * whole
    assert not caplog.messages
    gpu.memory.total, few = 10 * MIB, {**SMALL, "chunked_prefill_size": 64, "max_running_requests": 1}
    with pytest.raises(ConfigError, match=r"--mem-fraction-static=0\.05: ") as error:
        Start(model, mem_fraction_static=0.05, **few)()
    enough = re.search(r" (0\.\d\d) ", str(error.value))
    assert enough is not None
    del error  # with all that its frames hold
    assert Start(model, mem_fraction_static=float(enough[1]), **few)()[1].pool_tokens >= 16


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "of_graph", "setting"),
    [
        ({"chunked_prefill_size": 16_384, "max_running_requests": 32}, 0, "--chunked-prefill-size below 16384"),
        ({"chunked_prefill_size": -1, "max_running_requests": 32}, 0, "--chunked-prefill-size below"),
        ({"chunked_prefill_size": 64, "max_running_requests": 4096}, 0, "--max-running-requests below 4096"),
        ({"attention_backend": "triton", "cuda_graph_max_bs": 2}, 12, "--cuda-graph-max-bs"),
    ],
)
def test_steps_and_graphs_that_do_not_fit_are_refused_with_their_option(
    model: TinyModel, gpu: PretendedGpu, options: dict[str, Any], of_graph: int, setting: str
) -> None:
    gpu.memory.total, gpu.memory.foreign, gpu.of_graph = 24 * MIB, 5 * MIB, of_graph * MIB
    with pytest.raises(ConfigError, match=rf"{setting}\b.*"):
        Start(model, **{"attention_backend": "torch_native", "max_total_tokens": 30_000} | options)()


def broken(monkeypatch: pytest.MonkeyPatch, where: str, gpu: PretendedGpu) -> list[int]:
    """Memory runs out where the pool that serves is allocated, or at the end of a capture over it. The result gets its size."""
    sizes: list[int] = []
    make = KvPool.__init__

    def pool(self: KvPool, spec: Any, tokens: int, page_size: int, *args: Any) -> None:
        if tokens > page_size:
            sizes.append(tokens)
        make(self, spec, tokens, page_size, *args)
        if where == "pool" and sizes:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def fails(moment: str) -> None:
        if moment == where and sizes:
            raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(KvPool, "__init__", pool)
    gpu.fails = fails
    return sizes


@pytest.mark.parametrize("where", ["pool", "end"])
def test_a_pool_that_does_not_fit_after_all_is_refused(
    model: TinyModel, gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    sizes = broken(monkeypatch, where, gpu)
    with pytest.raises(ConfigError) as error:
        Start(model, **GRAPHS)()
    assert len(sizes) == 1
    assert f"--max-total-tokens below {sizes[0]}" in str(error.value)
    assert "activations" in str(error.value)


def test_other_errors_of_a_start_are_not_taken_for_want_of_memory(
    model: TinyModel, gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(self: ModelRunner, step: object, **_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(ModelRunner, "launch", launch)
    with pytest.raises(RuntimeError, match="illegal"):
        Start(model, **SMALL)()


def test_want_of_memory_is_known_behind_the_error_of_a_capture_that_it_ended() -> None:
    def work() -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    with pytest.raises(ConfigError, match="no room"), no_memory("no room"):
        work()


def test_vectors_are_profiled_as_such(model: TinyModel, gpu: PretendedGpu) -> None:
    runner, limits = Start(model, is_embedding=True, **SMALL)()
    lens = np.full(2, 256, np.int32)
    runner.launch(memory_profiling.vector_step(lens, 1)).result()
    assert gpu.memory.free >= 1.6 * MIB
    assert limits.pool_tokens > 1000


class Clock:
    """Each look takes so many seconds."""

    def __init__(self, each: float) -> None:
        self.now, self._each = 0.0, each

    def __call__(self) -> float:
        self.now += self._each
        return self.now


@pytest.mark.long
def test_a_slow_capture_ends_and_larger_graphs_serve_what_it_left_out(
    model: TinyModel, gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(graphs.StepGraphs.__init__, "__defaults__", (None, Clock(graphs.CAPTURE_S / 2.5)))
    runner, _ = Start(model, **GRAPHS | {"cuda_graph_max_bs": 3})()
    told = [message for message in caplog.messages if "rows" in message and "tokens" in message]
    assert len(told) == 2, "in the profile, and then"
    assert "[1] rows" in told[-1]
    request = Request([5, 6, 7], new_tokens=4, row=0)
    gpu.replays = 0
    Driver(runner, rows=3, context=16).run([request])
    assert gpu.replays >= 3, "by the graph of two rows"
    assert request.output == model.choices(request.prompt, request.output)


def test_graphs_are_captured_from_coarse_to_fine() -> None:
    """Of the fine ones decode steps first."""

    def graph(size: int, sequences: int | None) -> graphs._Graph:
        return graphs._Graph(graphs.Held.empty(size, torch.device("cpu"), sequences))

    rows, tokens = [graph(size, None) for size in graphs.ladder(24)], [graph(size, 4) for size in graphs.prompt_ladder(100)]
    order = [each.held.size for each in graphs._in_turn(rows, tokens)]
    assert order == [100, 64, 32, 24, 16, 16, 8, 4, 2, 1, 12, 96, 48]


def test_freed_memory_stays_reserved_until_the_reserve_is_emptied_or_runs_short() -> None:
    memory = Memory(10 * MIB)
    first, second = torch.zeros(4 * MIB, dtype=torch.uint8), torch.zeros(7 * MIB, dtype=torch.uint8)
    held = memory.hold(first)
    assert memory.hold(first[5:]) == held
    assert memory.free == 6 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        memory.hold(second)
    memory.release(held)
    assert memory.allocated == 4 * MIB
    memory.release(held)
    assert (memory.allocated, memory.free) == (0, 6 * MIB)
    memory.release(memory.hold(second))
    assert (memory.free, memory.most_reserved) == (3 * MIB, 7 * MIB)
    memory.empty_cache()
    assert memory.free == 10 * MIB
