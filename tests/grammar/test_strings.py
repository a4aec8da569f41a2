"""Strings of a schema, apart from its other values."""

from __future__ import annotations

from typing import Any

import pytest

from banyan_runtime.grammar.strings import strings_of, without_strings

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
    assert strings_of(schema) == strings
    assert without_strings(schema) == rest


@pytest.mark.parametrize(
    "schema",
    [
        {}, {"type": "string"}, {"type": ["string", "integer"]}, {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"anyOf": [{"const": "a"}, {"type": "string"}]}, {"$ref": "#/$defs/nobody"}, {"$ref": "#/$defs/R", **ROUND}, {"allOf": [{}]},
    ],
)  # fmt: skip
def test_others_too(schema: dict[str, Any]) -> None:
    assert strings_of(schema) is None
