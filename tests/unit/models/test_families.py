"""config.json as families publish it, in the spelling of transformers 4, and what their models need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest

from banyan_runtime.errors import ModelError
from banyan_runtime.models.config import LayerInputs, LinearRope, Llama3Rope, LongRope, PlainRope, ProportionalRope, QueryGrowth, YarnRope
from banyan_runtime.models.registry import parse, weights_of

SIZES: Final[dict[str, Any]] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 1000, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
}  # fmt: skip


def of(architecture: str, **keys: Any) -> Any:
    return parse(SIZES | {"architectures": [architecture]} | keys)


def test_gemma_3_leaves_out_what_its_class_says() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024}
    spec = parse({
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {},
        "text_config": text | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    })  # fmt: skip
    first, sixth = (spec.layers[index].attention for index in (0, 5))
    assert (first.heads, first.kv_heads, first.head_dim, first.window, sixth.window) == (8, 4, 256, 1024, None)
    assert first.rope is not None
    assert sixth.rope is not None
    assert (first.rope.theta, first.rope.scaling, sixth.rope.theta, sixth.rope.scaling) == (1e4, PlainRope(), 1e6, LinearRope(8.0))
    assert (spec.vocab_size, spec.context_len, spec.tied, spec.dtype) == (262_208, 131_072, True, "bfloat16")
    assert sum(window is None for window in spec.windows) == 5
    assert spec.embed_scale == 2560**0.5


def test_gemma_3_of_transformers_4_has_two_ropes() -> None:
    spec = of("Gemma3ForCausalLM", head_dim=256, rope_local_base_freq=10_000, sliding_window_pattern=2, sliding_window=512)
    assert [rope.theta for rope in spec.ropes] == [1e4, 1e6]
    assert spec.windows == (512, None) * 4


def test_gemma_4_has_wider_full_layers_shared_keys_and_layer_inputs() -> None:
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    spec = of(
        "Gemma4ForConditionalGeneration",
        text_config=SIZES | {
            "layer_types": kinds * 2, "head_dim": 32, "global_head_dim": 64, "num_kv_shared_layers": 4, "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 900, "sliding_window": 64, "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            },
        },
    )  # fmt: skip
    assert [layer.attention.kv_layer for layer in spec.layers] == [None] * 4 + [2, 2, 2, 3]
    assert [layer.attention.head_dim for layer in spec.layers] == [32, 32, 32, 64] * 2
    full = spec.layers[3].attention.rope
    assert (full.dim, full.scaling) == (64, ProportionalRope(8, 1.0))
    assert spec.layer_inputs == LayerInputs(16, 900, "gelu_tanh")
    assert "model.layers.5.self_attn.k_proj.weight" in weights_of(spec).ignored


def test_olmo_3_scales_the_rope_of_full_layers_alone() -> None:
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "attention_factor": 1.2}
    spec = of("Olmo3ForCausalLM", rope_scaling=scaling, max_position_embeddings=65_536, sliding_window=4096, rope_theta=5e5)
    assert spec.windows == (4096, 4096, 4096, None) * 2
    sliding, full = spec.ropes
    assert (sliding.theta, sliding.scaling) == (5e5, PlainRope())
    assert isinstance(full.scaling, YarnRope)
    assert spec.context_len == 65_536


def test_cohere_2_turns_windows_alone() -> None:
    spec = of("Cohere2ForCausalLM", sliding_window_pattern=4, sliding_window=4096, logit_scale=0.25, layer_norm_eps=1e-5)
    assert [layer.attention.rope is None for layer in spec.layers] == [False, False, False, True] * 2
    assert (spec.logit_scale, spec.tied, spec.norm.kind, spec.norm.bias) == (0.25, True, "layer", False)
    assert "model.layers.0.post_attention_layernorm.weight" not in weights_of(spec).slices


@pytest.mark.parametrize("pattern", ["LLLG", 4])
def test_exaone_4_names_its_pattern_by_letters_or_a_number(pattern: Any) -> None:
    spec = of("Exaone4ForCausalLM", sliding_window=4096, sliding_window_pattern=pattern, rope_scaling={
        "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    })  # fmt: skip
    assert spec.windows == (4096, 4096, 4096, None) * 2
    assert [layer.attention.rope is None for layer in spec.layers] == [False, False, False, True] * 2
    assert isinstance(spec.ropes[0].scaling, Llama3Rope)


def test_exaone_4_without_windows_turns_every_layer() -> None:
    spec = of("Exaone4ForCausalLM", sliding_window=None, sliding_window_pattern=None)
    assert spec.windows == (None,) * 8
    assert all(layer.attention.rope is not None for layer in spec.layers)


def test_phi_4_mini_turns_a_part_of_each_head_by_factors_of_its_own() -> None:
    factors = {"short_factor": [1.0] * 12, "long_factor": [2.0] * 12}
    spec = of(
        "Phi3ForCausalLM", rope_scaling={"type": "longrope", **factors}, partial_rotary_factor=0.75, max_position_embeddings=131_072,
        original_max_position_embeddings=4096, sliding_window=262_144, tie_word_embeddings=True,
    )  # fmt: skip
    (rope,) = spec.ropes
    assert rope.dim == 24
    assert isinstance(rope.scaling, LongRope)
    assert rope.scaling.magnitude == pytest.approx(1.190238)  # sqrt(1 + ln 32 / ln 4096)
    weights = weights_of(spec)
    assert weights.slices["model.layers.0.self_attn.qkv_proj.weight"].shape == weights.parameters["layers.0.qkv"] == (512, 256)


def test_granite_4_without_mamba_layers_is_served_and_with_them_refused() -> None:
    keys: dict[str, Any] = {"shared_intermediate_size": 512, "position_embedding_type": "rope", "num_local_experts": 0}
    keys |= {"logits_scaling": 8, "embedding_multiplier": 12, "attention_multiplier": 0.015625, "residual_multiplier": 0.22}
    spec = of("GraniteMoeHybridForCausalLM", layer_types=["attention"] * 8, **keys)
    assert (spec.embed_scale, spec.logit_scale, spec.layers[0].residual_scale) == (12.0, 0.125, 0.22)
    assert weights_of(spec).slices["model.layers.0.shared_mlp.input_linear.weight"].shape == (1024, 256)
    assert of("GraniteMoeHybridForCausalLM", layer_types=["attention"] * 8, **keys | {"position_embedding_type": "nope"}).ropes == ()
    with pytest.raises(ModelError, match="layer_types names mamba"):
        of("GraniteMoeHybridForCausalLM", layer_types=["mamba", *["attention"] * 7], **keys)
    with pytest.raises(ModelError, match="num_local_experts=62"):
        of("GraniteMoeHybridForCausalLM", layer_types=["attention"] * 8, **keys | {"num_local_experts": 62})


def test_smollm_3_lists_the_layers_with_rope() -> None:
    spec = of("SmolLM3ForCausalLM", no_rope_layers=[1, 1, 1, 0] * 2, use_sliding_window=False, sliding_window=None)
    assert [layer.attention.rope is None for layer in spec.layers] == [False, False, False, True] * 2
    with pytest.raises(ModelError, match="no_rope_layers"):
        of("SmolLM3ForCausalLM", no_rope_layers=[1, 0])


def test_hunyuan_raises_theta_by_alpha() -> None:
    spec = of("HunYuanDenseV1ForCausalLM", head_dim=128, rope_theta=1e4, rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0})
    assert spec.ropes[0].theta == pytest.approx(1e4 * 1000.0 ** (128 / 126))


def test_the_text_tower_of_mistral_3_may_be_a_ministral_3() -> None:
    rope = {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384, "mscale": 1.0,
        "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    }  # fmt: skip
    text = SIZES | {"model_type": "ministral3", "max_position_embeddings": 262_144, "rope_parameters": rope}
    spec = of("Mistral3ForConditionalGeneration", text_config=text, tie_word_embeddings=True)
    assert (spec.ropes[0].growth, spec.context_len, spec.tied) == (QueryGrowth(0.1, 16_384), 262_144, True)
    plain = of("Mistral3ForConditionalGeneration", text_config=SIZES | {"model_type": "mistral", "sliding_window": None})
    assert plain.windows == (None,) * 8


def test_the_rope_of_older_files_of_qwen_2_5_vl_is_the_plain_one_for_text() -> None:
    spec = of("Qwen2_5_VLForConditionalGeneration", rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}, vision_config={})
    assert spec.ropes[0].scaling == PlainRope()
    assert spec.layers[0].attention.qkv_bias


@pytest.mark.parametrize(("prefix", "head"), [("model.", ""), ("model.language_model.", ""), ("language_model.model.", "language_model.")])
def test_names_of_a_checkpoint_may_begin_in_several_ways(prefix: str, head: str) -> None:
    weights = weights_of(replace(of("Qwen3ForCausalLM"), tied=False))
    found = weights.spelled({f"{prefix}embed_tokens.weight", "visual.patch_embed.weight"})
    assert f"{prefix}layers.7.mlp.up_proj.weight" in found.slices
    assert f"{head}lm_head.weight" in found.slices
    assert found.layer_prefix == f"{prefix}layers."
