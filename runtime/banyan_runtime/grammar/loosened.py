"""What is left of a schema that cannot be enforced as a whole: the same one, without what keeps it from being so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from banyan_runtime.grammar.keywords import LISTS, MAPS, SINGLE
from banyan_runtime.grammar.schema import DEFINITIONS, Schema

MOST_TRIALS: Final = 100  # each is a grammar that is compiled, of a millisecond or some; what is not tried by then is left out whole
_FRAME: Final = frozenset(
    {"type", "properties", "required", "additionalProperties", "items", "prefixItems", "anyOf", "enum", "const", "$ref", *DEFINITIONS}
)
"""What a value is, at all. Other keywords narrow it."""


def loosened(schema: Schema, fits: Callable[[Schema], bool]) -> Schema:
    """The schema of an object, or as much of it as `fits`: each part that does not is narrowed less, and the smallest such parts alone.
    Whatever fits the schema fits what is left."""
    return _Loosening(schema, fits).whole()


class _Loosening:
    def __init__(self, schema: Schema, fits: Callable[[Schema], bool]) -> None:
        self._schema = schema
        self._fits = fits
        self._trials = 0
        # Anything, until they are loosened themselves: one that is not would keep all others from fitting.
        self._definitions: Schema = {name: {key: {} for key in schema[name]} for name in DEFINITIONS if isinstance(schema.get(name), dict)}

    def whole(self) -> Schema:
        if self._fit(self._schema):
            return self._schema
        for name, those in self._definitions.items():
            for key in those:
                those[key] = self._part(self._schema[name][key])
        root = self._schema | self._definitions
        return self._least(self._with_parts(root), self._fit)

    def _fit(self, schema: Schema) -> bool:
        self._trials += 1
        return self._trials <= MOST_TRIALS and self._fits(schema)

    def _fit_as_part(self, part: Any) -> bool:
        return self._fit({"type": "object", "properties": {"part": part}, "required": ["part"], **self._definitions})

    def _part(self, part: Any) -> Any:
        if not isinstance(part, dict) or self._fit_as_part(part):
            return part
        return self._least(self._with_parts(part), self._fit_as_part)

    def _with_parts(self, schema: Schema) -> Schema:
        """Each part of it loosened by itself."""
        made = dict(schema)
        for name in schema.keys() & {*MAPS} - {*DEFINITIONS}:
            if isinstance(found := schema[name], dict):
                made[name] = {key: self._part(part) for key, part in found.items()}
        for name in schema.keys() & {*LISTS, *SINGLE}:
            found = schema[name]
            made[name] = [self._part(part) for part in found] if isinstance(found, list) else self._part(found)
        return made

    def _least(self, schema: Schema, fit: Callable[[Schema], bool]) -> Schema:
        """Without one keyword that narrows it, without all of them, or without anything that does not fit."""
        return next((one for one in _less(schema) if fit(one)), {})


def _less(schema: Schema) -> Iterator[Schema]:
    yield schema
    narrowing = [key for key in schema if key not in _FRAME]
    for key in narrowing:
        yield {other: value for other, value in schema.items() if other != key}
    frame = {key: value for key, value in schema.items() if key in _FRAME}
    if len(narrowing) > 1:
        yield frame
    kept: Schema = {key: frame[key] for key in ("type", *DEFINITIONS) if key in frame}
    if len(kept) < len(frame):
        yield kept
