"""What a server computes with, settled before a weight is read."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError
from banyan_runtime.model import device as devices
from banyan_runtime.model.attention import AttentionKind, backends
from banyan_runtime.models.config import DecoderSpec

log = logging.getLogger("banyan")

_KV_TYPES: Final = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
MOST_ROWS: Final = 256  # --cuda-graph-max-bs
MOST_TOKENS: Final = 8192  # --cuda-graph-max-tokens
LAUNCHED: Final = 150 * 10**9
"""Parameters of a layer times tokens: at 600 TFLOP/s they take 500 us, which a served model's layer took to be launched beside an H200."""


@dataclass(frozen=True, slots=True)
class Graphs:
    """The largest steps that are captured as CUDA graphs, with all smaller ones."""

    rows: int  # of decode steps; 0: none is captured
    tokens: int  # of other steps, likewise


NO_GRAPHS: Final = Graphs(0, 0)


@dataclass(frozen=True, slots=True)
class Choice:
    spec: DecoderSpec
    device: torch.device
    dtype: torch.dtype
    context_len: int  # tokens
    kv_dtype: torch.dtype  # of keys and values that are kept
    attention: AttentionKind | None  # None: the runner has its own
    graphs: Graphs
    autotune: bool = False  # whether kernels of decode steps are measured (`autotune.py`)


def choose(
    config: ServerConfig, model_dir: Path, spec: DecoderSpec, device: torch.device, *, fast_bf16: bool, own_attention: bool
) -> Choice:
    """For a runner on a device that computes bfloat16 as fast as float32 or faster, and brings its own attention, or does not.

    Raises ConfigError for options that do not fit the machine.
    """
    if spec.headless and config.serves_text:
        raise ConfigError(f"{model_dir}: {spec.architecture} has no head to make text with; serve its vectors with --is-embedding")
    dtype = devices.choose_dtype(config, spec, device, fast_bf16=fast_bf16)
    context_len = config.context_length or spec.context_len
    if context_len > spec.context_len:
        log.warning("context_length=%d is larger than the %d tokens that the model was made for.", context_len, spec.context_len)
    kv_dtype = _KV_TYPES.get(config.kv_cache_dtype, dtype)
    if kv_dtype != dtype:
        log.info("Using KV cache dtype: %s, without scales.", kv_dtype)
    attention = None if own_attention else backends.choose(config.attention_backend, spec, device, dtype, kv_dtype)
    graphs = NO_GRAPHS
    if device.type == "cuda" and not config.disable_cuda_graph:
        rows = (config.cuda_graph_max_bs or MOST_ROWS) if config.serves_text else 0  # vectors take no decode steps
        graphs = Graphs(rows, prompt_tokens(config, spec) if config.cuda_graph_max_tokens is None else config.cuda_graph_max_tokens)
    if config.autotune and (not graphs.rows or attention is None or attention.name != "triton"):
        raise ConfigError(
            "--autotune measures captured decode steps of --attention-backend=triton on a GPU, which these options rule out; leave it out"
        )
    return Choice(spec, device, dtype, context_len, kv_dtype, attention, graphs, config.autotune)


def prompt_tokens(config: ServerConfig, spec: DecoderSpec) -> int:
    """Of the largest graph for prompts: none is for more than a step is asked to have. Drafts of others' texts come beside a prompt's."""
    most, chunk, rows = worth_a_graph(spec), config.chunked_prefill_size, config.max_running_requests
    if config.speculative_algorithm:
        return most
    bounds = [chunk] if chunk is not None and chunk > 0 else []
    bounds += [config.max_total_tokens] if config.max_total_tokens is not None else []
    bounds += [rows * (config.context_length or spec.context_len)] if rows is not None else []
    return min(most, max(16, min(bounds, default=most)))


def worth_a_graph(spec: DecoderSpec) -> int:
    """Tokens up to which a step takes a large GPU no longer than launching its kernels one by one would take the host."""
    return max(16, min(MOST_TOKENS, LAUNCHED // spec.layer_parameters // 16 * 16))
