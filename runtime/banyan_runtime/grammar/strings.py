"""Strings that a schema admits, apart from its other values: where parameters are text, strings stand bare and all else as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

Schema = Mapping[str, Any]

_LISTS: Final = ("anyOf", "oneOf", "allOf")


def strings_of(schema: Schema) -> list[str] | None:
    """Those that it lists; None: others, too. References are to its own "$defs" or "definitions"."""
    return _strings(schema, schema, ())


def without_strings(schema: Schema) -> dict[str, Any] | None:
    """A schema of all other values, of one that lists its strings. None: there are none."""
    return _without(schema, schema, ())


def _strings(schema: Schema, root: Schema, within: tuple[int, ...]) -> list[str] | None:
    if id(schema) in within:
        return None
    within = (*within, id(schema))
    found: list[list[str] | None] = []  # what each keyword lets be
    named = schema.get("type")
    if named is not None and "string" not in (named if isinstance(named, list) else [named]):
        found.append([])
    if "const" in schema:
        found.append([schema["const"]] if isinstance(schema["const"], str) else [])
    if isinstance(listed := schema.get("enum"), list):
        found.append([item for item in listed if isinstance(item, str)])
    if (target := resolved(schema.get("$ref"), root)) is not None:
        found.append(_strings(target, root, within))
    for word in _LISTS:
        branches = [_strings(branch, root, within) for branch in _branches(schema, word)]
        if word == "allOf":
            found += branches
        elif branches:
            found.append(None if None in branches else list(dict.fromkeys(item for branch in branches for item in branch or ())))
    lists = [each for each in found if each is not None]
    return [item for item in lists[0] if all(item in each for each in lists[1:])] if lists else None


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


def _branches(schema: Schema, word: str) -> list[Schema]:
    listed = schema.get(word)
    return [branch for branch in listed if isinstance(branch, Mapping)] if isinstance(listed, list) else []


def resolved(target: Any, root: Schema) -> Schema | None:
    """What a local reference such as #/$defs/City points to; None: no schema."""
    if not isinstance(target, str) or not target.startswith("#"):
        return None
    found: Any = root
    for part in target[1:].split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None
