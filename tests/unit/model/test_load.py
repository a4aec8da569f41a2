"""A model is loaded to fit its machine, and the log says how."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from banyan_runtime.config import ServerConfig
from banyan_runtime.engine.memory.tables import SLACK
from banyan_runtime.errors import ConfigError
from banyan_runtime.model import device, host
from banyan_runtime.model.attention import AttentionKind
from banyan_runtime.model.attention.flashinfer_paged import FlashInferAttention
from banyan_runtime.model.attention.triton_paged import TritonAttention
from banyan_runtime.model.choice import Choice, Graphs, prompt_tokens, worth_a_graph
from banyan_runtime.model.memory_profiling import PoolCost, cpu_tokens
from banyan_runtime.model.penalties import Penalties
from banyan_runtime.model.pool import cell_bytes
from banyan_runtime.model.rope import Ropes
from banyan_runtime.model.runners import load
from banyan_runtime.model.table import DeviceTable, SlotTable
from banyan_runtime.models.registry import parse, read
from banyan_runtime.step import TableShape
from tests.support.models.driver import Driver, Request
from tests.support.models.tiny import TinyModel, resident_bytes
from tests.unit.models.test_registry import BASE

Models = Callable[[str], TinyModel]


def test_start_up_lines_come_in_order(tiny_model: Models, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "banyan"):
        runner = tiny_model("qwen2").load(max_total_tokens=2048)
    text = "\n".join(caplog.messages)
    lines = [
        r"Attention backend not set\. Use torch_native backend by default\.",
        r"Load weight begin\. avail mem=\d+\.\d\d GB",
        r"Using model weights format \['\*\.safetensors'\]",
        r"Loading safetensors: 100%.*",
        r"Load weight end\. type=Qwen2ForCausalLM, dtype=torch\.float32, avail mem=\d+\.\d\d GB, mem usage=0\.00 GB\.",
        r"KV Cache is allocated\. #tokens: 2048, K size: 0\.00 GB, V size: 0\.00 GB",
        r"Memory pool end\. avail mem=\d+\.\d\d GB",
    ]
    assert re.search(r"\n(?:.*\n)*?".join(lines), text), text
    assert set(runner.info.phase_seconds) == {"load_weights", "kv_alloc"}


def test_the_runner_describes_what_it_loaded(tiny_model: Models) -> None:
    info = tiny_model("qwen2").load(max_total_tokens=2050, page_size=16, context_length=300).info
    assert (info.architecture, info.model_type, info.vocab_size, info.context_len) == ("Qwen2ForCausalLM", "qwen2", 503, 300)
    assert (info.pool_tokens, info.dtype, info.device, info.attention_backend) == (2048, "float32", "cpu", "torch_native")
    assert info.kv_bytes == (2048 + 16) * 2 * 3 * 2 * 16 * 4


@pytest.mark.parametrize(("runner", "invariant"), [("native", True), ("torch", False)])
def test_only_the_native_runner_promises_texts_that_depend_on_no_batch(tiny_model: Models, runner: str, invariant: bool) -> None:
    assert tiny_model("qwen2").load(runner=runner).info.batch_invariant is invariant


def test_the_engine_process_sets_how_threads_wait_before_torch_is_loaded() -> None:
    code = (
        "import os, sys; import banyan_runtime.server.engine_process as p; assert 'torch' not in sys.modules;"
        "import banyan_runtime.model; assert 'torch' not in sys.modules; print(os.environ['GOMP_SPINCOUNT'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) <= 10_000


def test_a_slot_table_takes_no_memory_before_it_is_written() -> None:
    before = resident_bytes()
    table = SlotTable(TableShape(2048, 131_072))
    assert not table.pages(np.arange(2048), 0, 2, 16).any()
    assert resident_bytes() - before < 32 << 20


def choice(model: TinyModel, device: str, dtype: torch.dtype, context: int, attention: AttentionKind | None = None) -> Choice:
    return Choice(read(model.folder), torch.device(device), dtype, context, dtype, attention, Graphs(256, 512))


@pytest.mark.parametrize("attention", [TritonAttention, FlashInferAttention])
def test_the_pool_of_a_gpu_leaves_room_for_its_tables(tiny_model: Models, attention: AttentionKind) -> None:
    model, room = tiny_model("llama"), 1 << 30
    config = ServerConfig(model_path="x", device="cuda", max_running_requests=1000)
    found = PoolCost(config, choice(model, "cuda", torch.float16, 32_768, attention), 1000)
    tokens = found.fitting(room)
    shape, cell, meta = TableShape(1000, 32_768 + SLACK), cell_bytes(read(model.folder), torch.float16), torch.device("meta")
    ropes = Ropes(read(model.folder), 32_768, torch.float16, torch.device("cpu"))
    ropes.reserve(shape.positions)
    held = (
        Penalties(shape, 16, meta)._tokens.nbytes
        + DeviceTable(shape, meta).slots.nbytes
        + sum(table.nbytes for table in ropes.tables[0].tables)
    )
    held += attention.beside(shape, 256, 512) - DeviceTable.bytes(shape)
    assert tokens > 32_768
    assert room - 1.1 * held < (tokens + 1) * cell <= room - held


def test_graphs_are_for_prompts_that_launches_take_longer_than_products() -> None:
    """Of Qwen2.5-0.5B, Llama-3.2-1B and Llama-3.1-8B."""
    sizes = [(896, 4864, 14, 2, 64), (2048, 8192, 32, 8, 64), (4096, 14336, 32, 8, 128)]
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    assert [worth_a_graph(parse(BASE | dict(zip(names, each, strict=True)))) for each in sizes] == [8192, 2464, 672]


@pytest.mark.parametrize(
    ("options", "most"),
    [({}, 8192), ({"chunked_prefill_size": 512}, 512), ({"chunked_prefill_size": -1}, 8192),
     ({"chunked_prefill_size": 512, "speculative_algorithm": "NGRAM"}, 8192), ({"max_total_tokens": 3000}, 3000),
     ({"max_running_requests": 2, "context_length": 700}, 1400), ({"max_running_requests": 2, "chunked_prefill_size": 512}, 512)],
)  # fmt: skip
def test_no_graph_is_for_more_than_a_step_may_have(options: dict[str, Any], most: int) -> None:
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    small = parse(BASE | dict(zip(names, (896, 4864, 14, 2, 64), strict=True)))
    assert prompt_tokens(ServerConfig(model_path="x", **options), small) == most


def test_the_pool_is_sixteen_contexts_unless_memory_is_short(tiny_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    assert model.load(max_total_tokens=None).info.pool_tokens == 16 * 512
    assert model.load(max_total_tokens=None, json_model_override_args='{"max_position_embeddings": 40000}').info.pool_tokens == 65536
    cell = cell_bytes(read(model.folder), torch.float32)
    monkeypatch.setattr(host, "memory_limit", lambda: 4 * cell * 1000)
    assert model.load(max_total_tokens=None, page_size=16).info.pool_tokens == 992
    monkeypatch.undo()
    short = '{"max_position_embeddings": 3}'
    assert model.load(max_total_tokens=None, page_size=64, json_model_override_args=short).info.pool_tokens == 64


def test_a_pool_of_less_than_a_page_is_refused_for_that(tiny_model: Models) -> None:
    with pytest.raises(ConfigError, match=r"--max-total-tokens=63: .*--page-size=64"):
        tiny_model("llama").load(max_total_tokens=63, page_size=64)


def test_keys_and_values_in_eight_bits_take_a_quarter_of_float32(tiny_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text is the same in whatever chunks its prompt is computed. The native runner leaves them to torch's."""
    model = tiny_model("llama")
    whole, narrow = (model.load(runner="auto", kv_cache_dtype=kept) for kept in ("auto", "fp8_e4m3"))
    assert 4 * narrow.info.kv_bytes == whole.info.kv_bytes
    assert narrow.info.attention_backend == "torch_native"
    texts = []
    for chunk in (20, 7):
        request = Request([7 * i % 90 for i in range(20)], new_tokens=12, row=0)
        Driver(narrow, rows=1, context=64).run([request], chunk=chunk)
        texts.append(request.output)
    assert texts[0] == texts[1]
    with pytest.raises(ConfigError, match="--runner=native: --kv-cache-dtype=fp8_e5m2"):
        model.load(runner="native", kv_cache_dtype="fp8_e5m2")
    monkeypatch.setattr(host, "memory_limit", lambda: 4 * cell_bytes(read(model.folder), torch.float32) * 1000)
    whole, narrow = (model.load(runner="torch", max_total_tokens=None, kv_cache_dtype=kept) for kept in ("auto", "fp8_e5m2"))
    assert (whole.info.pool_tokens, narrow.info.pool_tokens) == (1000, 4000)


def test_a_pool_that_does_not_fit_is_cut_with_a_warning(
    tiny_model: Models, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama")
    cell = cell_bytes(read(model.folder), torch.float32)
    monkeypatch.setattr(host, "memory_available", lambda: 10_000 * cell)
    assert model.load(max_total_tokens=9500).info.pool_tokens == 9000
    assert any(message.startswith("max_total_tokens=9500 ") and " 9000 " in message for message in caplog.messages)
    monkeypatch.setattr(host, "memory_available", lambda: cell)
    with pytest.raises(ConfigError, match=r"--mem-fraction-static"):
        cpu_tokens(ServerConfig(model_path="x", device="cpu"), choice(model, "cpu", torch.float32, 512), cell)


def test_all_that_depends_on_the_served_context_is_there_before_the_first_step(tiny_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = tiny_model("llama").load(context_length=5000, max_total_tokens=6000)
    driver = Driver(runner, rows=1, context=5000)

    def refuse(*_: object) -> None:
        raise AssertionError("memory that is kept was allocated by a step")

    monkeypatch.setattr(Ropes, "reserve", refuse)
    request = Request([3] * 4990, new_tokens=10, row=0)
    driver.run([request], chunk=2048)
    assert len(request.output) == 10


def test_a_longer_context_than_the_models_is_served_with_a_warning(tiny_model: Models, caplog: pytest.LogCaptureFixture) -> None:
    assert tiny_model("llama").load(context_length=600).info.context_len == 600
    assert any(message.startswith("context_length=600 ") and " 512 " in message for message in caplog.messages)


@pytest.mark.parametrize(("flags", "chosen"), [({"avx512_bf16"}, "bfloat16"), ({"amx_bf16"}, "bfloat16"), ({"avx2"}, "float32")])
def test_auto_takes_the_type_that_the_cpu_multiplies_fast(monkeypatch: pytest.MonkeyPatch, flags: set[str], chosen: str) -> None:
    monkeypatch.setattr(host, "instruction_sets", lambda: frozenset(flags))
    config = ServerConfig(model_path="x", device="cpu")
    spec = parse(BASE | {"dtype": "float16"})
    assert device.name(device.choose_dtype(config, spec, torch.device("cpu"))) == chosen


def test_float16_is_refused_on_the_cpu() -> None:
    with pytest.raises(ConfigError, match=r"--dtype=half: .*bfloat16.*float32"):
        device.choose_dtype(
            ServerConfig(model_path="x", device="cpu", dtype="half"), parse(BASE | {"dtype": "float16"}), torch.device("cpu")
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    ("built_for", "driver", "words"),
    [
        (None, None, r"spec\.runtime\.image"),
        ("13.0", "The NVIDIA driver on your system\nis too old (found version 12040).", "12040"),
        ("13.0", None, "nvidia-smi"),
        ("13.0", "No CUDA GPUs are available", "nvidia-smi"),
    ],
)
def test_cuda_without_a_device_says_why_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, built_for: str | None, driver: str | None, words: str
) -> None:
    def init() -> None:
        if driver is not None:
            raise RuntimeError(driver)

    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(ConfigError, match=rf"--device=cuda: .*{words}.*--device=cpu"):
        device.choose_device(ServerConfig(model_path="x", device="cuda"))


def test_the_loaded_dummy_model_generates(tiny_model: Models, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_model("qwen3").folder / "config.json").read_bytes())
    runner = load(ServerConfig(model_path=str(tmp_path), load_format="dummy", device="cpu"), tmp_path, lambda *_: None)
    request = Request([5, 6, 7], new_tokens=4, row=0)
    Driver(runner, rows=1, context=16).run([request])
    assert len(request.output) == 4


def test_control_groups_cut_memory_and_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "kubepods" / "pod"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text(str(1 << 30))
    (inner.parent / "memory.current").write_text(str(700 << 20))
    (inner.parent / "memory.stat").write_text(f"anon 5\ninactive_file {100 << 20}\nactive_file {24 << 20}\n")
    (inner / "cpu.max").write_text("150000 100000\n")
    monkeypatch.setattr(host, "_groups", lambda controller: iter([inner, inner.parent]))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    assert host.memory_limit() == 1 << 30
    assert host.memory_available() == (1024 - 700 + 124) << 20
    assert host.cores() == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert host.cores() == 5
