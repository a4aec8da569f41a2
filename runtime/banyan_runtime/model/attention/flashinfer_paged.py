"""Attention in FlashInfer, on CUDA: the fastest there is for prompts, and for decode steps that are replayed.

FlashInfer is told of a step by a plan, which is made on the host; its kernels read what the plan left on the device. A page is one slot
here, whatever --page-size says: the kernels look every key up by itself, so larger pages would spare nothing but indices, and those are
gathered on the device. Keys and values are read where they lie, through strides: [slots, kv_heads, 1, head_dim].

Long queries go to the kernels that FlashInfer chooses: FlashAttention 3's on Hopper, unless 2's alone are compiled. These do not cut a
context into parts, so steps of few queries go to FlashAttention 2's, which do; so do decode steps that are replayed.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from banyan_runtime.model.attention import Held, most_sequences
from banyan_runtime.model.attention.flashinfer_kernels import HEAD_DIMS, TYPES, Kind, Module, compiled_for, runs_on
from banyan_runtime.model.device import pinned, tensor
from banyan_runtime.model.pool import Cells, KvPool
from banyan_runtime.model.table import DeviceTable, SlotTable
from banyan_runtime.models.config import DecoderSpec, Feature
from banyan_runtime.step import I32, PADDING_SLOT, Pulse, Step, TableShape

log = logging.getLogger("banyan")

FEW_QUERIES: Final = 16  # of the longest sequence of a step
_UNKNOWN: Final[frozenset[Feature]] = frozenset({"attention sinks", "attention soft cap", "head sizes by layer", "value sizes"})
CUDA_CORES: Final = 4  # heads that share a KV head: with fewer, a decode step is faster without tensor cores
_SHOWN: Final = 300  # characters of a library's words
WORKSPACE: Final = 128 << 20  # bytes for parts of results, as FlashInfer recommends; what graphs need beyond that is asked for
TOGETHER: Final = 1 << 20
"""Keys that are looked up at once, each of which takes 24 bytes meanwhile: 24 MiB, whatever a step sees. Requests that share a long prefix
see many times the keys that the pool holds, and that are tried at start. Attention over so many takes one layer longer than the launches
for the next ones."""
PLAN: Final = 1 << 20  # bytes of a plan of decode steps: some 40 for each of a few thousand rows; FlashInfer takes 8 MiB for each wrapper


@dataclass(frozen=True, slots=True)
class _Keys:
    """Which keys the sequences of a step meet. int32; but for the slots on the host, where plans are made, in memory that can be
    copied from while the host goes on."""

    begun: Tensor  # [sequences + 1] slots before each
    lengths: Tensor  # [sequences]
    ones: Tensor  # [sequences] keys in the last page
    slots: Tensor  # [slots] on the device


@dataclass(frozen=True, slots=True)
class _Memory:
    """What steps that are replayed read. All of them share it, since one is replayed after another."""

    queries: Tensor  # int32 [sequences + 1] queries before each, of prompts
    begun: Tensor  # int32 [sequences + 1]
    ones: Tensor  # int32 [sequences]
    workspace: Tensor
    plans: dict[int | None, Tensor]  # by window, since all windows of a step are planned before the first is read
    wrappers: dict[tuple[int, int | None], dict[int | None, Any]]  # by numbers of tokens and sequences, then by window


class FlashInferAttention:
    name = "flashinfer"

    def __init__(self, spec: DecoderSpec, pool: KvPool, pulse: Pulse) -> None:
        os.environ["FLASHINFER_WORKSPACE_BASE"] = str(_base())  # read when it is imported
        import flashinfer  # two to three seconds

        self._flashinfer: Any = flashinfer
        uniform = spec.uniform
        assert uniform is not None
        self._spec = uniform
        self._pool = pool
        self._pulse = pulse
        self._windows = spec.windows  # of each layer
        self._caches = [tuple(part.transpose(0, 1).unsqueeze(2) for part in pool.slots(layer)) for layer in range(len(spec.layers))]
        self._workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=pool.device)
        generation = _generation(spec, pool.dtype, pool.device, _ahead(flashinfer.__file__))
        self._few, self._many = self._wrappers("fa2"), self._wrappers("fa2" if generation == "fa2" else "auto")
        self._table: DeviceTable | None = None
        self._slots: Tensor  # int32: those of the planned step's keys come first, if it is replayed or has no more
        self._memory: _Memory | None = None
        self._planned: dict[int | None, Any] = {}
        self.cells = Cells(pool, torch.empty(0, dtype=torch.int64, device=pool.device))
        # A plan is copied from memory that the next one writes.
        self._sent = torch.cuda.Event() if pool.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        log.info("Prepare FlashInfer's kernels. Those that are not compiled yet take up to ten minutes.")
        started = time.monotonic()
        self._plan_nothing()
        log.info("FlashInfer's kernels are there. Time elapsed: %.2f s.", time.monotonic() - started)

    @staticmethod
    def beside(shape: TableShape, rows: int, tokens: int) -> int:
        sequences = max(rows, most_sequences(tokens) + 1) if rows or tokens else 0
        return DeviceTable.bytes(shape) + WORKSPACE + torch.int32.itemsize * (sequences * shape.positions + max(rows, tokens))

    @staticmethod
    def refusal(spec: DecoderSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, asked: bool) -> str | None:
        if device.type != "cuda":
            return "it computes on CUDA devices"
        if (package := find_spec("flashinfer")) is None or package.origin is None:
            return "the package flashinfer-python is not installed"
        if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
            return "it needs compute capability 8.0"
        if dtype not in TYPES:
            return "it computes in float16 and bfloat16"
        if kv_dtype != dtype:
            return "it keeps keys and values in the model's type"
        if unknown := spec.features & _UNKNOWN:
            return f"it does not compute {', '.join(sorted(unknown))}"
        if (dim := spec.layers[0].attention.head_dim) not in HEAD_DIMS:
            return f"its heads are {', '.join(map(str, HEAD_DIMS))} wide, not {dim}"
        ahead, there, lacking = _ahead(package.origin), list[Path](), list[Module]()
        for module in _modules(spec, dtype, _generation(spec, dtype, device, ahead)):
            # FlashInfer takes what lies there as it is.
            architectures = compiled_for(ahead, module)
            if architectures and not any(runs_on(capability, architecture) for architecture in architectures):
                return f"its kernels are compiled for {' '.join(architectures)}, and this device is {'.'.join(map(str, capability))}"
            if architectures is not None:
                there.append(module.path(ahead))
            elif find_spec("flashinfer_jit_cache") is None:
                lacking.append(module)
        if reason := next((reason for path in there if (reason := _unloadable(path))), None):
            return f"its kernels cannot be loaded: {reason}"  # FlashInfer would begin to compile them
        if not lacking:
            return None
        if missing := _missing(curand=any(module.kind == "fa3" for module in lacking)):
            return f"its kernels are not compiled and there is no {missing}"
        if not asked and not all(_compiled_before(module, capability) for module in lacking):
            return "its kernels are not compiled, which takes up to ten minutes; --attention-backend=flashinfer does it"
        return None

    def _wrappers(self, backend: str) -> dict[int | None, Any]:
        kind = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper
        return {window: kind(self._workspace, "HND", backend=backend) for window in dict.fromkeys(self._windows)}

    def reserve(self, shape: TableShape) -> DeviceTable:
        self._table = DeviceTable(shape, self._pool.device)
        return self._table

    @property
    def _there(self) -> DeviceTable:
        assert self._table is not None, "reserve comes first"
        return self._table

    def plan(self, step: Step, table: SlotTable) -> None:
        if self._table is None:
            self.reserve(TableShape(*table.slots.shape))
        self._there.follow(step, table)
        self.cells = Cells(self._pool, tensor(step.out_slots, self._pool.device, torch.int32))  # as those of replayed steps
        self._planned = self._few if int(step.query_lens.max()) <= FEW_QUERIES else self._many
        self._plan(self._planned, self._keys(step, np.empty(0, np.int32)), step.query_lens)

    def _plan_nothing(self) -> None:
        """One query that sees one key: kernels are loaded, and nothing holds what plans before were made of."""
        self._slots = torch.full((1,), PADDING_SLOT, dtype=torch.int32, device=self._pool.device)
        one = np.ones(1, np.int32)
        for wrappers in (self._few, self._many):
            self._plan(wrappers, self._told(one, self._slots), one)

    def _plan(self, wrappers: dict[int | None, Any], keys: _Keys, query_lens: I32 | None) -> None:
        self._wait()
        for window, wrapper in wrappers.items():
            wrapper.plan(**self._asked(window, keys, query_lens))
        self._record()

    def _asked(self, window: int | None, keys: _Keys, query_lens: I32 | None) -> dict[str, Any]:
        """What a plan says; with `query_lens` to the kernels for prompts."""
        if query_lens is None:
            return {
                "indptr": keys.begun, "indices": keys.slots, "last_page_len": keys.ones, "head_dim": self._spec.head_dim,
                **self._named(window),
            }  # fmt: skip
        return {
            "qo_indptr": self._on_host(np.append(0, np.cumsum(query_lens))), "paged_kv_indptr": keys.begun, "paged_kv_indices": keys.slots,
            "paged_kv_last_page_len": keys.ones, "seq_lens": keys.lengths, "head_dim_qk": self._spec.head_dim, "causal": True,
            **self._named(window),
        }  # fmt: skip

    def _named(self, window: int | None) -> dict[str, Any]:
        """What all plans say."""
        spec, dtype = self._spec, self._pool.dtype
        return {
            "num_qo_heads": spec.heads, "num_kv_heads": spec.kv_heads, "page_size": 1, "sm_scale": spec.scale,
            "window_left": -1 if window is None else window - 1, "q_data_type": dtype, "kv_data_type": dtype,
        }  # fmt: skip

    def hold(self, steps: Sequence[Held]) -> None:
        def column(length: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(length, dtype=dtype, device=self._pool.device)

        def memory(workspace: int, plan: int) -> _Memory:
            return _Memory(
                queries, begun, ones,
                self._workspace if workspace <= WORKSPACE else column(workspace, torch.uint8),
                {window: column(plan, torch.uint8) for window in dict.fromkeys(self._windows)}, {},
            )  # fmt: skip

        most = max(map(_sequences, steps))
        queries, begun, ones = column(most + 1), column(most + 1), column(most)
        self._plan_nothing()
        # Of all sequences at their longest.
        self._slots = column(most * self._there.slots.shape[1] + max(step.size for step in steps))
        some, asked = memory(WORKSPACE, PLAN), [(WORKSPACE, PLAN)]
        # The largest of each kind needs most; smaller decode steps, which are cut more, far less than WORKSPACE.
        for step in {step.sequences is None: step for step in sorted(steps, key=lambda step: step.size)}.values():
            keys, query_lens = self._padding(step)
            for window, wrapper in self._held_wrappers(some, step).items():
                asked.append(wrapper.workspace_size(**self._asked(window, keys, query_lens)))
        workspaces, plans = zip(*asked, strict=True)
        self._memory = memory(max(workspaces), max(plans))

    def _held_wrappers(self, own: _Memory, held: Held) -> dict[int | None, Any]:
        """Wrappers over the memory that stays: where it lies and how the grid is cut is the same in all plans for so many tokens."""
        wrappers: dict[int | None, Any] = {}
        sequences = _sequences(held)
        for window, plan in own.plans.items():
            if held.sequences is None:
                wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                    own.workspace, "HND", use_cuda_graph=True, use_tensor_cores=self._spec.group >= CUDA_CORES, backend="fa2",
                    paged_kv_indptr_buffer=own.begun[: sequences + 1], paged_kv_indices_buffer=self._slots,
                    paged_kv_last_page_len_buffer=own.ones[:sequences],
                )  # fmt: skip
            else:
                wrapper = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                    own.workspace, "HND", use_cuda_graph=True, backend="fa2", qo_indptr_buf=own.queries[: sequences + 1],
                    paged_kv_indptr_buf=own.begun[: sequences + 1], paged_kv_indices_buf=self._slots,
                    paged_kv_last_page_len_buf=own.ones[:sequences],
                )  # fmt: skip
            wrapper.reset_workspace_buffer(own.workspace, plan)
            wrappers[window] = wrapper
        return wrappers

    def plan_held(self, held: Held) -> None:
        own, kind = self._memory, (held.size, held.sequences)
        assert own is not None, "hold comes first"
        if kind not in own.wrappers:  # never while a graph is captured: the body has run before
            own.wrappers[kind] = self._held_wrappers(own, held)
            self._plan(own.wrappers[kind], *self._padding(held))
        self._planned = own.wrappers[kind]
        self.cells = Cells(self._pool, held.slots)

    def fill(self, step: Step, table: SlotTable, held: Held) -> I32:
        assert self._memory is not None, "hold comes first"
        self._there.follow(step, table)
        self._plan(self._memory.wrappers[held.size, held.sequences], *self._padded(step, held))
        return np.zeros(tuple(held.own.shape), np.int32)

    def _padded(self, step: Step, held: Held) -> tuple[_Keys, I32 | None]:
        """What the plan of a step says that is replayed as `held`: keys, and numbers of queries of prompts."""
        lengths, queries = _further(held, len(step.token_ids), len(step.rows))
        return self._keys(step, lengths), None if queries is None else np.append(step.query_lens, queries)

    def _padding(self, held: Held) -> tuple[_Keys, I32 | None]:
        """As `_padded`, of no step."""
        lengths, queries = _further(held, 0, 0)
        return self._told(lengths, self._slots[: int(lengths.sum())].fill_(PADDING_SLOT)), queries

    def _keys(self, step: Step, further: I32) -> _Keys:
        """The keys of a step; of further sequences, the padding slot so many times."""
        ends = np.cumsum(step.kv_lens, dtype=np.int64)
        seen, padded = int(ends[-1]), int(further.sum())
        room = self._slots  # few others see more: of rows that share long prefixes, or many
        if seen + padded > len(room):
            room = torch.empty(seen + padded, dtype=torch.int32, device=self._pool.device)
        # Key `at` of the sequences laid out one after another is in the table at [row, at - begun].
        begun = ends - step.kv_lens
        sent = tensor(np.stack((ends, step.rows.astype(np.int64) * self._there.slots.shape[1] - begun)), self._pool.device)
        slots = room[: seen + padded]
        for first in range(0, seen, TOGETHER):
            _look_up(self._there, sent, first, slots[first : min(first + TOGETHER, seen)])
        if padded:
            slots[seen:].fill_(PADDING_SLOT)
        return self._told(np.append(step.kv_lens, further), slots)

    def _told(self, lengths: I32, slots: Tensor) -> _Keys:
        begun = np.append(0, np.cumsum(lengths))
        return _Keys(self._on_host(begun), self._on_host(lengths), self._on_host(np.ones_like(lengths)), slots)

    def _on_host(self, column: npt.NDArray[np.signedinteger]) -> Tensor:
        return pinned(column, self._pool.device, torch.int32)

    def _wait(self) -> None:
        """Until the plans before are on the device. They lie there before the work of their step, so this seldom takes time."""
        if self._sent is not None:
            self._sent.synchronize()

    def _record(self) -> None:
        if self._sent is not None:
            self._sent.record()

    def attend(self, layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        assert sinks is None, "such models are refused"
        self._pulse()
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)  # else prompts' is filled with zeros first
        result: Tensor = self._planned[self._windows[layer]].run(q, self._caches[layer], out=out)
        return result


def _look_up(table: DeviceTable, sent: Tensor, first: int, slots: Tensor) -> None:
    """Into `slots`, int32, those of as many keys from `first` on. `sent`: int64 [2, sequences], the keys up to each one's end, and what
    its keys' numbers lack to be those of cells of the table."""
    at = torch.arange(first, first + len(slots), device=slots.device)
    cells = sent[1].index_select(0, torch.searchsorted(sent[0], at, right=True)).add_(at)
    torch.index_select(table.slots.view(-1), 0, cells, out=slots)


def _sequences(held: Held) -> int:
    """That a plan is made for: one more than prompts may have, which takes the padded tokens."""
    return held.size if held.sequences is None else held.sequences + 1


def _further(held: Held, tokens: int, sequences: int) -> tuple[I32, I32 | None]:
    """Numbers of keys, and of queries of prompts, of the sequences beside those of a step of so many tokens. They mean nothing."""
    lengths = np.ones(_sequences(held) - sequences, np.int32)
    if held.sequences is None:
        return lengths, None
    queries = np.zeros_like(lengths)
    queries[-1] = held.size - tokens
    return np.maximum(queries, lengths), queries


def _ahead(package: str) -> Path:
    """Where FlashInfer looks for what was compiled ahead; `package`: its file."""
    return Path(package).parent / "data" / "aot"


def _generation(spec: DecoderSpec, dtype: torch.dtype, device: torch.device, ahead: Path) -> Kind:
    """The kernels for many queries. Whoever has compiled FlashAttention 2's ahead and no others does not want to wait for 3's, which take
    longest. What an earlier start has compiled says nothing: it may have been ended between the two."""
    if device.type != "cuda" or (capability := torch.cuda.get_device_capability(device))[0] != 9:
        return "fa2"

    def of(kind: Kind) -> list[Module]:
        return [module for module in _modules(spec, dtype, kind) if module.kind == kind]

    alone = all(compiled_for(ahead, module) is not None for module in of("fa2"))
    others = all(compiled_for(ahead, module) is not None or _compiled_before(module, capability) for module in of("fa3"))
    return "fa2" if alone and not others else "fa3"


def _modules(spec: DecoderSpec, dtype: torch.dtype, generation: Kind) -> list[Module]:
    """What the wrappers' plans load: for few queries, for many if those are others, for steps that are replayed."""
    kinds = list(dict.fromkeys(("fa2", generation)))
    attention = spec.layers[0].attention
    if attention.group < CUDA_CORES:
        kinds.append("decode")
    windowed = sorted({window is not None for window in spec.windows})
    return [Module(kind, dtype, attention.head_dim, window) for kind in kinds for window in windowed]


def _missing(curand: bool) -> str | None:
    """What FlashInfer would need to compile its kernels and does not find, where it looks for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = f"{home}/bin/nvcc" if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    programs = {"nvcc": os.environ.get("FLASHINFER_NVCC", nvcc), "ninja": "ninja", "C++ compiler": os.environ.get("CXX", "c++")}
    if absent := [name for name, program in programs.items() if shutil.which(program) is None]:
        return absent[0]
    header = Path(nvcc).parent.parent / "include" / "curand_kernel.h"  # the smallest installations of a toolkit have none
    return f"{header}" if curand and not header.exists() else None


def _base() -> Path:
    """Below which FlashInfer keeps what it compiles: with all else that is kept, so that a pod finds what the one before has compiled."""
    ours = os.environ.get("BANYAN_CACHE")
    return Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or (f"{ours}/flashinfer" if ours else Path.home()))


def _unloadable(path: Path) -> str | None:
    """Why a compiled module cannot be loaded, as FlashInfer loads it: it was made for another C++ library or CUDA runtime."""
    try:
        import tvm_ffi

        tvm_ffi.load_module(str(path))
    except Exception as error:  # the library's own
        return " ".join(str(error).split())[:_SHOWN]
    return None


def _compiled_before(module: Module, capability: tuple[int, int]) -> bool:
    """Whether an earlier start has compiled it: FlashInfer looks through its sources then, which takes seconds."""
    base = _base() / ".cache" / "flashinfer" / version("flashinfer-python")
    major, minor = capability  # a folder's name lists the architectures: 86, 90a, 75_80_90a
    return any(
        re.search(rf"(^|_){major}{minor}[af]?(_|$)", found.relative_to(base).parts[0])
        for found in base.glob(f"*/cached_ops/{module.name}/{module.name}.so")
    )
