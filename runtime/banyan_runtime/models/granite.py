"""Granite 3 and the dense models of Granite 4: Llama's blocks with four scalars."""

from __future__ import annotations

from dataclasses import replace

from banyan_runtime.models.config import DecoderSpec, Layer, Mlp
from banyan_runtime.models.family import Family, Names
from banyan_runtime.models.hf_config import HfConfig


def granite3(config: HfConfig) -> DecoderSpec:
    return _spec(config, config.mlp(bias=config.flag("mlp_bias")), rope=True)


def granite4(config: HfConfig) -> DecoderSpec:
    """Granite 4 with attention in every layer and without experts."""
    kinds = config.values.get("layer_types") or config.values.get("layers_block_type") or ["mamba"]
    if any(kind not in ("attention", "full_attention") for kind in kinds):
        raise config.error("layer_types names mamba layers; they keep state that is not KV, which is not supported")
    if config.values.get("num_local_experts"):
        raise config.error(f"num_local_experts={config.values['num_local_experts']} is not supported; take a dense model of the family")
    return _spec(
        config, Mlp(config.size("shared_intermediate_size"), config.activation()), config.text("position_embedding_type") == "rope"
    )


def _spec(config: HfConfig, mlp: Mlp, rope: bool) -> DecoderSpec:
    bias = config.flag("attention_bias")
    attention = config.attention()
    turned = config.rope(attention.head_dim) if rope else None
    attention = replace(attention, rope=turned, scale=config.number("attention_multiplier", 1.0), qkv_bias=bias, out_bias=bias)
    layer = Layer(attention, mlp, residual_scale=config.number("residual_multiplier", 1.0))
    return replace(
        config.decoder(config.alike(layer), config.rms_norm()),
        embed_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
    )


FAMILIES = {
    "GraniteForCausalLM": Family("Granite 3", granite3),
    "GraniteMoeHybridForCausalLM": Family(
        "Granite 4, dense", granite4, Names(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")
    ),
}
