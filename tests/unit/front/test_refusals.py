"""What each API refuses: the status, the code and the name of the field that is wrong, as clients of that API write it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.openai.responses.references import Before
from banyan_runtime.front.plan import Endpoint
from banyan_runtime.front.prepare.planner import Planner
from tests.unit.front.planning import USER, planner_of

CITY: Final[dict[str, Any]] = {"properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}}, "required": ["city"]}
SHAPE: Final = "response_format.json_schema"


@pytest.fixture(scope="module")
def planner(tiny_chat: Path) -> Planner:
    return planner_of(tiny_chat, reasoning_parser="qwen3")


def shape(**more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, **more}}


def refusal(planner: Planner, endpoint: Endpoint, body: dict[str, Any]) -> ApiError:
    """The refusal of a request, which is the same for a whole answer and a stream."""
    before = msgspec.json.encode(Before(id="resp_1")) + b"\n" if endpoint == "responses" else b""
    errors = []
    for streaming in (False, True):
        with pytest.raises(ApiError) as raised:
            planner.plan(endpoint, before + json.dumps({**body, "stream": streaming}).encode(), "request")
        errors.append(raised.value)
    assert errors[0].message == errors[1].message
    return errors[0]


@pytest.mark.parametrize(
    ("endpoint", "body", "param", "code"),
    [
        ("chat", {}, "messages", "missing_required_parameter"),
        ("chat", {"messages": [{"content": "a"}]}, "messages[0].role", "missing_required_parameter"),
        ("chat", {"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ("chat", {"messages": []}, "messages", "empty_array"),
        ("chat", {"messages": "hi"}, "messages", "invalid_type"),
        ("chat", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
        ("chat", {"messages": USER, "temperature": "hot"}, "temperature", "invalid_type"),
        ("chat", {"messages": USER, "stop": ["a", 1]}, "stop[1]", "invalid_type"),
        ("chat", {"messages": USER, "n": True}, "n", "invalid_type"),
        ("chat", {"messages": USER, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid_type"),
        ("chat", {"messages": USER, "user": {}}, "user", "invalid_type"),
        ("chat", {"messages": USER, "prediction": 5}, "prediction", "invalid_type"),
        ("chat", {"messages": USER, "safety_identifier": 5}, "safety_identifier", "invalid_type"),
        ("chat", {"messages": USER, "prompt_cache_key": 5}, "prompt_cache_key", "invalid_type"),
        ("chat", {"messages": USER, "metadata": {"a": {"b": 1}}}, "metadata.a", "invalid_type"),
        ("chat", {"messages": USER, "response_format": shape(strict="yes")}, f"{SHAPE}.strict", "invalid_type"),
        ("chat", {"messages": USER, "response_format": shape(name="bad name!")}, f"{SHAPE}.name", "invalid_value"),
        ("chat", {"messages": USER, "response_format": shape(name="a" * 65)}, f"{SHAPE}.name", "invalid_value"),
        ("chat", {"messages": USER, "temperature": 3.0}, "temperature", "decimal_above_max_value"),
        ("chat", {"messages": USER, "max_tokens": 0}, "max_tokens", "integer_below_min_value"),
        ("chat", {"messages": USER, "top_logprobs": 1}, "top_logprobs", "invalid_value"),
        ("chat", {"messages": USER, "tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        ("chat", {"messages": USER, "tool_choice": "required"}, "tool_choice", "invalid_value"),
        ("chat", {"messages": USER, "ebnf": "a", "regex": "a+"}, "ebnf", "invalid_value"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "unsupported_content"),
        ("chat", {"messages": USER, "max_tokens": 5000}, "max_tokens", "context_length_exceeded"),
        ("chat", {"messages": [{"role": "user", "content": "word " * 3000}]}, "messages", "context_length_exceeded"),
        ("chat", {"messages": USER, "n": 0}, "n", "integer_below_min_value"),
        ("chat", {"messages": USER, "n": 129}, "n", "integer_above_max_value"),
        ("chat", {"messages": USER, "top_p": 0}, "top_p", "decimal_below_min_value"),
        ("chat", {"messages": USER, "temperature": -0.1}, "temperature", "decimal_below_min_value"),
        ("chat", {"messages": USER, "presence_penalty": 3}, "presence_penalty", "decimal_above_max_value"),
        ("chat", {"messages": USER, "frequency_penalty": -3}, "frequency_penalty", "decimal_below_min_value"),
        ("chat", {"messages": USER, "max_completion_tokens": 0}, "max_completion_tokens", "integer_below_min_value"),
        ("chat", {"messages": USER, "stop": ["x"] * 33}, "stop", "array_above_max_length"),
        ("chat", {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
        ("chat", {"messages": USER * 2049}, "messages", "array_above_max_length"),
        ("completions", {"prompt": "a", "user": 5}, "user", "invalid_type"),
        ("completions", {}, "prompt", "missing_required_parameter"),
        ("completions", {"prompt": ""}, "prompt", "empty_array"),
        ("completions", {"prompt": []}, "prompt", "empty_array"),
        ("completions", {"prompt": [1, 99999]}, "prompt", "invalid_value"),
        ("completions", {"prompt": [1, "a"]}, "prompt", "invalid_type"),
        ("completions", {"prompt": "a", "logprobs": 21}, "logprobs", "integer_above_max_value"),
        ("completions", {"prompt": "a", "suffix": "b"}, "suffix", "unsupported"),
        ("generate", {}, "text", "missing_required_parameter"),
        ("generate", {"input_ids": []}, "input_ids", "empty_array"),
        ("generate", {"text": "a", "sampling_params": {"tempature": 1}}, "sampling_params", "unknown_parameter"),
        ("generate", {"text": "a", "sampling_params": {"top_k": "x"}}, "sampling_params.top_k", "invalid_type"),
    ],
)
def test_a_bad_request_is_told_which_field_is_wrong_and_how(
    planner: Planner, endpoint: Endpoint, body: dict[str, Any], param: str, code: str
) -> None:
    error = refusal(planner, endpoint, body)
    assert (error.status, error.param, error.code) == (400, param, code)


TOOL: Final[dict[str, Any]] = {"name": "get_weather", "description": "The weather.", "input_schema": CITY}


@pytest.mark.parametrize(
    ("options", "param", "code"),
    [
        ({"messages": []}, "messages", "empty_array"),
        ({"messages": [{"role": "clown", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]", "unsupported_content"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text", "invalid_type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
            "messages[0].content[0].tool_use_id",
            "missing_required_parameter",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": "{}"}]}]},
            "messages[0].content[0].input",
            "invalid_type",
        ),
        ({"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
        ({"max_tokens": None}, "max_tokens", "missing_required_parameter"),
        ({"max_tokens": 5000}, "max_tokens", "context_length_exceeded"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type", "invalid_value"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens", "invalid_value"),
        ({"thinking": {"type": "enabled", "budget_tokens": "5"}}, "thinking.budget_tokens", "invalid_type"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema", "invalid_type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type", "unsupported"),
        ({"tools": [TOOL, {"type": "text_editor_20250728", "name": "x"}]}, "tools[1].type", "unsupported"),
        ({"tools": [{"type": "computer_20251124", "name": "computer"}]}, "tools[0].type", "unsupported"),
        ({"tools": [{"type": "memory_20250818", "name": "memory"}]}, "tools[0].type", "unsupported"),
        ({"messages": [{"role": "user", "content": "Hi"}], "thread": {"type": "create"}}, "thread", "thread_unsupported_request"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name", "invalid_value"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice", "invalid_value"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name", "missing_required_parameter"),
        ({"tools": [TOOL], "tool_choice": {"type": "maybe"}}, "tool_choice.type", "invalid_value"),
        ({"stop_sequences": ["x"] * 33}, "stop_sequences", "array_above_max_length"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort", "invalid_value"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type", "unsupported"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "strin"}}}},
            "output_config.format",
            "invalid_json_schema",
        ),
        ({"temperature": 3}, "temperature", "decimal_above_max_value"),
    ],
)
def test_messages_name_what_is_wrong_as_the_request_does(planner: Planner, options: dict[str, Any], param: str, code: str) -> None:
    error = refusal(planner, "messages", {"model": "tiny", "messages": USER, "max_tokens": 256, **options})
    assert (error.status, error.param, error.code) == (400, param, code)
    assert "function.name" not in error.message


FUNCTION: Final[dict[str, Any]] = {"type": "function", "name": "get_weather", "parameters": CITY}
CALL: Final = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}


@pytest.mark.parametrize(
    ("options", "param", "code"),
    [
        ({"input": []}, "input", "empty_array"),
        ({"input": ["x"]}, "input", "invalid_type"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "invalid_type"),
        ({"input": [{"role": "clown", "content": "x"}], "instructions": "Hi"}, "input[0].role", "invalid_value"),
        (
            {"input": [{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "input_text"}]}], "instructions": "Hi"},
            "input[1].content[0].text",
            "invalid_type",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input", "unsupported_content"),
        (
            {"input": [{"type": "reasoning", "summary": []}, {**CALL, "arguments": "{}"}, {**CALL, "arguments": 5}]},
            "input[2].arguments",
            "invalid_type",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output", "missing_required_parameter"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id", "missing_required_parameter"),
        ({"input": [{"type": "item_search_call", "id": "x"}]}, "input[0].type", "unsupported"),
        ({"tools": [{"type": "web_search"}, {"type": "computer_use_preview"}]}, "tools[1].type", "unsupported"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "invalid_value"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "invalid_value"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "strin"}}}}, "text.format", "invalid_json_schema"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity", "invalid_value"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "invalid_value"),
        ({"conversation": "c"}, "conversation", "unsupported"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "unsupported"),
        ({"stop_regex": "a+"}, "stop_regex", "unsupported"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported"),
        ({"truncation": "sometimes"}, "truncation", "invalid_value"),
        ({"truncation": "auto", "input": "Hello " * 5000}, "input", "context_length_exceeded"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata", "object_above_max_properties"),
        ({"metadata": {"k" * 65: "v"}}, "metadata", "invalid_value"),
        ({"metadata": {"k": "v" * 513}}, "metadata", "invalid_value"),
        ({"metadata": {"k": 1}}, "metadata.k", "invalid_type"),
        ({"background": True, "store": False}, "background", "invalid_value"),
        ({"max_output_tokens": 0}, "max_output_tokens", "integer_below_min_value"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "context_length_exceeded"),
        ({"top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
        ({"temperature": 3}, "temperature", "decimal_above_max_value"),
        ({"model": "x"}, "model", "model_not_found"),
    ],
)
def test_responses_name_what_is_wrong_as_the_request_does(planner: Planner, options: dict[str, Any], param: str, code: str) -> None:
    error = refusal(planner, "responses", {"model": "tiny", "input": "Hello", **options})
    assert (error.status, error.param, error.code) == (404 if param == "model" else 400, param, code)
    assert "messages" not in error.message
    assert "function.name" not in error.message
