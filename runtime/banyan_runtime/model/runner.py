"""The torch runner: loads a model and computes steps with it, behind `step.Runner`.

It is the reference on every device. A native runner for the CPU will stand beside it behind the same seam; nothing outside
this file knows which one computes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from banyan_runtime.config import ServerConfig
from banyan_runtime.model import device as devices
from banyan_runtime.model import host, loader, sampler
from banyan_runtime.model import layout as layouts
from banyan_runtime.model import spec as specs
from banyan_runtime.model.attention.torch_native import TorchAttention
from banyan_runtime.model.decoder import Decoder
from banyan_runtime.model.layers import Kernels, PackedKernels, PlainKernels
from banyan_runtime.model.loader import Progress
from banyan_runtime.model.pool import KvPool, choose_tokens
from banyan_runtime.model.rope import Rope
from banyan_runtime.step import RunnerInfo, SamplingColumns, Step, StepResult

log = logging.getLogger("banyan")

_GIB = 1 << 30

Indices = npt.NDArray[np.int64]


class TorchRunner:
    """Computes steps in the order in which they are launched. `report` is told of every row without usable logits."""

    def __init__(self, decoder: Decoder, attention: TorchAttention, pool: KvPool, info: RunnerInfo, report: Callable[[str], None]) -> None:
        self.info = info
        self._report = report
        self._decoder = decoder
        self._attention = attention
        self._pool = pool
        # The last token sampled for each row of the slot table, on the device: a step may be launched before the engine knows
        # the tokens of the step before.
        self._latest = torch.zeros(0, dtype=torch.int64, device=pool.device)

    @torch.inference_mode()
    def launch(self, step: Step) -> _Launched:
        """Start a step. On the CPU it is done when this returns; on CUDA its kernels are queued."""
        picked = np.flatnonzero(step.samples)
        self._decoder.rope.reserve(int(step.kv_lens.max()))
        self._attention.plan(step)
        hidden = self._decoder.hidden(self._token_ids(step), self._tensor(step.positions), self._attention)
        if not len(picked):
            return _Launched(self._failed, self._pool.device, step, picked)
        last = self._tensor((np.cumsum(step.query_lens) - 1)[picked])
        logits = self._decoder.logits(hidden.index_select(0, last))
        tokens, failed = sampler.sample(logits, _cells(step.sampling, picked), step.kv_lens[picked])
        self._latest.index_copy_(0, self._tensor(step.rows[picked]), tokens)
        return _Launched(self._failed, self._pool.device, step, picked, tokens, failed)

    def _failed(self, step: Step, cell: int) -> None:
        """Leave no NaN in the slots of a row that failed: the engine hands them out again."""
        length = int(step.kv_lens[cell])
        self._report(f"The logits of row {step.rows[cell]} at position {length} hold NaN or nothing admissible; its request fails alone.")
        self._pool.scrub(self._tensor(step.table[step.rows[cell], :length]))

    def _token_ids(self, step: Step) -> Tensor:
        """The step's tokens; a negative one is the latest token of its row."""
        if len(self._latest) < len(step.table):
            grown = torch.zeros(len(step.table), dtype=torch.int64, device=self._pool.device)
            grown[: len(self._latest)] = self._latest
            self._latest = grown
        ids = self._tensor(step.token_ids)
        if (step.token_ids < 0).any():
            rows = self._tensor(np.repeat(step.rows, step.query_lens))
            ids = torch.where(ids < 0, self._latest.index_select(0, rows), ids)
        return ids

    def _tensor(self, column: npt.NDArray[np.signedinteger]) -> Tensor:
        return torch.from_numpy(column).to(self._pool.device, torch.int64, non_blocking=True)


class _Launched:
    """The handle of a step. On CUDA the results travel to the host behind the step's kernels."""

    def __init__(
        self,
        failed_row: Callable[[Step, int], None],
        device: torch.device,
        step: Step,
        picked: Indices,
        tokens: Tensor | None = None,
        failed: Tensor | None = None,
    ) -> None:
        self._failed_row = failed_row
        self._step = step
        self._picked = picked
        self._tokens = None if tokens is None else tokens.to("cpu", non_blocking=True)
        self._failed = None if failed is None else failed.to("cpu", non_blocking=True)
        self._done = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def result(self) -> StepResult:
        """Wait for the step and give its tokens. Called once."""
        if self._done is not None:
            self._done.synchronize()
        count = len(self._step.rows)
        result = StepResult(np.full(count, -1, dtype=np.int32), np.zeros(count, dtype=np.bool_))
        if self._tokens is not None and self._failed is not None:
            failed = self._failed.numpy()
            result.failed[self._picked] = failed
            result.token_ids[self._picked] = np.where(failed, -1, self._tokens.numpy())
            for cell in self._picked[failed].tolist():
                self._failed_row(self._step, cell)
        return result


def load(config: ServerConfig, model_dir: Path, progress: Progress) -> TorchRunner:
    """Read the model in a folder and allocate its KV pool.

    `progress(phase, percent, detail)` is told how far the weights are. Raises ModelError for what is wrong with the files,
    ConfigError for options that do not fit the machine.
    """
    torch.set_num_threads(host.cores())
    device = devices.choose_device(config)
    spec = specs.read(model_dir, config.json_model_override_args)
    dtype = devices.choose_dtype(config, spec, device)
    context_len = config.context_length or spec.context_len
    if context_len > spec.context_len:
        log.warning("context_length=%d is larger than the %d tokens that the model was made for.", context_len, spec.context_len)
    if config.attention_backend is None:
        log.info("Attention backend not set. Use %s backend by default.", TorchAttention.name)
    free = devices.available_bytes(device)
    started = time.monotonic()
    layout = layouts.layout(spec)
    weights_bytes = layout.elements() * dtype.itemsize
    decoder = Decoder(
        spec, _weights(config, model_dir, layout, dtype, device, progress), _kernels(device, dtype), Rope(spec, dtype, device)
    )
    log.info(
        "Load weight end. type=%s, dtype=%s, avail mem=%.2f GB, mem usage=%.2f GB.",
        spec.architecture, dtype, devices.available_bytes(device) / _GIB, weights_bytes / _GIB,
    )  # fmt: skip
    loaded = time.monotonic()
    tokens = choose_tokens(config, spec, context_len, dtype, device, free)
    pool = KvPool(spec, tokens, config.page_size, dtype, device)
    half = pool.bytes / 2 / _GIB
    log.info("KV Cache is allocated. #tokens: %d, K size: %.2f GB, V size: %.2f GB", tokens, half, half)
    attention = TorchAttention(spec, pool)
    available = devices.available_bytes(device)
    log.info("Memory pool end. avail mem=%.2f GB", available / _GIB)
    info = RunnerInfo(
        architecture=spec.architecture,
        model_type=spec.model_type,
        vocab_size=spec.vocab_size,
        context_len=context_len,
        pool_tokens=tokens,
        dtype=devices.name(dtype),
        device=device.type,
        attention_backend=attention.name,
        weights_bytes=weights_bytes,
        kv_bytes=pool.bytes,
        available_bytes=available,
        phase_seconds={"load_weights": loaded - started, "kv_alloc": time.monotonic() - loaded},
    )
    return TorchRunner(decoder, attention, pool, info, log.warning if config.enable_nan_detection else lambda message: None)


def _weights(
    config: ServerConfig, model_dir: Path, layout: layouts.Layout, dtype: torch.dtype, device: torch.device, progress: Progress
) -> dict[str, Tensor]:
    log.info("Load weight begin. avail mem=%.2f GB", devices.available_bytes(device) / _GIB)
    progress("loading", 0, str(model_dir))
    if config.load_format == "dummy":
        return loader.dummy(layout, dtype, device, progress)
    log.info("Using model weights format ['*.safetensors']")
    return loader.load(model_dir, layout, dtype, device, progress)


def _kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    return PackedKernels() if device.type == "cpu" and PackedKernels.supports(dtype) else PlainKernels()


def _cells(columns: SamplingColumns, rows: Indices) -> SamplingColumns:
    """The cells of some rows."""
    if len(rows) == len(columns.temperature):
        return columns
    return SamplingColumns(
        temperature=columns.temperature[rows],
        top_k=columns.top_k[rows],
        top_p=columns.top_p[rows],
        min_p=columns.min_p[rows],
        frequency_penalty=columns.frequency_penalty[rows],
        presence_penalty=columns.presence_penalty[rows],
        repetition_penalty=columns.repetition_penalty[rows],
        seed=columns.seed[rows],
        histories=[columns.histories[row] for row in rows],
        banned=[columns.banned[row] for row in rows],
    )
