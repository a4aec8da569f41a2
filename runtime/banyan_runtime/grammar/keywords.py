"""What may stand behind a keyword of a schema, so that nobody who reads schemas stumbles over something else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLE: Final = ("items", "additionalItems", "additionalProperties")
COUNTS: Final = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"))
MOST: Final = 1 << 30
"""Of a count: no output has as many characters. Beyond it the libraries' own numbers overflow."""
_TYPES: Final = ("array", "boolean", "integer", "null", "number", "object", "string")


def problem(part: Mapping[str, Any]) -> tuple[str, str] | None:
    """The keyword of a schema, not of those in it, whose value is wrong, and what is wrong with it."""
    for keywords, fits, reason in _FORMS:
        for keyword in keywords:
            if keyword in part and not fits(part[keyword]):
                return keyword, reason
    for low, high in COUNTS:
        least, most = part.get(low, 0), part.get(high)
        if least > MOST:
            return low, f"is more than any output has; at most {MOST} can be asked for"
        if most is not None and least > most:
            return low, f"is greater than {high} ({most})"
    return None


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_number(value: Any) -> bool:
    return type(value) is int or (isinstance(value, float) and math.isfinite(value))


def _is_bound(value: Any) -> bool:
    return _is_number(value) or isinstance(value, bool)  # as draft 4 has it, beside `minimum`


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value % 1 == 0


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in _TYPES for name in names)


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_schemas(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_schema, value))


def _is_map(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _is_single(value: Any) -> bool:
    return _is_schema(value) or _is_schemas(value)


_FORMS: Final[tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...]] = (
    (("type",), _is_type, f"must be one of {', '.join(_TYPES)}, or a list of them"),
    (("pattern", "format", "$anchor"), _is_text, "must be a string"),
    (("required",), _is_texts, "must be a list of strings"),
    (("enum",), lambda value: isinstance(value, list) and bool(value), "must be a list that is not empty"),
    (("minimum", "maximum", "multipleOf"), _is_number, "must be a number"),
    (("multipleOf",), lambda value: value > 0, "must be greater than 0"),
    (("exclusiveMinimum", "exclusiveMaximum"), _is_bound, "must be a number"),
    (tuple(name for pair in COUNTS for name in pair), _is_count, "must be an integer that is not negative"),
    (LISTS, _is_schemas, "must be a list of schemas"),
    (("anyOf", "oneOf", "allOf"), bool, "must not be empty"),
    (MAPS, _is_map, "must be an object of schemas"),
    (("items",), _is_single, "must be a schema, or a list of them"),
    (("additionalItems", "additionalProperties"), _is_schema, "must be a schema"),
)
