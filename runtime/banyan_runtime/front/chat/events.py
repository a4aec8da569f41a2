"""What a parser makes of generated text. Streaming sends events as they come; a whole answer is `feed(all) + finish()`, so
both always agree. Tool calls will be further events of the same contract."""

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


Event = Reasoning | Content


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
