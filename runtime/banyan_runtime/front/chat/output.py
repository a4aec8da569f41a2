"""What reads the output of a choice: reasoning first, then tool calls in the content that follows it."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Protocol

from banyan_runtime.front.chat.events import Content, Cut, Event, OutputParser, Reasoning, ToolArgs, ToolEnd, ToolStart
from banyan_runtime.front.chat.reasoning import HarmonyFormat, ReasoningFormat, ReasoningParser, Start
from banyan_runtime.front.chat.tools.format import ToolFormat
from banyan_runtime.front.chat.tools.harmony import HarmonyParser
from banyan_runtime.front.chat.tools.parser import Schemas, ToolParser, calls_among

_NO_TOOLS: Final[Schemas] = MappingProxyType({})


class ChoiceParser(OutputParser, Protocol):
    """The parser of one choice, as `make_parser` makes it."""

    enough: bool
    """The one call that the request allows is complete, and what follows is dropped: generating can stop."""

    def keeps(self, text: str) -> bool:
        """Whether a token of this text would be one of the reasoning, if it came now."""
        ...

    def rescue(self) -> list[Event]:
        """After an exception of `feed` or `finish`: all text that was fed and not given out, that of the failed call included."""
        ...


def make_parser(
    reasoning: ReasoningFormat | None,
    start: Start,
    tools: ToolFormat | None,
    schemas: Mapping[str, Mapping[str, Any]] = _NO_TOOLS,
    *,
    added: Container[str] = (),
    separate: bool = True,
    stream_reasoning: bool = True,
    parallel: bool = True,
    limited: bool = False,
    required: bool = False,
    implicit_end: bool = True,
    cut: Cut | None = None,
) -> ChoiceParser | None:
    """The parser of one choice, or None if its text is passed on as it is.

    `start`: where the prompt left the model, by `reasoning.start_state`. `tools` is None if the request has none or forbids them;
    `schemas`: the parameters of each tool. `added`: the texts that are single tokens of the vocabulary. With `separate` false
    reasoning stays in the content, with its markers; calls are looked for behind it all the same. `parallel` false: only the
    first call is given out; `limited`: calls of tools that are not in `schemas` are text. `required`: a grammar admits nothing
    but calls, so what was held back at the end is one that was cut off, and is dropped. `implicit_end` false: only its own marker ends
    reasoning, since a grammar waits for that. `cut`: what content is to go through, and reasoning is not.
    """
    if isinstance(reasoning, HarmonyFormat):
        only = schemas if limited else None
        parser: ChoiceParser = HarmonyParser(
            start, calls=tools is not None, separate=separate, stream_reasoning=stream_reasoning, only=only, required=required, cut=cut
        )
        return parser if parallel else _OneCall(parser)
    first: ReasoningParser | None = None
    if reasoning is not None and start is not Start.CONTENT and (separate or tools is not None or cut is not None):
        openers = () if tools is None or not implicit_end else tools.openers
        first = ReasoningParser(
            reasoning,
            start,
            end_is_token=reasoning.end in added,
            stream=stream_reasoning,
            raw=not separate,
            also_ends={opener: opener in added for opener in openers},
        )
    if first is None and tools is None:
        return None
    calls = None if tools is None else tools.parser(schemas, limited=limited)
    parser = _Output(first, calls, cut, separate=separate, required=required)
    return parser if parallel else _OneCall(parser)


class _Output:
    enough = False

    def __init__(
        self, reasoning: ReasoningParser | None, tools: ToolParser | None, cut: Cut | None, *, separate: bool, required: bool
    ) -> None:
        self.reasoning_tokens = 0
        self._reasoning = reasoning
        self._tools = tools
        self._cut = cut
        self._blank = False  # reasoning that stays in the content has ended, and nothing has come but the empty line behind it
        self._separate = separate
        self._required = required
        self._ending = False
        self._given: list[Event] = []  # by a call that may still fail

    def keeps(self, text: str) -> bool:
        if self._blank:
            return bool(text) and not text.strip("\n")
        return self._reasoning is not None and self._reasoning.keeps(text)

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Event]:
        self._given = []
        if self._reasoning is None or self._reasoning.over:
            self._content(text, self._cut)
        else:
            self._sort(self._reasoning.feed(text, token_ids))
            self.reasoning_tokens = self._reasoning.reasoning_tokens
        return self._take()

    def finish(self) -> list[Event]:
        self._given = []
        self._ending = True
        if self._reasoning is not None:
            self._sort(self._reasoning.finish())
            self.reasoning_tokens = self._reasoning.reasoning_tokens
        if self._cut is not None:
            self._content(self._cut.finish(), None)
        if self._tools is not None:
            self._said(self._tools.finish())
        return self._take()

    def rescue(self) -> list[Event]:
        events = self._take()
        if self._tools is not None:
            events += self._tools.rescue()
        if self._reasoning is not None:
            events += self._reasoning.rescue()
        return events

    def _sort(self, events: Sequence[Event]) -> None:
        """Reasoning comes before content, and content that fails is the last piece, so nothing is lost behind it."""
        for event in events:
            if isinstance(event, Content):
                self._content(event.text, self._cut)
            elif isinstance(event, Reasoning) and not self._separate:
                self._given.append(Content(event.text))
                self._blank = self._reasoning is not None and self._reasoning.over
            else:
                self._given.append(event)

    def _content(self, text: str, cut: Cut | None) -> None:
        """Look for calls in content, once it has gone through `cut`."""
        if cut is not None:
            said = text.lstrip("\n") if self._blank else text
            self._blank = self._blank and not said
            text = text[: len(text) - len(said)] + cut.feed(said)
        if self._tools is not None:
            self._said(self._tools.feed(text))
        elif text:
            self._given.append(Content(text))

    def _said(self, events: Sequence[Event]) -> None:
        """Take what the parser of calls makes of content."""
        self._given += calls_among(events) if self._required and self._ending else events

    def _take(self) -> list[Event]:
        events, self._given = self._given, []
        return events


class _OneCall:
    """Gives out nothing behind the end of the first call."""

    def __init__(self, parser: ChoiceParser) -> None:
        self.reasoning_tokens = 0
        self.enough = False
        self._parser = parser

    def keeps(self, text: str) -> bool:
        return self._parser.keeps(text)

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Event]:
        if self.enough:
            return []
        events = self._parser.feed(text, token_ids)
        self.reasoning_tokens = self._parser.reasoning_tokens
        return self._first(events)

    def finish(self) -> list[Event]:
        events = [] if self.enough else self._parser.finish()
        self.reasoning_tokens = self._parser.reasoning_tokens
        return self._first(events)

    def rescue(self) -> list[Event]:
        return [] if self.enough else self._first(self._parser.rescue())

    def _first(self, events: list[Event]) -> list[Event]:
        for position, event in enumerate(events):
            if isinstance(event, ToolEnd):
                self.enough = True
                return events[: position + 1]
            if isinstance(event, ToolStart | ToolArgs) and event.index:  # the first one was malformed and has no end
                self.enough = True
                return events[:position]
        return events
