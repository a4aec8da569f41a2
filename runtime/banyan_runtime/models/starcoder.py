"""StarCoder 2: LayerNorm with bias, an MLP without a gate, biases everywhere."""

from __future__ import annotations

from dataclasses import replace

from banyan_runtime.models.config import DecoderSpec, Layer, Norm
from banyan_runtime.models.family import Family, Names
from banyan_runtime.models.hf_config import HfConfig


def spec(config: HfConfig) -> DecoderSpec:
    bias = config.flag("use_bias", default=True)
    window = config.size_if_any("sliding_window")
    attention = replace(config.attention(), window=window, qkv_bias=bias, out_bias=bias)
    layer = Layer(replace(attention, rope=config.rope(attention.head_dim)), config.mlp(gated=False, bias=bias))
    return config.decoder(config.alike(layer), Norm("layer", config.number("norm_epsilon", 1e-5), bias=True), tied=True)


DEFAULTS = {"num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh"}
FAMILIES = {"Starcoder2ForCausalLM": Family("StarCoder 2", spec, Names(up="mlp.c_fc", down="mlp.c_proj"), DEFAULTS)}
