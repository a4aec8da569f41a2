"""The tool calls of one choice: what an answer says of them, and whether they are fit to be run."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from banyan_runtime.front.chat.events import ToolArgs, ToolEvent, ToolStart
from banyan_runtime.front.chat.messages import object_of
from banyan_runtime.front.chat.tools.ids import RANDOM_BYTES, call_id
from banyan_runtime.front.chat.tools.registry import find
from banyan_runtime.front.plan import ToolUse

NameCall = Callable[[ToolStart], str]
"""Makes the id by which a client refers to a call."""


@dataclass(slots=True)
class Call:
    id: str
    name: str
    ended: bool = False
    _arguments: list[str] = field(default_factory=list)

    def add(self, fragment: str) -> None:
        self._arguments.append(fragment)

    @property
    def arguments(self) -> str:
        return "".join(self._arguments)

    @property
    def fit(self) -> bool:
        """Whether the call is complete and its arguments are an object."""
        return self.ended and object_of(self.arguments) is not None


def call_names(tools: ToolUse | None) -> NameCall:
    """Ids in the form that the model's format of calls has for them."""
    form = find(tools.format) if tools is not None and tools.format else None
    make, before = (call_id, 0) if form is None or tools is None else (form.make_id, tools.calls_before)
    return lambda start: start.id or make(start.name, before + start.index, secrets.token_bytes(RANDOM_BYTES))


class Calls:
    """Takes the events of one choice, in their order."""

    def __init__(self, name_call: NameCall) -> None:
        self._name_call = name_call
        self.calls: list[Call] = []

    def add(self, events: Sequence[ToolEvent]) -> None:
        for event in events:
            if isinstance(event, ToolStart):
                self.calls.append(Call(self._name_call(event), event.name))
            elif isinstance(event, ToolArgs):
                self.calls[event.index].add(event.fragment)
            else:
                self.calls[event.index].ended = True

    @property
    def fit(self) -> bool:
        """Whether there are calls, and all of them are fit to be run: an agent runs what ends as `tool_calls`."""
        return bool(self.calls) and all(call.fit for call in self.calls)

    def message(self) -> list[dict[str, Any]]:
        """The `tool_calls` of a message."""
        return [{"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in self.calls]

    def deltas(self, events: Sequence[ToolEvent]) -> list[dict[str, Any]]:
        """Elements of `delta.tool_calls` for events that were added. Each needs a chunk of its own: of several in one, many clients
        read the first alone."""
        told: list[dict[str, Any]] = []
        for event in events:
            if isinstance(event, ToolStart):
                call = self.calls[event.index]
                told.append({"index": event.index, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}})
            elif isinstance(event, ToolArgs):
                if not (told and "id" not in told[-1] and told[-1]["index"] == event.index):
                    told.append({"index": event.index, "function": {"arguments": ""}})
                told[-1]["function"]["arguments"] += event.fragment
        return told
