"""One state machine for all reasoning that stands between a start and an end marker.

Linear in the output: each feed looks at the new text and at what is held back, which is never more than white space and a
proper prefix of one marker.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from banyan_runtime.front.chat.events import Content, Event, Reasoning
from banyan_runtime.front.text.stops import longest_partial


class Start(enum.Enum):
    """Where the output begins, as the end of the prompt shows."""

    REASONING = "reasoning"  # the prompt opened the block
    OPTIONAL = "optional"  # the model may open it
    CONTENT = "content"  # the prompt closed it: thinking is off


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers of a family of models. `forced`: it reasons even where the prompt does not open the block."""

    start: str
    end: str
    forced: bool = False

    def start_state(self, generation_prompt: str) -> Start:
        """Read it off the text that the template put behind the last turn. The last marker there decides."""
        opened, closed = generation_prompt.rfind(self.start), generation_prompt.rfind(self.end)
        if opened < 0 and closed < 0:
            return Start.REASONING if self.forced else Start.OPTIONAL
        return Start.REASONING if opened > closed else Start.CONTENT


class _State(enum.Enum):
    OPTIONAL = enum.auto()  # nothing visible yet; the start marker may come
    OPENED = enum.auto()  # opened by the prompt, nothing visible yet; a repeated start marker is absorbed
    FRESH = enum.auto()  # reasoning, only line breaks so far
    REASONING = enum.auto()
    CLOSED = enum.auto()  # behind the end marker, nothing visible yet
    CONTENT = enum.auto()


_FIRST = {Start.REASONING: _State.OPENED, Start.OPTIONAL: _State.OPTIONAL, Start.CONTENT: _State.CONTENT}
_INSIDE = (_State.OPENED, _State.FRESH, _State.REASONING)


class ReasoningParser:
    """`end_is_token`: the end marker is one token of the vocabulary, so a second one cannot be meant as text.

    With `stream` false the reasoning comes as one event, at its end. Tokens are counted right when they come one by one.
    """

    def __init__(self, form: ReasoningFormat, start: Start, *, end_is_token: bool, stream: bool = True) -> None:
        self.reasoning_tokens = 0
        self._form = form
        self._state = _FIRST[start]
        self._end_is_token = end_is_token
        self._stream = stream
        self._held = ""
        self._marker_tokens = 0  # tokens of a marker that is not complete yet
        self._just_opened = False  # this feed brought the start marker
        self._unsent: list[str] = []  # reasoning, only with stream=False

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Event]:
        if self._state is _State.CONTENT:
            return [Content(text)] if text else []
        before = self._state
        self._held += text
        events = self._advance()
        self._count(len(token_ids), before)
        return events

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        if self._state in _INSIDE:
            self.reasoning_tokens += self._marker_tokens
            return self._reason((held if self._state is _State.REASONING else held.lstrip("\n")).rstrip()) + self._release()
        rest = held.lstrip("\n") if self._state is _State.CLOSED else held
        return [Content(rest)] if rest else []

    def _advance(self) -> list[Event]:
        """Move through as many states as the held text decides."""
        events: list[Event] = []
        while True:
            before = self._state
            match before:
                case _State.OPTIONAL:
                    self._begin(_State.CONTENT)
                case _State.OPENED:
                    self._begin(_State.FRESH)
                case _State.FRESH:
                    if visible := self._held.lstrip("\n"):
                        self._held, self._state = visible, _State.REASONING
                case _State.REASONING:
                    events += self._think()
                case _State.CLOSED:
                    self._answer()
                case _State.CONTENT:
                    if self._held:
                        events.append(Content(self._held))
                        self._held = ""
            if self._state is before:
                return events

    def _begin(self, otherwise: _State) -> None:
        """Nothing visible yet: comes the start marker, a part of it, or something else?"""
        start, visible = self._form.start, self._held.lstrip()
        if visible.startswith(start):
            self._held, self._state = visible[len(start) :], _State.FRESH
            self._just_opened = True
        elif not start.startswith(visible):
            self._state = otherwise

    def _think(self) -> list[Event]:
        end = self._form.end
        before, found, after = self._held.partition(end)
        if found:
            self._held, self._state = after, _State.CLOSED
            return self._reason(before.rstrip()) + self._release()
        sure = before[: len(before) - longest_partial(before, end)].rstrip()
        self._held = before[len(sure) :]
        return self._reason(sure)

    def _answer(self) -> None:
        """Behind the end marker: drop line breaks, and a second marker where it can only be a slip."""
        end, visible = self._form.end, self._held.lstrip()
        while self._end_is_token and visible.startswith(end):
            self._held = visible[len(end) :]
            visible = self._held.lstrip()
        if visible and not (self._end_is_token and end.startswith(visible)):
            self._held, self._state = self._held.lstrip("\n"), _State.CONTENT

    def _reason(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._stream:
            return [Reasoning(text)]
        self._unsent.append(text)
        return []

    def _release(self) -> list[Event]:
        """The whole reasoning, where it was not streamed."""
        whole, self._unsent = "".join(self._unsent), []
        return [Reasoning(whole)] if whole else []

    def _count(self, tokens: int, before: _State) -> None:
        """Count the tokens of one feed as reasoning, unless they brought a marker."""
        opened, self._just_opened = self._just_opened, False
        if before not in _INSIDE or self._state not in _INSIDE or opened:
            self._marker_tokens = 0
            return
        marker = self._form.start if self._state is _State.OPENED else self._form.end
        if longest_partial(self._held, marker):
            self._marker_tokens += tokens
        else:
            self.reasoning_tokens += self._marker_tokens + tokens
            self._marker_tokens = 0
