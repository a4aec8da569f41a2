"""Mistral, Ministral and Mistral Small: Llama's blocks, often with windows. Ministral 3: queries grow with their position."""

from __future__ import annotations

from dataclasses import replace

from banyan_runtime.models.config import DecoderSpec, Layer
from banyan_runtime.models.family import Family
from banyan_runtime.models.hf_config import HfConfig

_WINDOW = {"num_key_value_heads": 8, "sliding_window": 4096}
_MINISTRAL3 = {
    "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384, "mscale": 1.0,
        "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    },
}  # fmt: skip


def spec(config: HfConfig) -> DecoderSpec:
    window = config.size_if_any("sliding_window")
    kinds = config.layer_types([("full" if window is None else "sliding") + "_attention"] * config.layers)
    attention = config.attention()
    layer = Layer(replace(attention, rope=config.rope(attention.head_dim)), config.mlp())
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    return config.decoder(config.alike(layer, windows), config.rms_norm())


FAMILIES = {
    "MistralForCausalLM": Family("Mistral, Mistral Small", spec, defaults=_WINDOW),
    "MinistralForCausalLM": Family("Ministral", spec, defaults=_WINDOW),
    "Ministral3ForCausalLM": Family("Ministral 3", spec, defaults=_MINISTRAL3),
    "Mistral3ForConditionalGeneration": Family("Mistral Small 3.1 and later, Ministral 3 (text)", spec, defaults=_WINDOW),
}
