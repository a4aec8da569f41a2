"""Hunyuan dense: Llama's blocks; queries and keys are normed after the rotation."""

from __future__ import annotations

from dataclasses import replace

from banyan_runtime.models.config import DecoderSpec, Layer
from banyan_runtime.models.family import Family, Names
from banyan_runtime.models.hf_config import HfConfig


def spec(config: HfConfig) -> DecoderSpec:
    bias = config.flag("attention_bias")
    attention = replace(config.attention(), qk_norm="head", norm_after_rope=True, qkv_bias=bias, out_bias=bias)
    layer = Layer(replace(attention, rope=config.rope(attention.head_dim)), config.mlp())
    return config.decoder(config.alike(layer), config.rms_norm())


NAMES = Names(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")
FAMILIES = {"HunYuanDenseV1ForCausalLM": Family("Hunyuan dense", spec, NAMES, {"rms_norm_eps": 1e-5})}
