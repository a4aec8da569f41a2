"""Errors of grammars are about what the client wrote, in words that a client knows."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.prepare.constraints import Constraints
from banyan_runtime.grammar.trial import Trial
from tests.unit.grammar.walks import Language

INTERNAL = re.compile(
    r"llguidance|guidance|coerce_one_of|no_forcing|forcing|whitespace_flexible|start: |\bat \d+\(\d+\)|f64|SearchRegex|\(And |registry|"
    r"Parser Error|\bfuel\b|\bin row\b|<state>|Exception|panicked|\w+::\w+\(",
    re.IGNORECASE,
)
SEVERAL = {"type": "object", "properties": {"a": {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]}}}
PRODUCT = {"allOf": [{"anyOf": [{"properties": {f"a{row}{at}": {}}, "required": [f"a{row}{at}"]} for at in range(6)]} for row in range(8)]}


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": value}}}


def tag(**content: Any) -> dict[str, Any]:
    return {"structural_tag": {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}}}


CASES: list[tuple[dict[str, Any], str]] = [
    (schema({"type": "string", "pattern": "("}), "the regex '(': unclosed group"),
    (schema({"type": "string", "pattern": "(" + "x" * 900}), "xxx…': unclosed group"),
    (
        schema({"type": "string", "pattern": r"\bword\b"}),
        r"the regex '\bword\b': ",
    ),
    (schema({"type": "string", "pattern": "a", "format": "date"}), "'pattern', 'format'"),
    (schema(SEVERAL), "'oneOf' at #/properties/a"),
    (schema({"type": "string", "format": "regex"}), "'format' regex "),
    (schema({"type": "number", "multipleOf": 0}), "'multipleOf' (0) at #"),
    (schema({"type": "number", "minimum": "3"}), "'minimum' (\"3\") at #"),
    (schema({"const": [2**53 + 1]}), "'const' ([9007199254740993]) at #"),
    (schema({"properties": {"a": {"enum": ["b", 0.1234567890123456]}}}), "at #/properties/a"),
    (
        schema({"type": "integer", "minimum": 2**64}),
        "'minimum' (18446744073709551616) at #",
    ),
    (schema({"type": "integer", "minimum": -(10**30), "maximum": -(10**29)}), "'maximum' (-100000000000000000000000000000) at #"),
    (schema({"type": "number", "minimum": 10**18}), "bounds"),
    (schema({"$schema": "http://y"}), "'http://y'"),
    (schema({"$ref": "#/nope"}), "'$ref' points to '#/nope'"),
    (schema({"enum": []}), "'enum' ([]) at #"),
    (schema(PRODUCT), "too complex"),
    ({"regex": "(a)\\1"}, "the regex '(a)\\1': backreferences are not supported"),
    ({"regex": "a(?=b)"}, "the regex 'a(?=b)': look-around, including look-ahead and look-behind, is not supported"),
    ({"regex": "(" * 500 + "a" + ")" * 500}, "…': exceed the maximum number of nested parentheses"),
    ({"ebnf": 'start: "a" b\nb: foo'}, 'line 2: unknown name: "foo"'),
    ({"ebnf": "root ::= foo"}, "Rule 'foo' not found"),
    ({"ebnf": "root ::= [z-a]"}, "the regex '[z-a]': invalid character class range"),
    ({"ebnf": "start: <|foo|>"}, 'line 1: unknown special token: "<|foo|>"'),
    (tag(type="regex", pattern="("), "the regex '(': unclosed group"),
    (tag(type="json_schema", json_schema={"type": "string", "pattern": "("}), "the regex '(': unclosed group"),
    (tag(type="json_schema", json_schema=SEVERAL), "'oneOf' at #/properties/a"),
]


@pytest.mark.parametrize(("fields", "words"), CASES)
def test_an_error_is_one_line_in_the_words_of_the_client(tiny: Language, fields: dict[str, Any], words: str) -> None:
    constraints = Constraints(Trial(tiny.backend, tiny.vocabulary.size))
    with pytest.raises(ApiError) as refusal:
        constraints.of(SimpleNamespace(**fields))
    message = refusal.value.message
    assert words in message
    assert refusal.value.param == next(iter(fields))
    assert "\n" not in message
    assert len(message) <= 300
    assert INTERNAL.search(message) is None, message
