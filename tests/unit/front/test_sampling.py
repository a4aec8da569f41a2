"""Sampling fields: their ranges, defaults in their order, seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError, ModelError
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.sampling import SamplingFields, SamplingParams, resolve
from banyan_runtime.front.text.defaults import GenerationDefaults

VOCABULARY = 100


def params(defaults: dict[str, float] | None = None, **fields: Any) -> SamplingParams:
    return resolve(SamplingFields(**fields), defaults or {}, frozenset({7}), VOCABULARY)


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("temperature", 3.0, "decimal_above_max_value"),
        ("temperature", -1, "decimal_below_min_value"),
        ("top_p", 0, "decimal_below_min_value"),
        ("top_p", 1.5, "decimal_above_max_value"),
        ("min_p", 2, "decimal_above_max_value"),
        ("presence_penalty", 3, "decimal_above_max_value"),
        ("frequency_penalty", -3, "decimal_below_min_value"),
        ("repetition_penalty", 0.0, "decimal_below_min_value"),
        ("max_tokens", 0, "integer_below_min_value"),
        ("n", 0, "integer_below_min_value"),
        ("n", 129, "integer_above_max_value"),
        ("stop", ["x"] * 33, "array_above_max_length"),
        ("stop", "", "empty_string"),
        ("stop_token_ids", [VOCABULARY], "invalid_value"),
        ("seed", 2**63, "invalid_value"),
        ("top_k", -2, "integer_below_min_value"),
    ],
)
def test_a_value_out_of_range_is_named(field: str, value: Any, code: str) -> None:
    with pytest.raises(ApiError) as raised:
        params(**{field: value})
    assert (raised.value.status, raised.value.code, raised.value.param) == (400, code, field)


def test_min_tokens_cannot_exceed_max_tokens() -> None:
    with pytest.raises(ApiError) as raised:
        params(min_tokens=4, max_tokens=3)
    assert raised.value.param == "min_tokens"


def test_a_request_wins_over_the_defaults_and_those_over_neutral() -> None:
    defaults = {"temperature": 0.7, "top_p": 0.8}
    values = params(defaults, temperature=0.0).values
    assert (values["temperature"], values["top_p"], values["min_p"], values["repetition_penalty"]) == (0.0, 0.8, 0.0, 1.0)


def test_top_k_of_zero_or_beyond_the_vocabulary_is_off() -> None:
    assert [params(top_k=value).values["top_k"] for value in (0, -1, VOCABULARY, 10**30, 5)] == [-1, -1, -1, -1, 5]


def test_the_end_of_text_stops_unless_ignored_and_own_stop_tokens_always_do() -> None:
    assert params(stop_token_ids=[3]).stop_token_ids == (3, 7)
    assert params(stop_token_ids=[3], ignore_eos=True).stop_token_ids == (3,)


def test_each_choice_has_a_seed_of_its_own_and_a_negative_seed_is_a_seed() -> None:
    seeds = [params(seed=seed).sampling(8, "id", 0, index).seed for seed in (-1, 41, 42) for index in range(3)]
    assert seeds[::3] == [2**64 - 1, 41, 42]
    assert len(set(seeds)) == 9
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert len({params().sampling(8, "id", 0, index).seed for index in range(4)}) == 4


def test_without_a_seed_requests_differ_and_the_servers_seed_matters() -> None:
    seeds = {params().sampling(8, request, server, 0).seed for request in ("a", "b") for server in (0, 1)}
    assert len(seeds) == 4
    assert params().sampling(8, "a", 0, 0) == params().sampling(8, "a", 0, 0)


def defaults(folder: Path, generation: dict[str, Any] | None, model: dict[str, Any] | None = None, **flags: Any) -> GenerationDefaults:
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "config.json").write_text(json.dumps(model or {}))
    return GenerationDefaults.load(ServerConfig(model_path=str(folder), **flags), folder, 2)


def test_the_models_own_defaults_fill_the_openai_routes_alone(tmp_path: Path) -> None:
    generation = {"temperature": 0.7, "top_k": 20, "max_length": 20, "eos_token_id": [5, 6], "do_sample": True}
    loaded = defaults(tmp_path, generation, preferred_sampling_params='{"top_k": 40, "presence_penalty": 1}')
    assert loaded.openai == {"temperature": 0.7, "top_k": 40, "presence_penalty": 1}
    assert loaded.native == {"top_k": 40, "presence_penalty": 1}
    assert loaded.eos_ids == {2, 5, 6}


def test_without_generation_config_the_end_token_of_the_model_counts(tmp_path: Path) -> None:
    assert defaults(tmp_path, None, {"eos_token_id": 9}).eos_ids == {2, 9}


def test_defaults_out_of_range_stop_the_start(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"generation_config.json: top_p is 7"):
        defaults(tmp_path, {"top_p": 7})
    with pytest.raises(ConfigError, match="typo"):
        defaults(tmp_path, {}, preferred_sampling_params='{"typo": 1}')
