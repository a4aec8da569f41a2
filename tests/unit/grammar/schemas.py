"""JSON schemas for fuzzing: such as people write, by chance, and such as nobody should."""

from __future__ import annotations

from random import Random
from typing import Any

Schema = dict[str, Any]
_NAMES = ("name", "age", "tags", "city", "größe", "a b", "x-y", "0", "emoji🚀", 'q"uote', "back\\slash", "value", "next")
_PATTERNS = ("^[a-z]{2,5}$", "[0-9]+", "^(yes|no)$", r"^\d{3}-\d{4}$", r"^\w+@\w+\.com$", "^é+$", "x")
_FORMATS = ("date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "uri", "hostname", "binary", "uuid4")


def some_schema(dice: Random) -> Schema:
    """One that a program may well send."""
    schema = _some(dice, 3)
    if dice.random() < 0.2:
        node = {"type": "object", "properties": {"v": _some(dice, 1), "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}}
        schema = {"$defs": {"n": {**node, "required": ["v"]}}, "type": "object", "properties": {"root": {"$ref": "#/$defs/n"}, "x": schema}}
    return {"title": "Some", "description": "made by chance", **schema}


def _some(dice: Random, depth: int) -> Schema:
    kinds = [_string, _integer, _number, _plain, _choice]
    if depth:
        kinds += [_array, _object, _object, _any]
    return dice.choice(kinds)(dice, depth - 1)


def _string(dice: Random, depth: int) -> Schema:
    kind = dice.randrange(4)
    if kind == 0:
        least = dice.randrange(6)
        return {"type": "string", "minLength": least, "maxLength": least + dice.randrange(20)}
    if kind == 1:
        return {"type": "string", "pattern": dice.choice(_PATTERNS)}
    return {"type": "string", "format": dice.choice(_FORMATS)} if kind == 2 else {"type": "string"}


def _integer(dice: Random, depth: int) -> Schema:
    low = dice.randrange(-1000, 1000)
    return dice.choice(
        [
            {"type": "integer"},
            {"type": "integer", "minimum": low, "maximum": low + dice.randrange(2000)},
            {"type": "integer", "multipleOf": 7},
        ]
    )


def _number(dice: Random, depth: int) -> Schema:
    low = dice.randrange(-100, 100) / 4
    return dice.choice([{"type": "number"}, {"type": "number", "minimum": low, "exclusiveMaximum": low + 10.5}])


def _plain(dice: Random, depth: int) -> Schema:
    return dice.choice([{"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}, {"type": ["integer", "boolean"]}])


def _choice(dice: Random, depth: int) -> Schema:
    values: list[Any] = ["red", "grün", 7, -2.5, None, True, {"k": [1, "x"]}, [], "a\nb", "</s>"]
    return dice.choice([{"enum": dice.sample(values, 4)}, {"const": dice.choice(values)}])


def _array(dice: Random, depth: int) -> Schema:
    least = dice.randrange(3)
    kinds: list[Schema] = [
        {"type": "array", "items": _some(dice, depth)},
        {"type": "array", "items": _some(dice, depth), "minItems": least, "maxItems": least + dice.randrange(4)},
        {"type": "array", "prefixItems": [_some(dice, depth), _some(dice, depth)], "items": False, "minItems": 2},
    ]
    return dice.choice(kinds)


def _object(dice: Random, depth: int) -> Schema:
    names = dice.sample(_NAMES, dice.randrange(1, 6))
    schema: Schema = {"type": "object", "properties": {name: _some(dice, depth) for name in names}}
    schema["required"] = [name for name in names if dice.random() < 0.6]
    if dice.random() < 0.5:
        schema["additionalProperties"] = dice.choice([False, True, _some(dice, 0)])
    return schema


def _any(dice: Random, depth: int) -> Schema:
    return dice.choice(
        [
            {"anyOf": [_some(dice, depth), _some(dice, depth)]},
            {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 90}]},
            {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        ]
    )


def _nested(depth: int, leaf: Any, *, arrays: bool = False) -> Any:
    for _ in range(depth):
        leaf = {"type": "array", "items": leaf} if arrays else {"type": "object", "properties": {"a": leaf}}
    return leaf


def _one_of(depth: int) -> Schema:
    schema: Schema = {"type": "string"}
    for level in range(depth):
        branches = [{"k": {"const": f"{branch}{level}"}, "v": schema} for branch in "ab"]
        schema = {"oneOf": [{"type": "object", "properties": branch, "required": ["k", "v"]} for branch in branches]}
    return schema


def _strings(number: int, **more: Any) -> Schema:
    return {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(number)}, **more}


HOSTILE: dict[str, Any] = {
    "no object": [],
    "a number": 7,
    "null": None,
    "deep objects": _nested(30, {"type": "integer"}),
    "deeper objects": _nested(5000, {}),
    "deep arrays": _nested(60, {"type": "integer"}, arrays=True),
    "deeper arrays": _nested(5000, {}, arrays=True),
    "400 optional properties": _strings(400),
    "1,000 optional properties": _strings(1000),
    "2,000 optional properties": _strings(2000),
    "1,000 and others": _strings(1000, additionalProperties=True),
    "a large enum": {"enum": [f"v{index}" for index in range(6000)]},
    "a larger enum": {"enum": [f"v{index}" for index in range(20_000)]},
    "nested oneOf": _one_of(5),
    "more nested oneOf": _one_of(12),
    "long text": {"type": "string", "minLength": 100_000, "maxLength": 100_001},
    "endless text": {"type": "string", "minLength": 10**9},
    "long list": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    "crossed items": {"type": "array", "minItems": 3, "maxItems": 2},
    "crossed lengths": {"type": "string", "minLength": 3, "maxLength": 2},
    "crossed numbers": {"type": "integer", "minimum": 3, "maximum": 2},
    "repeated repeats": {"type": "string", "pattern": "(a{1000}){1000}"},
    "nested quantifiers": {"type": "string", "pattern": "(a+)+b"},
    "counting": {"type": "string", "pattern": "(.{0,200}x){0,20}"},
    "look ahead": {"type": "string", "pattern": "^(?=a)b"},
    "look behind": {"type": "string", "pattern": "(?<!a)b"},
    "a backreference": {"type": "string", "pattern": r"(a)\1"},
    "an open bracket": {"type": "string", "pattern": "["},
    "a long pattern": {"type": "string", "pattern": "a" * 3000},
    "patterns": {f"p{index}": 1 for index in range(3)}
    | {"properties": {f"p{i}": {"type": "string", "pattern": f"(.{{0,{i}}}x){{9}}"} for i in range(60)}},
    "no integer": {"type": "integer", "minimum": -(10**400), "maximum": 10**400},
    "multiples": {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (9973, 9967, 9949)]},
    "a large multiple": {"type": "integer", "multipleOf": 19_997},
    "a larger multiple": {"type": "integer", "multipleOf": 10**300 + 7},
    "a fine multiple": {"type": "number", "multipleOf": 1.00000001},
    "a hundredth": {"type": "number", "multipleOf": 0.01},
    "a multiple of 1e-300": {"type": "number", "multipleOf": 1e-300},
    "a number that Python does not write": {"type": "integer", "minimum": 10**5000},
    "a multiple that Python does not write": {"type": "integer", "multipleOf": 10**5000},
    "a multiple that is no number": {"type": "integer", "multipleOf": "7"},
    "multiple of 0": {"type": "integer", "multipleOf": 0},
    "itself": {"$ref": "#"},
    "a circle": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "an endless list": {"$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}}, "$ref": "#/$defs/n"},
    "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}},
    "nowhere": {"$ref": "#/$defs/nope"},
    "elsewhere": {"$ref": "https://example.com/schema.json"},
    "no text as ref": {"$ref": 7},
    "many allOf": {"allOf": [{"properties": {f"p{index}": {"type": "string"}}} for index in range(300)]},
    "allOf of anyOf": {"allOf": [{"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(4)]} for i in range(12)]},
    "overlapping patterns": {"type": "object", "patternProperties": {".*a.*": {"type": "integer"}, ".*b.*": {"type": "string"}}},
    "an unknown type": {"type": "foo"},
    "type is a number": {"type": 7},
    "properties is a list": {"type": "object", "properties": ["a"]},
    "required is text": {"type": "object", "properties": {"a": {}}, "required": "a"},
    "enum is text": {"enum": "a"},
    "empty enum": {"enum": []},
    "empty anyOf": {"anyOf": []},
    "false inside": {"type": "object", "properties": {"a": False}, "required": ["a"]},
    "items of draft 4": {"type": "array", "items": [{"type": "integer"}]},
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 2}},
    "contains": {"type": "array", "contains": {"type": "string"}},
    "unique": {"type": "array", "uniqueItems": True},
    "dependent": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "unevaluated": {"type": "object", "unevaluatedProperties": False},
    "names": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "NUL in a const": {"const": "a\0b"},
    "NUL in a name": {"type": "object", "properties": {"a\0": {}}},
    "half a pair": {"const": "\ud83d"},
    "overlapping oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "a compiler's switches": {"type": "array", "uniqueItems": False, "x-guidance": {"lenient": True, "whitespace_pattern": " *"}},
    "nonsense switches": {"type": "string", "x-guidance": 7},
    "an unknown format": {"type": "string", "format": "iri"},
    "format is a number": {"type": "string", "format": 7},
    "huge text": {"const": "x" * 100_000},
    "many properties of nothing": {"type": "object", "minProperties": 500},
}
