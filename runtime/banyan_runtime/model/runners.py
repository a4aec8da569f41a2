"""From a configuration to a runner: what computes is chosen, weights are loaded, the pool is sized.

Another runner is a class behind `ModelKind` and a line in `RUNNERS`; nothing outside this file knows which one computes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import torch

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError, ModelError
from banyan_runtime.hub.gguf.files import find
from banyan_runtime.model import device as devices
from banyan_runtime.model import host, loader, memory_profiling
from banyan_runtime.model.blocks import Parameter
from banyan_runtime.model.choice import Choice, choose
from banyan_runtime.model.forward import Model, ModelKind
from banyan_runtime.model.loader import Progress
from banyan_runtime.model.memory_profiling import DeviceMemory, PoolCost, no_memory
from banyan_runtime.model.native.forward import NativeModel
from banyan_runtime.model.pool import cell_bytes
from banyan_runtime.model.runner import ModelRunner
from banyan_runtime.model.torch_forward import TorchModel
from banyan_runtime.models import registry
from banyan_runtime.models.compared import COMPARED
from banyan_runtime.models.config import DecoderSpec
from banyan_runtime.models.weight_map import WeightMap
from banyan_runtime.step import Pulse, Runner, RunnerInfo

if TYPE_CHECKING:
    from banyan_runtime.model.transformers_backend.library import Library

log = logging.getLogger("banyan")

_GIB = 1 << 30

Served = TypeVar("Served")

RUNNERS: Final[dict[str, ModelKind]] = {kind.name: kind for kind in (NativeModel, TorchModel)}
"""By name, the fastest first. The last one computes everything."""


def load(config: ServerConfig, model_dir: Path, progress: Progress, pulse: Pulse = lambda: None) -> Runner:
    """Read the model in a folder and allocate its KV pool.

    `progress(phase, percent, detail)` is told how far the weights are; `pulse` is called while steps are computed. Raises
    ModelError for what is wrong with the files, ConfigError for options that do not fit the machine.
    """
    return load_weights(config, model_dir, progress, pulse).serve(lambda runner, defaults: runner)


def load_weights(config: ServerConfig, model_dir: Path, progress: Progress, pulse: Pulse = lambda: None) -> Loaded:
    """As `load`, but for the pool."""
    device = devices.choose_device(config)
    spec, library = _read(config, model_dir)
    kind = _kind(config, device, spec) if library is None else TorchModel
    torch.set_num_threads(host.cores())
    memory = DeviceMemory(device) if device.type == "cuda" else None
    if memory is not None:
        config = memory_profiling.with_defaults(config, memory.total)
    if library is not None:
        _check_options(config, library)
    choice = choose(config, model_dir, spec, device, fast_bf16=kind.fast_bf16, own_attention=kind.own_attention)
    free = devices.available_bytes(device) if memory is None else memory.free()
    started = time.monotonic()
    if library is None:
        wanted = registry.weights_of(choice.spec)
        weights = _weights(config, model_dir, wanted, choice, progress, plain=not kind.takes_blocks)
        progress("loading", 100, "arranging the layers")
        model: Model = kind(choice, weights, pulse)
    else:
        model = _library_model(config, model_dir, library, choice, progress, pulse)
    if not kind.torch_threads:
        torch.set_num_threads(1)  # while they wait for work, they would take the cores from the runner's own
    log.info(
        "Load weight end. type=%s, dtype=%s, avail mem=%.2f GB, mem usage=%.2f GB.",
        choice.spec.architecture, choice.dtype, devices.available_bytes(choice.device) / _GIB, model.weights_bytes / _GIB,
    )  # fmt: skip
    return Loaded(config, choice, kind, model, progress, memory, free, time.monotonic() - started)


@dataclass(frozen=True, slots=True)
class Fit:
    """What computes a model on this machine in a server with default options."""

    family: str
    runner: str
    refused: dict[str, str]  # faster runners, and why each does not compute it
    context_len: int  # tokens
    weights_bytes: int | None  # in memory; None: not known before transformers loads it
    kv_bytes: int  # of a token


def fit(model_dir: Path) -> Fit:
    """From config.json and the headers of the weights. Raises ModelError for what cannot be served."""
    config = ServerConfig(model_path=str(model_dir))
    device = devices.choose_device(config)
    spec, library = _read(config, model_dir)
    reasons = {} if library is not None else {name: _refusal(kind, config, device, spec) for name, kind in RUNNERS.items()}
    kind = next((RUNNERS[name] for name, reason in reasons.items() if reason is None), TorchModel)
    choice = choose(config, model_dir, spec, device, fast_bf16=kind.fast_bf16, own_attention=kind.own_attention)
    kv_bytes = cell_bytes(spec, choice.kv_dtype)
    if library is not None:
        return Fit(f"{spec.architecture} of transformers", "transformers", {}, spec.context_len, None, kv_bytes)
    weights_bytes = loader.needed(model_dir, registry.weights_of(spec), choice.dtype, spec.packing, plain=not kind.takes_blocks)
    refused = {other: reason for other, reason in reasons.items() if reason is not None}
    return Fit(registry.family_of(spec).title, kind.name, refused, spec.context_len, weights_bytes, kv_bytes)


class Loaded:
    """A model whose weights are where they are computed with. What is still to come is its KV pool, and all that is as large as that."""

    def __init__(
        self,
        config: ServerConfig,
        choice: Choice,
        kind: ModelKind,
        model: Model,
        progress: Progress,
        memory: DeviceMemory | None,
        free_before: int,
        seconds: float,
    ) -> None:
        """`memory` of the GPU. Bytes that were free before the weights; seconds that they took."""
        self._config = config
        self._choice = choice
        self._kind = kind
        self._model = model
        self._progress = progress
        self._memory = memory
        self._free_before = free_before
        self._seconds = {"load_weights": seconds}

    def serve(self, build: Callable[[Runner, ServerConfig], Served]) -> Served:
        """What `build` makes of a runner, which it has to prepare, and of the config with the defaults of the device.

        Raises ConfigError where the device's memory does not suffice.
        """
        config, memory = self._config, self._memory
        if memory is None:
            return build(self._runner(memory_profiling.cpu_tokens(config, self._choice, self._free_before)), config)
        self._progress("loading", 100, "profiling the memory of the largest steps")
        profile = memory_profiling.profile(config, self._choice, lambda: self._over(config.page_size), memory, self._free_before)
        self._seconds["memory_profiling"] = profile.seconds
        cost = PoolCost(config, self._choice, profile.steps.rows)
        tokens = memory_profiling.gpu_tokens(profile, cost)
        self._progress("loading", 100, f"allocating a KV cache of {tokens} tokens")
        parts = memory_profiling.listed(memory_profiling.parts(profile, cost, tokens))
        with no_memory(
            f"The device's memory ran out with a KV cache of {tokens} tokens ({parts}); set --max-total-tokens below {tokens}, and keep "
            "other processes off the device"
        ):
            served = build(self._runner(tokens), config)
        memory.keep(profile.activations, profile.margin // 2)
        log.info("%s", memory_profiling.line(profile, cost, tokens))
        return served

    def _runner(self, tokens: int) -> ModelRunner:
        started = time.monotonic()
        runner = self._over(tokens, autotune=self._choice.autotune)
        half = runner.info.kv_bytes / 2 / _GIB
        log.info("KV Cache is allocated. #tokens: %d, K size: %.2f GB, V size: %.2f GB", tokens, half, half)
        log.info("Memory pool end. avail mem=%.2f GB", runner.info.available_bytes / _GIB)
        runner.info.phase_seconds["kv_alloc"] = time.monotonic() - started
        return runner

    def _over(self, tokens: int, *, autotune: bool = False) -> ModelRunner:
        """A runner over a pool of so many tokens."""
        choice = self._choice
        about = RunnerInfo(
            architecture=choice.spec.architecture,
            model_type=choice.spec.model_type,
            vocab_size=choice.spec.vocab_size,
            context_len=choice.context_len,
            pool_tokens=tokens,
            dtype=devices.name(choice.dtype),
            device=choice.device.type,
            attention_backend=choice.attention.name if choice.attention else self._kind.name,
            weights_bytes=self._model.weights_bytes,
            kv_bytes=0,
            available_bytes=0,
            phase_seconds=dict(self._seconds),
        )
        forward = self._model.forward(tokens, self._config.page_size, autotune=autotune)
        return ModelRunner(forward, about, choice.device)


def _read(config: ServerConfig, model_dir: Path) -> tuple[DecoderSpec, Library | None]:
    """--model-impl, or our own code where it reads the model's config.json; then there is no library."""
    contents, where = registry.contents(model_dir, config.json_model_override_args)
    reason = "--model-impl says so"
    refused: ModelError | None = None
    if config.model_impl != "transformers":
        try:
            return registry.parse(contents, where), None
        except ModelError as error:
            if config.model_impl == "banyan" or find(model_dir) is not None:
                raise
            refused, reason = error, str(error)
    from banyan_runtime.model.transformers_backend import library  # importing transformers takes seconds

    try:
        found = library.read(model_dir, contents, where, trusted=config.trust_remote_code)
    except ModelError:
        if refused is not None and registry.known(contents):
            raise refused from None  # the family says best what is wrong with its files
        raise
    log.info("transformers computes this model, and not our own code: %s", reason)
    if found.computed_by not in COMPARED:
        log.warning("No test of Banyan compares %s with transformers' own results; compare some of its answers.", found.computed_by)
    return found.spec, found


def _check_options(config: ServerConfig, library: Library) -> None:
    """Raises ConfigError for options that models of the transformers backend do not have."""
    remedy = "leave it out, or take a model of a family of docs/models.md"
    if config.runner == "native":
        raise ConfigError(f"computes no model of the transformers backend; {remedy}", field="--runner", value="native")
    if config.quantization is not None:
        raise ConfigError(f"is not for models of the transformers backend; {remedy}", field="--quantization", value=config.quantization)
    if config.autotune:
        raise ConfigError(f"measures kernels that models of the transformers backend do not use; {remedy}", field="--autotune")
    if config.context_length is not None and config.context_length > library.spec.context_len:
        raise ConfigError(
            f"is more than the {library.spec.context_len} tokens that the model was made for; lower it, or set its rope scaling with "
            "--json-model-override-args",
            field="--context-length",
            value=config.context_length,
        )


def _library_model(config: ServerConfig, model_dir: Path, library: Library, choice: Choice, progress: Progress, pulse: Pulse) -> Model:
    from banyan_runtime.model.transformers_backend import weights
    from banyan_runtime.model.transformers_backend.kind import TransformersModel

    progress("loading", 0, str(model_dir))
    dummy = config.load_format == "dummy"
    return TransformersModel(choice, weights.dummy(library, choice) if dummy else weights.load(library, model_dir, choice), pulse)


def _kind(config: ServerConfig, device: torch.device, spec: DecoderSpec) -> ModelKind:
    """--runner, or the first that can compute the model there. Raises ConfigError when the one that was asked for cannot."""
    if config.runner != "auto":
        kind = RUNNERS[config.runner]
        if reason := _refusal(kind, config, device, spec):
            raise ConfigError(f"{reason}; leave it out for one that fits", field="--runner", value=config.runner)
        return kind
    for kind in RUNNERS.values():
        if reason := _refusal(kind, config, device, spec):
            if device.type == "cpu":
                log.warning("The %s runner is not used: %s. Another one computes, which is slower.", kind.name, reason)
        else:
            return kind
    raise AssertionError("the last runner computes everything")


def _refusal(kind: ModelKind, config: ServerConfig, device: torch.device, spec: DecoderSpec) -> str | None:
    """Why a kind of runner cannot compute a model, in words that go on after "is not used:"; or None."""
    if missing := spec.features - kind.implements:
        return f"it does not implement what {spec.architecture} needs: {', '.join(sorted(missing))}"
    return kind.refusal(config, device)


def _weights(
    config: ServerConfig, model_dir: Path, wanted: WeightMap, choice: Choice, progress: Progress, *, plain: bool
) -> dict[str, Parameter]:
    log.info("Load weight begin. avail mem=%.2f GB", devices.available_bytes(choice.device) / _GIB)
    progress("loading", 0, str(model_dir))
    if config.load_format == "dummy":
        return loader.dummy(wanted, choice.dtype, choice.device, progress, config.quantization)
    return loader.load(model_dir, wanted, choice.dtype, choice.device, progress, config.quantization, choice.spec.packing, plain)
