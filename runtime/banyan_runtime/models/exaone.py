"""EXAONE 4: norms behind the blocks, normed queries and keys, windows with rope, full layers without it."""

from __future__ import annotations

from dataclasses import replace

from banyan_runtime.models.config import DecoderSpec, Layer
from banyan_runtime.models.family import Family
from banyan_runtime.models.hf_config import HfConfig


def spec(config: HfConfig) -> DecoderSpec:
    window = config.size_if_any("sliding_window")
    attention = replace(config.attention(kv_heads=32), qk_norm="head")
    rope = config.rope(attention.head_dim)
    full = replace(attention, rope=rope if window is None else None)
    pattern = config.values.get("sliding_window_pattern")
    every = len(pattern) if isinstance(pattern, str) else config.size("sliding_window_pattern", 4)  # "LLLG": three local layers, one global
    kinds = config.every_nth_full(every) if window else ("full_attention",) * config.layers
    layers = tuple(
        Layer(replace(attention, rope=rope, window=window) if kind == "sliding_attention" else full, config.mlp(), "post") for kind in kinds
    )
    return config.decoder(layers, config.rms_norm())


FAMILIES = {"Exaone4ForCausalLM": Family("EXAONE 4", spec, defaults={"sliding_window": 4096, "rms_norm_eps": 1e-5})}
