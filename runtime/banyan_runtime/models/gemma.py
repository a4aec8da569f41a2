"""Gemma 2, 3 and 4 (dense): norms before and behind the blocks with weights stored less one, GELU gates, scaled embeddings, windows.

2 caps scores and logits. 3 norms queries and keys, and has two ropes. 4 has wider heads and proportional rope in its full layers, may take
values from keys and KV from earlier layers, and adds embeddings to each layer.
"""

from __future__ import annotations

from dataclasses import replace

from banyan_runtime.models.config import Attention, DecoderSpec, Layer, LayerInputs
from banyan_runtime.models.family import Family, Names
from banyan_runtime.models.hf_config import HfConfig


def gemma2(config: HfConfig) -> DecoderSpec:
    attention = _attention(config)
    attention = replace(attention, rope=config.rope(attention.head_dim))
    sliding = replace(attention, window=config.size("sliding_window", 4096))
    return _spec(config, attention, sliding, config.every_nth_full(2))


def gemma3(config: HfConfig) -> DecoderSpec:
    attention = replace(_attention(config), qk_norm="head")
    full = config.rope(attention.head_dim, kind="full_attention", theta=1_000_000.0)
    sliding = config.rope(attention.head_dim, kind="sliding_attention", key="rope_local_base_freq")
    kinds = config.every_nth_full(config.size("sliding_window_pattern", 6))
    window = config.size("sliding_window", 4096)
    decoder = _spec(config, replace(attention, rope=full), replace(attention, rope=sliding, window=window), kinds)
    return replace(decoder, context_len=config.size("max_position_embeddings"))  # the factor of the full layers' rope is in it


def gemma4(config: HfConfig) -> DecoderSpec:
    if config.flag("enable_moe_block"):
        raise config.error("enable_moe_block=true is not supported; take a dense model of the family")
    own = replace(config.attention(head_dim=256, kv_heads=4), scale=1.0, qk_norm="head", value_norm=True)
    own = replace(own, qkv_bias=config.flag("attention_bias"), out_bias=config.flag("attention_bias"))
    sliding = replace(own, rope=config.rope(own.head_dim, kind="sliding_attention"), window=config.size("sliding_window", 512))
    kinds = (*config.every_nth_full(6)[:-1], "full_attention")  # the last layer is full, whatever the list says
    full = _gemma4_full(config, own, kinds.index("full_attention"))
    first_shared = config.layers - config.count("num_kv_shared_layers")
    layers = []
    for index, kind in enumerate(kinds):
        attention, mlp = sliding if kind == "sliding_attention" else full, config.mlp()
        if index >= first_shared:
            sources = [at for at in range(first_shared) if kinds[at] == kind]
            if not sources:
                raise config.error(f"num_kv_shared_layers leaves no {kind} layer whose keys the later ones could read")
            attention = replace(attention, kv_layer=sources[-1])
            if config.flag("use_double_wide_mlp"):
                mlp = replace(mlp, inner=2 * mlp.inner)
        layers.append(Layer(attention, mlp, "both", learned_scale=True))
    decoder = config.decoder(tuple(layers), config.rms_norm(wide=True), tied=True)
    size = config.count("hidden_size_per_layer_input", 256)
    inputs = LayerInputs(size, config.size("vocab_size_per_layer_input", decoder.vocab_size), config.activation()) if size else None
    cap = config.number_if_any("final_logit_softcapping")
    return replace(decoder, embed_scale=decoder.hidden_size**0.5, logit_soft_cap=cap, layer_inputs=inputs)


def _gemma4_full(config: HfConfig, own: Attention, index: int) -> Attention:
    """The attention of full layers, of which layer `index` is the first. Older files give its sizes by keys of their own, newer ones by
    `per_layer_config`."""
    shared_value = config.flag("attention_k_eq_v")
    layers = config.values.get("per_layer_config")
    if layers is None:
        wide, kv_heads = config.size("global_head_dim", 512), own.kv_heads
        if shared_value:
            kv_heads = config.size("num_global_key_value_heads", kv_heads)
    else:
        layer = config.nested("per_layer_config").nested(str(index))
        wide, kv_heads = layer.size("head_dim", own.head_dim), layer.size("num_key_value_heads", own.kv_heads)
    rope = config.rope(wide, kind="full_attention", theta=1_000_000.0, partial=0.25)
    return replace(own, head_dim=wide, kv_heads=kv_heads, value_is_key=shared_value, rope=rope)


def _attention(config: HfConfig) -> Attention:
    bias = config.flag("attention_bias")
    return replace(
        config.attention(head_dim=256, kv_heads=4),
        scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        soft_cap=config.number_if_any("attn_logit_softcapping"),
        qkv_bias=bias,
        out_bias=bias,
    )


def _spec(config: HfConfig, full: Attention, sliding: Attention, kinds: tuple[str, ...]) -> DecoderSpec:
    layers = tuple(Layer(sliding if kind == "sliding_attention" else full, config.mlp(), "both") for kind in kinds)
    decoder = config.decoder(layers, config.rms_norm(wide=True), tied=True)
    return replace(decoder, embed_scale=decoder.hidden_size**0.5, logit_soft_cap=config.number_if_any("final_logit_softcapping"))


_NAMES = Names(mlp_norm="pre_feedforward_layernorm", norm_offset=1.0)
_HEADS = {"num_attention_heads": 8, "hidden_activation": "gelu_pytorch_tanh"}
_GEMMA3 = {**_HEADS, "vocab_size": 262_208, "max_position_embeddings": 131_072}
_GEMMA4 = {**_HEADS, "vocab_size": 262_144, "max_position_embeddings": 131_072, "rope_parameters": {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}}  # fmt: skip
_GEMMA4_NAMES = Names(mlp_norm="pre_feedforward_layernorm")
FAMILIES = {
    "Gemma2ForCausalLM": Family("Gemma 2", gemma2, _NAMES, {**_HEADS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    "Gemma3ForCausalLM": Family("Gemma 3", gemma3, _NAMES, _GEMMA3),
    "Gemma3ForConditionalGeneration": Family("Gemma 3 (text)", gemma3, _NAMES, _GEMMA3),
    "Gemma4ForCausalLM": Family("Gemma 4, dense", gemma4, _GEMMA4_NAMES, _GEMMA4),
    "Gemma4ForConditionalGeneration": Family("Gemma 4, dense (text)", gemma4, _GEMMA4_NAMES, _GEMMA4),
}
