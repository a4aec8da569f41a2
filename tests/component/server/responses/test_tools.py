"""Tools that are no plain functions, through the real client: what their calls are told as, and how their conversations go on."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import openai

from tests.component.server.responses.conftest import CITY, WEATHER, ask, lasting, stream
from tests.support.server.process import MODEL, ServerProcess

CODE: Final[dict[str, Any]] = {
    "type": "custom", "name": "code", "description": "Takes a code.",
    "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]{3}-[a-c]{2}"},
}  # fmt: skip
SPACE: Final[dict[str, Any]] = {
    "type": "namespace", "name": "sky", "description": "About the sky.",
    "tools": [{"type": "function", "name": "get_weather", "parameters": CITY}],
}  # fmt: skip
FORCED: Final[dict[str, Any]] = {"reasoning": {"effort": "none"}, "tools": [CODE, SPACE, {"type": "web_search"}]}


def test_a_tool_of_free_text_is_called_with_text_and_its_conversation_goes_on(client: openai.OpenAI) -> None:
    options = {**FORCED, "tool_choice": {"type": "custom", "name": "code"}}
    first = ask(client, WEATHER, **options)
    (call,) = first.output
    assert (call.type, call.name, call.status) == ("custom_tool_call", "code", "completed")  # type: ignore[union-attr]
    assert re.fullmatch("[0-9]{3}-[a-c]{2}", call.input)  # type: ignore[union-attr]
    events = stream(client, WEATHER, **options)
    assert lasting(events[-1].response) == lasting(first)
    middle = [event for event in events if event.type.startswith("response.custom_tool_call_input.")]
    assert "".join(event.delta for event in middle[:-1]) == middle[-1].input == call.input  # type: ignore[union-attr]
    result: list[Any] = [{"type": "custom_tool_call_output", "call_id": call.call_id, "output": "fine"}]  # type: ignore[union-attr]
    whole: list[Any] = [{"role": "user", "content": WEATHER}, call.model_dump(), *result]
    chained = ask(client, result, tools=[CODE], previous_response_id=first.id)
    assert chained.status == "completed"
    assert lasting(chained.output) == lasting(ask(client, whole, tools=[CODE]).output)
    stored = [item.type for item in client.responses.input_items.list(chained.id)]
    assert stored == ["custom_tool_call_output"]


def test_a_call_in_a_namespace_is_told_with_it(client: openai.OpenAI) -> None:
    response = ask(client, WEATHER, **FORCED, tool_choice={"type": "function", "name": "get_weather", "namespace": "sky"})
    (call,) = response.output
    assert (call.type, call.name, call.namespace) == ("function_call", "get_weather", "sky")  # type: ignore[union-attr]
    assert set(json.loads(call.arguments)) == {"city"}  # type: ignore[union-attr]


def test_what_servers_of_openai_would_run_is_named(server: ServerProcess) -> None:
    body = {"model": MODEL, "input": [{"role": "user", "content": "Hi"}, {"type": "compaction", "encrypted_content": "x"}]}
    answer = server.post("/v1/responses", {**body, **FORCED, "tool_choice": "none", "max_output_tokens": 2})
    assert answer.status_code == 200
    assert answer.headers["x-banyan-ignored"] == "tools[2], input[1]"
