"""Grammars of tool calls: each call begins, holds its arguments and ends as the model's format says.

An answer of calls is

    opening  call  (separator call)*  closing        call = begin arguments end
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from banyan_runtime.grammar import structural
from banyan_runtime.grammar.structural import Json, Node, Or, Parameters, Star, Tag, TagsWithSeparator, Text, TriggeredTags
from banyan_runtime.wire import Grammar

NUMBER: Final = structural.Regex("[0-9]+")
"""A part of a call's beginning: digits of the model's choice."""
_SAY_MORE: Final = frozenset({"$ref", "anyOf", "oneOf", "allOf"})  # beside which compilers do not all take a type


def json_arguments(schema: Mapping[str, Any] | None) -> Node:
    """Arguments as JSON of a schema; without one, any object. They are an object where the schema does not say so, too."""
    given = dict(schema or {})
    return Json(given if isinstance(given.get("type"), str) or given.keys() & _SAY_MORE else {**given, "type": "object"})


def text_arguments(
    schema: Mapping[str, Any] | None, before: str, between: str, after: str, separator: str = "", excludes: tuple[str, ...] = ()
) -> Node:
    """Arguments one by one, as `structural.Parameters` says; without a schema, whatever names and values."""
    return Parameters({"type": "object"} if schema is None else dict(schema), before, between, after, separator, excludes)


@dataclass(frozen=True, slots=True)
class Call:
    """How one tool is called. `begin` is text, in which `NUMBER` may stand behind the first part."""

    begin: tuple[str | Node, ...]
    arguments: Node
    end: str

    def tag(self, opening: str = "", closing: str = "", more: Node | None = None) -> Tag:
        first, *parts = self.begin
        assert isinstance(first, str)
        inner: list[Node] = [*(Text(part) if isinstance(part, str) else part for part in parts), self.arguments]
        if more is not None:
            inner += [Text(self.end), more]
        content = inner[0] if len(inner) == 1 else structural.Sequence(tuple(inner))
        return Tag(opening + first, content, closing if more is not None else self.end + closing)


@dataclass(frozen=True, slots=True)
class Answer:
    """What may be called, and what stands around the calls. `several`: more than one call may be made."""

    calls: Sequence[Call]
    opening: str = ""
    closing: str = ""
    separator: str = ""
    several: bool = True

    @property
    def node(self) -> Node:
        """At least one call and nothing else."""
        parts = tuple(node for node in (Text(self.opening), self._inner, Text(self.closing)) if node != Text(""))
        return parts[0] if len(parts) == 1 else structural.Sequence(parts)

    @property
    def _tags(self) -> tuple[Tag, ...]:
        return tuple(call.tag() for call in self.calls)

    @property
    def _inner(self) -> TagsWithSeparator:
        return TagsWithSeparator(self._tags, self.separator, at_least_one=True, stop_after_first=not self.several)

    def forced(self) -> Grammar:
        """As `node`. Raises GrammarError for arguments that cannot be enforced."""
        return _grammar(self.node)

    def triggered(self, trigger: str) -> Grammar:
        """Free text, in which `trigger`, the beginning of opening and call, begins an answer. Raises GrammarError."""
        if self.opening.startswith(trigger):
            tags: tuple[Tag, ...] = (Tag(self.opening, self._inner, self.closing),)
        elif self.opening and self.several:
            more = Star(structural.Sequence((Text(self.separator), Or(self._tags))))
            tags = tuple(call.tag(self.opening, self.closing, more) for call in self.calls)
        else:
            tags = tuple(call.tag(self.opening, self.closing) for call in self.calls)
        return _grammar(TriggeredTags((trigger,), tags, stop_after_first=not self.several))

    def leading(self, prose: str, marker: str) -> Grammar:
        """Calls at the beginning, else what the regex `prose` says, with calls behind `marker` if there is one. Raises GrammarError."""
        calls, other = self.node, structural.Regex(prose)
        if not marker:
            return _grammar(Or((calls, other)))
        marked = structural.Optional(Text(marker))
        later = structural.Optional(structural.Sequence((Text(marker), calls)))
        return _grammar(Or((structural.Sequence((marked, calls)), structural.Sequence((other, later)))))

    def or_json(self, other: Grammar) -> Grammar:
        """At least one call, or else what `other`, a grammar of JSON, says. Raises GrammarError."""
        return _grammar(Or((self.node, structural.node_of(other))), other.whitespace)


def _grammar(node: Node, whitespace: str = "bounded") -> Grammar:
    return Grammar("structural_tag", structural.write(node), whitespace)
