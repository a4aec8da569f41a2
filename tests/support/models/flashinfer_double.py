"""A double of FlashInfer, which takes what the package takes, and computes from exactly what was planned."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

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
            if cap := planned["logits_soft_cap"]:
                scores = cap * torch.tanh(scores / cap)
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
