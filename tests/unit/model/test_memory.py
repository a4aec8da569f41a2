"""A start on a GPU whose memory is counted (`pretended.py`): it never runs out, uses what there is, and says what takes what."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from banyan_runtime.config import ServerConfig
from banyan_runtime.engine.limits import EngineLimits
from banyan_runtime.engine.memory.tables import SLACK
from banyan_runtime.errors import ConfigError
from banyan_runtime.model import choice, graphs, headroom, trial
from banyan_runtime.model.headroom import MIB
from banyan_runtime.model.pool import KvPool
from banyan_runtime.model.runner import ModelRunner
from banyan_runtime.model.runners import ATTEMPTS, load_weights
from banyan_runtime.step import Runner, Step, TableShape
from tests.support.models.driver import Driver, Request
from tests.support.models.pretended import Memory, PretendedGpu, only_attention, pretended
from tests.support.models.tiny import TinyModel, make

pytestmark = [pytest.mark.matrix(gate=1), pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")]

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
    monkeypatch.setattr(headroom, "MARGIN_LEAST", 2 * MIB)
    only_attention(monkeypatch)
    with pretended(monkeypatch, tmp_path) as found:
        found.memory.total = 64 * MIB
        yield found


class Start:
    """As the engine process starts."""

    def __init__(self, model: TinyModel, **options: Any) -> None:
        settings: dict[str, Any] = {"device": "cuda", "dtype": "float32", "runner": "torch"} | options
        self.told: list[str] = []
        self.builds = 0
        self.before: Callable[[int], None] = lambda builds: None  # each runner prepares, from the first on
        self._config = ServerConfig(model_path=str(model.folder), **settings)
        self._folder = model.folder

    def __call__(self) -> tuple[ModelRunner, EngineLimits]:
        def build(runner: Runner, settled: ServerConfig) -> tuple[ModelRunner, EngineLimits]:
            assert isinstance(runner, ModelRunner)
            limits = EngineLimits.of(settled, runner.info)
            self.builds += 1
            self.before(self.builds)
            runner.prepare(TableShape(limits.max_running, limits.max_model_len + SLACK))
            return runner, limits

        return load_weights(self._config, self._folder, lambda phase, percent, detail: self.told.append(detail)).serve(build)


def run_largest(runner: ModelRunner, limits: EngineLimits) -> None:
    """The largest steps that the engine may launch."""
    most = min(limits.chunk or max(limits.max_prefill_tokens, limits.max_model_len), limits.pool_tokens)
    whole, rest = divmod(most, limits.max_model_len)
    lens = np.array([limits.max_model_len] * whole + [rest] * bool(rest), np.int32)[: limits.max_running]
    ones, page = np.ones(limits.max_running, np.int32), limits.page_size
    for step in (trial.texts("prefill", lens, lens, page), trial.texts("decode", ones, ones * limits.max_model_len, page)):
        runner.launch(step).result()


@pytest.mark.long
def test_the_largest_prompts_are_tried_without_graphs(model: TinyModel, gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
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
        remedy = str(error).rpartition(" missing. ")[2]
        assert re.search(r"--\w|[MG]B", remedy), error  # noqa: PT017
        return
    assert start.builds == 1
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
    assert set(runner.info.phase_seconds) == {"load_weights", "memory_trial", "kv_alloc", "graph_capture"}
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
    with pytest.raises(ConfigError, match=r"--mem-fraction-static=0\.05 ") as error:
        Start(model, mem_fraction_static=0.05, **few)()
    enough = re.search(r" (0\.\d\d) ", str(error.value))
    assert enough is not None
    del error  # with all that its frames hold
    assert Start(model, mem_fraction_static=float(enough[1]), **few)()[1].pool_tokens >= 16


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({"chunked_prefill_size": 16_384, "max_running_requests": 32}, "--chunked-prefill-size"),
        ({"chunked_prefill_size": -1, "max_running_requests": 32}, "--chunked-prefill-size"),
        ({"chunked_prefill_size": 64, "max_running_requests": 4096}, "--max-running-requests"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused_with_one_that_does(
    model: TinyModel, gpu: PretendedGpu, options: dict[str, Any], setting: str
) -> None:
    gpu.memory.total, gpu.memory.foreign = 24 * MIB, 5 * MIB
    options |= {"attention_backend": "torch_native", "max_total_tokens": 30_000}
    with pytest.raises(ConfigError) as error:
        Start(model, **options)()
    told = str(error.value)
    for part in (" 24.00 MB", "weights", "activations", "KV", "margin 2.00 MB", "CUDA 5.00 MB"):
        assert part in told, told
    found = re.search(rf"{setting}=(\d+)", told)
    assert found is not None, told
    runner, limits = Start(model, **options | {setting[2:].replace("-", "_"): int(found[1])})()
    run_largest(runner, limits)


@pytest.mark.long
def test_defaults_that_are_too_much_for_a_device_are_settled(model: TinyModel, gpu: PretendedGpu, caplog: pytest.LogCaptureFixture) -> None:
    runner, limits = Start(model, attention_backend="torch_native")()
    (told,) = [message for message in caplog.messages if "--chunked-prefill-size" in message]
    assert f"--chunked-prefill-size={limits.chunk}" in told
    assert f"--max-running-requests={limits.max_running}" in told
    assert limits.chunk is not None
    assert limits.chunk < 8192
    run_largest(runner, limits)


FEW: dict[str, Any] = {key: value for key, value in GRAPHS.items() if key != "cuda_graph_max_bs"}


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps of 4, 2 and 1 rows are captured by default, in two graphs each, then fewer."""
    monkeypatch.setattr(choice, "MOST_ROWS", 4)
    monkeypatch.setattr(headroom, "FEWER", ((2, 0), (1, 0), (0, 0)))


def serves(model: TinyModel, gpu: PretendedGpu, runner: ModelRunner, limits: EngineLimits) -> None:
    """All that there is, and the right tokens."""
    run_largest(runner, limits)
    assert 1.6 * MIB <= gpu.memory.free <= 8 * MIB
    gpu.of_graph = 0  # the driver prepares the runner once more
    request = Request([5, 6, 7], new_tokens=4, row=0)
    Driver(runner, rows=1, context=16).run([request])
    assert request.output == model.choices(request.prompt, request.output)


@pytest.mark.long
@pytest.mark.usefixtures("four")
@pytest.mark.parametrize(
    ("of_graph", "graphs", "told"),
    [
        (12, 4, "--cuda-graph-max-bs=2"),
        pytest.param(30.5, 0, "--disable-cuda-graph", id="two fit, but no pool beside them"),
        (70, 0, "--disable-cuda-graph"),
    ],
)
def test_graphs_of_the_defaults_are_fewer_where_they_do_not_fit(
    model: TinyModel, gpu: PretendedGpu, caplog: pytest.LogCaptureFixture, of_graph: float, graphs: int, told: str
) -> None:
    gpu.of_graph = int(of_graph * MIB)
    start = Start(model, **FEW)
    runner, limits = start()
    (message,) = caplog.messages
    assert f" {told} " in message
    assert (start.builds, len(gpu.graphs)) == (1, graphs)
    assert runner.info.graph_bytes >= graphs * gpu.of_graph
    gpu.replays = 0
    serves(model, gpu, runner, limits)
    assert bool(gpu.replays) == bool(graphs)


@pytest.mark.long
@pytest.mark.usefixtures("four")
@pytest.mark.parametrize(("of_graph", "setting"), [(12, {"cuda_graph_max_bs": 2}), (70, {"disable_cuda_graph": True})])
def test_graphs_that_were_asked_for_are_refused_with_what_fits(
    model: TinyModel, gpu: PretendedGpu, of_graph: int, setting: dict[str, Any]
) -> None:
    gpu.of_graph = of_graph * MIB
    with pytest.raises(ConfigError) as error:
        Start(model, **FEW, cuda_graph_max_bs=4)()
    told = re.search(r"(--[a-z-]+(?:=\d+)?),", str(error.value))
    assert told is not None, error.value
    ((name, value),) = setting.items()
    assert told[1] == f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
    del error  # with all that its frames hold
    serves(model, gpu, *Start(model, **FEW | setting)())


def broken(monkeypatch: pytest.MonkeyPatch, where: str, times: int, gpu: PretendedGpu) -> list[int]:
    """Memory runs out `times` where a pool is allocated that is more than the trial's, or at the end of a capture over one. The result gets
    the sizes of the pools."""
    sizes: list[int] = []
    make = KvPool.__init__

    def pool(self: KvPool, spec: Any, tokens: int, page_size: int, *args: Any) -> None:
        if tokens > page_size:
            sizes.append(tokens)
        make(self, spec, tokens, page_size, *args)
        if where == "pool" and 0 < len(sizes) <= times:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def fails(moment: str) -> None:
        if moment == where and 0 < len(sizes) <= times:
            raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(KvPool, "__init__", pool)
    gpu.fails = fails
    return sizes


@pytest.mark.parametrize("where", ["pool", "end"])
def test_a_pool_that_does_not_fit_after_all_is_made_smaller(
    model: TinyModel, gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    sizes = broken(monkeypatch, where, 2, gpu)
    runner, limits = Start(model, **GRAPHS, page_size=16)()
    assert len(sizes) == 3
    assert sizes[1] == sizes[0] * 9 // 10 // 16 * 16
    assert limits.pool_tokens == sizes[2] == sizes[1] * 9 // 10 // 16 * 16
    told = [[int(number) for number in re.findall(r" (\d+)\b", message)[:2]] for message in caplog.messages]
    assert told == [sizes[:2], sizes[1:]]
    run_largest(runner, limits)
    assert gpu.memory.allocated < runner.info.kv_bytes + 4 * MIB, "those that did not fit are gone"


@pytest.mark.parametrize("left", [0, 3 * MIB // 2])
def test_memory_that_others_take_meanwhile_makes_the_pool_smaller(model: TinyModel, gpu: PretendedGpu, left: int) -> None:
    """Nothing is left for tables, or enough for these, but not for steps."""
    start = Start(model, **SMALL)

    def take(builds: int) -> None:
        if builds == 1:
            gpu.memory.foreign += gpu.memory.free - left

    start.before = take
    runner, limits = start()
    assert start.builds == 2
    run_largest(runner, limits)


@pytest.mark.parametrize("where", ["pool", "end"])
def test_three_times_out_of_memory_are_one_error_with_every_number(
    model: TinyModel, gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    gpu.memory.foreign = 9 * MIB
    sizes = broken(monkeypatch, where, 9, gpu)
    with pytest.raises(ConfigError) as error:
        Start(model, **GRAPHS)()
    told = str(error.value)
    assert len(sizes) == ATTEMPTS == 3
    for part in (
        f" {sizes[-1]} tokens", " 64.00 MB", "weights", "activations", "graphs", "tables", "margin 2.00 MB", "CUDA 9.00 MB", " 16 tokens",
        f"--max-total-tokens={sizes[-1] // 2}",
    ):  # fmt: skip
        assert part in told, (part, told)
    assert gpu.memory.allocated < 4 * MIB, "weights alone are left"


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

    assert not trial.fits(work)


def test_vectors_are_tried_as_such(model: TinyModel, gpu: PretendedGpu) -> None:
    runner, limits = Start(model, is_embedding=True, **SMALL)()
    lens = np.full(2, 256, np.int32)
    runner.launch(trial.vectors(lens, 1)).result()
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
    assert len(told) == 2, "in the trial, and then"
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
