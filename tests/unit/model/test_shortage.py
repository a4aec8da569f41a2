"""A GPU (`pretended.py`) whose memory runs out anywhere in a step: nobody outside of it notices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from banyan_runtime.config import ServerConfig
from banyan_runtime.engine.limits import EngineLimits
from banyan_runtime.engine.loop import Engine
from banyan_runtime.engine.out_of_memory import WINDOW_S
from banyan_runtime.model import device as devices
from banyan_runtime.model import memory_profiling
from banyan_runtime.model.launched import Drawn
from banyan_runtime.model.runner import ModelRunner
from banyan_runtime.step import Handle, OutOfMemory, Ragged, RowUpdates, RunnerInfo, Step, TableShape, TokenMask
from banyan_runtime.wire import LogprobRequest, Sampling, Submit, pack_ids
from tests.support.models.pretended import Memory, PretendedGpu, only_attention, pretended
from tests.support.models.tiny import VOCAB, TinyModel, gate, make
from tests.unit.engine.grammars import Rules, constraint
from tests.unit.engine.outputs import served as served_by

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one")

OPTIONS: dict[str, Any] = {
    "attention_backend": "triton", "cuda_graph_max_bs": 2, "cuda_graph_max_tokens": 16, "chunked_prefill_size": 32,
    "max_running_requests": 4, "max_total_tokens": 160, "device": "cuda", "runner": "torch",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make(tmp_path_factory.mktemp("qwen3"), "qwen3", num_hidden_layers=1)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[PretendedGpu]:
    """Attention is computed by kernels of ours, whose table is the device's; the others take long here."""
    only_attention(monkeypatch)
    with pretended(monkeypatch, tmp_path) as found:
        yield found


class Short:
    """A runner whose device has no memory for some steps: for the n-th piece that one of them asks for. `steps`: which, and n."""

    def __init__(self, runner: ModelRunner, memory: Memory, steps: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
        self._runner, self._steps = runner, steps
        self._left: int | None = None  # pieces until there is no more
        self.now = 0.0
        self.launched = self.missed = self.missed_drawing = 0
        hold = memory.hold

        def hold_or_not(tensor: Tensor) -> int:
            if self._left is not None:
                self._left -= tensor.untyped_storage()._cdata not in memory._held
                if self._left < 0:
                    self._left = None
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 KiB.")
            return hold(tensor)

        monkeypatch.setattr(memory, "hold", hold_or_not)

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    def prepare(self, shape: TableShape) -> None:
        self._runner.prepare(shape)

    def launch(self, step: Step) -> Handle:
        self.launched += 1
        self._left = self._steps.get(self.launched)
        try:
            handle = self._runner.launch(step)
        except OutOfMemory:
            self.missed += 1
            self.now += WINDOW_S + 1
            raise
        if not step.mask_later:
            self._left = None
        return _Handle(self, handle)

    def drawn(self) -> None:
        self._left = None


@dataclasses.dataclass
class _Handle:
    short: Short
    handle: Handle

    def draw(self, mask: TokenMask | None) -> None:
        try:
            self.handle.draw(mask)
        except OutOfMemory:
            self.short.missed_drawing += 1
            self.short.now += WINDOW_S + 1
            raise
        finally:
            self.short.drawn()

    def result(self) -> Any:
        return self.handle.result()


def some_requests() -> list[Submit]:
    random, found = np.random.default_rng(7), []
    shared = random.integers(0, VOCAB, 20).tolist()
    wishes: list[dict[str, Any]] = [
        {}, {"temperature": 0.0}, {"top_p": 0.9, "top_k": 40}, {"repetition_penalty": 1.3},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    ]  # fmt: skip
    for id in range(10):
        prompt = shared[: int(random.integers(0, 20))] + random.integers(0, VOCAB, int(random.integers(1, 30))).tolist()
        sampling = Sampling(max_new_tokens=int(random.integers(3, 12)), seed=int(random.integers(0, 1 << 60)), **wishes[id % len(wishes)])
        rule = constraint(int(random.integers(0, 1 << 20))) if id % 4 == 1 else None
        scores = LogprobRequest(2, 0, 1, b"") if id % 5 == 2 else None
        found.append(Submit(id=id, token_ids=pack_ids(prompt), sampling=sampling, constraint=rule, logprobs=scores))
    return found


def served(model: TinyModel, gpu: PretendedGpu, steps: dict[int, int]) -> tuple[dict[int, list[int]], dict[int, object], Short]:
    """Tokens and ends by request."""
    with pytest.MonkeyPatch.context() as patches:
        short = Short(model.load(**OPTIONS), gpu.memory, steps, patches)
        limits = EngineLimits.of(ServerConfig(model_path="x", **OPTIONS), short.info)
        engine = Engine(short, dataclasses.replace(limits, overlap=True), lambda: short.now, lambda line: None, Rules(VOCAB))
        text, ends = served_by(engine, some_requests(), 1)
        assert engine.memory.imbalance() == 0
        return text, ends, short


@pytest.fixture(scope="module")
def unharmed() -> dict[str, Any]:
    """What is said with memory for all; once for the module."""
    return {}


@pytest.mark.long
@pytest.mark.parametrize("seed", gate(range(4)))
def test_memory_that_runs_out_anywhere_in_a_step_harms_only_those_in_it(
    model: TinyModel, gpu: PretendedGpu, unharmed: dict[str, Any], seed: int
) -> None:
    if not unharmed:
        unharmed["text"], unharmed["ends"], _ = served(model, gpu, {})
    random = np.random.default_rng(seed)
    steps = {int(step): int(random.integers(0, 40)) for step in random.integers(2, 40, 6)}
    text, ends, short = served(model, gpu, steps)
    lost = {id for id, end in ends.items() if end == "out_of_memory"}
    assert short.missed + short.missed_drawing > 1
    assert lost
    for id, end in ends.items():
        if id in lost:
            assert text[id] == unharmed["text"][id][: len(text[id])]
        else:
            assert (text[id], end) == (unharmed["text"][id], unharmed["ends"][id])


@pytest.mark.long
def test_what_was_computed_till_then_is_given_back(model: TinyModel, gpu: PretendedGpu) -> None:
    runner = model.load(**OPTIONS)
    runner.prepare(TableShape(4, 64))
    step = memory_profiling.text_step("prefill", np.array([30], np.int32), np.array([30], np.int32), 1)
    runner.launch(step).result()
    before = gpu.memory.allocated
    gpu.memory.foreign = gpu.memory.total - gpu.memory.allocated - 20_000
    with pytest.raises(OutOfMemory, match="CUDA out of memory"):
        runner.launch(step)
    assert gpu.memory.allocated <= before
    gpu.memory.foreign = 0
    runner.launch(step).result()


def part(row: int, tokens: list[int], slots: list[int], start: int = 0, updates: RowUpdates | None = None) -> Step:
    """A step of one row that says what comes next, and how likely that was."""
    lens = np.array([len(tokens)], np.int32)
    step = memory_profiling.text_step("prefill", lens, lens + np.int32(start), 1)
    ids, own = np.array(tokens, np.int32), np.array(slots, np.int32)
    return dataclasses.replace(step, token_ids=ids, out_slots=own, rows=np.array([row], np.int32), prompt_scores=None, updates=updates)


@pytest.mark.parametrize("piece", gate([5, 0, 1, None]))
def test_what_a_step_without_memory_says_of_other_rows_is_known(model: TinyModel, gpu: PretendedGpu, piece: int | None) -> None:
    """Row 0 has its keys in the slots of row 1 from then on, and its own are written over. `piece`: that there is no memory for."""
    with pytest.MonkeyPatch.context() as patches:
        short = Short(model.load(**OPTIONS), gpu.memory, {} if piece is None else {3: piece}, patches)
        short.prepare(TableShape(4, 64))
        text, moved = [7, 8, 9, 10, 11], Ragged(np.arange(11, 16, dtype=np.int32), np.array([0, 5], np.int32))
        short.launch(part(0, text, [1, 2, 3, 4, 5])).result()
        short.launch(part(1, text, [11, 12, 13, 14, 15])).result()
        none = np.zeros(1, np.int32)
        missed = part(2, [20, 21], [21, 22], updates=RowUpdates(none, none, moved))
        if piece is None:
            short.launch(missed).result()
        else:
            with pytest.raises(OutOfMemory):
                short.launch(missed)
        short.launch(part(3, [30, 31, 32, 33, 34], [1, 2, 3, 4, 5])).result()
        found = short.launch(part(0, [40], [6], start=5)).result()
        expected = short.launch(part(1, [40], [16], start=5)).result()
        assert found.logprobs.top_ids.tolist() == expected.logprobs.top_ids.tolist()
        np.testing.assert_allclose(found.logprobs.top_values, expected.logprobs.top_values, atol=1e-5)


@pytest.mark.parametrize("later", [False, True])
def test_memory_of_the_host_that_is_missing_for_results_is_a_shortage_too(
    model: TinyModel, monkeypatch: pytest.MonkeyPatch, later: bool
) -> None:
    runner = model.load()
    runner.prepare(TableShape(4, 64))
    runner.launch(part(0, [1, 2, 3], [1, 2, 3])).result()
    ones = np.ones(1, np.int32)
    step = dataclasses.replace(part(0, [-1], [4], start=3), mode="decode", samples=ones, mask_later=later, top_logprobs=None)

    def missing(self: Drawn) -> Drawn:
        raise RuntimeError("CUDA error: cudaErrorMemoryAllocation")

    with monkeypatch.context() as patches:
        patches.setattr(Drawn, "to_host", missing)
        if later:
            handle = runner.launch(step)
            with pytest.raises(OutOfMemory, match="MemoryAllocation"):
                handle.draw(None)
        else:
            with pytest.raises(OutOfMemory, match="MemoryAllocation"):
                runner.launch(step)
    assert len(runner.launch(part(1, [1, 2, 3], [11, 12, 13])).result().token_ids) == 1


@pytest.mark.parametrize(
    "words", ["CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED when calling", "NVRTC_ERROR_OUT_OF_MEMORY", "std::bad_alloc"]
)
def test_words_of_libraries_are_known(words: str) -> None:
    behind = RuntimeError("the capture ended early")
    behind.__context__ = RuntimeError(words)
    assert devices.shortage(behind) == words
    assert devices.shortage(MemoryError()) == "MemoryError"
    assert devices.shortage(RuntimeError("CUDA error: an illegal memory access was encountered")) is None
