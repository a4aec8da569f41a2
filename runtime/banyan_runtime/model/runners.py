"""From a configuration to a runner: what computes is chosen, weights are loaded, the pool is sized.

Another runner is a class behind `ModelKind` and a line in `RUNNERS`; nothing outside this file knows which one computes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor

from banyan_runtime.config import ServerConfig
from banyan_runtime.model import device as devices
from banyan_runtime.model import host, loader
from banyan_runtime.model.choice import Choice, choose
from banyan_runtime.model.layout import Layout, layout
from banyan_runtime.model.loader import Progress
from banyan_runtime.model.pool import choose_tokens
from banyan_runtime.model.runner import TorchModel
from banyan_runtime.step import Pulse, Runner, RunnerInfo

log = logging.getLogger("banyan")

_GIB = 1 << 30


class Model(Protocol):
    """Weights in the form that one kind of runner computes with."""

    def runner(self, info: RunnerInfo, page_size: int, report: Callable[[str], None]) -> Runner:
        """Allocate the KV pool for `info.pool_tokens` tokens. The runner's own info adds what only it knows: bytes and features.

        `report` is told of every row without usable logits.
        """


class ModelKind(Protocol):
    """Takes weights over: each leaves the dict when it is in its new form, so that memory never holds both."""

    def __call__(self, choice: Choice, weights: dict[str, Tensor], pulse: Pulse) -> Model: ...


RUNNERS: Final[dict[str, ModelKind]] = {"torch": TorchModel}


def load(config: ServerConfig, model_dir: Path, progress: Progress, pulse: Pulse = lambda: None) -> Runner:
    """Read the model in a folder and allocate its KV pool.

    `progress(phase, percent, detail)` is told how far the weights are; `pulse` is given while products are measured and steps are
    computed. Raises
    ModelError for what is wrong with the files, ConfigError for options that do not fit the machine.
    """
    torch.set_num_threads(host.cores())
    choice = choose(config, model_dir)
    free = devices.available_bytes(choice.device)
    started = time.monotonic()
    wanted = layout(choice.spec)
    weights_bytes = wanted.elements() * choice.dtype.itemsize
    weights = _weights(config, model_dir, wanted, choice, progress)
    progress("loading", 100, "arranging and measuring the layers")
    model = RUNNERS["torch"](choice, weights, pulse)
    log.info(
        "Load weight end. type=%s, dtype=%s, avail mem=%.2f GB, mem usage=%.2f GB.",
        choice.spec.architecture, choice.dtype, devices.available_bytes(choice.device) / _GIB, weights_bytes / _GIB,
    )  # fmt: skip
    loaded = time.monotonic()
    tokens = choose_tokens(config, choice.spec, choice.context_len, choice.dtype, choice.device, free)
    seconds = {"load_weights": loaded - started}
    about = RunnerInfo(
        architecture=choice.spec.architecture,
        model_type=choice.spec.model_type,
        vocab_size=choice.spec.vocab_size,
        context_len=choice.context_len,
        pool_tokens=tokens,
        dtype=devices.name(choice.dtype),
        device=choice.device.type,
        attention_backend=choice.attention.name,
        weights_bytes=weights_bytes,
        kv_bytes=0,
        available_bytes=0,
        phase_seconds=seconds,
    )
    runner = model.runner(about, config.page_size, log.warning if config.enable_nan_detection else lambda message: None)
    half = runner.info.kv_bytes / 2 / _GIB
    log.info("KV Cache is allocated. #tokens: %d, K size: %.2f GB, V size: %.2f GB", tokens, half, half)
    log.info("Memory pool end. avail mem=%.2f GB", runner.info.available_bytes / _GIB)
    seconds["kv_alloc"] = time.monotonic() - loaded
    return runner


def _weights(config: ServerConfig, model_dir: Path, layout: Layout, choice: Choice, progress: Progress) -> dict[str, Tensor]:
    log.info("Load weight begin. avail mem=%.2f GB", devices.available_bytes(choice.device) / _GIB)
    progress("loading", 0, str(model_dir))
    if config.load_format == "dummy":
        return loader.dummy(layout, choice.dtype, choice.device, progress)
    log.info("Using model weights format ['*.safetensors']")
    return loader.load(model_dir, layout, choice.dtype, choice.device, progress)
