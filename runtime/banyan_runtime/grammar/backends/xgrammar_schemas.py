"""JSON schemas for xgrammar, which looks at some keywords of a schema and passes over those beside them in silence. What it would pass
over was measured (`tests/unit/grammar/test_xgrammar.py`), and is refused here. Needs neither xgrammar nor torch."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

from banyan_runtime.grammar.patterns import may_need_escapes
from banyan_runtime.grammar.schema import ANNOTATIONS, DEFINITIONS, parts, refuse

_FORMATS: Final = frozenset({
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "uri-reference", "uri-template",
    "json-pointer", "relative-json-pointer",
})  # fmt: skip
_LENGTHS: Final = frozenset({"minLength", "maxLength"})
_NUMBERS: Final = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_TEXTS: Final = frozenset({"pattern", "format", *_LENGTHS})
_ARRAYS: Final = frozenset({"items", "prefixItems"})
_OBJECTS: Final = frozenset({"properties", "additionalProperties"})
_ITEMS: Final = frozenset({"minItems", "maxItems"})
_PROPERTIES: Final = frozenset({"minProperties", "maxProperties", "patternProperties", "required"})
_WHOLE: Final = ("$ref", "const", "enum", "anyOf", "allOf")  # each of which it takes for all of the schema
_CONSTRAINTS: Final = frozenset({"type", *_WHOLE, "multipleOf"} | _NUMBERS | _TEXTS | _ARRAYS | _OBJECTS | _ITEMS | _PROPERTIES)
_SAY_NOTHING: Final = frozenset({"$schema", *DEFINITIONS, *ANNOTATIONS})
_MOST_MULTIPLE: Final = 500  # an automaton has a state for each remainder; beyond 1024 it is passed over
_DIGITS: Final = Decimal("0.000001")  # of a number that has bounds: it writes no more
_KINDS: Final = ((bool, "boolean"), (str, "string"), (list, "array"), (dict, "object"))

Wrong = Iterator[tuple[str, str]]


def enforced(schema: dict[str, Any], at: str = "#") -> dict[str, Any]:
    """The schema (it is changed), which stands at this place, in the keywords that xgrammar enforces. Raises GrammarError for what it would
    pass over."""
    for path, part in parts(schema, at):
        for wrong in (_whole, _untyped, _listed, _numbers, _texts, _members):
            for keyword, reason in wrong(part):
                raise refuse(path, part, keyword, reason)
        if part.keys() & _LENGTHS:  # as such it would admit control characters, which JSON does not
            least, most = part.pop("minLength", 0), part.pop("maxLength", "")
            part["pattern"] = f'^[^"\\\\\\x00-\\x1f]{{{least},{most}}}$'
    return schema


def _whole(part: dict[str, Any]) -> Wrong:
    """Keywords that are taken for all of a schema."""
    if "oneOf" in part:
        yield "oneOf", "is not supported by xgrammar; use anyOf"
    if len(part.get("allOf", ())) > 1:
        yield "allOf", "of several schemas is not supported by xgrammar"
    if "$ref" in part and part.keys() - {"$ref", *_SAY_NOTHING}:
        yield "$ref", "with keywords beside it is not supported by xgrammar"
    if "$anchor" in part or part.get("$ref", "#/")[:2] not in ("#", "#/"):
        yield "$anchor" if "$anchor" in part else "$ref", "is not supported by xgrammar"
    for keyword in _WHOLE:
        beside = part.keys() & _CONSTRAINTS - ({keyword, "type"} if keyword in ("const", "enum") else {keyword})
        if keyword in part and beside:
            yield keyword, f"with {min(beside)!r} beside it is not supported by xgrammar, which would hold to one of them"


def _untyped(part: dict[str, Any]) -> Wrong:
    """Keywords without a type, or another keyword that tells it."""
    if "type" in part:
        return
    for keyword in sorted(part.keys() & (_NUMBERS | _TEXTS | _ITEMS | _PROPERTIES | {"multipleOf"})):
        if not (keyword in _ITEMS and part.keys() & _ARRAYS) and not (keyword in _PROPERTIES and part.keys() & _OBJECTS):
            yield keyword, "needs a 'type' beside it for xgrammar"


def _listed(part: dict[str, Any]) -> Wrong:
    kinds = _kinds(part)
    if kinds is None:
        return
    for keyword in {"const", "enum"} & part.keys():
        for value in part["enum"] if keyword == "enum" else [part["const"]]:
            if not _fits(value, kinds):
                yield keyword, "holds what the 'type' beside it does not admit, which xgrammar would pass over: leave one of them out"


def _kinds(part: dict[str, Any]) -> list[str] | None:
    """The types that it names."""
    kinds = part.get("type")
    return [kinds] if isinstance(kinds, str) else kinds


def _fits(value: Any, kinds: list[str]) -> bool:
    if value is None:
        return "null" in kinds
    named = next((name for kind, name in _KINDS if isinstance(value, kind)), None)
    if named is not None:
        return named in kinds
    return "number" in kinds or ("integer" in kinds and value % 1 == 0)


def _numbers(part: dict[str, Any]) -> Wrong:
    step, bounds = part.get("multipleOf"), sorted(part.keys() & _NUMBERS)
    kinds = _kinds(part) or []
    if step is not None:
        if "number" in kinds or step % 1:
            yield "multipleOf", "of what is no integer is not supported by xgrammar"
        if step > _MOST_MULTIPLE:
            yield "multipleOf", f"is not supported by xgrammar beyond {_MOST_MULTIPLE}"
        if bounds:
            yield "multipleOf", f"with {bounds[0]!r} beside it is not supported by xgrammar"
    for keyword in bounds:
        if isinstance(part[keyword], bool):
            yield keyword, "must be a number for xgrammar"
        if "number" in kinds and _units(part[keyword]) % 1:
            yield keyword, "has more than six decimals, which is not supported by xgrammar"
    if "number" in kinds and bounds and not _has_number(part):
        yield bounds[0], "leaves no number of six decimals, which is what xgrammar writes"


def _units(bound: float) -> Decimal:
    """In the last digit that a number may have."""
    return Decimal(repr(bound)) / _DIGITS


def _has_number(part: dict[str, Any]) -> bool:
    """Whether one is between the bounds, none of which is an end itself."""
    lows = [_units(part[name]) + beyond for name, beyond in (("minimum", 0), ("exclusiveMinimum", 1)) if name in part]
    highs = [_units(part[name]) - beyond for name, beyond in (("maximum", 0), ("exclusiveMaximum", 1)) if name in part]
    return not lows or not highs or max(lows) <= min(highs)


def _texts(part: dict[str, Any]) -> Wrong:
    for keyword in ("pattern", "format"):
        if keyword in part and part.keys() & _LENGTHS:
            yield keyword, "together with a length is not supported by xgrammar"
    if "pattern" in part and "format" in part:
        yield "pattern", "together with a format is not supported by xgrammar"
    if "format" in part and part["format"] not in _FORMATS:
        yield "format", "is not supported by xgrammar"
    pattern = part.get("pattern")
    if pattern is None:
        return
    if any(sign in pattern for sign in ("(?=", "(?!", "(?<")):
        yield "pattern", "with look-around is not supported by xgrammar"
    if not (pattern.startswith("^") and pattern.endswith("$")):
        yield "pattern", "must begin with ^ and end with $ for xgrammar, which matches whole texts"
    if may_need_escapes(pattern):
        yield "pattern", 'asks for ", \\ or a control character, which xgrammar would not write as JSON does'


def _members(part: dict[str, Any]) -> Wrong:
    if "additionalItems" in part:
        yield "additionalItems", "is not supported by xgrammar; use 'prefixItems' and 'items'"
    patterns = part.get("patternProperties", {})
    if patterns and ("properties" in part or len(patterns) > 1):
        yield "patternProperties", "beside other properties is not supported by xgrammar"
    if any(map(may_need_escapes, patterns)):
        yield "patternProperties", 'asks for ", \\ or a control character, which xgrammar would not write as JSON does'
    for name in part.get("required", ()):
        if name not in part.get("properties", {}):
            yield "required", f"names {name[:60]!r}, which is not among the properties: not supported by xgrammar"
