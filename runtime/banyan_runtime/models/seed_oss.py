"""Seed-OSS: Llama's blocks with a bias of queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from banyan_runtime.models.config import DecoderSpec, Layer
from banyan_runtime.models.family import Family
from banyan_runtime.models.hf_config import HfConfig


def spec(config: HfConfig) -> DecoderSpec:
    attention = replace(
        config.attention(head_dim=128), qkv_bias=config.flag("attention_bias", default=True), out_bias=config.flag("attention_out_bias")
    )
    layer = Layer(replace(attention, rope=config.rope(attention.head_dim)), config.mlp(bias=config.flag("mlp_bias")))
    return config.decoder(config.alike(layer), config.rms_norm())


FAMILIES = {"SeedOssForCausalLM": Family("Seed-OSS", spec, defaults={"num_key_value_heads": 8})}
