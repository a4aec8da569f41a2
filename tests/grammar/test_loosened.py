"""Of a schema that cannot be enforced as a whole the rest is, and what fits the schema fits that."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest

from banyan_runtime.grammar import loosened as module
from banyan_runtime.grammar import schema as schemas
from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.loosened import loosened
from banyan_runtime.wire import Grammar
from tests.grammar.walks import Language

CITY = {"type": "string", "maxLength": 5}


def object_of(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required or [*properties], "additionalProperties": False}


@pytest.mark.parametrize(
    ("hard", "left"),
    [
        ({"not": {"type": "string"}}, {}),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, {"type": "array", "items": {"type": "integer"}}),
        ({"type": "string", "pattern": "(?=a)b", "maxLength": 3}, {"type": "string", "maxLength": 3}),
        ({"type": "integer", "minimum": 2, "maximum": 1}, {"type": "integer", "maximum": 1}),
        ({"anyOf": [{"type": "string", "pattern": "(?=a)b"}, {"type": "null"}]}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        (object_of(a={"not": {}}, b=CITY), object_of(a={}, b=CITY)),
        ({"type": "array", "items": {"contains": {}, "type": "null"}}, {"type": "array", "items": {"type": "null"}}),
    ],
)  # fmt: skip
def test_what_keeps_a_schema_from_being_enforced_is_left_out_alone(tiny: Language, hard: dict[str, Any], left: dict[str, Any]) -> None:
    whole = object_of(city=CITY, hard=hard)
    before = copy.deepcopy(whole)
    assert loosened(whole, fits(tiny)) == object_of(city=CITY, hard=left)
    assert whole == before
    assert loosened({**object_of(city=CITY), "not": {}}, fits(tiny)) == object_of(city=CITY)


def fits(language: Language) -> Any:
    def fit(schema: schemas.Schema) -> bool:
        try:
            language.backend.compile(Grammar("json_schema", schemas.prepare(schema)))
        except GrammarError:
            return False
        return True

    return fit


def test_definitions_are_loosened_where_they_stand(tiny: Language) -> None:
    whole = {**object_of(city=CITY, one={"$ref": "#/$defs/one"}), "$defs": {"one": {"type": "array", "uniqueItems": True}, "city": CITY}}
    found = loosened(whole, fits(tiny))
    assert found == {**object_of(city=CITY, one={"$ref": "#/$defs/one"}), "$defs": {"one": {"type": "array"}, "city": CITY}}


def test_a_schema_that_fits_is_itself() -> None:
    whole = object_of(city=CITY)
    assert loosened(whole, lambda schema: True) is whole


def test_where_nothing_fits_nothing_is_left() -> None:
    assert loosened(object_of(city=CITY), lambda schema: False) == {}


def test_trials_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[bytes] = []
    monkeypatch.setattr(module, "MOST_TRIALS", 20)
    hard = object_of()
    hard["properties"] = {f"p{number}": {"type": "string", "not": {}, "if": {}} for number in range(500)}

    def fit(schema: schemas.Schema) -> bool:
        tried.append(msgspec.json.encode(schema))
        return False

    loosened(hard, fit)
    assert len(tried) == 20
