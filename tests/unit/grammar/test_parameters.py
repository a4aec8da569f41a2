"""Parameters in text: all that a schema says of them holds, or it is refused."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from banyan_runtime.front.chat.tools.format import ToolFormat
from banyan_runtime.front.chat.tools.tags import TextArguments, filled
from banyan_runtime.front.chat.tools.typed import Parameters
from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.parameters import Shape, parameters_of
from tests.unit.grammar.test_texts import by_form, grammar_of, parameters, read, takes
from tests.unit.grammar.walks import Language

NUMBER = {"type": "integer"}
SHORT = {"type": "string", "maxLength": 2}
NODE = {"type": "object", "properties": {"v": NUMBER, "n": {"$ref": "#"}}, "required": ["v"]}


def called(form: ToolFormat, *values: tuple[str, str]) -> str:
    assert form.tag is not None
    assert isinstance(form.tag.arguments, TextArguments)
    arguments = form.tag.arguments
    body = "".join(filled(arguments.begin, name) + text + arguments.end for name, text in values)
    return form.tag.begin_of("f") + body + form.tag.end


@pytest.mark.parametrize(
    ("schema", "properties", "required", "others"),
    [
        ({}, {}, set(), {}),
        ({"type": "object", "additionalProperties": False}, {}, set(), None),
        ({"additionalProperties": SHORT}, {}, set(), SHORT),
        ({"properties": {"a": NUMBER}, "additionalProperties": SHORT}, {"a": NUMBER}, set(), None),
        ({"properties": {"a": NUMBER, "b": True, "c": False}, "required": ["b"]}, {"a": NUMBER, "b": {}}, {"b"}, None),
        ({"required": ["a"], "additionalProperties": SHORT}, {"a": SHORT}, {"a"}, None),
        ({"properties": {"a": NUMBER}, "required": ["b", "a"]}, {"a": NUMBER, "b": {}}, {"a", "b"}, None),
        ({"type": ["object", "null"], "properties": {"a": NUMBER}}, {"a": NUMBER}, set(), None),
    ],
)
def test_an_object_is_its_parameters(schema: dict[str, Any], properties: dict[str, Any], required: set[str], others: Any) -> None:
    assert parameters_of(schema) == Shape(properties, frozenset(required), others)


@pytest.mark.parametrize(
    ("schema", "start"),
    [
        ({"type": "string"}, "'type' (\"string\") at #"),
        ({"anyOf": [{"required": ["a"]}]}, '\'anyOf\' ([{"required":["a"]}]) at #'),
        ({"allOf": [{}]}, "'allOf' ([{}]) at #"),
        ({"enum": [{"a": 1}]}, "'enum' ([{\"a\":1}]) at #"),
        ({"const": {}}, "'const' ({}) at #"),
        ({"patternProperties": {"^x": {}}}, "'patternProperties' ({\"^x\":{}}) at #"),
        (
            {"properties": {"a": NUMBER}, "required": ["zzz"], "additionalProperties": False},
            "'required' ([\"zzz\"]) at #",
        ),
        (
            {"properties": {"a": False}, "required": ["a"]},
            "'required' ([\"a\"]) at #",
        ),
        ({"minProperties": 1}, "'minProperties' (1) at #"),
        ({"maxProperties": 3}, "'maxProperties' (3) at #"),
        ({"$ref": "#"}, "'$ref' (\"#\") at #"),
        ({"$ref": "#/$defs/x"}, "'$ref' (\"#/$defs/x\") at #"),
    ],
)
@by_form
def test_what_is_said_of_all_parameters_together_is_refused(form: ToolFormat, schema: dict[str, Any], start: str) -> None:
    with pytest.raises(GrammarError) as caught:
        grammar_of(form, schema)
    assert str(caught.value).startswith(f"{start} ")


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (NODE, [[("v", "7")], [("v", "7"), ("n", '{"v": 8}')]], [[], [("v", "x")], [("v", "7"), ("n", '{"v": "x"}')]]),
        ({"type": "object", "additionalProperties": NUMBER}, [[], [("a", "7"), ("b", "8")]], [[("a", "x")]]),
        ({"type": "object", "additionalProperties": SHORT}, [[("a", "7"), ("b", "tr")]], [[("a", "abc")]]),
        ({"type": "object", "required": ["q"], "additionalProperties": SHORT}, [[("q", "7")]], [[], [("a", "7")], [("q", "abc")]]),
        ({"type": "object", "properties": {"a": NUMBER, "b": False}}, [[("a", "7")], []], [[("b", "7")]]),
    ],
)
@by_form
def test_parameters_are_what_the_schema_says(
    tiny: Language, form: ToolFormat, schema: dict[str, Any], good: list[list[tuple[str, str]]], bad: list[list[tuple[str, str]]]
) -> None:
    grammar = grammar_of(form, schema)
    for values in good:
        assert tiny.takes(grammar, called(form, *values)), values
        jsonschema.validate(read(form, schema, called(form, *values)) if values else {}, schema)
    for values in bad:
        assert not tiny.takes(grammar, called(form, *values)), values


@pytest.mark.parametrize(
    "value",
    [
        {"enum": ["1", "2", 3]},
        {"enum": ["null", "x"], "type": ["string", "null"]},
        {"enum": ["true", False]},
        {"enum": ["1", True]},
        {"enum": ["1", 1.0]},
        {"enum": ["[1]", [2]]},
        {"enum": ["{}", {"a": 1}]},
        {"anyOf": [{"const": "5"}, {"type": "integer", "minimum": 100, "maximum": 101}]},
    ],
)
@by_form
def test_a_listed_text_is_read_as_something_that_is_listed(tiny: Language, form: ToolFormat, value: dict[str, Any]) -> None:
    for text in ("1", "2", "3", "5", "100", "null", "x", "true", "false", "[1]", "[2]", "{}", '{"a": 1}'):
        if takes(tiny, form, value, text):
            found = read(form, parameters(value), called(form, ("v", text)))
            jsonschema.validate(found, parameters(value))
    listed = [text for text in value.get("enum", ["5"]) if isinstance(text, str)]
    assert all(takes(tiny, form, value, text) for text in listed)


@by_form
def test_of_parameters_of_one_name_the_first_counts(form: ToolFormat) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "n": NUMBER, "o": {"type": "object"}}}
    output = called(form, ("a", "x"), ("n", "1"), ("a", "second"), ("n", "2"), ("o", '{"k": 1}'), ("o", "{}"))
    parser = form.parser({"f": schema})
    for pieces in ([output], list(output)):
        parser = form.parser({"f": schema})
        events = [*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()]
        text = "".join(getattr(event, "fragment", "") for event in events)
        assert json.loads(text, object_pairs_hook=list) == [("a", "x"), ("n", 1), ("o", [("k", 1)])]


@pytest.mark.parametrize(
    ("reference", "good"),
    [("#/$defs/A%20B", True), ("#/$defs/A~1B", True), ("#/properties/w/anyOf/1", True), ("#/properties/w", False), ("#foo", None)],
)
@by_form
def test_references_are_pointers(tiny: Language, form: ToolFormat, reference: str, good: bool | None) -> None:
    schema = {
        "type": "object", "properties": {"v": {"$ref": reference}, "w": {"anyOf": [{"type": "boolean"}, NUMBER]}}, "required": ["v"],
        "$defs": {"A B": NUMBER, "A/B": NUMBER, "C": {"$anchor": "foo", "type": "integer"}},
    }  # fmt: skip
    if good is None:
        with pytest.raises(GrammarError, match=r"'\$ref' .* at #/properties/v "):
            tiny.backend.compile(grammar_of(form, schema))
        return
    assert tiny.takes(grammar_of(form, schema), called(form, ("v", "7")))
    assert tiny.takes(grammar_of(form, schema), called(form, ("v", "true"))) != good
    assert read(form, schema, called(form, ("v", "7"))) == {"v": 7}


@by_form
def test_a_value_that_refers_to_the_whole_is_held_to_the_whole(tiny: Language, form: ToolFormat) -> None:
    """As zod writes trees, and a schema that occurs twice."""
    tree = {"type": "object", "properties": {"v": NUMBER, "c": {"type": "array", "items": {"$ref": "#"}}}, "required": ["v"]}
    assert tiny.takes(grammar_of(form, tree), called(form, ("v", "1"), ("c", '[{"v": 1, "c": [{"v": 2}]}]')))
    assert not tiny.takes(grammar_of(form, tree), called(form, ("v", "1"), ("c", "[[]]")))
    twice = {"type": "object", "properties": {"a": {"type": "array", "items": NUMBER}, "b": {"$ref": "#/properties/a"}}}
    assert tiny.takes(grammar_of(form, twice), called(form, ("b", "[1]")))
    assert not tiny.takes(grammar_of(form, twice), called(form, ("b", '["x"]')))


@by_form
def test_oneof_admits_texts_of_lists_that_do_not_overlap(tiny: Language, form: ToolFormat) -> None:
    value = {"oneOf": [{"const": "a"}, {"enum": ["b", "c"]}, {"type": "null"}]}
    assert [text for text in ("a", "b", "c", "d", "null") if takes(tiny, form, value, text)] == ["a", "b", "c", "null"]


def test_others_are_read_by_their_own_schema() -> None:
    known = Parameters({"properties": {"n": NUMBER, "any": True}, "additionalProperties": {"type": "string"}})
    assert [known.json(name, "7") for name in ("n", "any", "other")] == ["7", "7", '"7"']
    assert [known.is_text(name) for name in ("n", "any", "other")] == [False, False, True]
