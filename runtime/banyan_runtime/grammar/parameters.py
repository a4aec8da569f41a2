"""Parameters that are written as text, one by one: what each may be, by the schema of the object that they make."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.keywords import COUNTS, LISTS, SINGLE
from banyan_runtime.grammar.schema import copied, parts, refuse

Schema = Mapping[str, Any]

_HERE: Final = "is not supported where parameters are text"
_BESIDE: Final = "with keywords beside it is not supported where parameters are text"
_OF_THE_WHOLE: Final = ("$ref", "allOf", "anyOf", "oneOf", "enum", "const", "patternProperties", "minProperties", "maxProperties")
_NARROWING: Final = frozenset({
    "type", "enum", "const", "$ref", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "properties", "patternProperties", "required", *LISTS, *SINGLE, *(name for pair in COUNTS for name in pair),
})  # fmt: skip
_INDEX: Final = re.compile("[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Shape:
    """`properties`: the schemas of the parameters, in their order; `required`: the names of those that must be there; `others`: the schema
    of parameters of any name, where none is named."""

    properties: Mapping[str, Schema]
    required: frozenset[str]
    others: Schema | None


@dataclass(frozen=True, slots=True)
class Bare:
    """Strings, written without quotes: those in which the pattern of JSON Schema is found, of `least` to `most` characters."""

    pattern: str = ""
    least: int = 0
    most: int | None = None


Value = str | Bare | dict[str, Any]
"""Of a parameter: exactly this text, such strings, or JSON of this schema."""

ANY: Final = Bare()


def parameters_of(schema: Schema) -> Shape:
    """Which parameters there may be. An object that names some has no others. Raises GrammarError for keywords about all of them."""
    for keyword in _OF_THE_WHOLE:
        if keyword in schema:
            raise refuse("#", schema, keyword, _HERE)
    if "object" not in (_types(schema) or ["object"]):
        raise refuse("#", schema, "type", "must be 'object': parameters are its properties")
    given: Mapping[str, Any] = schema.get("properties", {})
    more = schema.get("additionalProperties", True)
    others: Schema | None = None if more is False else {} if more is True else more
    properties: dict[str, Schema] = {name: {} if value is True else value for name, value in given.items() if value is not False}
    required = dict.fromkeys(schema.get("required", ()))
    for name in required:
        if name not in properties:
            if name in given or others is None:
                raise refuse("#", schema, "required", f"names {name[:60]!r}, which is not among the properties that there may be")
            properties[name] = others
    return Shape(properties, frozenset(required), None if properties else others)


def values_of(schema: Schema, root: Schema, path: str) -> list[Value]:
    """What a parameter with this schema may be. `root`: the schema that it stands in, at `path`. Raises GrammarError for what no text can
    be held to."""
    found = _values(schema, root, path, frozenset())
    if ANY in found:
        return [ANY]
    if not found:
        raise GrammarError(f"no value fits the schema at {path[:200]}.")
    others = [value for value in found if isinstance(value, dict)]
    if any(isinstance(value, Bare) for value in found) and any(_types(value) != ["null"] for value in others):
        raise GrammarError(f"the schema at {path[:200]} has other types beside a string with a pattern or a length, which {_HERE}.")
    return [_alone(value, root) if isinstance(value, dict) else value for value in found]


def _values(schema: Any, root: Schema, path: str, passed: frozenset[str]) -> list[Value]:
    if schema is True:
        return [ANY]
    said = schema.keys() & _NARROWING
    kinds = _types(schema)
    if not said or (said == {"type"} and "string" in kinds):
        return [ANY]
    if kinds and "string" not in kinds:
        return [dict(schema)]
    for keyword in ("$ref", "allOf", "anyOf", "oneOf"):
        if keyword in said:
            if len(said) > 1 or (keyword == "allOf" and len(schema[keyword]) > 1):
                raise refuse(path, schema, keyword, _BESIDE if len(said) > 1 else _HERE)
            return _followed(schema, keyword, root, path, passed)
    for keyword in ("const", "enum"):
        if keyword in said:
            if said - {keyword, "type"}:
                raise refuse(path, schema, keyword, _BESIDE)
            return _listed(schema[keyword] if keyword == "enum" else [schema[keyword]], kinds)
    if not kinds:
        raise GrammarError(f"the schema at {path[:200]} needs a 'type': what is read of a parameter's text depends on it.")
    if "format" in said:
        raise refuse(path, schema, "format", f"{_HERE}; use 'pattern', or leave it out")
    rest = [kind for kind in kinds if kind != "string"]
    bare = Bare(schema.get("pattern", ""), schema.get("minLength", 0), schema.get("maxLength"))
    return [bare, *([{**schema, "type": rest}] if rest else [])]


def _followed(schema: Schema, keyword: str, root: Schema, path: str, passed: frozenset[str]) -> list[Value]:
    """By a keyword that nothing stands beside."""
    if keyword == "$ref":
        reference = schema["$ref"]
        target = resolved(reference, root)
        if target is None or reference in passed:
            raise refuse(path, schema, "$ref", "leads to no schema; where parameters are text it must begin with '#/'")
        return _values(target, root, reference, passed | {reference})
    branches = [_values(one, root, f"{path}/{keyword}/{index}", passed) for index, one in enumerate(schema[keyword])]
    texts: list[Value] = [value for branch in branches for value in branch if not isinstance(value, dict)]
    told_apart = len(texts) < 2 or (all(isinstance(value, str) for value in texts) and len(texts) == len(set(texts)))
    if keyword == "oneOf" and not told_apart:
        raise refuse(path, schema, "oneOf", "is not supported where a value may fit several of its schemas; use 'anyOf'")
    others: list[Value] = [value for branch in branches for value in branch if isinstance(value, dict)]
    return [*texts, *([{"oneOf": others}] if keyword == "oneOf" and len(others) > 1 else others)]


def _listed(values: list[Any], kinds: list[str]) -> list[Value]:
    texts: list[Value] = [value for value in values if isinstance(value, str)]
    others: dict[str, Any] = {"enum": [value for value in values if not isinstance(value, str)]}
    rest = [kind for kind in kinds if kind != "string"]
    if others["enum"] and (rest or not kinds):
        texts.append({**others, "type": rest} if rest else others)
    return texts


def _types(schema: Schema) -> list[str]:
    named = schema.get("type", [])
    return [named] if isinstance(named, str) else named


def _alone(schema: dict[str, Any], root: Schema) -> dict[str, Any]:
    """A schema of `root`'s, with what it refers to there."""
    if not any("$ref" in part for _, part in parts(schema)):
        return schema
    alone: dict[str, Any] = copied({**schema, "$defs": {"whole": root}})
    for _, part in parts(alone):
        if "$ref" in part:
            part["$ref"] = "#/$defs/whole" + part["$ref"][1:]
    return alone


def resolved(target: Any, root: Schema) -> Schema | None:
    """What a local reference such as #/$defs/City points to; None: no schema."""
    if not isinstance(target, str) or not (target == "#" or target.startswith("#/")):
        return None
    found: Any = root
    for part in unquote(target[1:]).split("/")[1:]:
        found = _inside(found, part.replace("~1", "/").replace("~0", "~"))
    return found if isinstance(found, Mapping) else None


def _inside(value: Any, name: str) -> Any:
    if isinstance(value, list):
        return value[int(name)] if _INDEX.fullmatch(name) and int(name) < len(value) else None
    return value.get(name) if isinstance(value, Mapping) else None
