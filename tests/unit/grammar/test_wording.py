"""Errors of grammars: one line each, with the field that is wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.prepare.constraints import Constraints
from banyan_runtime.grammar.trial import Trial
from tests.unit.grammar.walks import Language

SEVERAL = {"type": "object", "properties": {"a": {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]}}}
PRODUCT = {"allOf": [{"anyOf": [{"properties": {f"a{row}{at}": {}}, "required": [f"a{row}{at}"]} for at in range(6)]} for row in range(8)]}


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": value}}}


def tag(**content: Any) -> dict[str, Any]:
    return {"structural_tag": {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}}}


CASES: list[tuple[dict[str, Any], str]] = [
    (schema({"type": "string", "pattern": "("}), "unclosed group"),
    (schema({"type": "string", "pattern": r"\bword\b"}), r"\bword\b"),
    (schema({"type": "string", "pattern": "a", "format": "date"}), ""),
    (schema(SEVERAL), "oneOf"),
    (schema({"type": "string", "format": "regex"}), "format: regex"),
    (schema({"type": "number", "multipleOf": 0}), "'multipleOf' (0) at #"),
    (schema({"const": [2**53 + 1]}), "'const' ([9007199254740993]) at #"),
    (schema({"type": "integer", "minimum": 2**64}), "range"),
    (schema({"$ref": "#/nope"}), "'/nope'"),
    (schema(PRODUCT), ""),
    ({"regex": "(a)\\1"}, "backreferences are not supported"),
    ({"regex": "a(?=b)"}, "look-ahead"),
    ({"ebnf": 'start: "a" b\nb: foo'}, "at 2(4): unknown name"),
    ({"ebnf": "root ::= foo"}, "foo"),
    ({"ebnf": "start: <|foo|>"}, "<|foo|>"),
    (tag(type="regex", pattern="("), "unclosed group"),
    (tag(type="json_schema", json_schema=SEVERAL), "oneOf"),
]


@pytest.mark.parametrize(("fields", "words"), CASES)
def test_an_error_is_one_line_about_what_the_client_wrote(tiny: Language, fields: dict[str, Any], words: str) -> None:
    constraints = Constraints(Trial(tiny.backend, tiny.vocabulary.size))
    with pytest.raises(ApiError) as refusal:
        constraints.of(SimpleNamespace(**fields))
    message = refusal.value.message
    assert words in message
    assert refusal.value.param == next(iter(fields))
    assert "\n" not in message
    assert len(message) <= 300
    assert not any(ours in message for ours in ("x-guidance", "no_forcing", "<state>", "start: %json")), message
