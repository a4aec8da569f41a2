"""Errors of a response or a message of Anthropic's, which are found in the chat completion that it asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from banyan_runtime.front.anthropic.schema import MessagesRequest
from banyan_runtime.front.errors import ApiError, invalid
from banyan_runtime.front.openai.responses.items import messages_of
from banyan_runtime.front.parsing import parse
from banyan_runtime.front.plan import ChatPlan, Endpoint
from banyan_runtime.front.prepare.constraints import Constraints
from banyan_runtime.front.prepare.planner import Planner
from banyan_runtime.front.renaming import renamed
from tests.unit.front.planning import planner_of

CALL = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "x"}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": [{"type": "text", "text": "so"}, CALL, {**CALL, "id": "b"}]},
    {"role": "user", "content": [RESULT, {**RESULT, "tool_use_id": "b"}, {"type": "text", "text": "now?"}]},
    {"role": "assistant", "content": "Well"},
]
SEARCH = {"type": "web_search_20260209", "name": "web_search"}


@pytest.mark.parametrize("system", [None, "Be kind."])
@pytest.mark.parametrize(
    ("turn", "field", "ours"),
    [
        (0, "", "messages[0]"),
        (1, ".content", "messages[1].content"),
        (1, ".tool_calls[1].function.arguments", "messages[1].content[2].input"),
        (1, ".tool_calls[0].function.name", "messages[1].content[1].name"),
        (2, ".content", "messages[2].content[0].content"),
        (3, ".tool_call_id", "messages[2].content[1].tool_use_id"),
        (4, ".role", "messages[2].role"),
        (5, ".role", "messages[3].role"),
    ],
)
def test_each_turn_is_named_by_the_block_that_it_was_made_of(system: str | None, turn: int, field: str, ours: str) -> None:
    asked = parse(MessagesRequest, {"max_tokens": 1, "system": system, "messages": TALK})
    chats = f"messages[{turn + (system is not None)}]{field}"
    assert len(asked.chat()["messages"]) == 6 + (system is not None)
    told = renamed(invalid(chats, f"odd: '{chats}'"), asked.names())
    assert (told.param, told.message) == (ours, f"odd: '{ours}'")


def test_the_system_prompt_is_named_as_such() -> None:
    asked = parse(MessagesRequest, {"max_tokens": 1, "system": "Be kind.", "messages": TALK})
    assert renamed(invalid("messages[0].content", "messages[0].content is odd"), asked.names()).param == "system.content"


@pytest.mark.parametrize(
    ("chats", "ours"),
    [
        ("messages[1]", "input[0]"),
        ("messages[2].tool_calls[1].function.arguments", "input[3].arguments"),
        ("messages[2].content", "input[4].content"),
        ("messages[3].tool_call_id", "input[5].tool_call_id"),
        ("messages[3].content[1]", "input[5].output[1]"),
        ("messages[0].content", "messages[0].content"),
    ],
)
def test_each_turn_is_named_by_the_item_that_it_was_made_of(chats: str, ours: str) -> None:
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}
    said = {"role": "assistant", "content": "so"}
    items = [
        {"role": "user", "content": "Hello"}, {"type": "reasoning", "summary": []}, call, call, said,
        {"type": "function_call_output", "call_id": "a", "output": "x"},
    ]  # fmt: skip
    messages, names = messages_of(items, before=1)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert renamed(invalid(chats, "odd"), names).param == ours


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (invalid("tools[1].function.name", "'stop' is there twice."), "'stop' is there twice."),
        (invalid("regex", "Invalid regex in 'regex': no 'stop' before the response_format"), None),
        (invalid("stop", "stop must not be 'messages'. A stop stops."), "stop_sequences must not be 'messages'. A stop stops."),
        (invalid("stop", "'stop' and 'response_format' exclude each other", beside=["response_format"]),
         "'stop_sequences' and 'output_config.format' exclude each other"),
    ],
)  # fmt: skip
def test_what_a_client_or_a_library_wrote_stays_as_it_is(error: ApiError, message: str | None) -> None:
    asked = parse(MessagesRequest, {"max_tokens": 1, "messages": TALK})
    assert renamed(error, [*asked.names(), ("messages", "input")]).message == (message or error.message)


@pytest.mark.parametrize(
    ("endpoint", "body", "prompt", "constraint"),
    [
        ("responses", {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}}, "input", "text.format"),
        ("responses", {"input": "x", "regex": "a"}, "input", "regex"),
        ("messages", {"messages": TALK, "max_tokens": 5, "output_config": {"format": {"type": "json_schema", "schema": {}}}}, "messages",
         "output_config.format"),
    ],
)  # fmt: skip
def test_what_the_engine_may_find_wrong_is_known_by_the_field_that_the_client_wrote(
    tiny_chat: Path, endpoint: Endpoint, body: dict[str, Any], prompt: str, constraint: str
) -> None:
    known = b'{"id":"resp_1"}\n' if endpoint == "responses" else b""
    made = planner_of(tiny_chat, Constraints.load(tiny_chat, (2,))).plan(endpoint, known + json.dumps(body).encode(), "request")
    assert isinstance(made, ChatPlan)
    (one,) = made.requests
    assert one.constraint is not None
    assert (one.param, one.constraint.param) == (prompt, constraint)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [SEARCH, {"name": "a b", "input_schema": {}}]}, "tools[1].name"),
        ({"tools": [{"name": "f", "input_schema": {}}, SEARCH, {"name": "f", "input_schema": {}}]}, "tools[2].name"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 33}, "stop_sequences"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ],
)
def test_a_message_that_is_refused_names_its_own_fields(planner: Planner, options: dict[str, Any], param: str) -> None:
    body = {"max_tokens": 5, "system": "Be kind.", "messages": TALK, **options}
    with pytest.raises(ApiError) as refused:
        planner.plan("messages", json.dumps(body).encode(), "request")
    assert refused.value.param == param
    assert ".function" not in refused.value.message


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"input": [{"role": "clown", "content": "x"}], "instructions": "Hi"}, "input[0].role", "'input[0].role'"),
        ({"max_output_tokens": 100_000}, "max_output_tokens", "100000"),
        ({"min_tokens": 7, "max_output_tokens": 5}, "min_tokens", "max_output_tokens"),
        ({"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function"}]}},
         "tool_choice.tools[0].name", "'tool_choice.tools[0].name'"),
        ({"regex": "a", "text": {"format": {"type": "json_object"}}}, "regex", "'text.format'"),
    ],
)  # fmt: skip
def test_a_response_that_is_refused_names_its_own_fields(planner: Planner, options: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ApiError) as refused:
        planner.plan("responses", b'{"id":"resp_1"}\n' + json.dumps({"input": "Hello", **options}).encode(), "request")
    assert refused.value.param == param
    assert words in refused.value.message
