"""Parameters that a model writes as text: what they are as JSON follows from the tool's schema."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

from banyan_runtime.front.chat.tools.json_scan import encoded
from banyan_runtime.grammar.parameters import resolved

Schema: TypeAlias = Mapping[str, Any]

_INTEGER: Final = re.compile(r"[-+]?[0-9]{1,1000}")
_NUMBER: Final = re.compile(r"[-+]?([0-9]{1,1000}(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_BOOLEANS: Final = {"true": True, "1": True, "false": False, "0": False}
_NAMES: Final = (  # the standard's, and those that people take over from languages and databases
    (re.compile("string|str|text|varchar|char"), "string"),
    (re.compile("u?int.*|long|short"), "integer"),
    (re.compile("number|float.*|double"), "number"),
    (re.compile("bool|boolean"), "boolean"),
    (re.compile("object|dict.*"), "object"),
    (re.compile("array|list.*|arr"), "array"),
    (re.compile("null"), "null"),
)
_TYPES_OF_VALUES: Final = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"), (dict, "object"))


class Parameters:
    """The parameters of one tool. `schema` is None for a tool that nobody knows."""

    def __init__(self, schema: Schema | None) -> None:
        self._root: Schema = schema if isinstance(schema, Mapping) else {}

    def is_text(self, key: str) -> bool:
        """Whether a parameter can be nothing but a string: its text is its value, and can be given out as it comes."""
        found = _property(self._root, self._root, key)
        return found is not None and set(_types(found, self._root)) == {"string"}

    def json(self, key: str, text: str) -> str:
        """The value of a parameter as JSON."""
        try:
            return encoded(_value(text, _property(self._root, self._root, key) or {}, self._root))
        except (ValueError, RecursionError):
            return encoded(text)


def _value(text: str, schema: Schema, root: Schema) -> Any:
    """The text itself where the schema lists it and not what would be read of it; else that."""
    value = _typed(text, schema, root)
    listed = [one for found in _alternatives(schema, root) for one in _listed(found)]
    return text if text in listed and not any(_same(value, one) for one in listed) else value


def _same(value: Any, other: Any) -> bool:
    """As JSON has it: 1 is 1.0 and no truth."""
    kinds = {type(value), type(other)}
    return bool(value == other) if kinds == {int, float} else bool(encoded(value) == encoded(other))


def _typed(text: str, schema: Schema, root: Schema) -> Any:
    """The first type of the schema that the text fits."""
    types = set(_types(schema, root))
    bare = text.strip()
    if "null" in types and bare == "null":
        return None
    if types & {"integer", "number"} and _INTEGER.fullmatch(bare):
        return int(bare)
    if "number" in types and _NUMBER.fullmatch(bare) and not math.isinf(value := float(bare)):
        return value
    if "boolean" in types and (known := _BOOLEANS.get(bare.lower())) is not None:
        return known
    if types and not types & {"object", "array"}:
        return text
    parsed = _parsed(bare)
    fits = not types or (isinstance(parsed, dict) and "object" in types) or (isinstance(parsed, list) and "array" in types)
    return _read(parsed, schema, root) if fits and parsed is not _UNREADABLE else text


_UNREADABLE: Final = object()


def _parsed(text: str) -> Any:
    try:
        value = json.loads(text)
        encoded(value)  # finite
    except (ValueError, RecursionError):
        return _UNREADABLE
    return value


def _read(value: Any, schema: Schema, root: Schema) -> Any:
    """A value that JSON has read; strings inside it may be meant as something else."""
    if isinstance(value, dict):
        return {key: _member(inner, _property(schema, root, key), root) for key, inner in value.items()}
    if isinstance(value, list):
        items = next((found["items"] for found in _alternatives(schema, root) if isinstance(found.get("items"), Mapping)), None)
        return [_member(inner, items, root) for inner in value]
    return value


def _member(value: Any, schema: Schema | None, root: Schema) -> Any:
    if schema is None:
        return value
    if isinstance(value, str):
        types = set(_types(schema, root))
        return value if not types or "string" in types else _value(value, schema, root)
    return _read(value, schema, root)


def _property(schema: Schema, root: Schema, key: str) -> Schema | None:
    """The schema of a property: the object's own, else one of its alternatives', else that of whatever others there are."""
    alternatives = list(_alternatives(schema, root))
    named = [found["properties"] for found in alternatives if isinstance(found.get("properties"), Mapping)]
    own = [properties[key] for properties in named if key in properties]
    others = [found.get("additionalProperties") for found in alternatives]
    return next((found for found in own or others if isinstance(found, Mapping)), None)


def _alternatives(schema: Schema, root: Schema) -> Iterator[Schema]:
    """The schema and those that it is made of, each once: references may go round in a circle."""
    waiting, seen = [schema], set[int]()
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        branches: list[Any] = [resolved(found.get("$ref"), root)]
        for word in ("anyOf", "oneOf", "allOf"):
            listed = found.get(word)
            branches += listed if isinstance(listed, list) else ()
        waiting += [branch for branch in reversed(branches) if isinstance(branch, Mapping)]


def _types(schema: Schema, root: Schema) -> Iterator[str]:
    for found in _alternatives(schema, root):
        named = found.get("type")
        for name in named if isinstance(named, list) else (named,):
            if isinstance(name, str) and (standard := _standard(name.lower())) is not None:
                yield standard
        if named is None:
            yield from _types_of_values(found)
        if found.get("nullable") is True:
            yield "null"


def _types_of_values(schema: Schema) -> Iterator[str]:
    """Of a schema that lists its values instead."""
    for value in _listed(schema):
        yield "null" if value is None else next(name for kind, name in _TYPES_OF_VALUES if isinstance(value, kind))


def _listed(schema: Schema) -> list[Any]:
    """Its own values, where it lists them."""
    listed = schema.get("enum")
    return [*(listed if isinstance(listed, list) else ()), *([schema["const"]] if "const" in schema else ())]


def _standard(name: str) -> str | None:
    return next((standard for known, standard in _NAMES if known.fullmatch(name)), None)
