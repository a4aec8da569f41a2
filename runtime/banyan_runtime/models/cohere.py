"""Cohere Command R7B and A (Cohere 2): parallel blocks, LayerNorm, windows with interleaved rope, full layers without rope."""

from __future__ import annotations

from dataclasses import replace

from banyan_runtime.models.config import DecoderSpec, Layer, Norm
from banyan_runtime.models.family import Family, Names
from banyan_runtime.models.hf_config import HfConfig


def spec(config: HfConfig) -> DecoderSpec:
    bias, window = config.flag("attention_bias"), config.size("sliding_window", 4096)
    attention = replace(config.attention(), qkv_bias=bias, out_bias=bias)
    sliding = replace(attention, rope=config.rope(attention.head_dim), window=window)
    kinds = config.every_nth_full(config.size("sliding_window_pattern", 4))
    layers = tuple(Layer(sliding if kind == "sliding_attention" else attention, config.mlp(), "parallel") for kind in kinds)
    decoder = config.decoder(layers, Norm("layer", config.number("layer_norm_eps", 1e-5)), tied=True)
    return replace(decoder, logit_scale=config.number("logit_scale", 0.0625))


FAMILIES = {"Cohere2ForCausalLM": Family("Cohere Command R7B, A", spec, Names(interleaved=True))}
