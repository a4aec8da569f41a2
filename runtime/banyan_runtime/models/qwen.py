"""Qwen 2, 2.5 and 3, dense: Llama's blocks with biased projections (2) or normed queries and keys (3). The text decoders of Qwen-VL turn
text by one position in all three dimensions of their rope, which is the plain rope.
"""

from __future__ import annotations

from dataclasses import replace

from banyan_runtime.hub.files import shown
from banyan_runtime.models.config import Attention, DecoderSpec, Layer
from banyan_runtime.models.family import Family
from banyan_runtime.models.hf_config import HfConfig


def qwen2(config: HfConfig) -> DecoderSpec:
    return _spec(config, replace(config.attention(), qkv_bias=True))


def qwen3(config: HfConfig) -> DecoderSpec:
    bias = config.flag("attention_bias")
    return _spec(config, replace(config.attention(head_dim=128), qk_norm="head", qkv_bias=bias, out_bias=bias))


def _spec(config: HfConfig, attention: Attention) -> DecoderSpec:
    layer = Layer(replace(attention, rope=config.rope(attention.head_dim)), config.mlp())
    return config.decoder(config.alike(layer, _windows(config)), config.rms_norm())


def _windows(config: HfConfig) -> list[int | None]:
    """Windows count with use_sliding_window, and from max_window_layers on."""
    if not config.flag("use_sliding_window") or config.values.get("sliding_window", 4096) is None:
        return [None] * config.layers
    window, first = config.size("sliding_window", 4096), config.values.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise config.error(f"'max_window_layers' is {shown(first)}, not a number of layers")
    kinds = config.layer_types([("sliding" if index >= first else "full") + "_attention" for index in range(config.layers)])
    return [window if kind == "sliding_attention" else None for kind in kinds]


FAMILIES = {
    "Qwen2ForCausalLM": Family("Qwen 2, 2.5", qwen2),
    "Qwen3ForCausalLM": Family("Qwen 3", qwen3),
    "Qwen2VLForConditionalGeneration": Family("Qwen2-VL (text)", qwen2),
    "Qwen2_5_VLForConditionalGeneration": Family("Qwen2.5-VL (text)", qwen2),
    "Qwen3VLForConditionalGeneration": Family("Qwen3-VL (text)", qwen3),
}
