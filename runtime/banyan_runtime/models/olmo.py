"""OLMo 2 and 3: norms behind the blocks, queries and keys normed over all heads together. OLMo 3: windows in three of four layers."""

from __future__ import annotations

from dataclasses import replace

from banyan_runtime.models.config import DecoderSpec, Layer
from banyan_runtime.models.family import Family
from banyan_runtime.models.hf_config import HfConfig


def olmo2(config: HfConfig) -> DecoderSpec:
    return _spec(config, ["full_attention"] * config.layers, theta=10_000.0)


def olmo3(config: HfConfig) -> DecoderSpec:
    return _spec(config, config.every_nth_full(4), theta=500_000.0)


def _spec(config: HfConfig, kinds: list[str] | tuple[str, ...], theta: float) -> DecoderSpec:
    """Scaling of the rope, where config.json has any, is of the full layers alone."""
    bias, window = config.flag("attention_bias"), config.size("sliding_window", 4096)
    attention = replace(config.attention(), qk_norm="row", qkv_bias=bias, out_bias=bias)
    full = replace(attention, rope=config.rope(attention.head_dim, kind="full_attention", theta=theta))
    sliding = replace(attention, rope=config.rope(attention.head_dim, kind="sliding_attention", theta=theta), window=window)
    layers = tuple(Layer(sliding if kind == "sliding_attention" else full, config.mlp(), "post") for kind in kinds)
    return config.decoder(layers, config.rms_norm(wide=True))


FAMILIES = {
    "Olmo2ForCausalLM": Family("OLMo 2", olmo2, defaults={"rms_norm_eps": 1e-5}),
    "Olmo3ForCausalLM": Family("OLMo 3", olmo3, defaults={"rms_norm_eps": 1e-5}),
}
