"""The torch runner as on a GPU (`pretended.py`): what only a GPU refuses, what makes its host wait, and what its graphs replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from banyan_runtime.config import ServerConfig
from banyan_runtime.model import capture, fused_products
from banyan_runtime.model.attention.flashinfer_paged import FlashInferAttention
from banyan_runtime.model.blank import blank
from banyan_runtime.model.capture import CudaRecorder
from banyan_runtime.model.runner import ModelRunner
from banyan_runtime.model.runners import load
from banyan_runtime.step import OutOfMemory, Step
from tests.support.models import flashinfer_double, ggufs
from tests.support.models.contract import Play, Settings, check
from tests.support.models.driver import Driver, Request
from tests.support.models.pretended import DEVICE, OnGpu, PretendedGpu, only_attention, pretended, small_kernels
from tests.support.models.tiny import VOCAB, TinyModel, make
from tests.unit.model import test_pooling
from tests.unit.model.test_gguf import unfolded

pytestmark = [pytest.mark.matrix(gate=1), pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")]

GRAPHS: dict[str, Any] = {"cuda_graph_max_bs": 2, "cuda_graph_max_tokens": 16, "chunked_prefill_size": 32, "max_running_requests": 3}
POISON = VOCAB - 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[PretendedGpu]:
    """Kernels as small as in `test_triton.py`."""
    monkeypatch.setattr(fused_products, "_OUTPUTS", 128)
    small_kernels(monkeypatch)
    with pretended(monkeypatch, tmp_path) as found:
        yield found


def on_gpu(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=DEVICE)


@pytest.mark.parametrize(
    "mixed", [lambda a: a + torch.ones(3), lambda a: a.index_select(0, torch.tensor([0])), lambda a: a[torch.tensor([0])]]
)
def test_tensors_of_two_devices_do_not_meet(gpu: PretendedGpu, mixed: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(AssertionError, match="two devices"):
        mixed(on_gpu(1, 2, 3))
    assert (on_gpu(1, 2, 3) + torch.tensor(1.0)).cpu().tolist() == [2, 3, 4], "a number is no tensor"


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "a number": lambda a: a[0].item(),
    "a condition": lambda a: bool((a > 1).any()),
    "places": lambda a: torch.nonzero(a),
    "what a mask leaves": lambda a: a[a > 1],
    "repeats": lambda a: torch.repeat_interleave(a, a.long()),
    "a copy": lambda a: a.cpu(),
    "a copy from memory that is not pinned": lambda a: torch.ones(3).to(DEVICE, non_blocking=True),
    "a copy that is waited for": lambda a: torch.ones(3).pin_memory().to(DEVICE),
}


def dropped(found: object) -> None:
    """A graph's body returns nothing."""


@pytest.mark.matrix(gate=len(WAITS))
@pytest.mark.parametrize("name", WAITS)
def test_who_waits_is_noted_and_refused_in_a_graph(gpu: PretendedGpu, name: str) -> None:
    numbers = on_gpu(1, 2, 3)
    gpu.waits.clear()
    assert (numbers * 2).sum().device == DEVICE
    torch.ones(3).pin_memory().to(DEVICE, non_blocking=True)
    assert gpu.waits == []
    WAITS[name](numbers)
    assert gpu.waits
    with pytest.raises(AssertionError, match="while a graph is captured"):
        CudaRecorder().record(lambda: dropped(WAITS[name](numbers)))


def test_what_comes_to_the_host_is_there_when_it_has_waited(gpu: PretendedGpu) -> None:
    found = on_gpu(1, 2).to("cpu", non_blocking=True)
    event = torch.cuda.current_stream().record_event()
    later = on_gpu(3).to("cpu", non_blocking=True)
    assert found.isnan().all()
    event.synchronize()
    assert found.tolist() == [1, 2]
    assert later.isnan().all()


def test_graphs_replay_what_was_captured_over_the_memory_of_then(gpu: PretendedGpu) -> None:
    """Numbers of Python's are those of then; what one graph leaves in its own memory no other graph finds."""
    given, doubled, kept = on_gpu(1, 2), on_gpu(0, 0), list[torch.Tensor]()
    factor = 2

    def body() -> None:
        kept.append(given * factor)
        doubled.copy_(kept[-1])

    recorder = CudaRecorder()
    replay, other = recorder.record(body), recorder.record(lambda: dropped(given.add_(1)))
    factor = 5
    given.copy_(on_gpu(10, 20))
    replay()
    assert doubled.cpu().tolist() == [20, 40]
    assert kept[-1].cpu().tolist() == [20, 40]
    other()
    assert given.cpu().tolist() == [11, 21]
    assert kept[-1].cpu().isnan().all()
    assert doubled.cpu().tolist() == [20, 40]


MOMENTS = ["body and end", "warm-up", "begin", "body", "end", "instantiate"]


@pytest.mark.matrix(gate=3)
@pytest.mark.parametrize("version", [(2, 12), (2, 13), (2, 14)], ids=str)
@pytest.mark.parametrize("first", [True, False], ids=["the first", "a later one"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_capture_that_runs_out_of_memory_leaves_nothing_behind(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch, moment: str, first: bool, version: tuple[int, int]
) -> None:
    """Neither another stream nor memory, and nothing that could be replayed; what it ran out of its caller hears. The end of a capture that
    ended early is another error. Each version of torch has its own way with what it could not end."""
    gpu.torch = version
    monkeypatch.setattr(capture, "_TORCH", version)
    given, doubled = on_gpu(1, 2), on_gpu(0, 0)
    recorder, here = CudaRecorder(), torch.cuda.current_stream()
    bodies = 0

    def body() -> None:
        nonlocal bodies
        bodies += 1
        doubled.copy_(given * 2)
        if bodies == {"warm-up": 1, "body": 2, "body and end": 2}.get(moment):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def fails(now: str) -> None:
        if now == moment:
            raise RuntimeError("CUDA error: out of memory")
        if f"body and {now}" == moment:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    earlier = None if first else recorder.record(lambda: dropped(given.add_(1)))
    gpu.memory.empty_cache()
    before = gpu.memory.allocated, gpu.memory.free
    gpu.fails = fails
    failed = False
    try:
        dropped(recorder.record(body))
    except RuntimeError:  # which nothing holds from then on
        failed = True
    assert failed
    assert torch.cuda.current_stream() is here
    gpu.memory.empty_cache()
    assert (gpu.memory.allocated, gpu.memory.free) == before
    gpu.fails = lambda moment: None
    replay = recorder.record(body)
    if earlier is not None:
        earlier()
    given.copy_(on_gpu(10, 20))
    replay()
    assert doubled.cpu().tolist() == [20, 40]


def texts(*lengths: int) -> list[Request]:
    """That come one after another, the longest beside two others."""
    prompts = [[(31 * row + 7 * i) % VOCAB for i in range(9 + 12 * row)] for row in range(len(lengths))]
    return [Request(prompt, length, row=row, start=row) for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))]


def computed(runner: ModelRunner, gpu: PretendedGpu, requests: list[Request]) -> None:
    """Without that the host waits for anything but the results of steps."""
    driver = Driver(runner, rows=3, context=64)
    gpu.waits.clear()
    driver.run(requests, chunk=20)
    assert gpu.waits == []


@pytest.mark.long
@pytest.mark.parametrize("options", [{"page_size": 16, "dtype": "float16"}, {}, {"attention_backend": "torch_native"}], ids=str)
def test_texts_are_those_of_transformers(
    tiny_model: Callable[[str], TinyModel], shallow_model: Callable[[str], TinyModel], gpu: PretendedGpu, options: dict[str, Any]
) -> None:
    model, requests = (shallow_model if options else tiny_model)("qwen3"), texts(5, 3, 4)
    runner = model.load(device="cuda", **GRAPHS, **options)
    computed(runner, gpu, requests)
    assert runner.info.attention_backend == options.get("attention_backend", "triton")
    assert gpu.replays == 0 if options.get("attention_backend") else gpu.replays > 10
    for request in requests:
        assert request.output == model.choices(request.prompt, request.output)


@pytest.mark.parametrize(
    ("family", "fused"),
    [("gemma4-shared", False), ("gemma4-shared", True), ("gemma2", True), ("ministral3", True), ("smollm3", True), ("starcoder2", True)],
)
def test_steps_of_models_beyond_llama_are_replayed(
    tiny_model: Callable[[str], TinyModel], gpu: PretendedGpu, family: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that read tokens, ropes and heads by layer, scales that are learned or grow with positions. torch computes between products
    what our kernels do not, or all of it."""
    if not fused:
        only_attention(monkeypatch)
    model, requests = tiny_model(family), texts(4, 3)
    runner = model.load(device="cuda", **GRAPHS)
    computed(runner, gpu, requests)
    assert runner.info.attention_backend == "triton"
    assert gpu.replays > 5
    for request in requests:
        assert request.output == model.choices(request.prompt, request.output)


@pytest.mark.long
def test_the_likeliest_tokens_are_picked_by_our_kernels_without_graphs_too(
    shallow_model: Callable[[str], TinyModel], gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, requests = shallow_model("llama"), texts(3, 2)
    runner = model.load(device="cuda", disable_cuda_graph=True)
    launched: list[str] = []
    launch, step = gpu.launch, runner.launch
    monkeypatch.setattr(gpu, "launch", lambda executor, *told: (launched.append(executor.fn.__name__), launch(executor, *told)))
    monkeypatch.setattr(runner, "launch", lambda asked: (launched.append("step"), step(asked))[1])
    Driver(runner, rows=3, context=64).run(requests)
    assert launched.count("step") == launched.count("survey") == launched.count("choose") > 2
    for request in requests:
        assert request.output == model.choices(request.prompt, request.output)


@pytest.mark.long
def test_a_step_whose_graph_found_no_memory_is_told_again(
    shallow_model: Callable[[str], TinyModel], gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told, and never fetched that: the next step finds its own letter all the same."""
    model, requests = shallow_model("llama"), texts(5, 3)
    runner = model.load(device="cuda", **GRAPHS)
    driver, launch, missed = Driver(runner, rows=3, context=64), runner.launch, 0

    def no_memory() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def twice(step: Step) -> Any:
        nonlocal missed
        graphs = runner.forward._graphs  # type: ignore[attr-defined]
        if step.mode == "decode" and (graph := graphs._fitting(step)) is not None:
            replay, graph.replay = graph.replay, no_memory
            with pytest.raises(OutOfMemory):
                launch(step)
            graph.replay = replay
            missed += 1
        return launch(step)

    monkeypatch.setattr(runner, "launch", twice)
    driver.run(requests)
    assert missed > 2
    for request in requests:
        assert request.output == model.choices(request.prompt, request.output)


@pytest.mark.long
def test_steps_are_not_padded_to_many_times_their_tokens(shallow_model: Callable[[str], TinyModel], gpu: PretendedGpu) -> None:
    """For the sake of their sequences; where there is little to compute anyway they are."""
    runner = shallow_model("llama").load(device="cuda", **GRAPHS)
    Driver(runner, rows=3, context=64)
    graphs = runner.forward._graphs  # type: ignore[attr-defined]
    graphs._prompts = [SimpleNamespace(held=SimpleNamespace(size=size)) for size in (16, 64, 256, 512, 1024)]

    def size(tokens: int, sequences: int) -> int | None:
        lens = np.ones(sequences, np.int32)
        lens[0] += tokens - sequences
        found = graphs._fitting(blank(lens, lens))
        return None if found is None else found.held.size

    assert [size(10, 4), size(40, 30), size(60, 58)] == [16, 256, 256]
    assert [size(300, 100), size(300, 140), size(255, 120), size(256, 120)] == [512, None, None, 512]
    assert size(2000, 3) is None


def launches(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Modes of the steps that are launched from now on."""
    modes: list[str] = []
    launch = runner.launch
    monkeypatch.setattr(runner, "launch", lambda step: (modes.append(step.mode), launch(step))[1])
    return modes


@pytest.mark.long
def test_tokens_are_drawn_by_graphs_too(
    shallow_model: Callable[[str], TinyModel], gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of steps that ask for nothing beside them: one graph for the step, one for its tokens, and logits that nobody writes down in fp32."""
    model, found = shallow_model("llama"), []
    for options in (GRAPHS, {**GRAPHS, "disable_cuda_graph": True}):
        runner, requests = model.load(device="cuda", dtype="float16", **options), texts(6, 3, 4)
        for seed, request in enumerate(requests):
            request.temperature, request.seed = (0.0, 0.8, 1.5)[seed], 2**63 + seed
        requests[1].top_k, requests[2].top_p, requests[2].min_p = 20, 0.9, 0.01
        driver = Driver(runner, rows=3, context=64)
        monkeypatch.setattr(runner.forward, "logits", lambda hidden: pytest.fail("logits in fp32"))
        gpu.waits.clear()
        before = gpu.replays
        modes = launches(runner, monkeypatch)
        driver.run(requests, chunk=20)
        assert gpu.waits == []
        if not options.get("disable_cuda_graph"):
            decodes, prompts = modes.count("decode"), modes.count("prefill")
            assert 2 * decodes <= gpu.replays - before <= 2 * decodes + prompts
        found.append([request.output for request in requests])
    assert found[0] == found[1]
    assert found[0][0] == model.choices(requests[0].prompt, found[0][0]), "of a greedy row beside drawn ones"


@pytest.mark.long
@pytest.mark.parametrize("kept", ["auto", "fp8_e5m2"])
@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_weights_of_any_form_and_keys_of_any_type(gpu: PretendedGpu, tmp_path: Path, kind: str, kept: str) -> None:
    model = make(tmp_path / "model", "llama", hidden_size=64, intermediate_size=128, num_attention_heads=4, num_hidden_layers=1)
    file = ggufs.write(model.folder, tmp_path / "m.gguf", lambda name: "F32" if "norm" in name else kind)
    options: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 2048, "runner": "torch", "kv_cache_dtype": kept}
    outputs = []
    for device in ("cuda", "cpu"):
        runner = load(ServerConfig(model_path=str(file), device=device, **GRAPHS, **options), unfolded(file), lambda *_: None)
        assert isinstance(runner, ModelRunner)
        computed(runner, gpu, requests := texts(5))
        outputs.append(requests[0].output)
    # The interpreter rounds what is kept in eight bits in another way.
    assert outputs[0] == outputs[1] or kept != "auto"


@pytest.mark.long
@pytest.mark.parametrize("kind", test_pooling.KINDS)
def test_vectors(tiny_model: Callable[[str], TinyModel], request: pytest.FixtureRequest, kind: str) -> None:
    model = tiny_model("qwen2")
    reference = test_pooling.read(model.folder)  # whose own buffers would be made on a GPU
    gpu: PretendedGpu = request.getfixturevalue("gpu")
    runner = model.load(device="cuda", is_embedding=True, **GRAPHS)
    prompts = [test_pooling.prompt(seed, length) for seed, length in enumerate((1, 2, 40))]
    driver = Driver(runner, rows=4, context=64)
    gpu.waits.clear()
    requests = [Request(tokens, new_tokens=1, row=row) for row, tokens in enumerate(prompts)]
    found = test_pooling.pooled(driver, requests, test_pooling.KINDS[kind], 30)
    assert gpu.waits == []
    for tokens, vector in zip(prompts, found, strict=True):
        np.testing.assert_allclose(vector, test_pooling.expected(reference, tokens, test_pooling.KINDS[kind]), atol=test_pooling.CLOSE)


@pytest.mark.long
@pytest.mark.parametrize("page_size", [16, 1])
def test_any_schedule_neither_waits_nor_mixes(gpu: PretendedGpu, tmp_path: Path, page_size: int) -> None:
    """Whatever steps ask for, one of them in flight; with drafts the second time."""
    model = make(tmp_path, "qwen3", num_hidden_layers=1)
    with torch.no_grad():
        model.reference.model.embed_tokens.weight[POISON] = float("nan")
    model.reference.save_pretrained(model.folder)

    @torch.inference_mode()
    def logits(tokens: list[int]) -> torch.Tensor:
        found: torch.Tensor = model.reference(torch.tensor([tokens])).logits[0]
        return found

    known: dict[int, list[int]] | None = None
    for _ in range(2):
        runner = model.load(device="cuda", max_total_tokens=2048, page_size=page_size, **GRAPHS)
        play = Play(runner, Settings(2, page_size, overlap=True, poison=POISON, requests=6), known)
        gpu.waits.clear()
        play.play()
        assert gpu.waits == []
        for request in play.done:
            check(request, logits)
        known = {request.seed: request.output for request in [*play.done, *play.poisoned]}
    assert play.events["accepted"]
    assert play.events["ahead"]
    assert gpu.replays


def library(gpu: PretendedGpu, kind: type[flashinfer_double.Double]) -> type[flashinfer_double.Double]:
    """A wrapper of FlashInfer's that is told where its tensors lie."""

    def here(named: dict[str, Any]) -> dict[str, bool]:
        return {name: isinstance(value, OnGpu) for name, value in named.items() if isinstance(value, torch.Tensor)}

    def method(name: str) -> Callable[..., Any]:
        def call(self: flashinfer_double.Double, *args: Any, **named: Any) -> Any:
            told = here(self.bound(name, args, named))
            own = partial(getattr(kind, name), self)
            if name in ("plan", "workspace_size"):  # which read what they are told, but for a column
                assert told == {column: column.endswith("indices") for column in told}
                return gpu.apart(own, args, named)
            assert all(told.values())
            return gpu.compute(own, args, named) if name == "run" else gpu.apart(own, args, named)

        return call

    names = ("__init__", "reset_workspace_buffer", "workspace_size", "plan", "run")
    return type(kind.__name__, (kind,), {name: method(name) for name in names})


@pytest.mark.long
def test_flashinfer_is_told_what_it_reads_on_the_host_there(
    shallow_model: Callable[[str], TinyModel], gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    flashinfer_double.install(monkeypatch, lambda kind: library(gpu, kind))
    monkeypatch.setattr(FlashInferAttention, "refusal", staticmethod(lambda *_: None))
    model, requests = shallow_model("mistral-window"), texts(5, 3, 4)
    runner = model.load(device="cuda", attention_backend="flashinfer", **GRAPHS)
    computed(runner, gpu, requests)
    assert gpu.replays > 10
    for request in requests:
        assert request.output == model.choices(request.prompt, request.output)
