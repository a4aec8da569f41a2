"""From a configuration to a runner: what computes is chosen, weights are loaded, the pool is sized.

Another runner is a class behind `ModelKind` and a line in `RUNNERS`; nothing outside this file knows which one computes.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Final

import torch

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError
from banyan_runtime.model import device as devices
from banyan_runtime.model import host, loader
from banyan_runtime.model.blocks import Parameter
from banyan_runtime.model.capacity import choose_tokens
from banyan_runtime.model.choice import Choice, choose
from banyan_runtime.model.forward import ModelKind
from banyan_runtime.model.layout import Layout, layout
from banyan_runtime.model.loader import Progress
from banyan_runtime.model.native.forward import NativeModel
from banyan_runtime.model.runner import ModelRunner
from banyan_runtime.model.torch_forward import TorchModel
from banyan_runtime.step import Pulse, Runner, RunnerInfo

log = logging.getLogger("banyan")

_GIB = 1 << 30


RUNNERS: Final[dict[str, ModelKind]] = {kind.name: kind for kind in (NativeModel, TorchModel)}
"""By name, the fastest first. The last one computes everything."""


def load(config: ServerConfig, model_dir: Path, progress: Progress, pulse: Pulse = lambda: None) -> Runner:
    """Read the model in a folder and allocate its KV pool.

    `progress(phase, percent, detail)` is told how far the weights are; `pulse` is given while products are measured and steps are
    computed. Raises
    ModelError for what is wrong with the files, ConfigError for options that do not fit the machine.
    """
    device = devices.choose_device(config)
    kind = _kind(config, device)
    torch.set_num_threads(host.cores())
    choice = choose(config, model_dir, device, fast_bf16=kind.fast_bf16, own_attention=kind.own_attention)
    free = devices.available_bytes(choice.device)
    started = time.monotonic()
    wanted = layout(choice.spec)
    weights = _weights(config, model_dir, wanted, choice, progress)
    progress("loading", 100, "arranging and measuring the layers")
    model = kind(choice, weights, pulse)
    if not kind.torch_threads:
        torch.set_num_threads(1)  # while they wait for work, they would take the cores from the runner's own
    log.info(
        "Load weight end. type=%s, dtype=%s, avail mem=%.2f GB, mem usage=%.2f GB.",
        choice.spec.architecture, choice.dtype, devices.available_bytes(choice.device) / _GIB, model.weights_bytes / _GIB,
    )  # fmt: skip
    loaded = time.monotonic()
    tokens = choose_tokens(config, choice, free)
    seconds = {"load_weights": loaded - started}
    about = RunnerInfo(
        architecture=choice.spec.architecture,
        model_type=choice.spec.model_type,
        vocab_size=choice.spec.vocab_size,
        context_len=choice.context_len,
        pool_tokens=tokens,
        dtype=devices.name(choice.dtype),
        device=choice.device.type,
        attention_backend=choice.attention.name if choice.attention else kind.name,
        weights_bytes=model.weights_bytes,
        kv_bytes=0,
        available_bytes=0,
        phase_seconds=seconds,
    )
    forward = model.forward(tokens, config.page_size)
    runner = ModelRunner(forward, about, choice.device, log.warning if config.enable_nan_detection else lambda message: None)
    half = runner.info.kv_bytes / 2 / _GIB
    log.info("KV Cache is allocated. #tokens: %d, K size: %.2f GB, V size: %.2f GB", tokens, half, half)
    log.info("Memory pool end. avail mem=%.2f GB", runner.info.available_bytes / _GIB)
    seconds["kv_alloc"] = time.monotonic() - loaded
    return runner


def _kind(config: ServerConfig, device: torch.device) -> ModelKind:
    """--runner, or the first that can compute there. Raises ConfigError when the one that was asked for cannot."""
    if config.runner != "auto":
        kind = RUNNERS[config.runner]
        if reason := kind.refusal(config, device):
            raise ConfigError(f"--runner={config.runner}: {reason}; leave it out for one that fits")
        return kind
    for kind in RUNNERS.values():
        if reason := kind.refusal(config, device):
            if device.type == "cpu":
                log.warning("The %s runner is not used: %s. Another one computes, which is slower.", kind.name, reason)
        else:
            return kind
    raise AssertionError("the last runner computes everything")


def _weights(config: ServerConfig, model_dir: Path, layout: Layout, choice: Choice, progress: Progress) -> dict[str, Parameter]:
    log.info("Load weight begin. avail mem=%.2f GB", devices.available_bytes(choice.device) / _GIB)
    progress("loading", 0, str(model_dir))
    if config.load_format == "dummy":
        return loader.dummy(layout, choice.dtype, choice.device, progress, config.quantization)
    return loader.load(model_dir, layout, choice.dtype, choice.device, progress, config.quantization)
