"""What the parameters of a tool may look like: a JSON Schema, as far as models are shown it and arguments are read by it.

A schema that an output is held to is compiled as well, which finds the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import msgspec

_TYPES: Final = ("array", "boolean", "integer", "null", "number", "object", "string")
_SCHEMAS: Final = ("items", "additionalProperties", "additionalItems", "contains", "propertyNames", "not", "if", "then", "else")
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_OBJECTS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
MAX_SIZE: Final = 20_000  # schemas and values of enums; arguments are read by them while others wait
_ECHOED: Final = 100  # characters of a client's input that an error may repeat
Place: TypeAlias = tuple[str, Any]  # where in the schema, and what stands there


def problem(schema: dict[str, Any]) -> str | None:
    """What is wrong with it, and where; None: nothing that we look for."""
    kinds = schema.get("type", "object")
    if isinstance(kinds, str) and kinds in _TYPES and kinds != "object":
        return f"""schema must be a JSON Schema of 'type: "object"', got 'type: "{kinds}"'"""
    if isinstance(kinds, list) and kinds and set(map(str, kinds)) <= {*_TYPES} - {"object"}:
        return f"""schema must be a JSON Schema of 'type: "object"', got 'type: {msgspec.json.encode(kinds[:8]).decode()}'"""
    size = 0
    waiting: list[Iterator[Place]] = [iter([("", schema)])]  # one for each level: as much as the schema is deep, however wide it is
    while waiting:
        place = next(waiting[-1], None)
        if place is None:
            waiting.pop()
            continue
        where, value = place
        size += 1 + (len(value["enum"]) if isinstance(value, dict) and isinstance(value.get("enum"), list) else 0)
        if size > MAX_SIZE:
            return f"it has more than {MAX_SIZE} schemas and values of enums in it"
        if isinstance(value, bool):
            continue
        if not isinstance(value, dict):
            return _said(where, "must be an object, true or false")
        wrong = _wrong(value)
        if wrong is not None:
            name, reason = wrong
            return _said(f"{where}.{name}", reason)
        waiting.append(_inside(where[-_ECHOED:], value))
    return None


def _wrong(schema: dict[str, Any]) -> tuple[str, str] | None:
    """The keyword at fault, and how."""
    kinds = schema.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    for kind in kinds:
        if not isinstance(kind, str) or kind not in _TYPES:
            got = kind[:_ECHOED] if isinstance(kind, str) else "something else"
            return "type", f"must be one of {', '.join(_TYPES)}, or a list of them, got {got}"
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return "required", "must be a list of strings"
    for name in ("enum", *_LISTS):
        if name in schema and not (isinstance(schema[name], list) and schema[name]):
            return name, "must be a list that is not empty"
    for name in _OBJECTS:
        if not isinstance(schema.get(name, {}), dict):
            return name, "must be an object"
    return None


def _inside(where: str, schema: dict[str, Any]) -> Iterator[Place]:
    """The schemas inside a schema."""
    for name, value in schema.items():
        if name in _SCHEMAS and not (name == "items" and isinstance(value, list)):
            yield f"{where}.{name}", value
        elif name in _LISTS or name == "items":  # the latter as older drafts have it
            yield from ((f"{where}.{name}[{index}]", item) for index, item in enumerate(value))
        elif name in _OBJECTS:
            yield from ((f"{where}.{name}.{key[:_ECHOED]}", item) for key, item in value.items())


def _said(where: str, reason: str) -> str:
    place = where.lstrip(".")[-_ECHOED:]
    return f"'{place}' {reason}" if place else f"it {reason}"
