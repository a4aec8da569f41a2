"""What a generation gives to who makes its answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from banyan_runtime import wire
from banyan_runtime.front.chat.events import Content, Event, Reasoning, ToolEvent
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.logprobs import Row

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one sequence."""

    reason: FinishReason
    matched: int | str | None  # the stop token's id or the stop string; None for length and abort
    cached_tokens: int
    retractions: int
    reasoning_tokens: int | None  # None where nothing looks for reasoning


class Delta(msgspec.Struct, gc=False):
    """What became certain since the last delta. Text may lag behind its tokens, never the other way round."""

    content: str
    reasoning: str
    token_ids: list[int]
    completion_tokens: int  # so far
    logprobs: Sequence[Row] = ()  # of `token_ids`, where the request asked for them
    prompt_logprobs: Sequence[wire.PromptLogprobs] = ()  # with the first delta, where the request asked for them
    finished: Finished | None = None
    tools: Sequence[ToolEvent] = ()
    said: Sequence[Event] = ()  # reasoning, content and tools as they were said, where that was in another order
    vector: bytes = b""  # float32, with the end of a request for one


def in_order(delta: Delta) -> Iterator[Event]:
    """What a delta says, as it was said: text behind a call is not a text before it."""
    if delta.said:
        yield from delta.said
        return
    if delta.reasoning:
        yield Reasoning(delta.reasoning)
    if delta.content:
        yield Content(delta.content)
    yield from delta.tools


class Consumer(Protocol):
    """Who makes the answer out of deltas. Called on the event loop; it must not wait."""

    def add(self, index: int, delta: Delta) -> None:
        """The next delta of one sequence; its last one is `finished`."""
        ...

    def end(self, error: ApiError | None) -> None:
        """All sequences have finished, or one of them has failed and the others are given up. Called once, last of all."""
        ...
