"""ERNIE 4.5, dense: Llama's blocks with interleaved rope."""

from __future__ import annotations

from dataclasses import replace

from banyan_runtime.models.config import DecoderSpec, Layer
from banyan_runtime.models.family import Family, Names
from banyan_runtime.models.hf_config import HfConfig


def spec(config: HfConfig) -> DecoderSpec:
    bias = config.flag("use_bias")
    attention = replace(config.attention(head_dim=128), qkv_bias=bias, out_bias=bias)
    layer = Layer(replace(attention, rope=config.rope(attention.head_dim, theta=500_000.0)), config.mlp(bias=bias))
    return config.decoder(config.alike(layer), config.rms_norm(), tied=True)


DEFAULTS = {"num_key_value_heads": 2, "rms_norm_eps": 1e-5}
FAMILIES = {"Ernie4_5ForCausalLM": Family("ERNIE 4.5, dense", spec, Names(interleaved=True), DEFAULTS)}
