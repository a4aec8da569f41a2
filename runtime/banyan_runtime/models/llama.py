"""Llama 2 and 3, and what is built like them: pre-norm blocks, RMS norm, gated SiLU, rope over the whole head."""

from __future__ import annotations

from dataclasses import replace

from banyan_runtime.models.config import DecoderSpec, Layer
from banyan_runtime.models.family import Family
from banyan_runtime.models.hf_config import HfConfig


def spec(config: HfConfig) -> DecoderSpec:
    bias = config.flag("attention_bias")
    attention = config.attention()
    attention = replace(attention, rope=config.rope(attention.head_dim), qkv_bias=bias, out_bias=bias)
    layer = Layer(attention, config.mlp(bias=config.flag("mlp_bias")))
    return config.decoder(config.alike(layer), config.rms_norm())


FAMILIES = {"LlamaForCausalLM": Family("Llama 2, 3", spec)}
