"""Grammars of tool calls: forced ones, and those that a trigger in free text begins."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from banyan_runtime.front.chat.events import ToolArgs
from banyan_runtime.front.chat.tools.llama3 import LLAMA3
from banyan_runtime.front.chat.tools.registry import find
from banyan_runtime.front.openai.tools import Tool
from banyan_runtime.front.prepare.forced import Leniency, forced, strict
from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.tags import NUMBER, Answer, Call, json_arguments, text_arguments
from banyan_runtime.wire import Grammar
from tests.unit.grammar.walks import Language

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
HERMES = Answer(
    [
        Call(('<tool_call>\n{"name": "get_weather", "arguments": ',), json_arguments(WEATHER), "}\n</tool_call>"),
        Call(('<tool_call>\n{"name": "now", "arguments": ',), json_arguments(None), "}\n</tool_call>"),
    ],
    separator="\n",
)
ROME = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {"whatever": [1]}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        (ROME, True),
        (f"{ROME}\n{NOW}", True),
        ("It is sunny.", False),
        (ROME.replace("get_weather", "get_whether"), False),
        (ROME.replace('"Rome"', "7"), False),
        (NOW.replace('{"whatever": [1]}', "7"), False),
    ],
)
def test_forced_calls_are_calls_and_nothing_else(qwen3: Language, text: str, fits: bool) -> None:
    assert qwen3.takes(HERMES.forced(), text) == fits


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("It is sunny <b>now</b>.", True),
        (f"Let me see.\n{ROME}\n{NOW}", True),
        (ROME.replace('"Rome"', "7"), False),
    ],
)
def test_a_trigger_in_free_text_begins_a_call(qwen3: Language, text: str, fits: bool) -> None:
    assert qwen3.takes(HERMES.triggered("<tool_call>"), text) == fits


def test_markers_that_are_tokens_come_as_these_tokens_alone(qwen3: Language) -> None:
    start = qwen3.vocabulary.added["<tool_call>"]
    assert qwen3.admitted(qwen3.matcher(HERMES.forced())).tolist() == [start]
    free = qwen3.matcher(HERMES.triggered("<tool_call>"))
    assert start in qwen3.admitted(free)
    for token_id in qwen3.ids("<tool") + qwen3.ids("_call"):  # as plain text it calls nothing, and may be said
        assert free.accept(token_id)
    assert qwen3.eos in qwen3.admitted(free)


def test_only_one_call_where_no_more_are_allowed(qwen3: Language) -> None:
    one = Answer(HERMES.calls, separator="\n", several=False)
    assert qwen3.takes(one.forced(), ROME)
    assert not qwen3.takes(one.forced(), f"{ROME}\n{NOW}")
    assert qwen3.takes(one.triggered("<tool_call>"), f"Well.\n{ROME}")
    assert not qwen3.takes(one.triggered("<tool_call>"), f"{ROME}\n{NOW}")


def test_calls_or_json(qwen3: Language) -> None:
    either = HERMES.or_json(Grammar("json_schema", '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'))
    assert qwen3.takes(either, '{"a": 1}')
    assert qwen3.takes(either, NOW)
    assert not qwen3.takes(either, '{"a": "x"}')


def test_parameters_are_text_between_tags(qwen3: Language) -> None:
    style = ("<parameter=", ">\n", "\n</parameter>\n")
    end = "</function>\n</tool_call>"
    answer = Answer(
        [
            Call(("<tool_call>\n<function=get_weather>\n",), text_arguments(WEATHER, *style), end),
            Call(("<tool_call>\n<function=now>\n",), text_arguments(None, *style), end),
        ]
    )
    called = f"<tool_call>\n<function=get_weather>\n<parameter=city>\nNew </York>\n</parameter>\n<parameter=days>\n2\n</parameter>\n{end}"
    assert qwen3.takes(answer.forced(), called)
    assert qwen3.takes(answer.triggered("<tool_call>"), f"Aha.\n{called}")
    assert not qwen3.takes(answer.forced(), called.replace("\n2\n", "\ntwo\n"))
    assert qwen3.takes(answer.forced(), f"<tool_call>\n<function=now>\n<parameter=q>\n<x\n</parameter>\n{end}")
    assert qwen3.takes(answer.forced(), f"<tool_call>\n<function=now>\n{end}")


TEXTS: dict[str, dict[str, Any]] = {
    "Optional[str]": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    "a list of types": {"type": ["string", "null"]},
    "Literal": {"const": "abc", "type": "string"},
    "Optional[Literal]": {"anyOf": [{"enum": ["abc", "d"], "type": "string"}, {"type": "null"}]},
    "an Enum": {"$ref": "#/$defs/Colour"},
    "an Enum with words": {"allOf": [{"$ref": "#/$defs/Colour"}], "description": "which"},
    "int | str": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    "a mixed enum": {"enum": ["abc", 1]},
}


@pytest.mark.parametrize("form", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_is_forced_is_what_is_read_of_it(tiny: Language, form: str, name: str) -> None:
    """Strings stand bare where parameters are text, whatever the schema says beside: with quotes they would be read with them."""
    schema = {
        "type": "object", "properties": {"v": TEXTS[name]}, "required": ["v"],
        "$defs": {"Colour": {"enum": ["abc", "blue"], "type": "string"}},
    }  # fmt: skip
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}})
    found = find(form)
    grammar = forced(found.tag, [tool], several=True, leniency=Leniency(lambda grammar: True)).forced()

    def read(text: str) -> str | None:
        """The arguments; None: the grammar lets nobody say that."""
        begin = "".join(part if isinstance(part, str) else "v" for part in found.tag.arguments.begin)
        call = f"{found.tag.begin_of('f')}{begin}{text}{found.tag.arguments.end}{found.tag.end}"
        if not tiny.takes(grammar, call):
            return None
        parser = found.parser({"f": schema})
        return "".join(event.fragment for event in [*parser.feed(call), *parser.finish()] if isinstance(event, ToolArgs))

    def value(text: str) -> Any:
        arguments = read(text)
        return None if arguments is None else json.loads(arguments)

    assert value("abc") == {"v": "abc"}
    others = {"Optional[str]": None, "a list of types": None, "Optional[Literal]": None, "int | str": 7, "a mixed enum": 1}
    if name in others:
        assert value(json.dumps(others[name])) == {"v": others[name]}
    if "str" not in name and name != "a list of types":
        assert (value('"abc"'), value("ab"), value("7")) == (None, None, None)


def test_separators_stand_between_parameters_alone(tiny: Language) -> None:
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in "abc"}, "required": ["b"]}
    grammar = Answer([Call(("f(",), text_arguments(schema, "", "=", ";", ","), ")")]).forced()
    for text in ("f(b=1;)", "f(a=1;,b=2;)", "f(b=1;,c=2;)", "f(a=1;,b=2;,c=3;)"):
        assert tiny.takes(grammar, text), text
    for text in ("f()", "f(,b=1;)", "f(a=1;)", "f(b=1;,)", "f(b=1;c=2;)"):
        assert not tiny.takes(grammar, text), text


def test_sections_hold_several_numbered_calls(tiny: Language) -> None:
    answer = Answer(
        [Call(("<begin>functions.get:", NUMBER, "<arg>"), json_arguments(WEATHER), "<end>")], opening="<section>", closing="</section>"
    )
    call = '<begin>functions.get:12<arg>{"city": "Rome"}<end>'
    section = f"<section>{call}{call}</section>"
    assert tiny.takes(answer.forced(), section)
    assert not tiny.takes(answer.forced(), call)
    for trigger in ("<section>", "<section><begin>"):
        assert tiny.takes(answer.triggered(trigger), f"Well: {section} and so on"), trigger
        assert not tiny.takes(answer.triggered(trigger), "<section><begin>functions.put:1")


@pytest.mark.parametrize(
    "schema", [{"properties": {"a": {"type": "integer"}}}, {"type": ["object", "null"]}, {"description": "Any."}, {}, None]
)
def test_arguments_are_an_object_where_the_schema_leaves_it_open(tiny: Language, schema: dict[str, Any] | None) -> None:
    grammar = Answer([Call(("f",), json_arguments(schema), "")]).forced()
    assert tiny.takes(grammar, 'f{"a": 1}')
    assert [text for text in ("null", "[1]", '"a"', "1") if tiny.takes(grammar, f"f{text}")] == []


def test_arguments_that_cannot_be_enforced_are_refused() -> None:
    with pytest.raises(GrammarError, match="'uniqueItems'"):
        Answer([Call(("f",), json_arguments({"type": "array", "uniqueItems": True}), "")]).forced()


LLAMA = '{"name": "get_weather", "parameters": {"city": "Rome"}}'


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        (LLAMA, True),
        (f"{LLAMA}; {LLAMA}", True),
        (LLAMA.replace('"Rome"', "7"), False),
        ("Say {it}: " + LLAMA.replace('"Rome"', "7"), True),  # the parser takes it for text
        ('{"answer": 42}', True),
        ('\n{ "names": []}', True),
        ('{"type": 42}', False),
        ("", True),
        (f"<tool_call>{LLAMA}", True),
        (f"Well. <tool_call>{LLAMA}", True),
        ("Well. <tool_call>" + LLAMA.replace('"Rome"', "7"), False),
    ],
)
def test_calls_that_nothing_marks_stand_at_the_beginning(qwen3: Language, text: str, fits: bool) -> None:
    tag = LLAMA3.tag
    assert tag is not None
    tool = Tool.model_validate({"function": {"name": "get_weather", "parameters": WEATHER, "strict": True}})
    marked = dataclasses.replace(tag, marker="<tool_call>")  # the one that this vocabulary has
    grammar = strict(marked, [tool], qwen3.vocabulary.added, several=True)
    assert grammar is not None
    assert qwen3.takes(grammar, text) == fits


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("parameters", [None, {"type": "object", "properties": {}}, {"properties": {}, "required": [], "title": "Now"}])
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_a_tool_that_has_no_parameters_is_given_none(tiny: Language, name: str, parameters: dict[str, Any] | None, strict: bool) -> None:
    form = find(name)
    assert form is not None
    assert form.tag is not None
    tool = Tool.model_validate({"type": "function", "function": {"name": "now", "strict": strict, "parameters": parameters}})
    grammar = forced(form.tag, [tool], several=False, leniency=Leniency(lambda grammar: True)).forced()
    free = Tool.model_validate({"type": "function", "function": {"name": "now", "strict": strict, "parameters": {"type": "object"}}})
    any_grammar = forced(form.tag, [free], several=False, leniency=Leniency(lambda grammar: True)).forced()
    if name == "hermes":
        empty, one = (f'<tool_call>\n{{"name": "now", "arguments": {said}}}\n</tool_call>' for said in ("{}", '{"a": 1}'))
    else:
        begin, end = "<tool_call>\n<function=now>\n", "</function>\n</tool_call>"
        empty, one = begin + end, f"{begin}<parameter=a>\n1\n</parameter>\n{end}"

    def takes(grammar: Grammar, text: str) -> bool:
        """By `accept` alone: where all that follows is decided masks admit but one token for it."""
        matcher = tiny.matcher(grammar)
        return all(matcher.accept(token) for token in tiny.ids(text)) and matcher.is_completed

    assert [takes(grammar, text) for text in (empty, one)] == [True, False]
    assert [takes(any_grammar, text) for text in (empty, one)] == [True, True]


def test_a_tool_that_requires_what_it_does_not_name_is_given_it(tiny: Language) -> None:
    form = find("hermes")
    assert form is not None
    assert form.tag is not None
    parameters = {"type": "object", "properties": {}, "required": ["a"]}
    tool = Tool.model_validate({"type": "function", "function": {"name": "now", "parameters": parameters}})
    grammar = forced(form.tag, [tool], several=False, leniency=Leniency(lambda grammar: True)).forced()
    assert tiny.takes(grammar, '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>')
