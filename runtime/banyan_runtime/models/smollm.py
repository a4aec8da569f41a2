"""SmolLM3: Llama's blocks; every fourth layer has no rope."""

from __future__ import annotations

from dataclasses import replace

from banyan_runtime.hub.files import shown
from banyan_runtime.models.config import DecoderSpec, Layer
from banyan_runtime.models.family import Family
from banyan_runtime.models.hf_config import HfConfig


def spec(config: HfConfig) -> DecoderSpec:
    every, layers = config.size("no_rope_layer_interval", 4), config.layers
    turned = config.values.get("no_rope_layers", [int((index + 1) % every != 0) for index in range(layers)])
    if not isinstance(turned, list) or len(turned) < layers or any(each not in (0, 1) for each in turned):
        raise config.error(f"'no_rope_layers' is {shown(turned)}, not a list of {layers} numbers 0 or 1")
    windowed = config.flag("use_sliding_window") and config.has("sliding_window")
    kinds = config.layer_types([("sliding" if windowed and not each else "full") + "_attention" for each in turned[:layers]])
    bias = config.flag("attention_bias")
    attention = replace(config.attention(), qkv_bias=bias, out_bias=bias)
    rope, mlp = config.rope(attention.head_dim, theta=2_000_000.0), config.mlp(bias=config.flag("mlp_bias"))
    window = config.size("sliding_window") if windowed else None
    found = tuple(
        Layer(replace(attention, rope=rope if each else None, window=window if kind == "sliding_attention" else None), mlp)
        for each, kind in zip(turned, kinds, strict=False)
    )
    return config.decoder(found, config.rms_norm(), tied=True)


FAMILIES = {"SmolLM3ForCausalLM": Family("SmolLM3", spec, defaults={"num_key_value_heads": 4})}
