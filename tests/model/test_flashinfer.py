"""FlashInfer: that its plans say what a step means, with a double of the package anywhere and with the package itself on a GPU."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from banyan_runtime.errors import ConfigError
from banyan_runtime.model.attention import Held, backends, flashinfer_paged, most_sequences
from banyan_runtime.model.attention.flashinfer_kernels import ARCHITECTURES, Kind, Module
from banyan_runtime.model.attention.flashinfer_paged import FlashInferAttention
from banyan_runtime.model.graphs import Sizes
from banyan_runtime.model.layers import PackedKernels
from banyan_runtime.model.table import SlotTable
from banyan_runtime.model.torch_forward import TorchForward
from banyan_runtime.step import I32, PADDING_SLOT, Ragged, RowUpdates, Step, TableShape

from . import test_attention
from .conftest import VOCAB, TinyModel
from .driver import Again, Driver, Request, columns
from .replays import Replays
from .test_attention import Room, spec

CLOSE = {torch.float32: (1e-4, 2e-5), torch.float16: (1e-2, 1e-2), torch.bfloat16: (5e-2, 5e-2)}

# Of flashinfer-python 0.7.2.post1: positional parameters, those that may be left out in brackets, those that are only named behind a *.
PLANNED = (
    "pos_encoding_mode window_left window_right logits_soft_cap q_data_type kv_data_type o_data_type data_type sm_scale rope_scale "
    "rope_theta non_blocking block_tables seq_lens fixed_split_size disable_split_kv q_len_per_req is_causal"
)
RUN = (
    "q paged_kv_cache * q_scale k_scale v_scale out lse return_lse enable_pdl window_left sinks kv_cache_sf "
    "skip_softmax_threshold_scale_factor "
)
RECORDED = {
    "BatchPrefillWithPagedKVCacheWrapper": {
        "__init__": "float_workspace_buffer [ kv_layout use_cuda_graph qo_indptr_buf paged_kv_indptr_buf paged_kv_indices_buf "
        "paged_kv_last_page_len_buf custom_mask_buf mask_indptr_buf backend jit_args jit_kwargs variant_owns_mask",
        "plan": "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads head_dim_qk page_size "
        "[ head_dim_vo custom_mask packed_custom_mask causal pos_encoding_mode use_fp16_qk_reduction sm_scale window_left "
        "logits_soft_cap rope_scale rope_theta q_data_type kv_data_type o_data_type non_blocking prefix_len_ptr "
        "token_pos_in_items_ptr token_pos_in_items_len max_item_len_ptr seq_lens seq_lens_q block_tables max_token_per_sequence "
        "max_sequence_kv fixed_split_size disable_split_kv uniform_q_len",
        "run": RUN + "lse_base lse_layout use_fp16_softmax uses_spcompress",
        "reset_workspace_buffer": "float_workspace_buffer int_workspace_buffer",
        "workspace_size": "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads head_dim_qk "
        "page_size [ head_dim_vo custom_mask packed_custom_mask causal pos_encoding_mode use_fp16_qk_reduction sm_scale window_left "
        "logits_soft_cap rope_scale rope_theta q_data_type kv_data_type o_data_type prefix_len_ptr token_pos_in_items_ptr "
        "token_pos_in_items_len max_item_len_ptr seq_lens seq_lens_q block_tables max_token_per_sequence max_sequence_kv "
        "fixed_split_size disable_split_kv uniform_q_len",
    },
    "BatchDecodeWithPagedKVCacheWrapper": {
        "__init__": "float_workspace_buffer [ kv_layout use_cuda_graph use_tensor_cores paged_kv_indptr_buffer "
        "paged_kv_indices_buffer paged_kv_last_page_len_buffer backend jit_args",
        "reset_workspace_buffer": "float_workspace_buffer int_workspace_buffer",
        "workspace_size": "indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size [ pos_encoding_mode window_left "
        "logits_soft_cap q_data_type kv_data_type o_data_type data_type sm_scale rope_scale rope_theta block_tables seq_lens "
        "fixed_split_size disable_split_kv q_len_per_req",
        "plan": "indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size * " + PLANNED,
        "run": RUN + "q_len_per_req",
    },
}


def signature(names: str) -> inspect.Signature:
    kind, default, parameters = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty, []
    for name in names.split():
        if name in "[*":
            kind, default = (kind if name == "[" else inspect.Parameter.KEYWORD_ONLY), None
        else:
            parameters.append(inspect.Parameter(name, kind, default=default))
    return inspect.Signature(parameters)


class Double:
    """What both wrappers have in common. A call that the real one would not take fails."""

    planned: dict[str, Any]

    def bound(self, method: str, args: Any, named: Any) -> dict[str, Any]:
        return dict(signature(RECORDED[type(self).__name__][method]).bind(*args, **named).arguments)

    @staticmethod
    def check(planned: dict[str, Any], on_host: list[str], indices: str) -> None:
        for name in on_host:
            column = planned[name]
            assert (column.device.type, column.dtype, column.dim()) == ("cpu", torch.int32, 1), name
        assert planned[indices].dtype == torch.int32
        assert planned["q_data_type"] == planned["kv_data_type"]

    def attended(self, q: Tensor, cache: tuple[Tensor, Tensor], queries: Tensor, begun: Tensor, pages: Tensor, last: Tensor) -> Tensor:
        """Of exactly what was planned, one sequence after another. Keys and values in "HND": [pages, kv_heads, page_size, head_dim]."""
        planned, out = self.planned, torch.empty_like(q)
        assert q.dtype == cache[0].dtype == planned["q_data_type"]
        assert cache[0].stride() == cache[1].stride()  # the kernels for others are compiled when they are first met
        assert [cache[0].shape[1], cache[0].shape[2]] == [planned["num_kv_heads"], planned["page_size"]]
        group = planned["num_qo_heads"] // planned["num_kv_heads"]
        for index in range(len(last)):
            first, end = int(begun[index]), int(begun[index + 1])
            length = (end - first - 1) * planned["page_size"] + int(last[index])
            k, v = (part[pages[first:end].long()].transpose(1, 2).flatten(0, 1)[:length].float() for part in cache)
            rows = slice(int(queries[index]), int(queries[index + 1]))
            scores = torch.einsum("qhd,khd->hqk", q[rows].float(), k.repeat_interleave(group, 1)) * planned["sm_scale"]
            position = torch.arange(length - (rows.stop - rows.start), length)[:, None]
            hidden = torch.arange(length)[None] > position
            if planned["window_left"] >= 0:
                hidden |= torch.arange(length)[None] < position - planned["window_left"]
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[rows] = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)).to(q.dtype)
        return out


class Memory:
    """What a wrapper in graph mode reads when it runs: its buffers, and its plan's memory."""

    def __init__(self, made: dict[str, Any], *names: str) -> None:
        self.buffers = [made[name] for name in names]
        self.plans = 0
        self.planned: dict[str, Any] = {}

    def fill(self, planned: dict[str, Any], *names: str) -> None:
        fixed = {name: value for name, value in planned.items() if not isinstance(value, Tensor)}
        if self.plans:
            assert fixed == {name: self.planned[name] for name in fixed}, "a captured kernel keeps what it was launched with"
        self.planned = planned
        self.plans += 1
        for buffer, name in zip(self.buffers, names, strict=True):
            assert "indices" in name or len(planned[name]) == len(buffer), "the batch size is fixed"
            buffer[: len(planned[name])].copy_(planned[name])
        self.mark = torch.tensor([id(self) % 251, self.plans % 256], dtype=torch.uint8)
        self.memory[:2].copy_(self.mark)

    def check(self) -> None:
        assert torch.equal(self.memory[:2], self.mark), "another plan lies there"


class BatchPrefillWithPagedKVCacheWrapper(Double):
    COLUMNS = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")

    def __init__(self, *args: Any, **named: Any) -> None:
        made = self.bound("__init__", args, named)
        assert made["kv_layout"] == "HND"
        assert made["float_workspace_buffer"].nbytes >= 128 << 20
        self.held = None
        if made.get("use_cuda_graph"):
            assert made["backend"] == "fa2"
            self.held = Memory(made, *(f"{name}_buf" for name in self.COLUMNS))

    def reset_workspace_buffer(self, *args: Any, **named: Any) -> None:
        assert self.held is not None
        self.held.memory = self.bound("reset_workspace_buffer", args, named)["int_workspace_buffer"]

    def workspace_size(self, *args: Any, **named: Any) -> tuple[int, int]:
        asked = self.bound("workspace_size", args, named)
        assert self.held is not None
        assert len(asked["paged_kv_last_page_len"]) == len(self.held.buffers[3])
        return 1 << 20, 1 << 10

    def plan(self, *args: Any, **named: Any) -> None:
        planned = self.bound("plan", args, named)
        self.check(planned, ["qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len", "seq_lens"], "paged_kv_indices")
        assert planned["causal"]
        lengths = (planned["paged_kv_indptr"].diff() - 1) * planned["page_size"] + planned["paged_kv_last_page_len"]
        assert torch.equal(planned["seq_lens"], lengths)
        assert len(planned["paged_kv_indices"]) == planned["paged_kv_indptr"][-1]
        assert (planned["qo_indptr"].diff() <= lengths).all(), "a query sees itself"
        self.planned = planned
        if self.held is not None:
            if self.held.plans:
                assert planned["qo_indptr"][-1] == self.held.planned["qo_indptr"][-1], "kernels are launched for so many queries"
            self.held.fill(planned, *self.COLUMNS)
        self.columns = [planned[name] for name in self.COLUMNS] if self.held is None else self.held.buffers

    def run(self, *args: Any, **named: Any) -> Tensor:
        asked = self.bound("run", args, named)
        assert len(asked["q"]) == self.planned["qo_indptr"][-1]
        if self.held is not None:
            self.held.check()
        found = self.attended(asked["q"], asked["paged_kv_cache"], *self.columns)
        return asked["out"].copy_(found)  # type: ignore[no-any-return]


class BatchDecodeWithPagedKVCacheWrapper(Double):
    """In graph mode, as it is used."""

    def __init__(self, *args: Any, **named: Any) -> None:
        made = self.bound("__init__", args, named)
        assert made["kv_layout"] == "HND"
        assert made["use_cuda_graph"]
        self.held = Memory(made, *(f"paged_kv_{name}_buffer" for name in ("indptr", "indices", "last_page_len")))
        self.rows = len(self.held.buffers[2])
        assert len(self.held.buffers[0]) == self.rows + 1

    def reset_workspace_buffer(self, *args: Any, **named: Any) -> None:
        self.held.memory = self.bound("reset_workspace_buffer", args, named)["int_workspace_buffer"]

    def workspace_size(self, *args: Any, **named: Any) -> tuple[int, int]:
        asked = self.bound("workspace_size", args, named)
        assert len(asked["last_page_len"]) == self.rows
        return 1 << 20, 1 << 10

    def plan(self, *args: Any, **named: Any) -> None:
        planned = self.bound("plan", args, named)
        self.check(planned, ["indptr", "last_page_len"], "indices")
        assert len(planned["indices"]) == planned["indptr"][-1] <= len(self.held.buffers[1])
        self.planned = planned
        self.held.fill(planned, "indptr", "indices", "last_page_len")

    def run(self, *args: Any, **named: Any) -> Tensor:
        asked = self.bound("run", args, named)
        self.held.check()
        assert len(asked["q"]) == self.rows
        found = self.attended(asked["q"], asked["paged_kv_cache"], torch.arange(self.rows + 1), *self.held.buffers)
        return asked["out"].copy_(found)  # type: ignore[no-any-return]


def install(monkeypatch: pytest.MonkeyPatch, changed: Callable[[Any], Any] = lambda kind: kind) -> None:
    """The double for the package; `changed`: its wrappers."""
    fake = types.ModuleType("flashinfer")
    fake.__file__ = "/nowhere/flashinfer/__init__.py"
    for kind in (BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper):
        setattr(fake, kind.__name__, changed(kind))
    monkeypatch.setitem(sys.modules, "flashinfer", fake)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


@pytest.fixture(params=["double", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The CPU with a double, or a GPU with the package."""
    if request.param == "double":
        request.getfixturevalue("double")
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if find_spec("flashinfer") is None:
        pytest.skip("the package flashinfer-python is not installed")
    return "cuda"


def room(device: str, lengths: list[int], *options: Any, **named: Any) -> Room:
    return Room(lengths, *options, kind=FlashInferAttention, device=device, dim=64, **named)


def close(found: Tensor, expected: Tensor) -> None:
    rtol, atol = CLOSE[found.dtype]
    torch.testing.assert_close(found.double().cpu(), expected, rtol=rtol, atol=atol)


HALVES = [(None, torch.float16), (37, torch.bfloat16), (None, torch.bfloat16), (100, torch.bfloat16)]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("window", "dtype"), HALVES)
def test_prompts_equal_one_softmax_over_all_keys(device: str, window: int | None, page_size: int, dtype: torch.dtype) -> None:
    texts = room(device, [150, 3, 64], window, page_size, dtype)
    found = texts.attend([(row, 0, length) for row, length in enumerate(texts.lengths)])
    for row, values in enumerate(found):
        close(values, texts.expected(row))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("window", "dtype"), HALVES)
def test_decode_steps_drafts_and_ends_of_cached_prompts(device: str, window: int | None, page_size: int, dtype: torch.dtype) -> None:
    lengths = [150, 3, 64, 65, 200]
    texts = room(device, lengths, window, page_size, dtype)
    texts.prefill()
    expected = [texts.expected(row) for row in range(len(lengths))]
    for queries in (1, 2, 7, 40):
        work = [(row, max(length - queries, 0), length) for row, length in enumerate(lengths)]
        for (row, start, end), values in zip(work, texts.attend(work), strict=True):
            close(values, expected[row][start:end])


def test_a_prompt_in_chunks_beside_decode_steps_of_others(device: str) -> None:
    texts = room(device, [180, 40], dtype=torch.bfloat16)
    expected = [texts.expected(row) for row in range(2)]
    for start in range(0, 180, 60):
        work = [(0, start, start + 60), (1, start // 60, start // 60 + 1)]
        for (row, begin, end), values in zip(work, texts.attend(work), strict=True):
            close(values, expected[row][begin:end])


def test_a_broken_key_breaks_those_who_see_it_and_nobody_else(device: str) -> None:
    texts = room(device, [40, 40], dtype=torch.bfloat16)
    texts.v[0][20] = float("nan")
    found = texts.attend([(0, 0, 40), (1, 0, 40)])
    broken = [not torch.isfinite(values).all() for values in found[0]]
    assert broken == [False] * 20 + [True] * 20
    assert torch.isfinite(found[1]).all()


@pytest.mark.parametrize("heads", [6, 14])  # three and seven for each KV head: the former without tensor cores
@pytest.mark.parametrize("window", [None, 37])
def test_steps_that_are_replayed_follow_their_texts(device: str, window: int | None, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of four rows and of two, each replayed for fewer and over contexts that grow; of drafts, which are of two and four tokens
    each; and of pieces of prompts beside them."""
    monkeypatch.setattr(test_attention, "HEADS", heads)
    lengths = [150, 20, 64]
    texts = room(device, lengths, window, dtype=torch.bfloat16)
    expected = [texts.expected(row) for row in range(3)]
    replays = Replays(texts, rows=(4, 2), tokens=(12, 40))
    texts.prefill()
    for back in range(15, 0, -1):
        rows = [2, 0, 1] if back % 3 else [1]
        for counts in ((1, 1, 1), (2, 4, 2), (30, 1, 9))[: 1 + back % 3]:
            work = [
                (row, max(0, lengths[row] - back + 1 - count), lengths[row] - back + 1) for row, count in zip(rows, counts, strict=False)
            ]
            for (row, start, end), values in zip(work, replays.attend(work), strict=True):
                close(values, expected[row][start:end])


def over_shared_prefixes(chance: np.random.Generator, rows: I32, query_lens: I32, longest: int, page_size: int) -> Step:
    """A step whose rows come anew, each behind cached pages of which the first are those of others."""
    kv_lens = chance.integers(query_lens, longest + 1).astype(np.int32)
    alike = chance.integers(1, 50, -(-longest // page_size))
    slots = []
    for length in kv_lens.tolist():
        pages = np.where(np.arange(len(alike)) < chance.integers(len(alike) + 1), alike, chance.integers(50, 1000, len(alike)))
        slots.append((pages[:, None] * page_size + np.arange(page_size)).reshape(-1)[:length].astype(np.int32))
    begun = kv_lens - query_lens
    cached = [own[:start] for own, start in zip(slots, begun, strict=True)]
    return Step(
        mode="prefill",
        token_ids=np.zeros(query_lens.sum(), np.int32),
        positions=np.concatenate([np.arange(start, end, dtype=np.int32) for start, end in zip(begun, kv_lens, strict=True)]),
        out_slots=np.concatenate([own[start:] for own, start in zip(slots, begun, strict=True)]),
        rows=rows,
        query_lens=query_lens,
        kv_lens=kv_lens,
        samples=np.zeros_like(rows),
        sampling=columns([]),
        updates=RowUpdates(rows, 0 * rows, Ragged(np.concatenate(cached), np.append(0, np.cumsum(begun)).astype(np.int32))),
        page_size=page_size,
    )


@pytest.mark.parametrize("together", [1, 7, 64, flashinfer_paged.TOGETHER])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.usefixtures("double")
@torch.inference_mode()
def test_a_plan_names_the_slots_of_all_keys_in_turn(page_size: int, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of decode steps and others that are replayed, padded, and of steps that are not."""
    monkeypatch.setattr(flashinfer_paged, "TOGETHER", together)
    chance, shape = np.random.default_rng(together), TableShape(5, 96)
    attention, table = room("cpu", [1], dtype=torch.bfloat16).attention, SlotTable(shape)
    assert isinstance(attention, FlashInferAttention)
    attention.reserve(shape)
    decode, prompts = (Held.empty(size, torch.device("cpu"), sequences) for size, sequences in ((5, None), (40, 5)))
    attention.hold([decode, prompts])
    for held in (decode, prompts):
        attention.plan_held(held)
    assert attention._memory is not None
    for longest in (1, 40, 95, 96, 96):
        for kind in (decode, prompts, None):
            rows = chance.permutation(5)[: chance.integers(1, 6)].astype(np.int32)
            query_lens = np.ones_like(rows) if kind is decode else chance.integers(1, min(longest, 8) + 1, len(rows)).astype(np.int32)
            step = over_shared_prefixes(chance, rows, query_lens, longest, page_size)
            table.apply(step)
            if kind is None:
                attention.plan(step, table)
                planned = attention._planned[None].planned
            else:
                attention.fill(step, table, kind)
                planned = attention._memory.wrappers[kind.size, kind.sequences][None].planned
            seen, count = int(step.kv_lens.sum()), len(rows)
            begun, slots = (planned[name if kind is decode else f"paged_kv_{name}"].numpy() for name in ("indptr", "indices"))
            assert begun[: count + 1].tolist() == [0, *np.cumsum(step.kv_lens)]
            expected = np.concatenate([table.slots[row, :length] for row, length in zip(rows, step.kv_lens, strict=True)])
            assert slots[:seen].tolist() == expected.tolist()
            assert len(slots) == begun[-1]
            assert (slots[seen:] == PADDING_SLOT).all()
            assert kind is not None or len(slots) == seen


@pytest.mark.usefixtures("double")
def test_it_takes_the_memory_that_it_says() -> None:
    """But for plans and what a few columns take."""
    for rows, tokens in ((4, 0), (4, 200), (100, 24)):
        attention = room("cpu", [150, 20], dtype=torch.bfloat16).attention
        assert isinstance(attention, FlashInferAttention)
        attention.reserve(shape := TableShape(100, 5000))
        columns = [(rows, None), *([(tokens, most_sequences(tokens))] if tokens else [])]
        attention.hold([Held.empty(size, torch.device("cpu"), sequences) for size, sequences in columns])
        assert attention._memory is not None
        assert attention._table is not None
        taken = attention._table.slots.nbytes + attention._slots.nbytes + attention._memory.workspace.nbytes
        assert taken == FlashInferAttention.beside(shape, rows, tokens)


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2-window"])  # the last has layers with and without a window
@pytest.mark.usefixtures("double")
def test_a_model_says_the_same_with_and_without_replays(
    tiny_model: Callable[[str], TinyModel], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three texts of different lengths that come and go: the graphs are for 1, 2 and 4 rows and for 16 and 24 other tokens, so some steps
    are padded, and the longest prompt goes by them."""
    monkeypatch.setattr(FlashInferAttention, "refusal", staticmethod(lambda *_: None))
    monkeypatch.setattr(PackedKernels, "supports", staticmethod(lambda dtype: False))
    model = tiny_model(family)
    for recorder in (None, Again()):
        runner = model.load(runner="torch")
        assert runner.info.attention_backend == "flashinfer"
        forward = runner.forward
        assert isinstance(forward, TorchForward)
        if recorder is not None:
            runner.forward = TorchForward(forward.decoder, forward.attention, forward._pool, recorder, Sizes.upto(4, 24))
        requests = [
            Request([(31 * row + 7 * i) % VOCAB for i in range(9 + 30 * row)], new_tokens=6 + 3 * row, row=row, start=row)
            for row in range(3)
        ]
        Driver(runner, rows=4, context=128).run(requests, chunk=20 if recorder else 13)
        for request in requests:
            assert request.output == model.choices(request.prompt, request.output)


@pytest.mark.usefixtures("double")
def test_kernels_for_long_prompts_have_run_before_the_first_request(
    tiny_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the request that warms a server up is short, and replayed. What they wrote is in no page but the padding's."""
    monkeypatch.setattr(FlashInferAttention, "refusal", staticmethod(lambda *_: None))
    forward = tiny_model("llama").load(runner="torch").forward
    assert isinstance(forward, TorchForward)
    attention = forward.attention
    assert isinstance(attention, FlashInferAttention)
    forward = TorchForward(forward.decoder, attention, forward._pool, None, Sizes.upto(4, 100))
    forward.reserve(4, 200, torch.zeros(4, dtype=torch.int64))
    assert attention._planned is attention._many
    assert len(attention.cells.slots) == 101
    assert not attention._pool.slots(0)[0][:, 1:].any()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.SimpleNamespace:
    """One where FlashInfer computes, with a compiler."""
    here = types.SimpleNamespace(package=tmp_path, capability=(8, 6), programs={"nvcc", "ninja", "c++", "gcc"})
    for name in ("CUDA_PATH", "FLASHINFER_NVCC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    origin = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(flashinfer_paged, "find_spec", lambda name: origin if here.package and name == "flashinfer" else None)
    monkeypatch.setattr(flashinfer_paged, "version", lambda name: "0.7.2")
    monkeypatch.setattr(flashinfer_paged, "_unloadable", lambda path: None)  # they are empty
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: here.capability)
    monkeypatch.setattr(flashinfer_paged.shutil, "which", lambda name: name if Path(name).name in here.programs else None)
    return here


def refusal(
    head_dim: int = 64,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    kept: torch.dtype | None = None,
    asked: bool = True,
    window: int | None = None,
) -> str | None:
    return FlashInferAttention.refusal(spec(window, head_dim), torch.device(device), dtype, kept or dtype, asked)


def test_it_is_refused_where_it_could_not_compute(machine: types.SimpleNamespace) -> None:
    assert refusal() is None
    assert refusal(device="cpu") == "it computes on CUDA devices"
    assert refusal(dtype=torch.float32) == "it computes in float16 and bfloat16"
    assert refusal(kept=torch.float8_e4m3fn) == "it keeps keys and values in the model's type"
    assert refusal(head_dim=80) == "its heads are 64, 128, 256 wide, not 80"
    machine.capability = (7, 5)
    assert refusal() == "it needs compute capability 8.0"
    machine.package = None
    assert refusal() == "the package flashinfer-python is not installed"


def compiled(folder: Path, *modules: Module, architectures: str = "") -> None:
    for module in modules:
        path = module.path(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        if architectures:
            (path.parent / ARCHITECTURES).write_text(architectures)


def loaded(windowed: bool, *kinds: Kind) -> list[Module]:
    return [Module(kind, torch.bfloat16, 64, windowed) for kind in kinds]


def test_without_a_compiler_it_needs_kernels_that_were_compiled_ahead(machine: types.SimpleNamespace) -> None:
    ahead = machine.package / "data" / "aot"
    machine.programs = {"nvcc", "c++"}
    assert refusal() == "its kernels are not compiled and there is no ninja"
    machine.programs, machine.capability = {"nvcc", "ninja", "c++"}, (9, 0)
    assert refusal() == f"its kernels are not compiled and there is no {machine.package}/cuda/include/curand_kernel.h"
    machine.programs, machine.capability = set(), (8, 6)
    assert refusal() == "its kernels are not compiled and there is no nvcc"
    compiled(ahead, *loaded(False, "fa2", "decode"))
    assert refusal() is None
    assert refusal(asked=False) is None
    assert refusal(head_dim=128) == "its kernels are not compiled and there is no nvcc"
    assert refusal(dtype=torch.float16) == "its kernels are not compiled and there is no nvcc"


def test_every_module_that_will_be_loaded_counts(machine: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three heads share a KV head here, so decode steps have kernels of their own; from four on they have not."""
    ahead, lacking = machine.package / "data" / "aot", "its kernels are not compiled and there is no nvcc"
    machine.programs = set()
    compiled(ahead, *loaded(False, "fa2"))
    assert refusal() == lacking
    monkeypatch.setattr(test_attention, "HEADS", 8)
    assert refusal() is None
    assert refusal(window=37) == lacking
    compiled(ahead, *loaded(True, "fa2"))
    assert refusal(window=37) is None
    machine.capability = (9, 0)
    assert refusal() is None, "FlashAttention 2's compute prompts, too"
    assert refusal(window=37) is None


@pytest.mark.parametrize(("there", "generation"), [((), "fa3"), (("fa2",), "fa2"), (("fa2", "fa3"), "fa3"), (("fa3",), "fa3")])
def test_nobody_who_compiled_the_quick_kernels_waits_for_the_slow_ones(
    machine: types.SimpleNamespace, there: tuple[Kind, ...], generation: str
) -> None:
    machine.capability = (9, 0)
    compiled(machine.package / "data" / "aot", *loaded(False, *there))
    hopper, ahead = torch.device("cuda"), machine.package / "data" / "aot"
    assert flashinfer_paged._generation(spec(None, 64), torch.bfloat16, hopper, ahead) == generation
    compiled(machine.package / ".cache" / "flashinfer" / "0.7.2" / "90a" / "cached_ops", *loaded(False, "fa2"))
    assert flashinfer_paged._generation(spec(None, 64), torch.bfloat16, hopper, ahead) == generation, "an earlier start was ended"
    machine.capability = (10, 0)
    assert flashinfer_paged._generation(spec(None, 64), torch.bfloat16, hopper, ahead) == "fa2"


def test_kernels_for_another_device_are_no_kernels(machine: types.SimpleNamespace) -> None:
    ahead = machine.package / "data" / "aot"
    compiled(ahead, *loaded(False, "fa2", "decode"), architectures="9.0a")
    assert refusal() == "its kernels are compiled for 9.0a, and this device is 8.6"
    compiled(ahead, *loaded(False, "fa2", "decode"), architectures="8.0 9.0a")
    assert refusal() is None


def test_kernels_that_cannot_be_loaded_are_no_kernels(
    machine: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """FlashInfer would only warn, and begin to compile."""
    compiled(machine.package / "data" / "aot", *loaded(False, "fa2", "decode"))
    monkeypatch.setattr(flashinfer_paged, "_unloadable", lambda path: "no libcudart.so.13" if "decode" in path.name else None)
    assert refusal() == "its kernels cannot be loaded: no libcudart.so.13"
    monkeypatch.undo()
    (broken := tmp_path / "broken.so").write_bytes(b"no library")
    reason = flashinfer_paged._unloadable(broken)
    assert reason is not None
    assert str(broken) in reason


def test_what_it_compiles_is_kept_with_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLASHINFER_WORKSPACE_BASE", "BANYAN_CACHE"):
        monkeypatch.delenv(name, raising=False)
    assert flashinfer_paged._base() == Path.home()
    monkeypatch.setenv("BANYAN_CACHE", "/cache")
    assert flashinfer_paged._base() == Path("/cache/flashinfer")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", "/mine")
    assert flashinfer_paged._base() == Path("/mine")


def test_nobody_waits_for_a_compiler_who_did_not_ask_for_it(machine: types.SimpleNamespace) -> None:
    cache = machine.package / ".cache" / "flashinfer"
    for others in ("0.7.1/86", "0.7.2/90a", "0.7.2/186"):
        compiled(cache / others / "cached_ops", *loaded(False, "fa2", "decode"))
    before = cache / "0.7.2" / "75_86" / "cached_ops"
    waits = "its kernels are not compiled, which takes up to ten minutes; --attention-backend=flashinfer does it"
    assert refusal() is None
    assert refusal(asked=False) == waits
    compiled(before, *loaded(False, "fa2"))
    assert refusal(asked=False) == waits
    compiled(before, *loaded(False, "decode"))
    assert refusal(asked=False) is None


def test_it_is_the_first_choice_and_what_is_refused_is_an_error(machine: types.SimpleNamespace) -> None:
    on_gpu = spec(None, 64), torch.device("cuda"), torch.bfloat16, torch.bfloat16
    assert backends.choose(None, *on_gpu).name == "triton"
    assert backends.choose("flashinfer", *on_gpu).name == "flashinfer"
    compiled(machine.package / "data" / "aot", *loaded(False, "fa2", "decode"))
    assert backends.choose(None, *on_gpu).name == "flashinfer"
    with pytest.raises(ConfigError, match="--attention-backend=flashinfer: it computes on CUDA devices; leave it out"):
        backends.choose("flashinfer", spec(None, 64), torch.device("cpu"), torch.float32, torch.float32)
