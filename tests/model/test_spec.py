"""config.json, in the spellings of transformers 4 and 5, becomes one spec; what it cannot mean is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from banyan_runtime.errors import ModelError
from banyan_runtime.model.spec import LinearRope, Llama3Rope, PlainRope, parse, read

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip


def test_a_llama_config_of_transformers_4_is_read() -> None:
    scaling = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    spec = parse(BASE | {"rope_theta": 500000.0, "rope_scaling": scaling, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5})
    assert (spec.rope_theta, spec.rope) == (500000.0, Llama3Rope(8.0, 1.0, 4.0, 8192))
    assert (spec.dtype, spec.norm_eps, spec.context_len) == ("bfloat16", 1e-5, 2048)
    assert (spec.kv_heads, spec.head_dim, spec.group) == (4, 16, 1)
    assert not any((spec.qkv_bias, spec.output_bias, spec.mlp_bias, spec.qk_norm, spec.tied))


def test_a_llama_config_of_transformers_5_is_read() -> None:
    rope = {"rope_type": "linear", "rope_theta": 20000, "factor": 2.0}
    spec = parse(BASE | {"rope_parameters": rope, "dtype": "float32", "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2})
    assert (spec.rope_theta, spec.rope, spec.context_len) == (20000.0, LinearRope(2.0), 4096)
    assert (spec.dtype, spec.group) == ("float32", 2)
    assert spec.qkv_bias
    assert spec.output_bias
    assert spec.mlp_bias


@pytest.mark.parametrize("rope", [{}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}])
def test_no_scaling_has_many_spellings(rope: dict[str, Any]) -> None:
    spec = parse(BASE | rope)
    assert (spec.rope, spec.rope_theta) == (PlainRope(), 10000.0)


def test_families_differ_in_options_only() -> None:
    qwen2 = parse(BASE | {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True})
    assert qwen2.qkv_bias
    assert not qwen2.output_bias
    assert not qwen2.qk_norm
    assert qwen2.tied
    qwen3 = parse(BASE | {"architectures": ["Qwen3ForCausalLM"]})
    assert qwen3.qk_norm
    assert not qwen3.qkv_bias
    assert qwen3.head_dim == 128
    mistral = parse(BASE | {"architectures": ["MistralForCausalLM"], "num_attention_heads": 16})
    assert mistral.kv_heads == 8


@pytest.mark.parametrize(
    ("architecture", "keys", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, (None, None, None, None)),
        ("MistralForCausalLM", {"num_key_value_heads": 4}, (4096, 4096, 4096, 4096)),
        ("MistralForCausalLM", {"num_key_value_heads": 4, "sliding_window": None}, (None, None, None, None)),
        ("Qwen2ForCausalLM", {"sliding_window": 8}, (None, None, None, None)),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 8)),
        (
            "Qwen3ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 2},
            (8, None, 8, None),
        ),
    ],
)
def test_sliding_windows_by_layer(architecture: str, keys: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert parse(BASE | {"architectures": [architecture]} | keys).windows == windows


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported are LlamaForCausalLM, MistralForCausalLM"),
        ({"architectures": None}, "'architectures' is missing; supported are LlamaForCausalLM"),
        ({"vocab_size": None}, "'vocab_size' is missing"),
        ({"hidden_size": "64"}, "'hidden_size' is '64', not a positive integer"),
        ({"num_attention_heads": 5}, "hidden_size=64 is not a multiple of num_attention_heads=5"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_type=yarn is not supported; supported are default, linear, llama3"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4}}, "'rope original_max_position_embeddings' is None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized checkpoints are not supported"),
        ({"rms_norm_eps": 0}, "'rms_norm_eps' is 0, not a positive number"),
        ({"attention_bias": "yes"}, "'attention_bias' is 'yes', not true or false"),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "use_sliding_window": True, "layer_types": ["x"]}, "1 entries for 4"),
    ],
)
def test_what_a_config_cannot_mean_is_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=r"config\.json") as error:
        parse(BASE | keys)
    assert message in str(error.value)


def test_overrides_replace_keys_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    assert read(tmp_path, '{"max_position_embeddings": 77, "num_hidden_layers": 1}').context_len == 77


@pytest.mark.parametrize(("content", "message"), [(None, "there is no config.json"), ("{", "cannot be read as JSON"), ("[]", "is list")])
def test_a_folder_that_holds_no_config_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        read(tmp_path)
