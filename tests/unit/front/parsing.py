"""What a parser makes of a text, however it is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from banyan_runtime.front.chat.events import Content, Event, Reasoning, ToolArgs, ToolEnd, ToolStart
from banyan_runtime.front.chat.output import ChoiceParser, make_parser
from banyan_runtime.front.chat.reasoning import Start
from banyan_runtime.front.chat.tools.parser import Schemas
from banyan_runtime.front.chat.tools.registry import find
from tests.unit.front.support import splits

TOOLS: Schemas = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "opts": {"type": "object"}},
        "required": ["city"],
    },
    "now": {"type": "object", "properties": {}},
}


class Parser(Protocol):
    def feed(self, text: str, token_ids: Sequence[int]) -> list[Event]: ...
    def finish(self) -> list[Event]: ...


def parsed(parser: Parser, deltas: Iterable[str]) -> list[Event]:
    """All events of these deltas, those that continue each other joined."""
    return joined([*(event for delta in deltas for event in parser.feed(delta, (0,))), *parser.finish()])


def joined(events: Iterable[Event]) -> list[Event]:
    whole: list[Event] = []
    for event in events:
        last = whole[-1] if whole else None
        match last, event:
            case Content(before), Content(text):
                whole[-1] = Content(before + text)
            case Reasoning(before), Reasoning(text):
                whole[-1] = Reasoning(before + text)
            case ToolArgs(one, before), ToolArgs(two, text) if one == two:
                whole[-1] = ToolArgs(one, before + text)
            case _:
                whole.append(event)
    return whole


def call(index: int, name: str, arguments: str = "{}", id: str | None = None) -> list[Event]:
    """A whole call."""
    return [ToolStart(index, name, id), ToolArgs(index, arguments), ToolEnd(index)]


def cut_call(index: int, name: str, arguments: str) -> list[Event]:
    """A call that has no end."""
    return [ToolStart(index, name), ToolArgs(index, arguments)]


def tool_parser(name: str) -> ChoiceParser:
    """A parser of calls alone."""
    form = find(name)
    assert form is not None
    parser = make_parser(None, Start.CONTENT, form, TOOLS)
    assert parser is not None
    return parser


def always(make: Callable[[], Parser], text: str, expected: list[Event]) -> None:
    """Whatever way the text is cut, these are its events."""
    for deltas in splits(text, shuffled=200):
        assert parsed(make(), deltas) == expected, deltas
