"""A wider schema, for tools that are not strict and whose schema cannot be enforced whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.keywords import LISTS, MAPS, SINGLE
from banyan_runtime.grammar.schema import ANNOTATIONS, DEFINITIONS, Schema, check_nesting, check_size, copied, enforceable, explicit, parts

_SHAPE: Final = frozenset({
    "$defs", "definitions", "$ref", "type", "properties", "required", "additionalProperties", "items", "prefixItems", "anyOf", "enum",
    "const",
})  # fmt: skip
"""Keywords that say what a value is. Others narrow it."""
_RESTS_ON: Final[Mapping[str, tuple[str, ...]]] = {
    "additionalProperties": ("properties", "patternProperties"), "items": ("prefixItems",), "additionalItems": ("items",),
}  # fmt: skip
"""Keywords that say something of what others beside them leave over: without those they would be about more."""
_MAY_NAME: Final = ("allOf", "anyOf", "oneOf", "patternProperties", "$ref")
_NAMING: Final = frozenset({"properties", "patternProperties", "additionalProperties", "$ref"})


def loosened(schema: Schema, fits: Callable[[Schema], bool]) -> Schema:
    """The schema of an object, or a wider one that `fits`.

    The schemas that are tried, in order: the schema; the same without the keywords that no compiler enforces; its types, properties
    and choices alone; and {}. A value that is valid under the schema is valid under the result.
    """
    if fits(schema):
        return schema
    try:
        check_nesting(schema, "the schema")
        check_size(schema)
    except GrammarError:
        return {}
    whole = copied(schema)
    explicit(whole)
    for _, part in parts(whole):
        if "oneOf" in part and "anyOf" not in part:  # anyOf is wider, and a part of the shape
            part["anyOf"] = part.pop("oneOf")
    for keep in (enforceable, lambda part, keyword: keyword in _SHAPE and enforceable(part, keyword)):
        wider: Schema = _reduced(whole, keep)
        if fits(wider):
            return wider
    return {}


def lacks_names(schema: Schema, found: Schema) -> bool:
    """Whether keywords are left out that may name parameters: where these are text, there are none but those that are named."""
    pairs: list[tuple[Any, Any]] = [(schema, found)]
    for name in DEFINITIONS:
        named, left = schema.get(name), found.get(name, {})
        pairs += [(one, left.get(key, {})) for key, one in named.items()] if isinstance(named, dict) else []
    return any(
        keyword in was and keyword not in left and any(part.keys() & _NAMING for _, part in parts({keyword: was[keyword]}))
        for was, left in pairs
        if isinstance(was, dict)
        for keyword in _MAY_NAME
    )


def _reduced(part: Any, keep: Callable[[Schema, str], bool]) -> Any:
    """A schema with those keywords that are to be kept, at every level."""
    if not isinstance(part, dict):
        return part
    made: Schema = {}
    for keyword, value in part.items():
        if keyword in ANNOTATIONS or not keep(part, keyword):
            continue
        if keyword in MAPS:
            made[keyword] = {name: _reduced(one, keep) for name, one in value.items()}
        elif keyword in (*LISTS, *SINGLE):
            made[keyword] = [_reduced(one, keep) for one in value] if isinstance(value, list) else _reduced(value, keep)
        else:
            made[keyword] = value
    for keyword, others in _RESTS_ON.items():
        if any(other in part and other not in made for other in others):
            made.pop(keyword, None)
    if "properties" in made:
        made.setdefault("additionalProperties", True)  # without it the object would be closed
    return made
