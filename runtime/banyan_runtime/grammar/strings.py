"""Strings that a schema admits, apart from its other values: where parameters are text, strings stand bare and all else as JSON."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.formats import FORMATS
from banyan_runtime.grammar.schema import DEFINITIONS, copied, parts, refuse

Schema = Mapping[str, Any]

_LISTS: Final = ("anyOf", "oneOf", "allOf")
_KINDS: Final = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"), (dict, "object"))


@dataclass(frozen=True, slots=True)
class Listed:
    """These."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Length:
    """So many characters."""

    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Pattern:
    """Those in which this regex is found, in the words of JSON Schema: ^ and $ are the text's beginning and end."""

    regex: str


@dataclass(frozen=True, slots=True)
class Both:
    """Those that all of the rules admit."""

    rules: tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class Either:
    """Those that one of the rules admits."""

    rules: tuple[Rule, ...]


Rule: TypeAlias = Listed | Length | Pattern | Both | Either

_INDEX: Final = re.compile("[0-9]{1,9}")
_DEFINED: Final = tuple(f"#/{name}/" for name in DEFINITIONS)

ANY: Final = Both(())
NONE: Final = Listed(())


@dataclass(frozen=True, slots=True)
class Value:
    """What stands for a parameter: a string that the rule admits, bare, or JSON of the schema, if there is one. `kinds`: the types that
    a text is read as, other than strings."""

    rule: Rule
    json: dict[str, Any] | None
    kinds: tuple[str, ...]


def value_of(schema: Schema, root: Schema, path: str, markers: Iterable[str]) -> Value:
    """Of a parameter in the schema `root`, at `path`. Raises GrammarError for what no text could be held to, and for texts that have one
    of the markers in them."""
    rule = rule_of(schema, root, path)
    if rule == ANY:
        return Value(ANY, None, ())
    if rule == NONE:
        return Value(NONE, _alone(schema, root), ())
    kinds = kinds_of(schema, root)
    if not kinds:
        raise GrammarError(f"the schema at {path[:200]} needs a 'type': what is read of a parameter's text depends on it.")
    for text in _texts(rule):
        for marker in markers:
            if marker in text:
                what = f"{text[:60]!r} at {path[:200]}"
                raise GrammarError(f"{what} has {marker!r} in it, with which this model ends a parameter; leave it out.")
    rest, others = without_strings(schema, root), tuple(sorted(kinds - {"string"}))
    if rest is None or not others:
        return Value(rule, None, ())
    return Value(rule, _alone({"type": list(others), **rest}, root), others)


def _alone(schema: Schema, root: Schema) -> dict[str, Any]:
    """A schema that stood in `root`, with what it refers to there."""
    alone: dict[str, Any] = copied({**schema, **{name: root[name] for name in DEFINITIONS if name in root}})
    if all(reference.startswith(_DEFINED) for reference in (part.get("$ref", _DEFINED[0]) for _, part in parts(alone))):
        return alone
    alone = copied({**schema, "$defs": {"whole": root}})
    for _, part in parts(alone):
        if "$ref" in part:
            part["$ref"] = "#/$defs/whole" + part["$ref"][1:]
    return alone


def rule_of(schema: Schema, root: Schema | None = None, path: str = "#") -> Rule:
    """Which strings it admits. References are to the `root` that it stands in, at `path`. Raises GrammarError for what no text could
    be held to."""
    return _rule(schema, schema if root is None else root, path, ())


def without_strings(schema: Schema, root: Schema | None = None) -> dict[str, Any] | None:
    """A schema of all other values, where types are named. None: there are none."""
    return _without(schema, schema if root is None else root, ())


def kinds_of(schema: Schema, root: Schema | None = None) -> set[str]:
    """The types that it names, itself or in one of the schemas that it is made of, and those of values that it lists."""
    return _kinds(schema, schema if root is None else root, ())


def _texts(rule: Rule) -> Iterator[str]:
    """Those that it lists."""
    match rule:
        case Listed(texts):
            yield from texts
        case Both(rules) | Either(rules):
            for one in rules:
                yield from _texts(one)


def _rule(schema: Schema, root: Schema, path: str, within: tuple[int, ...]) -> Rule:
    if id(schema) in within:
        return ANY
    within = (*within, id(schema))
    rules: list[Rule] = []
    named = schema.get("type")
    if named is not None and "string" not in (named if isinstance(named, list) else [named]):
        return NONE
    if "const" in schema:
        rules.append(_listed([schema["const"]]))
    if isinstance(listed := schema.get("enum"), list):
        rules.append(_listed(listed))
    if "minLength" in schema or "maxLength" in schema:
        rules.append(Length(schema.get("minLength", 0), schema.get("maxLength")))
    if "pattern" in schema:
        rules.append(Pattern(schema["pattern"]))
    if "format" in schema:
        if schema["format"] not in FORMATS:
            raise refuse(path, schema, "format", "is not supported; use 'pattern', or leave it out")
        rules.append(Pattern(f"^{FORMATS[schema['format']]}$"))
    if isinstance(reference := schema.get("$ref"), str):
        if (target := resolved(reference, root)) is None:
            named = reference != "#" and not reference.startswith("#/")
            raise refuse(path, schema, "$ref", "must begin with '#/' where parameters are text" if named else "does not exist")
        rules.append(_rule(target, root, reference, within))
    for word in _LISTS:
        branches = [_rule(branch, root, f"{path}/{word}/{index}", within) for index, branch in enumerate(_branches(schema, word))]
        if word == "allOf":
            rules += branches
        elif branches and word == "oneOf" and all(isinstance(rule, Listed) for rule in branches):
            found = Counter(text for rule in branches for text in _texts(rule))
            rules.append(_listed(text for text, times in found.items() if times == 1))
        elif branches:
            if word == "oneOf" and sum(rule != NONE for rule in branches) > 1:
                raise refuse(path, schema, "oneOf", "is not supported where a value may fit several of its schemas; use 'anyOf'")
            rules.append(_either(branches))
    return _both(rules)


def _listed(values: Iterable[Any]) -> Listed:
    return Listed(tuple(dict.fromkeys(value for value in values if isinstance(value, str))))


def _both(rules: Iterable[Rule]) -> Rule:
    """All of them, those that list texts as one."""
    rules = [rule for rule in rules if rule != ANY]
    lists = [rule for rule in rules if isinstance(rule, Listed)]
    others: list[Rule] = [rule for rule in rules if not isinstance(rule, Listed)]
    if lists:
        common = Listed(tuple(text for text in lists[0].texts if all(text in each.texts for each in lists[1:])))
        if common == NONE or not others:
            return common
        others.insert(0, common)
    return others[0] if len(others) == 1 else Both(tuple(others))


def _either(rules: Iterable[Rule]) -> Rule:
    """Any of them, those that list texts as one."""
    rules = [rule for rule in rules if rule != NONE]
    if ANY in rules:
        return ANY
    listed = _listed(text for rule in rules if isinstance(rule, Listed) for text in rule.texts)
    others: list[Rule] = [rule for rule in rules if not isinstance(rule, Listed)]
    if not others:
        return listed
    if listed != NONE:
        others.insert(0, listed)
    return others[0] if len(others) == 1 else Either(tuple(others))


def _without(schema: Schema, root: Schema, within: tuple[int, ...]) -> dict[str, Any] | None:
    if id(schema) in within:
        return dict(schema)
    within = (*within, id(schema))
    rest = dict(schema)
    if (target := resolved(rest.pop("$ref", None), root)) is not None:
        if (inner := _without(target, root, within)) is None:
            return None
        rest["allOf"] = [*_branches(schema, "allOf"), inner]
    named = rest.get("type")
    if isinstance(named, list):
        rest["type"] = named = [name for name in named if name != "string"]
    listed = rest.get("enum")
    if isinstance(listed, list):
        rest["enum"] = listed = [item for item in listed if not isinstance(item, str)]
    if named in ("string", []) or listed == [] or isinstance(rest.get("const"), str):
        return None
    for word in _LISTS:
        if branches := _branches(rest, word):
            kept = [_without(branch, root, within) for branch in branches]
            left = [branch for branch in kept if branch is not None]
            if not left or (word == "allOf" and len(left) < len(kept)):
                return None
            rest[word] = left
    if set(rest) <= {"allOf", "$defs", "definitions"} and len(_branches(rest, "allOf")) == 1:
        return {**{name: rest[name] for name in rest if name != "allOf"}, **rest["allOf"][0]}
    return rest


def _kinds(schema: Schema, root: Schema, within: tuple[int, ...]) -> set[str]:
    if id(schema) in within:
        return set()
    within = (*within, id(schema))
    named = schema.get("type")
    kinds = {name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)}
    if not kinds:
        listed = schema.get("enum")
        values = [*(listed if isinstance(listed, list) else ()), *([schema["const"]] if "const" in schema else ())]
        kinds = {"null" if value is None else next(name for kind, name in _KINDS if isinstance(value, kind)) for value in values}
    target = resolved(schema.get("$ref"), root)
    branches = [branch for word in _LISTS for branch in _branches(schema, word)]
    return kinds.union(*(_kinds(branch, root, within) for branch in (*branches, *([] if target is None else [target]))))


def _branches(schema: Schema, word: str) -> list[Schema]:
    listed = schema.get(word)
    return [branch for branch in listed if isinstance(branch, Mapping)] if isinstance(listed, list) else []


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
