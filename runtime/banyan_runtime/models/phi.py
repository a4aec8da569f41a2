"""Phi-3, 3.5, 4 and 4-mini: Llama's blocks with fused projections; some rotate a part of each head, with LongRoPE."""

from __future__ import annotations

from dataclasses import replace

from banyan_runtime.models.config import DecoderSpec, Layer
from banyan_runtime.models.family import Family, Names
from banyan_runtime.models.hf_config import HfConfig


def spec(config: HfConfig) -> DecoderSpec:
    window = config.size_if_any("sliding_window")
    attention = config.attention()
    layer = Layer(replace(attention, rope=config.rope(attention.head_dim), window=window), config.mlp())
    return config.decoder(config.alike(layer), config.rms_norm())


NAMES = Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
FAMILIES = {"Phi3ForCausalLM": Family("Phi-3, 3.5, 4, 4-mini", spec, NAMES, {"rms_norm_eps": 1e-5})}
