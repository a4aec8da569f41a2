"""What a request asks for that is wrong or cannot be had, and in whose words that is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from banyan_runtime.config import ServerConfig
from banyan_runtime.front.prepare.planner import Planner
from tests.unit.front.planning import chat, completion, native, refused
from tests.unit.front.support import engine_info


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"reasoning_effort": "bogus"}, "reasoning_effort", "none, minimal, low, medium, high, xhigh, max"),
        ({"reasoning": {"effort": "bogus"}}, "reasoning.effort", "none, minimal"),
        ({"verbosity": "loud"}, "verbosity", "low, medium, high"),
        ({"service_tier": "bogus"}, "service_tier", "auto, default, flex, scale, priority"),
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
        ({"function_call": {"name": "f"}}, "function_call", "use tool_choice"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call", "use tool_calls"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role", "must be one of"),
        ({"stop_regex": "a+"}, "stop_regex", "use stop"),
        ({"guided_choice": ["a"]}, "guided_choice", "use structured_outputs"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "Unsupported parameter"),
        ({"web_search_options": {}}, "web_search_options", "Unsupported parameter"),
        ({"min_tokens": 10**30}, "min_tokens", "min_tokens must be at most"),
        ({"min_tokens": 6, "max_completion_tokens": 5}, "min_tokens", "at most max_completion_tokens=5, got 6"),
        ({"priority": 1001}, "priority", "priority must be in [-1000, 1000]"),
        ({"priority": -1001}, "priority", "priority must be in [-1000, 1000]"),
        ({"cache_salt": "s" * 1025}, "cache_salt", "at most 1024 characters"),
        ({"repetition_penalty": 1e-38}, "repetition_penalty", "must be in [0.01, 2]"),
        ({"stop": "s" * 1025}, "stop", "at most 1024 characters"),
        ({"stop_token_ids": [5] * 1025}, "stop_token_ids", "at most 1024 stop token ids"),
        ({"max_tokens": 10**50}, "max_tokens", "a number of more than 40 digits"),
        ({"rid": "a\nb"}, "rid", "printable"),
    ],
)
def test_what_is_wrong_or_cannot_be_had_is_refused_by_name(planner: Planner, body: dict[str, Any], param: str, message: str) -> None:
    error = refused(planner, "chat", **body)
    assert error.param == param
    assert message in error.message


@pytest.mark.parametrize(
    ("ours", "value", "message"),
    [
        ("top_p", 7, "{} must be in (0, 1], got 7."),
        ("n", 0, "{} must be at least 1, got 0."),
        ("max_tokens", -1, "{} must be at least "),
        ("min_tokens", -1, "{} must be at least 0, got -1."),
        ("seed", 2**63, "{} must be a 64-bit integer, got "),
        ("stop", "", "{} must not contain an empty string."),
    ],
)
def test_a_sampling_field_is_refused_in_the_same_words_everywhere_under_the_clients_name_for_it(
    planner: Planner, ours: str, value: Any, message: str
) -> None:
    natively = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}.get(ours, ours)
    for name, error in (
        (ours, refused(planner, "chat", **{ours: value})),
        (ours, refused(planner, "completions", **{ours: value})),
        (natively, refused(planner, "generate", text="a", sampling_params={natively: value})),
    ):
        assert (error.param, error.message[: len(message.format(name))]) == (name, message.format(name))
    if natively != ours:
        assert refused(planner, "generate", text="a", sampling_params={ours: 1}).code == "unknown_parameter"
        wrong = refused(planner, "generate", text="a", sampling_params={natively: "x"})
        assert (wrong.code, wrong.param) == ("invalid_type", f"sampling_params.{natively}")


def test_the_newer_word_of_chat_for_the_most_tokens_wins_and_is_the_one_in_errors(planner: Planner) -> None:
    assert chat(planner, max_tokens=0, max_completion_tokens=3).requests[0].sampling.max_new_tokens == 3
    error = refused(planner, "chat", max_tokens=9, max_completion_tokens=3, min_tokens=4)
    assert (error.param, error.message) == ("min_tokens", "min_tokens must be at most max_completion_tokens=3, got 4.")


def test_stop_tokens_must_leave_something_to_generate(tmp_path: Path, planner: Planner) -> None:
    config = ServerConfig(model_path="m")
    small = Planner(config, planner._served.text, engine_info(vocab_size=64))
    error = refused(small, "completions", prompt=[5], stop_token_ids=list(range(64)), min_tokens=1)
    assert (error.param, error.status) == ("stop_token_ids", 400)
    assert completion(small, prompt=[5], stop_token_ids=list(range(64))).requests


@pytest.mark.parametrize("temperature", [10**400, 1e308, 1e6 + 1])
def test_a_temperature_that_no_computer_can_divide_by_is_refused(planner: Planner, temperature: float) -> None:
    error = refused(planner, "generate", text="a", sampling_params={"temperature": temperature})
    assert (error.status, error.param) == (400, "temperature")
    assert native(planner, text="a", sampling_params={"temperature": 100}).requests


def test_min_tokens_beyond_the_default_length_are_refused(planner: Planner) -> None:
    assert "at most 16" in refused(planner, "completions", min_tokens=17).message
    assert refused(planner, "generate", text="a", sampling_params={"min_new_tokens": 129}).param == "min_new_tokens"
    assert completion(planner, min_tokens=16).requests[0].sampling.min_new_tokens == 16


def test_one_request_cannot_ask_for_thousands_of_sequences(planner: Planner) -> None:
    assert len(completion(planner, prompt=["a"] * 8, n=128).requests) == 1024
    assert refused(planner, "completions", prompt=["a"] * 9, n=128).param == "n"
    assert refused(planner, "generate", text=["a"] * 1024, sampling_params={"n": 2}).param == "n"


def test_the_stop_conditions_of_a_list_are_bounded_together(planner: Planner) -> None:
    each = {"stop": ["s" * 1000 + str(number) for number in range(32)]}
    assert native(planner, text=["a"] * 2, sampling_params=[each] * 2).requests
    assert refused(planner, "generate", text=["a"] * 3, sampling_params=[each] * 3).code == "array_above_max_length"
