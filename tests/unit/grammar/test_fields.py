"""The fields of a request that hold its output to a grammar, in OpenAI's, SGLang's and vLLM's spelling."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.prepare.constraints import Asked, Constraints, asked_of
from banyan_runtime.grammar.trial import Trial
from banyan_runtime.wire import Constraint, Grammar
from tests.unit.grammar.walks import Language

PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"], "additionalProperties": False}
TEXT = json.dumps(PERSON, separators=(",", ":"))
SCHEMA = Grammar("json_schema", TEXT)
NOTHING = Grammar("json_schema", '{"type":"object","additionalProperties":false}')
TAG = {"structures": [{"begin": "<f>", "schema": PERSON, "end": "</f>"}], "triggers": ["<f"]}


FORMAT = "response_format"
OUTPUTS = "structured_outputs"
MISSING = "missing_required_parameter"


def asking(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**fields)


def grammar_of(request: SimpleNamespace) -> Grammar:
    found = asked_of(request)
    assert found is not None
    return found.grammar


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None, "regex": "", "ebnf": None, "json_schema": False},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False}},
    ],
)
def test_most_requests_ask_for_nothing(fields: dict[str, Any]) -> None:
    assert asked_of(asking(**fields)) is None


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "json_object"}}, Grammar("json_object", "")),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}}, SCHEMA),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}}, SCHEMA),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": PERSON, "strict": False}}}, SCHEMA),
        ({"response_format": {"type": "json_object", "schema": PERSON}}, SCHEMA),
        ({"response_format": {"type": "json_object", "schema": {}}}, Grammar("json_object", "")),
        ({"response_format": {"type": "json_object", "schema": None}}, Grammar("json_object", "")),
        ({"json_schema": PERSON}, SCHEMA),
        ({"json_schema": TEXT}, SCHEMA),
        ({"structured_outputs": {"json": PERSON}}, SCHEMA),
        ({"structured_outputs": {"json": TEXT, "disable_any_whitespace": True}}, Grammar("json_schema", TEXT, "none")),
        ({"structured_outputs": {"json": {"type": "object"}, "disable_additional_properties": True}}, NOTHING),
        ({"structured_outputs": {"json": '{"type":"object"}', "disable_additional_properties": True}}, NOTHING),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object", "")),
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["b", "a", "b"]}}, Grammar("choice", '["b","a"]')),
        ({"ebnf": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Grammar("ebnf", 'root ::= "a"')),
    ],
)
def test_every_spelling_makes_a_grammar(fields: dict[str, Any], grammar: Grammar) -> None:
    assert grammar_of(asking(**fields)) == grammar


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "structural_tag", **TAG}},
        {"structural_tag": TAG},
        {"structural_tag": json.dumps(TAG)},
        {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
        {"structural_tag": {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [
            {"begin": "<f>", "content": {"type": "json_schema", "json_schema": PERSON}, "end": "</f>"}]}}},
    ],
)  # fmt: skip
def test_both_forms_of_structural_tags_make_the_same_grammar(fields: dict[str, Any]) -> None:
    grammar = grammar_of(asking(**fields))
    assert grammar == grammar_of(asking(structural_tag=TAG))
    assert grammar.kind == "structural_tag"


@pytest.mark.parametrize(
    ("fields", "param", "code", "message"),
    [
        ({"regex": "a", "ebnf": "b"}, "ebnf", "invalid_value", "'regex' and 'ebnf' exclude each other"),
        ({FORMAT: {"type": "json_object"}, "regex": "a"}, "regex", "invalid_value", "'response_format' and 'regex' exclude"),
        ({OUTPUTS: {"json": {}, "regex": "a"}}, OUTPUTS, "invalid_value", "'structured_outputs.regex' exclude"),
        ({FORMAT: 7}, FORMAT, "invalid_type", "object"),
        ({FORMAT: {}}, "response_format.type", MISSING, "response_format.type"),
        ({FORMAT: {"type": "yaml"}}, "response_format.type", "invalid_value", "text, json_object"),
        ({FORMAT: {"type": "json_schema"}}, "response_format.json_schema", MISSING, "Missing"),
        ({FORMAT: {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema", MISSING, "Missing"),
        (
            {FORMAT: {"type": "json_schema", "json_schema": {"name": "p", "schema": {"items": {"not": {}}}}}},
            FORMAT, "invalid_json_schema", "response_format 'p': 'not' ({}) at #/items ",
        ),
        (
            {FORMAT: {"type": "json_object", "schema": {"items": {"not": {}}}}},
            FORMAT, "invalid_json_schema", "response_format: 'not' ({}) at #/items ",
        ),
        ({FORMAT: {"type": "json_object", "schema": 7}}, FORMAT, "invalid_json_schema", "JSON object"),
        ({FORMAT: {"type": "json_object", "schema": "{"}}, FORMAT, "invalid_json_schema", "response_format"),
        ({"json_schema": "{"}, "json_schema", "invalid_json_schema", "json_schema"),
        ({"json_schema": 7}, "json_schema", "invalid_json_schema", "JSON object"),
        ({"regex": ["a"]}, "regex", "invalid_type", "string"),
        ({"regex": "a" * 3000}, "regex", "invalid_grammar", "'regex': the regex has 3000 bytes"),
        ({"ebnf": "|" * 20_000}, "ebnf", "invalid_grammar", "it has 20001 alternatives"),
        ({"ebnf": "a\0"}, "ebnf", "invalid_grammar", "NUL"),
        ({OUTPUTS: {"choice": "a"}}, "structured_outputs.choice", "invalid_type", "array of strings"),
        ({OUTPUTS: {"choice": []}}, "structured_outputs.choice", "invalid_grammar", "structured_outputs.choice"),
        ({"structural_tag": {}}, "structural_tag", "invalid_grammar", "'structures'"),
        ({OUTPUTS: {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", "unsupported", "bounded"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_the_field(fields: dict[str, Any], param: str, code: str, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        asked_of(asking(**fields))
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)
    assert message in caught.value.message


def test_a_grammar_that_does_not_compile_is_refused_where_it_was_asked_for(tiny: Language) -> None:
    constraints = Constraints(Trial(tiny.backend, tiny.vocabulary.size))
    with pytest.raises(ApiError) as caught:
        constraints.of(asking(response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": {"$ref": "#/nope"}}}))
    assert caught.value.code == "invalid_json_schema"
    assert caught.value.param == "response_format"
    assert "'/nope'" in caught.value.message
    with pytest.raises(ApiError) as caught:
        constraints.of(asking(regex="(?=a)"))
    assert (caught.value.code, caught.value.param) == ("invalid_grammar", "regex")
    assert constraints.of(asking(json_schema=PERSON)) == Constraint(SCHEMA, param="json_schema")
    with pytest.raises(ApiError, match="tools"):
        constraints.check(Asked(Grammar("json_schema", '{"type":"foo"}'), "tools"))


def test_without_a_backend_what_asks_for_a_grammar_is_refused() -> None:
    with pytest.raises(ApiError) as caught:
        Constraints(None, "this model has no tokenizer.json").of(asking(regex="a"))
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "unsupported", "regex")
    assert "this model has no tokenizer.json" in caught.value.message
    assert Constraints(None).of(asking()) is None
