"""What is left of a schema that cannot be enforced as a whole: the same one, without the keywords that keep it from being so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.keywords import LISTS, MAPS, SINGLE
from banyan_runtime.grammar.schema import ANNOTATIONS, DEFINITIONS, Schema, check_nesting, copied, enforceable, explicit, parts

MOST_TRIALS: Final = 200
"""Each may be a grammar that is compiled. One that fails among a thousand keywords takes some twenty; what is not tried by then is
left out."""
_FRAME: Final = frozenset({"type", "properties", "required", "additionalProperties", "items", "prefixItems", "anyOf", "enum", "const"})
"""What a value is, at all. Other keywords narrow it."""
_RESTS_ON: Final[Mapping[str, tuple[str, ...]]] = {
    "additionalProperties": ("properties", "patternProperties"), "items": ("prefixItems",), "additionalItems": ("items",),
}  # fmt: skip
"""Keywords that say something of what others beside them leave over: without those they would be about more."""
_MAY_NAME: Final = ("allOf", "anyOf", "oneOf", "patternProperties", "$ref")
_NAMING: Final = frozenset({"properties", "patternProperties", "additionalProperties", "$ref"})


def loosened(schema: Schema, fits: Callable[[Schema], bool]) -> Schema:
    """The schema of an object, or as many of its keywords as there may be for it to `fit`. Whatever fits the schema fits what is left."""
    if fits(schema):
        return schema
    try:
        check_nesting(schema, "the schema")
    except GrammarError:
        return {}
    return _Loosening(schema, fits).whole()


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


class _Piece(NamedTuple):
    """A keyword of a schema, or of one in it."""

    part: int  # its id
    keyword: str


class _Loosening:
    def __init__(self, schema: Schema, fits: Callable[[Schema], bool]) -> None:
        self._fits = fits
        self._trials = 0
        self._whole = copied(schema)
        explicit(self._whole)
        for _, part in parts(self._whole):
            if "oneOf" in part and "anyOf" not in part:  # which is wider: of several that a value fits none can be told from the others
                part["anyOf"] = part.pop("oneOf")
        self._kept: set[_Piece] = set()

    def whole(self) -> Schema:
        pieces = [
            _Piece(id(part), keyword)
            for _, part in parts(self._whole)
            for keyword in part
            if keyword not in ANNOTATIONS and enforceable(part, keyword)
        ]
        self._keep(sorted(pieces, key=_rank))  # of one rank those of a schema before those of schemas in it
        made = self._made(self._whole, self._kept)
        assert isinstance(made, dict)
        return made

    def _keep(self, pieces: Sequence[_Piece]) -> None:
        """All of them, or of either half what can be kept: a few that cannot are found in few trials."""
        if not pieces or self._trials == MOST_TRIALS:
            return
        self._trials += 1
        kept = self._kept.union(pieces)
        if self._fits(self._made(self._whole, kept)):
            self._kept = kept
        elif len(pieces) > 1:
            middle = len(pieces) // 2
            self._keep(pieces[:middle])
            self._keep(pieces[middle:])

    def _made(self, part: Any, kept: set[_Piece]) -> Any:
        """A schema of nothing but what is kept."""
        if not isinstance(part, dict):
            return part
        made: Schema = {}
        for keyword, value in part.items():
            if _Piece(id(part), keyword) not in kept:
                continue
            if keyword in MAPS:
                made[keyword] = {name: self._made(one, kept) for name, one in value.items()}
            elif keyword in (*LISTS, *SINGLE):
                made[keyword] = [self._made(one, kept) for one in value] if isinstance(value, list) else self._made(value, kept)
            else:
                made[keyword] = value
        for keyword, others in _RESTS_ON.items():
            if any(other in part and other not in made for other in others):
                made.pop(keyword, None)
        if "properties" in made:
            made.setdefault("additionalProperties", True)  # else it would be closed
        return made


def _rank(piece: _Piece) -> int:
    """What others point to, what a value is, what points to others, and what narrows it."""
    if piece.keyword == "$ref":
        return 2
    return 0 if piece.keyword.startswith("$") or piece.keyword == "definitions" else 1 if piece.keyword in _FRAME else 3
