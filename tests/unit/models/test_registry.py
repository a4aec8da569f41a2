"""config.json, in the spellings of transformers 4 and 5, becomes one spec; what it cannot mean is said."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from banyan_runtime.errors import ModelError
from banyan_runtime.model.rope import inverse_frequencies, rotations
from banyan_runtime.models.config import DecoderSpec, LinearRope, Llama3Rope, PlainRope, Rope, YarnRope
from banyan_runtime.models.registry import FAMILIES, parse, read, weights_of

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0}
LONG: dict[str, Any] = {"rope_type": "longrope", "original_max_position_embeddings": 9}
WINDOW: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "use_sliding_window": True}


def test_a_llama_config_of_transformers_4_is_read() -> None:
    scaling = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    spec = parse(BASE | {"rope_theta": 500000.0, "rope_scaling": scaling, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5})
    assert spec.ropes == (Rope(500000.0, 16, Llama3Rope(8.0, 1.0, 4.0, 8192)),)
    assert (spec.dtype, spec.norm.eps, spec.context_len) == ("bfloat16", 1e-5, 2048)
    attention, mlp = spec.layers[0].attention, spec.layers[0].mlp
    assert (attention.kv_heads, attention.head_dim, attention.group) == (4, 16, 1)
    assert not any((attention.qkv_bias, attention.out_bias, mlp.bias, attention.qk_norm, spec.tied, spec.features))


@pytest.mark.parametrize(("declared", "original", "context"), [(32768, None, 131072), (40960, 32768, 131072), (131072, 32768, 131072)])
def test_the_context_of_yarn_is_the_original_one_times_the_factor(declared: int, original: int | None, context: int) -> None:
    """Whether a config declares the one or the other, or, as Qwen3's, more than the one."""
    more = {} if original is None else {"original_max_position_embeddings": original}
    spec = parse(BASE | {"max_position_embeddings": declared, "rope_scaling": YARN | more})
    assert spec.context_len == context
    assert spec.ropes[0].scaling == YarnRope(4.0, 32.0, 1.0, True, 1.0 + 0.1 * math.log(4.0), original or declared)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
        {"factor": 1.0},
        {"beta_fast": 64.0, "beta_slow": 0.5, "truncate": False},
        {"attention_factor": 0.9},
        {"original_max_position_embeddings": 7},  # of which all pairs turn seldom
        {"original_max_position_embeddings": 10_000_000, "factor": 1.5},  # and often
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_yarn_turns_as_transformers_does(changes: dict[str, Any], head_dim: int) -> None:
    rope = YARN | {"rope_theta": 1e6, "original_max_position_embeddings": 512} | changes
    keys = BASE | {"head_dim": head_dim, "max_position_embeddings": 4096, "rope_parameters": rope}
    expected, magnitude = ROPE_INIT_FUNCTIONS["yarn"](
        transformers.LlamaConfig(**{key: keys[key] for key in keys if key != "architectures"})
    )
    (found,) = parse(keys).ropes
    torch.testing.assert_close(inverse_frequencies(found, 4096), expected, rtol=1e-6, atol=0)
    cosines, sines = rotations(found, 4096, range(5, 8))
    angles = torch.tensor([5.0, 6.0, 7.0])[:, None] * expected
    torch.testing.assert_close(cosines, angles.cos() * magnitude, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sines, angles.sin() * magnitude, rtol=1e-5, atol=1e-6)


def test_a_llama_config_of_transformers_5_is_read() -> None:
    rope = {"rope_type": "linear", "rope_theta": 20000, "factor": 2.0}
    spec = parse(BASE | {"rope_parameters": rope, "dtype": "float32", "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2})
    assert (spec.ropes, spec.context_len) == ((Rope(20000.0, 16, LinearRope(2.0)),), 4096)
    attention = spec.layers[0].attention
    assert (spec.dtype, attention.group) == ("float32", 2)
    assert attention.qkv_bias
    assert attention.out_bias
    assert spec.layers[0].mlp.bias


@pytest.mark.parametrize("rope", [{}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}])
def test_no_scaling_has_many_spellings(rope: dict[str, Any]) -> None:
    spec = parse(BASE | rope)
    assert spec.ropes == (Rope(10000.0, 16),)


def test_families_differ_in_options_only() -> None:
    qwen2 = parse(BASE | {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True})
    attention = qwen2.layers[0].attention
    assert (attention.qkv_bias, attention.out_bias, attention.qk_norm, qwen2.tied) == (True, False, None, True)
    qwen3 = parse(BASE | {"architectures": ["Qwen3ForCausalLM"]})
    attention = qwen3.layers[0].attention
    assert (attention.qk_norm, attention.qkv_bias, attention.head_dim) == ("head", False, 128)
    mistral = parse(BASE | {"architectures": ["MistralForCausalLM"], "num_attention_heads": 16})
    assert mistral.layers[0].attention.kv_heads == 8


@pytest.mark.parametrize(
    ("architecture", "keys", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, (None, None, None, None)),
        ("MistralForCausalLM", {"num_key_value_heads": 4}, (4096, 4096, 4096, 4096)),
        ("MistralForCausalLM", {"num_key_value_heads": 4, "sliding_window": None}, (None, None, None, None)),
        ("Qwen2ForCausalLM", {"sliding_window": 8}, (None, None, None, None)),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 8)),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 4096)),
        ("Qwen2ForCausalLM", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, None)),
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
    ("keys", "field", "value"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture", "GPT2LMHeadModel"),
        ({"architectures": None}, "architectures", ""),
        ({"vocab_size": None}, "vocab_size", ""),
        ({"hidden_size": 10**12}, "hidden_size", "1000000000000"),
        ({"hidden_size": True}, "hidden_size", "True"),
        ({"hidden_size": {"value": 64}}, "hidden_size", "{'value': 64}"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers", "1000000000"),
        ({"num_attention_heads": 0}, "num_attention_heads", "0"),
        ({"vocab_size": 2**40}, "vocab_size", "1099511627776"),
        ({"head_dim": 3 * 10**9}, "head_dim", "3000000000"),
        ({"max_position_embeddings": 2**62}, "max_position_embeddings", "4611686018427387904"),
        ({"max_position_embeddings": 2048.0}, "max_position_embeddings", "2048.0"),
        ({"max_position_embeddings": 10**400}, "max_position_embeddings", "1000"),
        ({"rope_theta": "abc"}, "rope_theta", "abc"),
        ({"rope_theta": float("inf")}, "rope_theta", "inf"),
        ({"rope_theta": float("nan")}, "rope_theta", "nan"),
        ({"rope_theta": 10**400}, "rope_theta", "1000"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor", "0"),
        ({"rope_scaling": {"type": "linear", "factor": 1e300}}, "factor", "1e+300"),
        ({"rope_scaling": {"type": "linear", "factor": 1e5}}, "max_position_embeddings", "100000"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor", "4"),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192.5}}, "original_max_position_embeddings", "8192.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope", "full_attention"),
        ({"rope_parameters": [1]}, "rope", "[1]"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architecture", "['LlamaForCausalLM']"),
        ({"model_type": 5}, "model_type", "5"),
        ({"dtype": {"a": 1}}, "dtype", "{'a': 1}"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": 3}, "use_sliding_window", "3"),
        (WINDOW | {"max_window_layers": "3"}, "max_window_layers", "3"),
        (WINDOW | {"layer_types": 5}, "layer_types", "5"),
        (WINDOW | {"layer_types": ["full_attention", "linear_attention"] * 2}, "layer_types", "linear_attention"),
        ({"hidden_size": "64"}, "hidden_size", "64"),
        ({"num_attention_heads": 5}, "hidden_size=64", "num_attention_heads=5"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4", "num_key_value_heads=3"),
        ({"head_dim": 7}, "head_dim", "7"),
        ({"hidden_act": "gelu"}, "hidden_act", "gelu"),
        ({"rope_scaling": {"rope_type": "axial", "factor": 4}}, "rope_type", "axial"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4}}, "original_max_position_embeddings", "None"),
        (
            {"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 9, "short_factor": [1]}},
            "short_factor",
            "8 numbers",
        ),
        ({"rope_scaling": YARN | {"factor": 0.5}}, "factor", "0.5"),
        ({"rope_scaling": YARN | {"beta_slow": 32}}, "beta_slow=32", "beta_fast=32"),
        ({"rope_scaling": YARN | {"truncate": 1}}, "truncate", "1"),
        ({"rope_scaling": YARN | {"attention_factor": "1"}}, "attention_factor", "1"),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 0}}, "original_max_position_embeddings", "0"),
        ({"rope_scaling": YARN | {"factor": 1e5}}, "max_position_embeddings", "100000"),
        ({"rope_theta": 1, "rope_scaling": YARN}, "rope_theta", "1"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4}}, "original_max_position_embeddings", "None"),
        ({"partial_rotary_factor": 0.3, "head_dim": 10}, "partial_rotary_factor", "3 of 10"),
        ({"text_config": {**BASE, "hidden_size": 0}}, "text_config", "hidden_size"),
        ({"is_causal": False}, "is_causal", ""),
        ({"quantization_config": {"quant_method": "exl2"}}, "quantization_config.quant_method", "exl2"),
        ({"rms_norm_eps": 0}, "rms_norm_eps", "0"),
        ({"attention_bias": "yes"}, "attention_bias", "yes"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "use_sliding_window": True, "layer_types": ["x"]},
            "layer_types",
            "4",
        ),
    ],
)
def test_what_a_config_cannot_mean_is_named(keys: dict[str, Any], field: str, value: str) -> None:
    with pytest.raises(ModelError, match=r"config\.json") as error:
        parse(BASE | keys)
    assert field in str(error.value)
    assert value in str(error.value)


def test_overrides_replace_keys_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    assert read(tmp_path, '{"max_position_embeddings": 77, "num_hidden_layers": 1}').context_len == 77


NEW = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}, "dtype": "bfloat16"}
OLD = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5e5, "torch_dtype": "bfloat16"}


@pytest.mark.parametrize("file", [NEW, OLD])
@pytest.mark.parametrize(
    ("overrides", "theta", "rope"),
    [
        ({"rope_theta": 1e6}, 1e6, LinearRope(2.0)),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 5e5, LinearRope(4.0)),
        ({"rope_scaling": None}, 5e5, PlainRope()),
        ({"rope_theta": 1e6, "rope_scaling": {"rope_type": "default"}}, 1e6, PlainRope()),
        ({"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e4}}, 2e4, LinearRope(8.0)),
        ({"rope_parameters": {"rope_theta": 2e4}}, 2e4, PlainRope()),
        ({"rope_parameters": [1]}, None, "[1]"),
        ({"rope_scaling": 5}, None, "5"),
    ],
)
def test_overrides_count_in_either_spelling(
    tmp_path: Path, file: dict[str, Any], overrides: dict[str, Any], theta: float | None, rope: Any
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE | file))
    if theta is None:
        with pytest.raises(ModelError) as error:
            read(tmp_path, json.dumps(overrides))
        assert rope in str(error.value)
        return
    spec = read(tmp_path, json.dumps(overrides))
    assert (spec.ropes[0].theta, spec.ropes[0].scaling) == (theta, rope)


@pytest.mark.parametrize("file", [NEW, OLD])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_checkpoints_type_can_be_overridden_in_either_spelling(tmp_path: Path, file: dict[str, Any], key: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE | file))
    assert read(tmp_path, json.dumps({key: "float32"})).dtype == "float32"


def test_of_two_rope_settings_the_older_spelling_counts_as_in_transformers() -> None:
    assert parse(BASE | {"rope_scaling": OLD["rope_scaling"], "rope_parameters": {"rope_type": "default"}}).ropes[0].scaling == LinearRope(
        2.0
    )


def test_an_override_that_does_not_fit_is_told_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    with pytest.raises(ModelError, match=r"config\.json with --json-model-override-args: .*hidden_size.* -1"):
        read(tmp_path, '{"hidden_size": -1}')


KEYS = sorted({*BASE, *LLAMA3, "rope_theta", "rope_scaling", "rope_parameters", "dtype", "torch_dtype", "head_dim", "num_key_value_heads",
    "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias", "tie_word_embeddings", "sliding_window", "use_sliding_window",
    "max_window_layers", "layer_types", "partial_rotary_factor", "quantization_config", "type"})  # fmt: skip
WORDS = st.sampled_from(["llama3", "linear", "default", "silu", "full_attention", "sliding_attention", "bfloat16", *FAMILIES])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 300) | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=9) | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=8,
)


@given(changes=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4), architecture=st.sampled_from(sorted(FAMILIES)))
def test_any_config_gives_a_spec_with_weights_or_one_line_that_names_the_file(changes: dict[str, Any], architecture: str) -> None:
    found = outcome(lambda: parse(BASE | {"architectures": [architecture], **WINDOW, **changes}, "DIR/config.json"))
    if isinstance(found, ModelError):
        assert str(found).startswith("DIR/config.json: ")
        assert "\n" not in str(found)
    else:
        assert weights_of(found).elements() > 0
        assert len(found.windows) == len(found.layers)
        assert 1 <= found.context_len <= 1 << 24


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(content=st.binary(max_size=50) | st.builds(lambda value: json.dumps(value).encode(), VALUES))
def test_any_content_of_config_json_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    found = outcome(lambda: read(tmp_path))
    assert isinstance(found, ModelError)
    assert str(tmp_path / "config.json") in str(found)


def outcome(make: Callable[[], DecoderSpec]) -> DecoderSpec | ModelError:
    try:
        return make()
    except ModelError as error:
        return error


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_folder_that_holds_no_config_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read(tmp_path)
