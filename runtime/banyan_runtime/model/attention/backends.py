"""Which attention backend computes: --attention-backend, or the first that can."""

from __future__ import annotations

import logging
from typing import Final

import torch

from banyan_runtime.errors import ConfigError
from banyan_runtime.model.attention import AttentionKind
from banyan_runtime.model.attention.flashinfer_paged import FlashInferAttention
from banyan_runtime.model.attention.torch_native import TorchAttention
from banyan_runtime.model.attention.triton_paged import TritonAttention
from banyan_runtime.models.config import DecoderSpec

log = logging.getLogger("banyan")

BACKENDS: Final[dict[str, AttentionKind]] = {kind.name: kind for kind in (TritonAttention, FlashInferAttention, TorchAttention)}
"""By name, the best first: of the first two what was faster on an H200 (benchmarks/results). The last one computes everything."""


def choose(name: str | None, spec: DecoderSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> AttentionKind:
    """Raises ConfigError when the backend that was asked for cannot compute this."""
    if name is not None:
        if reason := BACKENDS[name].refusal(spec, device, dtype, kv_dtype, True):
            raise ConfigError(f"{reason}; leave it out for one that fits", field="--attention-backend", value=name)
        log.info("Use %s attention backend, as --attention-backend says.", name)
        return BACKENDS[name]
    for kind in BACKENDS.values():
        if reason := kind.refusal(spec, device, dtype, kv_dtype, False):
            log.log(logging.INFO if device.type == "cuda" else logging.DEBUG, "Attention backend %s is not used: %s.", kind.name, reason)
        else:
            log.info("Attention backend not set. Use %s backend by default.", kind.name)
            return kind
    raise AssertionError("the last backend computes everything")
