"""Of a schema that cannot be enforced as a whole the rest is, and what fits the schema fits that."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

import jsonschema
import pytest

from banyan_runtime.front.prepare import forced
from banyan_runtime.front.prepare.forced import Leniency
from banyan_runtime.grammar import schema as schemas
from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.loosened import loosened
from banyan_runtime.wire import Grammar
from tests.unit.grammar.walks import Language

CITY = {"type": "string", "maxLength": 5}
AHEAD = "(?=a)a"  # no backend enforces a look-ahead


def object_of(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required or [*properties], "additionalProperties": False}


@pytest.mark.parametrize(
    ("hard", "left"),
    [
        ({"not": {"type": "string"}}, {}),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, {"type": "array", "items": {"type": "integer"}}),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, {"anyOf": [{"type": "integer"}, {"type": "number"}]}),
        (object_of(a={"not": {}}, b=CITY), object_of(a={}, b=CITY)),
        ({"type": "array", "items": {"contains": {}, "type": "null"}}, {"type": "array", "items": {"type": "null"}}),
        ({"type": "array", "uniqueItems": True, "contains": {}, "minItems": 2}, {"type": "array", "minItems": 2}),
        ({"prefixItems": [CITY], "items": False, "uniqueItems": True}, {"prefixItems": [CITY], "items": False}),
        ({"title": "Of cities", "$ref": "#/properties/city", "not": {}}, {"$ref": "#/properties/city"}),
        ({"$ref": "elsewhere.json", "maxLength": 3}, {"maxLength": 3}),
    ],
)  # fmt: skip
def test_what_keeps_a_schema_from_being_enforced_is_left_out_alone(tiny: Language, hard: dict[str, Any], left: dict[str, Any]) -> None:
    whole = object_of(city=CITY, hard=hard)
    before = copy.deepcopy(whole)
    assert loosened(whole, fits(tiny)) == object_of(city=CITY, hard=left)
    assert whole == before
    assert loosened({**object_of(city=CITY), "not": {}}, fits(tiny)) == object_of(city=CITY)


@pytest.mark.parametrize(
    ("hard", "left"),
    [
        ({"type": "string", "pattern": AHEAD, "maxLength": 3}, {"type": "string"}),
        ({"type": "integer", "minimum": 2, "maximum": 1}, {"type": "integer"}),
        ({"anyOf": [{"type": "string", "pattern": AHEAD}, {"type": "null"}]}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        ({"allOf": [{"type": "string"}, {"pattern": AHEAD}]}, {}),
    ],
)
def test_where_a_keyword_cannot_be_compiled_the_shape_is_left(tiny: Language, hard: dict[str, Any], left: dict[str, Any]) -> None:
    assert loosened(object_of(city=CITY, hard=hard), fits(tiny)) == object_of(city={"type": "string"}, hard=left)


def fits(language: Language) -> Any:
    def fit(schema: schemas.Schema) -> bool:
        try:
            language.backend.compile(Grammar("json_schema", schemas.prepare(schema)))
        except GrammarError:
            return False
        return True

    return fit


B, C = ({"properties": {name: {"type": "integer"}}, "required": [name]} for name in "bc")


@pytest.mark.parametrize(
    ("hard", "good"),
    [
        ({"properties": {"a": {}}, "oneOf": [B, C]}, {"a": 1, "b": 2}),
        ({"properties": {"a": {}}, "oneOf": [B, C], "anyOf": [{}, C]}, {"a": 1, "b": 2}),
        ({"properties": {"a": {}}, "allOf": [B, {"not": {}}]}, {"a": 1, "b": 2}),
        ({"properties": {"a": {}}, "patternProperties": {"^(?=x)x": {}}}, {"a": 1, "x": 2}),
        ({"properties": {"a": {}}, "patternProperties": {"^(?=x)x": {}}, "additionalProperties": False}, {"a": 1, "x": 2}),
        ({"patternProperties": {"^(?=x)x": {}}, "additionalProperties": False, "minProperties": 1}, {"x": 2}),
        ({"$ref": "#/$defs/one", "properties": {"a": {}}, "additionalProperties": True, "not": {}}, {"a": 1, "b": 2}),
        ({"prefixItems": [{"pattern": AHEAD}], "items": False}, ["a"]),
    ],
)
def test_it_is_never_narrower(tiny: Language, hard: dict[str, Any], good: Any) -> None:
    """An object that names its properties has no others, unless other keywords beside them speak of some: also if those go."""
    whole = {"type": "object", "properties": {"value": hard}, "required": ["value"], "$defs": {"one": {"oneOf": [B, {"allOf": [B]}]}}}
    found = loosened(whole, fits(tiny))
    assert found != whole
    assert "value" in found["properties"]
    jsonschema.validate({"value": good}, json.loads(schemas.prepare(found)))


NAMES = ["a", "b", "xa"]
VALUES: list[Any] = [0, 1, 3, "", "a", "ab", None, True, [], [0], [0, 0], ["a", 1], {}]


def some_schema(random: Random, depth: int = 0) -> dict[str, Any]:
    deeper = depth < 2

    def one() -> dict[str, Any]:
        return some_schema(random, depth + 1)

    def several() -> list[dict[str, Any]]:
        return [one() for _ in range(random.randint(1, 2))]

    pool: dict[str, Any] = {
        "type": lambda: random.choice(["object", "array", "string", "integer", ["object", "null"]]),
        "enum": lambda: random.sample(VALUES, 6),
        "minimum": lambda: random.randint(0, 2),
        "maximum": lambda: random.randint(1, 3),
        "minLength": lambda: 1,
        "pattern": lambda: random.choice(["^a", AHEAD]),
        "minItems": lambda: 1,
        "uniqueItems": lambda: True,
        "required": lambda: random.sample(NAMES, 1),
        "minProperties": lambda: 1,
        "$ref": lambda: random.choice(["#/$defs/one", "#/$defs/two"]),
    }
    if deeper:
        pool |= {
            "properties": lambda: {name: one() for name in random.sample(NAMES, 2)},
            "patternProperties": lambda: {random.choice(["^x", "^(?=x)x"]): one()},
            "additionalProperties": lambda: random.choice([False, True, one()]),
            "items": lambda: random.choice([False, one()]),
            "prefixItems": several,
            "anyOf": several,
            "oneOf": several,
            "allOf": several,
            "not": one,
            "contains": one,
        }  # fmt: skip
    made = {keyword: pool[keyword]() for keyword in random.sample([*pool], random.randint(1, 4))}
    if "properties" in made:
        made.setdefault("additionalProperties", True)  # which JSON schemas mean, and ours do not
    return made


def some_value(random: Random, depth: int = 0) -> Any:
    if depth < 3 and random.random() < 0.6:
        return {name: some_value(random, depth + 1) for name in random.sample(NAMES, random.randint(0, 3))}
    return random.choice(VALUES)


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("seed", range(4))
def test_whatever_fits_a_schema_fits_what_is_left(tiny: Language, seed: int) -> None:
    random, fit, good, left = Random(seed), fits(tiny), 0, 0
    for _ in range(60):
        whole = {**some_schema(random), "type": "object", "$defs": {"one": some_schema(random, 2), "two": some_schema(random, 1)}}
        found = loosened(whole, fit)
        if found is whole:
            continue
        assert fit(found)
        left += len(found) > 2
        before, after = (jsonschema.Draft202012Validator(schema) for schema in (whole, json.loads(schemas.prepare(found))))
        for _ in range(60):
            value = {name: some_value(random, 1) for name in random.sample(NAMES, random.randint(0, 3))}
            try:
                valid = before.is_valid(value)
            except RecursionError:  # definitions that are nothing but one another
                break
            if valid:
                good += 1
                assert after.is_valid(value), (whole, found, value)
    assert good > 100
    assert left > 10


def test_definitions_are_loosened_where_they_stand(tiny: Language) -> None:
    whole = {**object_of(city=CITY, one={"$ref": "#/$defs/one"}), "$defs": {"one": {"type": "array", "uniqueItems": True}, "city": CITY}}
    found = loosened(whole, fits(tiny))
    assert found == {**object_of(city=CITY, one={"$ref": "#/$defs/one"}), "$defs": {"one": {"type": "array"}, "city": CITY}}


def test_a_schema_that_fits_is_itself() -> None:
    whole = object_of(city=CITY)
    assert loosened(whole, lambda schema: True) is whole


def test_where_nothing_fits_nothing_is_left() -> None:
    assert loosened(object_of(city=CITY), lambda schema: False) == {}


def test_of_one_that_is_nested_too_deep_nothing_is_left() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    assert loosened(deep, lambda schema: False) == {}


def test_trials_end_when_their_time_is_spent() -> None:
    now = [0.0]

    def slow(grammar: Grammar) -> bool:
        now[0] += 0.4 * forced.LENIENT_CPU_S
        return True

    leniency = Leniency(slow, lambda: now[0])
    assert [leniency.usable(Grammar("regex", "a")) for _ in range(5)] == [True, True, True, False, False]
