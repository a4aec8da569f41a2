"""What one sequence says: tokens → text → output parser → content, reasoning and calls of tools.

Stop strings and stop tokens stand behind the reasoning and before the content: a client that sets them means the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec

from banyan_runtime.front.chat.events import Content, Cut, Event, Reasoning, ToolEvent
from banyan_runtime.front.chat.output import ChoiceParser, make_parser
from banyan_runtime.front.chat.reasoning import Start
from banyan_runtime.front.chat.tools.json_array import JSON_ARRAY
from banyan_runtime.front.chat.tools.registry import find
from banyan_runtime.front.openai.calls import Calls
from banyan_runtime.front.plan import GenerateRequest
from banyan_runtime.front.text.detokenizer import Detokenizer
from banyan_runtime.front.text.stops import StopMatcher
from banyan_runtime.front.text.text import Text

log = logging.getLogger("banyan.requests")

_CHATS: Final = ("chat", "responses", "messages")


class Speech:
    """Tokens go in one by one; what is certain of their meaning lies in `content`, `reasoning` and `tools` until it is taken."""

    def __init__(self, text: Text, request: GenerateRequest, endpoint: str, request_id: str) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.tools: list[ToolEvent] = []
        self._said: list[Event] = []  # all of these, in order
        self._turned = False  # whether that is another one than reasoning, content, calls
        self._calls = Calls(lambda start: "")  # their ids are the answer's
        self._id = request_id
        self._cut = _Stopping(request) if request.stops or request.stop_ids else None
        self._parser = _parser(text, request, self._cut)
        self._detokenizer = _detokenizer(text, request, endpoint)
        self._tokenizer = text.tokenizer
        # What is said is the content, and ends nothing.
        self.plain = self._parser is None and self._cut is None

    @property
    def over(self) -> bool:
        """Whether its end was found in the text, whatever the engine still computes."""
        return self.matched is not None or (self._parser is not None and self._parser.enough)

    @property
    def calls(self) -> bool:
        """Whether there are calls of tools, all of them fit to be run."""
        return self._calls.fit

    @property
    def matched(self) -> str | int | None:
        """The stop string or stop token that ended it."""
        return None if self._cut is None else self._cut.matched

    @property
    def reasoning_tokens(self) -> int | None:
        """None where nothing looks for reasoning."""
        return None if self._parser is None else self._parser.reasoning_tokens

    def text(self, ids: Sequence[int]) -> str:
        """The text of the next tokens, for who has found it `plain`."""
        return "" if self._detokenizer is None else self._detokenizer.feed(ids)

    def feed(self, token_id: int, number: int) -> None:
        """Take the next token, the `number`th."""
        cut = self._cut
        if cut is not None:
            cut.reach(number)
            if cut.wants(token_id, number) and not self._kept(token_id):
                cut.token = token_id
                if not cut.include:
                    return
        ids = (token_id,)
        self._pass_on(self.text(ids), ids)

    def finish(self, number: int) -> None:
        """Release what the detokenizer, the stop strings and the parser held back behind the last token, the `number`th."""
        if self._parser is not None and self._parser.enough:
            return
        if self._cut is not None:
            self._cut.reach(number)
        if self._detokenizer is not None and not isinstance(self.matched, str):
            self._pass_on(self._detokenizer.finish())
        if (parser := self._parser) is not None:
            self._parse(parser, parser.finish)
        elif self._cut is not None and (rest := self._cut.finish()):
            self._sort((Content(rest),))

    def take(self) -> tuple[str, str, list[ToolEvent], list[Event]]:
        """What has become certain since it was last taken: content, reasoning, calls; and all of it as it was said, where that was
        in another order than reasoning, content, calls."""
        content, reasoning, tools = "".join(self.content), "".join(self.reasoning), self.tools
        said = self._said if self._turned else []
        self.content, self.reasoning, self.tools, self._said, self._turned = [], [], [], [], False
        return content, reasoning, tools, said

    def _kept(self, token_id: int) -> bool:
        """Whether this token, which comes now, is one of the reasoning."""
        if self._parser is None:
            return False
        return self._parser.keeps("" if self._tokenizer is None else self._tokenizer.token_text(token_id))

    def _pass_on(self, text: str, ids: Sequence[int] = ()) -> None:
        """Send text on its way behind the detokenizer."""
        parser = self._parser
        if parser is None:
            if self._cut is not None:
                text = self._cut.feed(text)
            if text:
                self._sort((Content(text),))
            return
        self._parse(parser, lambda: parser.feed(text, ids))

    def _parse(self, parser: ChoiceParser, events: Callable[[], Sequence[Event]]) -> None:
        """Take what the parser makes of text. One that fails gives the text back, and the rest is passed on as it is."""
        try:
            self._sort(events())
        except Exception:
            log.exception("the output parser failed on request %s; the rest is passed on as it is", self._id)
            self._parser = None
            self._sort(parser.rescue())

    def _sort(self, events: Sequence[Event]) -> None:
        for event in events:
            self._turned = self._turned or (bool(self._said) and _rank(event) < _rank(self._said[-1]))
            self._said.append(event)
            if isinstance(event, Content):
                self.content.append(event.text)
            elif isinstance(event, Reasoning):
                self.reasoning.append(event.text)
            else:
                self.tools.append(event)
                self._calls.add((event,))


def _rank(event: Event) -> int:
    """Where it comes among what a delta tells."""
    return 0 if isinstance(event, Reasoning) else 1 if isinstance(event, Content) else 2


class _Stopping:
    """What a client has set to end the answer: a `Cut`, and tokens."""

    def __init__(self, request: GenerateRequest) -> None:
        self.include = request.include_stop
        self._stops = StopMatcher(request.stops, include=self.include)
        self._ids = frozenset(request.stop_ids)
        self._min_new_tokens = request.sampling.min_new_tokens
        self._allowed = True
        self.token: int | None = None  # the one that ended it

    @property
    def matched(self) -> str | int | None:
        """A string comes before the token that it was found with."""
        return self.token if self._stops.matched is None else self._stops.matched

    def reach(self, number: int) -> None:
        """What comes now is said with the `number`th token."""
        self._allowed = number >= self._min_new_tokens

    def wants(self, token_id: int, number: int) -> bool:
        """Whether the `number`th token is a stop token, unless it is one of the reasoning."""
        return token_id in self._ids and number > self._min_new_tokens

    def feed(self, text: str) -> str:
        return self._stops.feed(text, allowed=self._allowed)

    def finish(self) -> str:
        return "" if self._stops.matched is not None else self._stops.finish()


def _parser(text: Text, request: GenerateRequest, cut: Cut | None) -> ChoiceParser | None:
    tools, form = request.tools, None
    if tools is not None:
        form = find(tools.format) if tools.format else JSON_ARRAY
        assert form is not None, tools.format
    return make_parser(
        None if request.reasoning is None or text.reasoning is None else text.reasoning.form,
        Start(request.reasoning or "content"),
        form,
        {} if tools is None else _schemas(tools.schemas),
        added=() if text.tokenizer is None else text.tokenizer.added,
        separate=request.separate_reasoning,
        stream_reasoning=request.stream_reasoning,
        parallel=tools is None or tools.parallel,
        limited=tools is not None and tools.limited,
        required=tools is not None and tools.required,
        implicit_end=request.constraint is None,
        cut=cut,
    )


@lru_cache(maxsize=4)
def _schemas(raw: bytes) -> dict[str, dict[str, Any]]:
    """The choices of a request come one after another, and have the same tools."""
    schemas: dict[str, dict[str, Any]] = msgspec.json.decode(raw)
    return schemas


def _detokenizer(text: Text, request: GenerateRequest, endpoint: str) -> Detokenizer | None:
    """None where only token ids are served. A chat that wants its reasoning unparsed wants its markers too, special or not."""
    if text.tokenizer is None:
        return None
    keep = text.reasoning.marker_ids if text.reasoning is not None and endpoint in _CHATS else frozenset()
    if request.tools is not None:
        keep |= text.tool_marker_ids
    return text.tokenizer.detokenizer(skip_special_tokens=request.skip_special_tokens, keep=keep)
