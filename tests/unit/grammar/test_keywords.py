"""Whatever stands behind a keyword of a schema, it is compiled or refused with its name, as JSON and as parameters in text."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from banyan_runtime.front.chat.tools.typed import Parameters
from banyan_runtime.grammar import schema
from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.tags import Answer, Call, json_arguments, text_arguments
from banyan_runtime.wire import Grammar
from tests.unit.grammar.walks import Language

KEYWORDS = (
    "type", "enum", "const", "format", "pattern", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf", "properties", "required", "additionalProperties", "minProperties", "maxProperties", "patternProperties", "items",
    "prefixItems", "additionalItems", "minItems", "maxItems", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions", "$anchor", "$id",
    "$schema", "title", "description", "default", "nullable", "uniqueItems", "propertyNames", "x-guidance",
)  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 5.0, 0.5, -0.5, 1e300, 2**31, 2**33, 2**70, 10**400, "", "a", "date", "string", "#", "#a", "^a$",
    [], {}, [1], ["a"], ["string"], ["string", 5], [["a"]], [{}], [None], {"a": 1}, {"a": {}}, {"a": []}, {"a": True}, {"^a": False},
)  # fmt: skip


def odd(keyword: str) -> Iterator[dict[str, Any]]:
    for value in ODD:
        yield {keyword: value}
        for kind in ("string", "integer", "array", "object", ["string", "null"]):
            if keyword != "type":
                yield {"type": kind, keyword: value}


@pytest.mark.matrix(gate=3)
@pytest.mark.parametrize("keyword", KEYWORDS)
def test_any_value_of_a_keyword_is_compiled_or_refused(tiny: Language, keyword: str) -> None:
    for part in odd(keyword):
        whole = {"type": "object", "properties": {"a": part}, "required": ["a"]}
        for given in (part, whole):
            Parameters(given).json("a", "1")
            for arguments in (text_arguments(given, "<", ">", "</>"), json_arguments(given)):
                try:
                    grammar = Answer([Call(("f",), arguments, "!")]).forced()
                except GrammarError:
                    continue
                with contextlib.suppress(GrammarError):
                    tiny.backend.compile(grammar)


def refusal(value: dict[str, Any]) -> str:
    with pytest.raises(GrammarError) as caught:
        schema.prepare({"type": "object", "properties": {"a": value}})
    return str(caught.value)


@pytest.mark.parametrize(
    ("value", "start"),
    [
        ({"format": ["a"]}, '\'format\' (["a"]) at #/properties/a'),
        ({"format": {}}, "'format' ({}) at #/properties/a"),
        ({"pattern": 5}, "'pattern' (5) at #/properties/a"),
        ({"required": "a"}, '\'required\' ("a") at #/properties/a'),
        ({"enum": {}}, "'enum' ({}) at #/properties/a"),
        ({"anyOf": []}, "'anyOf' ([]) at #/properties/a"),
        (
            {"type": ["string", 5]},
            '\'type\' (["string",5]) at #/properties/a',
        ),
        ({"minimum": "5"}, '\'minimum\' ("5") at #/properties/a'),
        ({"minLength": 2.5}, "'minLength' (2.5) at #/properties/a"),
        ({"minLength": True}, "'minLength' (true) at #/properties/a"),
        ({"minLength": 9, "maxLength": 5}, "'minLength' (9) at #/properties/a"),
        ({"minItems": 3, "maxItems": 2}, "'minItems' (3) at #/properties/a"),
        (
            {"minLength": 2**31},
            "'minLength' (2147483648) at #/properties/a",
        ),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_its_place_and_what_it_should_be(value: dict[str, Any], start: str) -> None:
    assert refusal(value).startswith(f"{start} ")


def test_counts_are_integers_and_those_that_no_output_reaches_say_nothing() -> None:
    value = {"type": "string", "minLength": 5.0, "maxLength": 2**40}
    assert json.loads(schema.prepare(value)) == {"type": "string", "minLength": 5}
    assert json.loads(schema.prepare({"type": "array", "maxItems": 2**32 + 1})) == {"type": "array"}


def test_a_length_is_held_however_it_is_written(tiny: Language) -> None:
    grammar = Grammar("json_schema", schema.prepare({"type": "string", "minLength": 2.0, "maxLength": 2**40}))
    assert tiny.takes(grammar, '"ab"')
    assert not tiny.takes(grammar, '"a"')


def test_a_number_of_a_parameter_in_text_is_named_with_its_place(tiny: Language) -> None:
    value = {"type": "object", "properties": {"a": {"type": "integer", "enum": [2**53 + 1]}}}
    with pytest.raises(GrammarError, match=r"'enum' .* at #/properties/a "):
        tiny.backend.compile(Answer([Call(("f",), text_arguments(value, "<", ">", "</>"), "!")]).forced())
