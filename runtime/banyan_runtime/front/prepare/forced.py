"""Grammars that hold a model to calls of tools in its own format."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Final

from banyan_runtime.front.chat.tools.format import ToolFormat
from banyan_runtime.front.chat.tools.tags import NAME, NUMBER, Hole, JsonArguments, Parts, TextArguments, ToolTag
from banyan_runtime.front.openai.tools import Tool
from banyan_runtime.grammar import tags
from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.loosened import lacks_names, loosened
from banyan_runtime.grammar.schema import ANNOTATIONS, Schema
from banyan_runtime.grammar.structural import Node
from banyan_runtime.wire import Grammar

Usable = Callable[[Grammar], bool]
"""Says whether a grammar can be used."""

LENIENT_CPU_S: Final = 1.0
"""Of computing time for one request's trials. A single one is bounded by itself (`constraints.TRIAL_CPU_S`)."""


_NAMING_NONE: Final = ANNOTATIONS | {"type", "properties", "required", "$schema"}
"""Keywords that give an object no property beyond those named."""


class Leniency:
    """Of tools that are not strict: those parts of their schemas are enforced that can be, as far as it is found out in time."""

    def __init__(self, usable: Usable, clock: Callable[[], float] = time.thread_time) -> None:
        self._usable = usable
        self._clock = clock
        self._spent_s = 0.0
        self.loosened: dict[str, None] = {}  # the names of tools whose schemas are not enforced as a whole

    def usable(self, grammar: Grammar) -> bool:
        if self._spent_s > LENIENT_CPU_S:
            return False
        begun = self._clock()
        found = self._usable(grammar)
        self._spent_s += self._clock() - begun
        return found


ARRAY: Final = ToolTag(
    trigger="",
    begin=('{"name": "', NAME, '", "arguments": '),
    end="}",
    separator=", ",
    opening="[",
    closing="]",
)
"""For models whose own format cannot be forced, or is not known."""


def tag_of(form: ToolFormat | None, added: Container[str]) -> ToolTag:
    """How calls are forced from a model with these added tokens."""
    tag = None if form is None else form.tag_for(added)
    return ARRAY if tag is None else tag


def forced(tag: ToolTag, tools: Sequence[Tool], *, several: bool, leniency: Leniency) -> tags.Answer:
    """At least one call of these tools, each with arguments that fit its schema. Of a tool that is not strict, what cannot be enforced
    (is not `usable` in a call) is not; Answer's methods raise GrammarError for one that is."""
    return _answer(tag, tools, several=several, leniency=leniency)


def strict(tag: ToolTag, tools: Sequence[Tool], added: Container[str], *, several: bool) -> Grammar | None:
    """Free text, in which calls fit the schemas of those tools that are strict; None: none is. Raises GrammarError."""
    if not tag.trigger or not any(tool.function.strict for tool in tools):
        return None
    answer = loose(tag, tools, several=several)
    if tag.prose:
        return answer.leading(tag.prose, tag.marker if tag.marker in added else "")
    return answer.triggered(tag.trigger)


def loose(tag: ToolTag, tools: Sequence[Tool], *, several: bool) -> tags.Answer:
    """Calls that fit the schemas of those tools that are strict."""
    return _answer(tag, tools, several=several, leniency=None)


def _answer(tag: ToolTag, tools: Sequence[Tool], *, several: bool, leniency: Leniency | None) -> tags.Answer:
    """`leniency` None: only strict tools are held to their schemas."""
    calls = []
    for tool in tools:
        schema = _parameters(tool)
        if not tool.function.strict:
            schema = {} if leniency is None else _enforced(tag, tool, leniency)
        calls.append(tags.Call(_parts(tag.begin, tool.function.name), _arguments(tag, schema), tag.end))
    return tags.Answer(calls, tag.opening, tag.closing, tag.separator, several)


def problem(tag: ToolTag, tool: Tool, tried: Callable[[Grammar], str | None]) -> str | None:
    """Why the arguments of a strict tool cannot be held to its schema. `tried`: why a grammar cannot be used."""
    if not tool.function.strict:
        return None
    try:
        return tried(_alone(tag, _parameters(tool)))
    except GrammarError as error:
        return str(error)


def _parameters(tool: Tool) -> Schema:
    """The schema of its arguments. A tool that has no parameters, or whose parameters name no property, takes none, as OpenAI's do."""
    told = tool.function.parameters
    if told is None or (told.get("properties") == {} and not told.get("required") and not told.keys() - _NAMING_NONE):
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return told


def _enforced(tag: ToolTag, tool: Tool, leniency: Leniency) -> Schema:
    schema = dict(_parameters(tool))
    found = loosened(schema, lambda part: _enforceable(tag, part, leniency.usable))
    if not isinstance(tag.arguments, JsonArguments) and lacks_names(schema, found):
        found = {}
    if found is not schema:
        leniency.loosened[tool.function.name] = None
    return found


def _enforceable(tag: ToolTag, schema: Mapping[str, Any], usable: Usable) -> bool:
    try:
        return usable(_alone(tag, schema))
    except GrammarError:
        return False


def _alone(tag: ToolTag, schema: Mapping[str, Any]) -> Grammar:
    """Of nothing but a call with such arguments. Raises GrammarError."""
    return tags.Answer([tags.Call(("{",), _arguments(tag, schema), "}")]).forced()


def _arguments(tag: ToolTag, schema: Mapping[str, Any]) -> Node:
    known = schema if schema else None
    if isinstance(tag.arguments, JsonArguments):
        return tags.json_arguments(known)
    form: TextArguments = tag.arguments
    at = form.begin.index(NAME)
    before, between = "".join(map(str, form.begin[:at])), "".join(map(str, form.begin[at + 1 :]))
    return tags.text_arguments(known, before, between, form.end, form.separator, form.excludes)


def _parts(begin: Parts, name: str) -> tuple[str | Node, ...]:
    """A call's beginning, the tool's name in it; neighbouring texts are one."""
    parts: list[str | Node] = []
    for part in begin:
        piece: str | Node = tags.NUMBER if part is NUMBER else name if isinstance(part, Hole) else part
        if isinstance(piece, str) and parts and isinstance(parts[-1], str):
            parts[-1] += piece
        else:
            parts.append(piece)
    return tuple(parts)
