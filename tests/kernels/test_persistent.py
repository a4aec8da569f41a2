"""A decode step of one row in one launch; and that it compiles for a GPU. In Triton's interpreter, which runs one program after another,
it is one launch of one program, or a launch of several for each phase."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from banyan_runtime.model import capture, fused, fused_products, persistent, torch_forward
from banyan_runtime.model.attention import Held, triton_paged
from banyan_runtime.model.attention.torch_native import TorchAttention
from banyan_runtime.model.attention.triton_paged import TritonAttention
from banyan_runtime.model.decoder import Decoder
from banyan_runtime.model.fused import FusedKernels
from banyan_runtime.model.graphs import Sizes
from banyan_runtime.model.layers import Kernels, PackedKernels, PlainKernels
from banyan_runtime.model.layout import layout
from banyan_runtime.model.mail import Mail
from banyan_runtime.model.persistent import PersistentDecode
from banyan_runtime.model.pool import KvPool
from banyan_runtime.model.rope import Rope
from banyan_runtime.model.spec import ModelSpec, parse
from banyan_runtime.model.table import DeviceTable, SlotTable
from banyan_runtime.model.torch_forward import TorchForward
from banyan_runtime.step import PADDING_SLOT, Step, TableShape
from tests.kernels.test_triton import DEVICE, DTYPES, assert_near
from tests.support.models import compiled
from tests.support.models.driver import Again, Driver, Request, columns
from tests.support.models.tiny import VOCAB, TinyModel
from tests.unit.model.test_spec import BASE

pytestmark = pytest.mark.matrix(gate=1)
MADE: dict[str, Any] = {
    "one launch": PersistentDecode if DEVICE == "cuda" else partial(PersistentDecode, programs=1),
    "apart": partial(PersistentDecode, programs=5, apart=True),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes milliseconds over each program; contexts are cut all the same, and weights multiplied in several turns."""
    monkeypatch.setattr(fused, "supports", lambda *_: True)
    monkeypatch.setattr(persistent, "supports", lambda *_: True)
    monkeypatch.setattr(TritonAttention, "refusal", staticmethod(lambda *_: None))
    monkeypatch.setattr(PackedKernels, "supports", staticmethod(lambda dtype: False))
    monkeypatch.setattr(fused_products, "_OUTPUTS", 128)
    monkeypatch.setattr(torch_forward, "_MANY", 4)
    monkeypatch.setattr(triton_paged, "KEYS", 16)
    monkeypatch.setattr(triton_paged, "STRETCH", 16)
    monkeypatch.setattr(triton_paged, "TOGETHER", 2)
    monkeypatch.setattr(persistent, "COLUMNS", 64)


def shape(*, heads: int = 6, kv_heads: int = 2, dim: int = 16, **options: object) -> ModelSpec:
    sizes = {"hidden_size": 96, "intermediate_size": 88, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim}
    found = parse(BASE | sizes | {"num_hidden_layers": 2, "vocab_size": 50})
    return dataclasses.replace(found, **{"windows": (None, None), **options})  # type: ignore[arg-type]


BIASED = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
MODELS = {
    "plain": shape(),
    "biased": shape(**BIASED),
    "normed": shape(heads=3, kv_heads=3, dim=24, qk_norm=True),
    "windowed": shape(windows=(None, 40)),
    "one head": shape(heads=7, kv_heads=1),
}


class Model:
    """Random weights, and a pool whose slots are filled with keys and values that nobody computed."""

    def __init__(self, spec: ModelSpec, kernels: Kernels, dtype: torch.dtype, positions: int, kept: torch.dtype | None) -> None:
        device = torch.device(DEVICE)
        generator = torch.Generator().manual_seed(3)

        def weight(name: str, sizes: tuple[int, ...]) -> torch.Tensor:
            around = 1.0 if "norm" in name else 0.0
            return (around + torch.randn(sizes, generator=generator) / 8).to(device, dtype)

        weights = {name: weight(name, sizes) for name, sizes in layout(spec).parameters.items()}
        if kept is not None:
            # What is kept is a number that eight bits hold, where nothing turns it: the interpreter rounds others wrongly.
            for name in weights:
                if name.endswith("qkv"):
                    weights[name].zero_()
                    weights[f"{name}_bias"] = weights[f"{name}_bias"].to(kept).to(dtype)
        self.rope = Rope(spec, dtype, device)
        self.rope.reserve(positions)
        self.decoder = Decoder(spec, weights, kernels, self.rope, lambda: None)
        self.pool = KvPool(spec, positions, 1, dtype, device, kept)
        for layer in range(spec.layers):
            k, v = (torch.randn(positions, spec.kv_heads, spec.head_dim, generator=generator).to(device, dtype) for _ in range(2))
            self.pool.store(layer, torch.arange(1, positions + 1, device=device), k, v)


class Texts:
    """Two rows, of which the second one has so many tokens before the next."""

    def __init__(self, length: int, positions: int = 100) -> None:
        self.table = SlotTable(TableShape(2, positions))
        self.slots = np.random.default_rng(4).permutation(positions).astype(np.int32) + 1
        self.length, self.row = length, 1

    def step(self, token: int) -> Step:
        def one(number: int) -> np.ndarray:
            return np.array([number], np.int32)

        at = self.length
        return Step("decode", one(token), one(at), one(self.slots[at]), one(self.row), one(1), one(at + 1), one(1), columns([]))

    def before(self) -> Step:
        """What puts the tokens before there."""
        at = np.arange(self.length, dtype=np.int32)
        one = np.ones(1, np.int32)
        return Step("prefill", at, at, self.slots[: self.length], one * self.row, one * self.length, one * self.length, one, columns([]))


def assert_the_same(spec: ModelSpec, lengths: list[int], dtype: torch.dtype, how: str, kept: torch.dtype | None = None) -> None:
    """Hidden states, and keys and values."""
    own, other = Model(spec, FusedKernels(), dtype, 100, kept), Model(spec, PlainKernels(), dtype, 100, kept)
    latest = torch.tensor([9, 33], device=DEVICE)
    table = DeviceTable(TableShape(2, 100), torch.device(DEVICE))
    alone = MADE[how](own.decoder, own.pool, table, latest)
    attention = TorchAttention(spec, other.pool, lambda: None)
    held = Held.empty(1, torch.device(DEVICE))
    hidden = torch.zeros(spec.hidden_size, dtype=dtype, device=DEVICE)
    for length in lengths:
        texts = Texts(length)
        if length:
            texts.table.apply(texts.before())
            table.follow(texts.before(), texts.table)
        step = texts.step(-1 if length % 2 else 21)
        texts.table.apply(step)
        held.tell(step, alone.fill(step, texts.table, held), Mail().bring)
        alone.compute(held, hidden)
        attention.plan(step, texts.table)
        at = torch.tensor([length], device=DEVICE)
        expected = other.decoder.hidden(torch.tensor([33 if length % 2 else 21], device=DEVICE), at, attention)
        assert_near(hidden[None], expected)
        assert table.slots[1, length] == texts.slots[length]
        for layer in range(spec.layers):
            for found, there in zip(own.pool.slots(layer), other.pool.slots(layer), strict=True):
                assert_near(found.to(dtype), there.to(dtype))


@pytest.mark.parametrize("how", MADE)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_the_step(name: str, how: str) -> None:
    """Of the first token, and of some whose contexts are cut into more and more stretches."""
    assert_the_same(MODELS[name], [0, 7, 40, 99], torch.float32, how)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float32])
def test_a_step_in_sixteen_bits(dtype: torch.dtype) -> None:
    assert_the_same(MODELS["biased"], [0, 40], dtype, "one launch")


def test_keys_and_values_in_eight_bits() -> None:
    assert_the_same(MODELS["biased"], [0], torch.float32, "one launch", torch.float8_e5m2)


@pytest.mark.long
@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device"))])
def test_one_launch_computes_the_same_bits_each_time(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As launches of one phase do, which wait for one another by themselves."""
    spec, dtype, length = MODELS["plain"], torch.float32, 40
    if large:
        monkeypatch.undo()
        spec = dataclasses.replace(
            shape(heads=14, dim=64, **BIASED), hidden_size=896, intermediate_size=4864, layers=24, windows=(None,) * 24
        )
        dtype, length = torch.bfloat16, 1500
    own = Model(spec, FusedKernels(), dtype, 2000, None)
    table = DeviceTable(TableShape(2, 2000), torch.device(DEVICE))
    latest = torch.tensor([9, 33], device=DEVICE)
    whole = MADE["one launch"](own.decoder, own.pool, table, latest)
    apart = PersistentDecode(own.decoder, own.pool, table, latest, whole.programs, apart=True)
    texts = Texts(length, 2000)
    texts.table.apply(texts.before())
    table.follow(texts.before(), texts.table)
    held = Held.empty(1, torch.device(DEVICE))
    texts.table.apply(step := texts.step(-1))
    held.tell(step, whole.fill(step, texts.table, held), Mail().bring)
    expected, found = (torch.zeros(spec.hidden_size, dtype=dtype, device=DEVICE) for _ in range(2))
    apart.compute(held, expected)
    assert expected.any()
    for _ in range(500 if DEVICE == "cuda" else 2):
        whole.compute(held, found.zero_())
        assert torch.equal(found, expected)


def test_padding_leaves_nothing_behind() -> None:
    """As a graph is warmed up, before a step is told."""
    spec = MODELS["plain"]
    own = Model(spec, FusedKernels(), torch.float32, 100, None)
    kept = [part.clone() for layer in range(spec.layers) for part in own.pool.slots(layer)]
    table = DeviceTable(TableShape(2, 100), torch.device(DEVICE))
    alone = MADE["one launch"](own.decoder, own.pool, table, torch.zeros(2, dtype=torch.int64, device=DEVICE))
    hidden = torch.zeros(spec.hidden_size, device=DEVICE)
    alone.compute(Held.empty(1, torch.device(DEVICE)), hidden)
    assert torch.isfinite(hidden).all()
    assert not table.slots.any()
    found = [part for layer in range(spec.layers) for part in own.pool.slots(layer)]
    assert all(torch.equal(before[:, PADDING_SLOT + 1 :], after[:, PADDING_SLOT + 1 :]) for before, after in zip(kept, found, strict=True))


@pytest.mark.long
def test_graphs_of_one_row_are_one_launch(tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a text that is by itself, then beside another one, whose steps have two rows, and then by itself again."""
    model = tiny_model("llama")
    runner = model.load(device=DEVICE, runner="torch", disable_cuda_graph=True)
    forward = runner.forward
    assert isinstance(forward, TorchForward)
    recorder = capture.CudaRecorder() if DEVICE == "cuda" else Again()
    runner.forward = TorchForward(
        forward.decoder, forward.attention, forward._pool, recorder, Sizes([1], []), persistent=MADE["one launch"]
    )
    computed = []
    compute = PersistentDecode.compute
    monkeypatch.setattr(PersistentDecode, "compute", lambda *told: (computed.append(told), compute(*told)))
    requests = [Request([(31 * row + 7 * i) % VOCAB for i in range(9)], new_tokens=8 - 5 * row, row=row, start=3 * row) for row in range(2)]
    Driver(runner, rows=2, context=32).run(requests)
    assert len(computed) >= 4 if DEVICE == "cpu" else computed
    for request in requests:
        assert request.output == model.choices(request.prompt, request.output)


COMPILE = """
from banyan_runtime.model.kernels import persistent

TYPES = {name: "*bf16" for name in
         "embed cos sin keys values nothing sums delta qkv queries attended inner hidden".split()}
TYPES |= {name: "*i32" for name in "ids rows positions slots ends table counters".split()}
TYPES |= {name: "*i64" for name in "latest windows input_norms qkv_weights qkv_biases q_norms k_norms out_weights out_biases mlp_norms "
          "gate_up_weights gate_up_biases down_weights down_biases".split()}
TYPES |= {name: "*fp32" for name in ("parts", "highs", "masses")}
TYPES |= {"table_stride": "i32", "head_stride": "i64", "eps": "fp32", "scale": "fp32", "begin": "i32", "end": "i32"}
PIECES = {"QKV_LINES": 16, "OUT_LINES": 16, "GATE_UP_LINES": 8, "DOWN_LINES": 16, "COLUMNS": 1024, "AHEAD": 65536, "STRETCHES": 66,
          "STRETCH": 128, "KEYS": 64, "ROWS": 16, "TOGETHER": 16, "PADDING": 0, "LARGEST": 448.0, "PRECISION": "tf32"}

def check(hidden, inner, heads, kv_heads, dim, group, yes, **types):
    sizes = {"HIDDEN": hidden, "INNER": inner, "HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "GROUP": group, "HALF": dim // 2}
    told = {name: yes for name in ("QKV_BIASED", "OUT_BIASED", "MLP_BIASED", "WINDOWED")}
    constants = PIECES | sizes | told | {"NORMED": not yes, "NARROW": bool(types), "ONLY": -1}
    kernel = made(persistent.decode, TYPES | types, constants, num_warps=8, launch_cooperative_grid=True)
    text = kernel.asm["ptx"]
    # What the programs tell one another all threads have written when one arrives, and none reads before that one has seen all arrive.
    # Six meetings in a layer, and the last.
    arrivals, meetings = text.split("atom.global.gpu.release.add"), text.split("ld.global.gpu.acquire")
    assert (len(arrivals), len(meetings)) == (8, 8)
    assert all(before.rindex("bar.sync") > before.rfind("st.global") for before in arrivals[:-1])
    assert all(behind.index("bar.sync") < behind.find("ld.global") for behind in meetings[1:])

check(896, 4864, 14, 2, 64, 8, True)
check(1024, 3072, 16, 8, 128, 4, False, keys="*fp8e4nv", values="*fp8e4nv")
"""


@pytest.mark.long
def test_it_compiles_for_a_gpu(tmp_path: Path) -> None:
    """Which takes none."""
    compiled.run(COMPILE, tmp_path)


def test_it_is_refused_where_it_cannot_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, kept = torch.device("cuda"), torch.bfloat16
    assert persistent.refusal(MODELS["plain"], cuda, kept, 1, TritonAttention) is None
    assert persistent.refusal(MODELS["plain"], torch.device("cpu"), kept, 1, None) is not None
    for rows, attention in ((0, TritonAttention), (1, TorchAttention)):
        assert "CUDA graphs" in str(persistent.refusal(MODELS["plain"], cuda, kept, rows, attention))
    large = dataclasses.replace(MODELS["plain"], hidden_size=4096, intermediate_size=14336, layers=32)
    assert "5.7 billion" in str(persistent.refusal(large, cuda, kept, 1, TritonAttention))
    monkeypatch.setattr(persistent, "supports", lambda *_: False)
    assert persistent.refusal(MODELS["plain"], cuda, kept, 1, TritonAttention) is not None
