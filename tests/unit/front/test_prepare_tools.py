"""Tools and functions that a request brings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from banyan_runtime.front.answers import ignored
from banyan_runtime.front.openai.responses.references import Before
from banyan_runtime.front.plan import AnswerPlan, ChatPlan, Endpoint
from banyan_runtime.front.prepare.constraints import Constraints
from banyan_runtime.front.prepare.planner import Planner
from tests.unit.front.planning import USER, chat, plan, planner_of, refused
from tests.unit.front.support import CHATML


@pytest.mark.parametrize(
    ("schema", "at"),
    [
        ({"type": "nope"}, "'type'"),
        ({"properties": {"many": {"anyOf": [{}] * 20_001}}}, "20000"),
        ({"properties": {"many": {"enum": [1] * 20_001}}}, "20000"),
        ({"type": "array", "items": {}}, '"array"'),
        ({"type": ["string", "null"]}, '["string","null"]'),
        ({"type": [["object"]]}, "'type'"),
        ({"type": "object", "properties": []}, "'properties'"),
        ({"type": "object", "properties": {"city": "string"}}, "'properties.city'"),
        ({"type": "object", "properties": {"city": {"type": "str"}}}, "'properties.city.type'"),
        ({"type": "object", "properties": {"city": {"type": "string", "required": True}}}, "'properties.city.required'"),
        ({"properties": {"many": {"items": {"anyOf": [{"type": "number"}, {"enum": []}]}}}}, "'properties.many.items.anyOf[1].enum'"),
        ({"$defs": {"a": {"items": [{"type": "x"}]}}}, "'$defs.a.items[0].type'"),
    ],
)  # fmt: skip
def test_a_tool_whose_parameters_are_no_schema_is_refused_whether_or_not_it_may_be_called(
    planner: Planner, schema: dict[str, Any], at: str
) -> None:
    error = refused(planner, "chat", tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}], tool_choice="none")
    assert (error.code, error.param) == ("invalid_function_parameters", "tools[0].function.parameters")
    assert "'f'" in error.message
    assert at in error.message


@pytest.mark.parametrize(
    "schema",
    [
        {},
        None,
        {"properties": {"a": {}}},
        {"type": "object"},
        {
            "type": ["object", "null"],
            "properties": {"a": True, "type": {"type": "string"}, "required": {"enum": ["x", None]}},
            "required": [],
        },
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"const": 1}}, "additionalProperties": False},
        {"type": "object", "properties": {"a": {"type": "array", "items": [{"type": "string"}], "x-order": [1], "default": {"type": "y"}}}},
    ],
)
def test_a_tool_may_have_any_schema_for_its_parameters(planner: Planner, schema: dict[str, Any]) -> None:
    chat(planner, tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}], tool_choice="none")


EASY = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
AT_FAULT: list[tuple[dict[str, Any], str]] = [
    ({"type": "object", "properties": {"a": {"not": {}}}}, "#/properties/a"),  # found as it is read
    ({"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}, "regex"),  # as it is compiled
]


@pytest.mark.parametrize(("parameters", "reason"), AT_FAULT)
@pytest.mark.parametrize(
    "more",
    [{"tool_choice": "required"}, {"tool_choice": "auto"}, {"response_format": {"type": "json_object"}}],
    ids=["required", "auto", "json"],
)
def test_of_several_tools_the_one_at_fault_is_named(tiny_chat: Path, parameters: dict[str, Any], reason: str, more: dict[str, Any]) -> None:
    constrained = planner_of(tiny_chat, Constraints.load(tiny_chat, [2]), tool_call_parser="hermes")
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema, strict in (("loose", parameters, False), ("fine", EASY, True), ("wrong", parameters, True))
    ]
    error = refused(constrained, "chat", tools=tools, **more)
    assert (error.code, error.param) == ("invalid_json_schema", "tools[2].function.parameters")
    assert "'wrong'" in error.message
    assert reason in error.message
    chat(constrained, tools=tools[:2], **more)


NOW: dict[str, Any] = {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}}
TOOL: dict[str, Any] = {"type": "function", "function": NOW}
DOCUMENT = {"title": "a", "text": "b"}


@pytest.mark.parametrize(
    ("body", "ignored"),
    [
        ({"tools": [TOOL]}, ("tools",)),
        ({"tools": [TOOL], "tool_choice": "required"}, ("tools",)),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "now"}}}, ("tools",)),
        ({"tools": [TOOL], "tool_choice": "none"}, ()),  # as it was asked for
        ({"documents": [DOCUMENT]}, ("documents",)),
        ({"tools": [TOOL], "documents": [DOCUMENT], "nonsense": 1}, ("tools", "documents", "nonsense")),
        ({"tools": [], "documents": []}, ()),
    ],
)
def test_what_the_template_does_not_show_the_model_is_named_as_ignored(
    tiny_chat: Path, body: dict[str, Any], ignored: tuple[str, ...]
) -> None:
    blind = planner_of(tiny_chat, Constraints.load(tiny_chat, [2]), chat_template=CHATML, tool_call_parser="hermes")
    made = chat(blind, **body)
    assert made.envelope.ignored == ignored
    assert (made.requests[0].constraint is None) == (made.requests[0].tools is None or not made.requests[0].tools.required)
    sighted = "{{ tools }}{{ documents }}" + CHATML
    seeing = planner_of(tiny_chat, Constraints.load(tiny_chat, [2]), chat_template=sighted, tool_call_parser="hermes")
    assert set(chat(seeing, **body).envelope.ignored) <= {"nonsense"}


def test_every_endpoint_with_tools_names_those_that_are_not_shown(tiny_chat: Path) -> None:
    blind = planner_of(tiny_chat, chat_template=CHATML)
    theirs = {"name": "now", "input_schema": {"type": "object"}}
    search = {"type": "web_search_20250305", "name": "web_search"}  # run by nobody here

    def ignored(endpoint: Endpoint, body: dict[str, Any]) -> tuple[str, ...]:
        if endpoint in ("responses", "input_tokens"):
            given = msgspec.json.encode(Before(id="resp_1")) + b"\n" + msgspec.json.encode(body)
            made = blind.plan(endpoint, given, "r")
        else:
            made = plan(blind, endpoint, body)
        assert isinstance(made, ChatPlan | AnswerPlan)
        return made.ignored if isinstance(made, AnswerPlan) else made.envelope.ignored

    assert ignored("messages", {"messages": USER, "max_tokens": 5, "tools": [theirs, search]}) == ("tools", "tools[1]")
    assert ignored("messages", {"messages": USER, "max_tokens": 5, "tools": [search]}) == ("tools[0]",)
    assert ignored("count_tokens", {"messages": USER, "tools": [theirs]}) == ("tools",)
    responses: tuple[Endpoint, ...] = ("responses", "input_tokens")
    for endpoint in responses:
        asked = {"input": "Hi", "tools": [{"type": "function", **NOW}], "documents": [DOCUMENT], "nonsense": 1}
        assert ignored(endpoint, asked) == ("tools", "documents", "nonsense")
    assert ignored("tokenize", {"messages": USER, "tools": [TOOL], "nonsense": 1}) == ("tools", "nonsense")


def test_of_very_many_fields_without_effect_the_first_are_named() -> None:
    """Proxies pass on headers of 4 or 8 KB, all of them together."""
    (value,) = ignored([f"tools[{index}].function.parameters" for index in range(128)]).values()
    assert value.startswith("tools[0].function.parameters, tools[1].")
    assert len(value) < 2000
