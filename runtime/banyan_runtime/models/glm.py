"""GLM-4-0414: norms before and behind the blocks, interleaved rope over half of each head."""

from __future__ import annotations

from dataclasses import replace

from banyan_runtime.models.config import DecoderSpec, Layer
from banyan_runtime.models.family import Family, Names
from banyan_runtime.models.hf_config import HfConfig


def spec(config: HfConfig) -> DecoderSpec:
    attention = replace(config.attention(head_dim=128), qkv_bias=config.flag("attention_bias", default=True))
    layer = Layer(replace(attention, rope=config.rope(attention.head_dim, partial=0.5)), config.mlp(), "both")
    return config.decoder(config.alike(layer), config.rms_norm())


NAMES = Names(
    gate_up=("mlp.gate_up_proj",), post_attention_norm="post_self_attn_layernorm", post_mlp_norm="post_mlp_layernorm", interleaved=True
)
FAMILIES = {"Glm4ForCausalLM": Family("GLM-4-0414", spec, NAMES, {"num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7})}
