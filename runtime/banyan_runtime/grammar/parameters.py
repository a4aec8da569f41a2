"""Parameters that are written as text, one by one: a schema of the object that they make is read as one of each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from banyan_runtime.grammar.schema import ANNOTATIONS, DEFINITIONS, refuse
from banyan_runtime.grammar.strings import resolved

Schema = Mapping[str, Any]

_WHOLE: Final = ("allOf", "anyOf", "oneOf", "enum", "const", "patternProperties")
_BESIDE: Final = frozenset({"$ref", "type", "$schema", "$id", "id", *DEFINITIONS, *ANNOTATIONS})  # a reference, and say nothing more


@dataclass(frozen=True, slots=True)
class Shape:
    """`properties`: the schemas of the parameters, in their order; `required`: their names that must be there; `others`: of parameters
    of whatever name, where none is named. `path`: where they stand."""

    properties: Mapping[str, Schema]
    required: frozenset[str]
    others: Schema | None
    path: str

    def place(self, name: str) -> str:
        """Of a parameter's schema."""
        return f"{self.path}/properties/{name}"


def parameters_of(schema: Schema) -> Shape:
    """What parameters there may be. Others than those that are named there are none, which a schema that is open for them admits, too.
    Raises GrammarError for what is said of all of them together."""
    found, path = _followed(schema)
    for keyword in _WHOLE:
        if keyword in found:
            raise refuse(path, found, keyword, "is not supported where parameters are text")
    _check_type(found, path)
    given: Mapping[str, Any] = found.get("properties", {})
    more = found.get("additionalProperties", True)
    others: Schema | None = None if more is False else {} if more is True else more
    properties: dict[str, Schema] = {name: {} if value is True else value for name, value in given.items() if value is not False}
    required = dict.fromkeys(found.get("required", ()))
    for name in required:
        if name in properties:
            continue
        if name in given or others is None:
            raise refuse(path, found, "required", f"names {name[:60]!r}, which is not among the properties that there may be")
        properties[name] = others
    if found.get("minProperties", 0) > len(required):
        raise refuse(path, found, "minProperties", "is not supported where parameters are text; name them in 'required'")
    named = len(properties) if properties or others is None else None
    if "maxProperties" in found and (named is None or found["maxProperties"] < named):
        raise refuse(path, found, "maxProperties", "is not supported where parameters are text")
    return Shape(properties, frozenset(required), None if properties else others, path)


def _followed(schema: Schema) -> tuple[Schema, str]:
    """The schema that its references lead to, and the place of that."""
    found, path, passed = schema, "#", {"#"}
    while "$ref" in found:
        _check_type(found, path)
        if found.keys() - _BESIDE:
            raise refuse(path, found, "$ref", "with keywords beside it is not supported where parameters are text")
        reference = found["$ref"]
        target = resolved(reference, schema)
        if target is None or reference in passed:
            raise refuse(path, found, "$ref", "leads to no schema; where parameters are text it must begin with '#/'")
        found, path = target, reference
        passed.add(reference)
    return found, path


def _check_type(schema: Schema, path: str) -> None:
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise refuse(path, schema, "type", "must be 'object': parameters are its properties")
