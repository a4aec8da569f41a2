"""What a parser makes of generated text. Streaming sends events as they come; a whole answer is `feed(all) + finish()`, so
both always agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class ToolStart:
    """A call begins: its name is known, its arguments are not."""

    index: int  # among the calls of one choice, from 0
    name: str
    id: str | None = None  # as the model wrote it; None: the format has none


@dataclass(frozen=True, slots=True)
class ToolArgs:
    """A piece of a call's arguments. The pieces joined are JSON, if the call was not cut off."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class ToolEnd:
    """A call is complete. One that the end of the output cut off has none."""

    index: int


ToolEvent = ToolStart | ToolArgs | ToolEnd
Event = Reasoning | Content | ToolEvent


class Cut(Protocol):
    """Ends what is said: content goes through it before anybody looks for calls in it, and nothing comes out behind the end. Of
    reasoning it learns nothing."""

    def feed(self, text: str) -> str:
        """The text that can be given out now."""
        ...

    def finish(self) -> str:
        """What was held back, where the content ends for another reason. More may follow, which is another text."""
        ...


class OutputParser(Protocol):
    """The state of one choice. However the output is cut into pieces, the joined events are equal."""

    reasoning_tokens: int
    """Generated tokens of the reasoning so far, without its markers."""

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Event]:
        """The next piece of text, and the tokens that came with it."""
        ...

    def finish(self) -> list[Event]:
        """The end of the output: releases everything that was held back."""
        ...
