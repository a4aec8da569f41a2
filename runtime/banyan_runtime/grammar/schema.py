"""JSON schemas before they are compiled: how large they may be, which keywords are enforced, and what they mean here.

An output must obey all of a schema or the schema is refused: a keyword that llguidance does not enforce is named with its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, Final

import msgspec

from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.keywords import COUNTS, LISTS, MAPS, MOST, SINGLE, problem
from banyan_runtime.grammar.limits import (
    MAX_ALTERNATIVES,
    MAX_NESTING,
    MAX_PROPERTIES,
    MAX_REGEX_BYTES,
    check_count,
    check_text,
)

Schema = dict[str, Any]

_UNENFORCED: Final = (
    "not", "if", "then", "else", "contains", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies",
    "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_BRANCHES: Final = ("anyOf", "oneOf")
DEFINITIONS: Final = ("$defs", "definitions")
ANNOTATIONS: Final = frozenset({"title", "description", "$comment", "examples", "default", "deprecated"})
_FORMATS: Final = frozenset({
    "date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "idn-email", "idn-hostname",
    "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer", "relative-json-pointer", "regex",
})  # fmt: skip
"""Those that JSON Schema defines. Any other name says nothing about the text, and is left out."""
_MAX_REMAINDERS: Final = 20_000  # of a number that is to be a multiple; 10,000 take 60 ms to compile, a million 12 s
_MAX_ALL_REMAINDERS: Final = 100_000  # of all of a schema
_EXACT: Final = (1 << 53) - 1  # llguidance computes with floats: beyond it not every integer is one


def prepare(schema: object) -> str:
    """The schema that is compiled, as JSON. Raises GrammarError with the reason, and the place in the schema.

    Objects that name their properties, and say nothing of others, have no others: a model that may go on with properties that
    nobody asked for often does so until it is cut off.
    """
    if not isinstance(schema, dict):
        raise GrammarError("a schema is a JSON object.")
    check_size(schema)
    marked: Schema = copied(schema)
    _mark_nothing(marked)
    remainders = 0
    for path, part in parts(marked):
        _check(path, part)
        remainders += _remainders(part["multipleOf"]) if "multipleOf" in part else 0
    check_count(remainders, "remainders of 'multipleOf' to tell apart", _MAX_ALL_REMAINDERS)
    marked.pop("x-guidance", None)  # llguidance's own switches
    _neutralise(marked)
    _close(marked)
    text = msgspec.json.encode(marked).decode()
    check_text(text, "the schema")
    return text


def parts(schema: Schema, at: str = "#") -> Iterator[tuple[str, Schema]]:
    """The schema and all schemas in it, each with its place, such as #/properties/a. `at`: that of a schema that was taken out of
    another one, with the definitions of that."""
    waiting: list[tuple[str, Any]] = [(at, schema)]
    while waiting:
        path, part = waiting.pop()
        if not isinstance(part, dict):
            continue
        yield path, part
        for name in MAPS:
            if isinstance(found := part.get(name), dict):
                where = "#" if part is schema and name in DEFINITIONS else path
                waiting += [(f"{where}/{name}/{key}", value) for key, value in found.items()]
        for name in (*LISTS, *SINGLE):
            found = part.get(name)
            if isinstance(found, list):
                waiting += [(f"{path}/{name}/{index}", value) for index, value in enumerate(found)]
            elif name in SINGLE:
                waiting.append((f"{path}/{name}", found))


def refuse(path: str, part: Mapping[str, Any], keyword: str, reason: str = "is not supported") -> GrammarError:
    """The error for a keyword at a place that an output could not be held to."""
    shown = msgspec.json.encode(part[keyword]).decode()
    shown = f" ({shown})" if len(shown) <= 60 else ""
    return GrammarError(f"'{keyword}'{shown} at {path[:200]} {reason}.")


def check_nesting(value: object, what: str) -> None:
    """Raises GrammarError for JSON that is nested deeper than can be worked on."""
    level, depth = [value], 0
    while level := [item for one in level for item in _children(one) if isinstance(item, dict | list)]:
        depth += 1
        if depth >= MAX_NESTING:
            raise GrammarError(f"{what} is nested more than {MAX_NESTING} levels deep.")


def _children(value: object) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def check_size(schema: Schema) -> None:
    """Nesting first, since everything else here recurses; then the size of it all, since places in it are as long as its names."""
    check_nesting(schema, "the schema")
    try:
        text = msgspec.json.encode(schema).decode()
    except UnicodeEncodeError:
        raise GrammarError("the schema has half of a surrogate pair, which no output can have.") from None
    except ValueError:
        raise GrammarError("the schema has a number of more than 4300 digits.") from None
    check_text(text, "the schema")
    properties = alternatives = 0
    for _, part in parts(schema):
        named = _mapping(part.get("properties"))
        properties += len(named) + sum(name not in named for name in _list(part.get("required")) if isinstance(name, str))
        alternatives += sum(len(_list(part.get(name))) for name in ("enum", "anyOf", "oneOf"))
    check_count(properties, "properties", MAX_PROPERTIES)
    check_count(alternatives, "alternatives", MAX_ALTERNATIVES)
    if "\\u0000" in text and has_nul(schema):
        raise GrammarError("the schema has a NUL character, which no output can have.")


def has_nul(value: Any) -> bool:
    """Whether any text in this JSON has a NUL character."""
    return any(isinstance(leaf, str) and "\0" in leaf for leaf in _leaves(value))


def _leaves(value: Any) -> Iterator[Any]:
    """The names and scalars in JSON."""
    yield from value if isinstance(value, dict) else () if isinstance(value, list) else (value,)
    for item in _children(value):
        yield from _leaves(item)


def enforceable(part: Schema, keyword: str) -> bool:
    """Whether nothing speaks against a keyword of a schema but what stands beside it or in it."""
    try:
        _check("#", {keyword: part[keyword]})
    except GrammarError:
        return False
    return True


def _mark_nothing(schema: Schema) -> None:
    """Write each branch of `anyOf` and `oneOf` that admits no value as false, in its place, where another one admits some."""
    for _, part in parts(schema):
        for keyword in _BRANCHES:
            if (branches := _list(part.get(keyword))) and not _all_nothing(part, keyword):
                part[keyword] = [False if _admits_nothing(branch) else branch for branch in branches]


def _admits_nothing(schema: Any) -> bool:
    """As far as it says so itself: false, or a `not` of everything, which is how some tools write it."""
    if not isinstance(schema, dict):
        return schema is False
    denied = schema.get("not")
    if denied is True or (isinstance(denied, dict) and ANNOTATIONS.issuperset(denied)):
        return True
    return any(map(_admits_nothing, _list(schema.get("allOf")))) or any(_all_nothing(schema, keyword) for keyword in _BRANCHES)


def _all_nothing(part: Schema, keyword: str) -> bool:
    return bool(branches := _list(part.get(keyword))) and all(map(_admits_nothing, branches))


def _check(path: str, part: Schema) -> None:
    for keyword in _UNENFORCED:
        if keyword in part and not (keyword == "propertyNames" and _takes_all_names(part[keyword])):
            raise refuse(path, part, keyword)
    if part.get("uniqueItems", False) is not False:
        raise refuse(path, part, "uniqueItems")
    if (wrong := problem(part)) is not None:
        raise refuse(path, part, *wrong)
    reference = part.get("$ref")
    if "$ref" in part and not (isinstance(reference, str) and reference.startswith("#")):
        raise refuse(path, part, "$ref", "must point into the schema itself ('#/...')")
    for keyword in _BRANCHES:
        if _all_nothing(part, keyword):
            raise refuse(path, part, keyword, "admits nothing; at least one of its schemas must admit a value")
    if _remainders(part.get("multipleOf", 1)) > _MAX_REMAINDERS:
        raise refuse(path, part, "multipleOf", f"has more than {_MAX_REMAINDERS} remainders to tell apart, which is not supported")
    for keyword in ("const", "enum"):
        if any(type(leaf) is int and abs(leaf) > _EXACT for leaf in _leaves(part.get(keyword))):
            raise refuse(path, part, keyword, "holds a number whose last digits would be lost: let it be a string")
    patterns = [("pattern", part.get("pattern", "")), *(("patternProperties", name) for name in part.get("patternProperties", {}))]
    for keyword, pattern in patterns:
        check_text(pattern, f"'{keyword}' at {path[:200]}", MAX_REGEX_BYTES)


def _takes_all_names(schema: Any) -> bool:
    """Whether a `propertyNames` says no more than that names are strings, as zod's do."""
    return schema is True or (
        isinstance(schema, dict) and all(name in ANNOTATIONS or (name, schema[name]) == ("type", "string") for name in schema)
    )


def _remainders(step: float) -> int:
    """How many remainders a division by it can have, in units of its last digit: an automaton has a state for each."""
    if isinstance(step, int):
        return abs(step)
    digits = Decimal(repr(step))
    exponent = digits.as_tuple().exponent
    return int(digits.scaleb(-exponent) if isinstance(exponent, int) and exponent < 0 else digits)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def copied(value: Any) -> Any:
    """JSON, each part of it once for each place where it stands."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else value


def _neutralise(schema: Schema) -> None:
    """Take out what says nothing, so that the compiler does not stumble over it."""
    for _, part in parts(schema):
        part.pop("uniqueItems", None)
        part.pop("propertyNames", None)
        for keyword in _BRANCHES:
            if keyword in part:
                part[keyword] = [branch for branch in part[keyword] if branch is not False]
        for low, high in COUNTS:
            part.update({name: int(part[name]) for name in (low, high) if name in part})
            if part.get(high, 0) > MOST:
                del part[high]
        name = part.get("format")
        if isinstance(name, str) and name not in _FORMATS:
            del part["format"]


def _close(schema: Schema) -> None:
    """Close the objects that name their properties. Not where several schemas describe one object together: each of them
    would forbid what the others name. What is required without being named is so by that."""
    found = list(parts(schema))
    if any("allOf" in part or ("$ref" in part and "properties" in part) for _, part in found):
        return
    shared = {id(branch) for _, part in found if "properties" in part for name in ("anyOf", "oneOf") for branch in _list(part.get(name))}
    for _, part in found:
        alone = id(part) not in shared and "anyOf" not in part and "oneOf" not in part
        if alone and (named := _mapping(part.get("properties"))) and not {"patternProperties", "additionalProperties"} & part.keys():
            part["properties"] = {**named, **{name: {} for name in _list(part.get("required")) if name not in named}}
            part["additionalProperties"] = False


def explicit(schema: Schema) -> None:
    """Have each object that names its properties say whether it has others, as `prepare` would take it."""
    _close(schema)
    for _, part in parts(schema):
        if "properties" in part:
            part.setdefault("additionalProperties", True)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
