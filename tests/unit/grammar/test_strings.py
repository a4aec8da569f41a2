"""Strings of a schema, apart from its other values."""

from __future__ import annotations

from typing import Any

import pytest

from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.strings import ANY, Both, Either, Length, Listed, Pattern, Rule, kinds_of, rule_of, without_strings

SHORT = Length(0, 5)

COLOURS = {"$defs": {"C": {"enum": ["red", "blue"], "type": "string"}, "N": {"anyOf": [{"$ref": "#/$defs/C"}, {"type": "null"}]}}}
ROUND = {"$defs": {"R": {"anyOf": [{"const": "x"}, {"$ref": "#/$defs/R"}]}}}


@pytest.mark.parametrize(
    ("schema", "strings", "rest"),
    [
        ({"type": "integer"}, [], {"type": "integer"}),
        ({"enum": ["a", "b"]}, ["a", "b"], None),
        ({"enum": ["a", 1, None]}, ["a"], {"enum": [1, None]}),
        ({"const": "a", "type": "string"}, ["a"], None),
        ({"const": 1}, [], {"const": 1}),
        ({"type": ["string", "null"], "enum": ["a", None]}, ["a"], {"type": ["null"], "enum": [None]}),
        ({"anyOf": [{"enum": ["a"]}, {"type": "null"}]}, ["a"], {"anyOf": [{"type": "null"}]}),
        ({"anyOf": [{"const": "a"}, {"const": "b"}, {"const": "a"}]}, ["a", "b"], None),
        ({"allOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c", 1]}]}, ["b"], None),
        ({"allOf": [{"type": "string"}, {"enum": ["a"]}]}, ["a"], None),
        ({"$ref": "#/$defs/C", **COLOURS}, ["red", "blue"], None),
        ({"allOf": [{"$ref": "#/$defs/C"}], "description": "d", **COLOURS}, ["red", "blue"], None),
        ({"$ref": "#/$defs/N", **COLOURS}, ["red", "blue"], {"anyOf": [{"type": "null"}], **COLOURS}),
    ],
)
def test_strings_that_are_listed(schema: dict[str, Any], strings: list[str], rest: dict[str, Any] | None) -> None:
    assert rule_of(schema) == Listed(tuple(strings))
    assert without_strings(schema) == rest


@pytest.mark.parametrize(
    "schema",
    [
        {}, {"type": "string"}, {"type": ["string", "integer"]}, {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"anyOf": [{"const": "a"}, {"type": "string"}]}, {"$ref": "#/$defs/R", **ROUND}, {"allOf": [{}]},
    ],
)  # fmt: skip
def test_others_too(schema: dict[str, Any]) -> None:
    assert rule_of(schema) == ANY


@pytest.mark.parametrize(
    ("schema", "rule"),
    [
        ({"type": "string", "maxLength": 5}, SHORT),
        ({"minLength": 2}, Length(2, None)),
        ({"type": ["string", "null"], "minLength": 2, "maxLength": 5, "pattern": "a"}, Both((Length(2, 5), Pattern("a")))),
        ({"anyOf": [{"type": "string", "maxLength": 5}, {"type": "integer", "pattern": "a"}]}, SHORT),
        ({"anyOf": [{"type": "string", "maxLength": 5}, {"enum": ["abc", 1]}, {"const": "d"}]}, Either((Listed(("abc", "d")), SHORT))),
        ({"allOf": [{"type": "string"}, {"maxLength": 5}, {"pattern": "a"}]}, Both((SHORT, Pattern("a")))),
        ({"enum": ["abc", 1], "maxLength": 5}, Both((Listed(("abc",)), SHORT))),
        ({"$ref": "#/$defs/S", "$defs": {"S": {"type": "string", "maxLength": 5}}}, SHORT),
    ],
)
def test_rules(schema: dict[str, Any], rule: Rule) -> None:
    assert rule_of(schema) == rule


def test_what_points_nowhere_is_no_rule() -> None:
    with pytest.raises(GrammarError, match=r"'\$ref' .* at #/properties/a "):
        rule_of({"$ref": "#/$defs/nobody"}, {}, "#/properties/a")


def test_kinds_are_those_that_are_named_anywhere() -> None:
    assert kinds_of({"anyOf": [{"$ref": "#/$defs/C"}, {"enum": [1, None]}, {"type": ["boolean", "string"]}], **COLOURS}) == {
        "string", "integer", "null", "boolean",
    }  # fmt: skip
    assert kinds_of({"minLength": 2}) == set()
