"""A response while it is generated: from deltas to items, and to the events that tell of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from banyan_runtime.front.chat.events import Content, Reasoning, ToolArgs, ToolEvent, ToolStart
from banyan_runtime.front.chat.messages import object_of
from banyan_runtime.front.deltas import Delta, Finished, in_order
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.event_stream import named
from banyan_runtime.front.logprobs import Row
from banyan_runtime.front.openai.calls import NameCall
from banyan_runtime.front.openai.responses.free_text import FreeText, text_of
from banyan_runtime.front.openai.responses.ids import item_id
from banyan_runtime.front.openai.responses.kinds import FUNCTION, KINDS, Kind
from banyan_runtime.front.plan import Called

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ENDED: Final[frozenset[Status]] = frozenset({"completed", "incomplete", "failed", "cancelled"})
_encode: Final = msgspec.json.Encoder().encode
Json = dict[str, Any]
TellLogprobs = Callable[[Sequence[Row]], list[Json]]
"""What an answer says of the log probabilities of some tokens."""


def event(kind: str, number: int, **fields: Any) -> bytes:
    return named(kind, _encode({"type": kind, "sequence_number": number, **fields}))


@dataclass(slots=True)
class _Text:
    """Thoughts or a message that are being written."""

    kind: Literal["reasoning", "message"]
    id: str
    place: int  # among the response's items
    text: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)

    def told(self, status: str, *, empty: bool = False) -> Json:
        """The item as it is now, or as it was when it began."""
        content = [] if empty else [self.part()]
        if self.kind == "reasoning":
            return {"id": self.id, "type": self.kind, "status": status, "summary": [], "content": content}
        return {"id": self.id, "type": self.kind, "status": status, "role": "assistant", "content": content}

    def part(self, *, empty: bool = False) -> Json:
        text = "" if empty else "".join(self.text)
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": [] if empty else self.logprobs}


@dataclass(slots=True)
class _Call:
    """A call that is being written."""

    kind: Kind
    id: str
    place: int  # among the response's items
    call_id: str
    tool: str  # as the model knows it
    called: Called
    pieces: list[str] = field(default_factory=list)  # of its arguments
    text: list[str] = field(default_factory=list)  # sent to the client while the arguments are written
    free: FreeText = field(default_factory=FreeText)

    def add(self, fragment: str) -> str:
        """What can be told at once of the next piece of its arguments."""
        self.pieces.append(fragment)
        return "" if self.kind.form == "object" else self.free.feed(fragment) if self.kind.form == "text" else fragment

    def rest(self) -> str:
        """What was not told of its arguments, which have ended."""
        return self.free.finish(self.arguments) if self.kind.form == "text" else ""

    @property
    def arguments(self) -> str:
        """As the model has written them."""
        return "".join(self.pieces)

    @property
    def whole(self) -> bool:
        """Whether the arguments are such that it can be run."""
        if self.kind.form == "text":
            return text_of(self.arguments) == "".join(self.text)  # a second field of the name may hold another
        given = object_of(self.arguments)
        return given is not None and self.kind.takes(given)

    def told(self, status: str, *, empty: bool = False) -> Json:
        """The item as it is now, or as it was when it began."""
        told = {"id": self.id, "type": self.kind.call, "status": status, "call_id": self.call_id, **self.kind.beside}
        if self.kind.named:
            told["name"] = self.called.name
        if self.called.namespace is not None:
            told["namespace"] = self.called.namespace
        if self.kind.form == "object":
            given = None if empty else object_of(self.arguments)
            return {**told, self.kind.called_with: {**self.kind.always, **(given or {})}}
        return {**told, self.kind.called_with: "" if empty else "".join(self.text)}

    def message(self) -> Json:
        """The call, as that of a chat."""
        function = {"name": self.tool, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


_TEXT: Final = {"reasoning": "response.reasoning_text", "message": "response.output_text"}


class Assembly:
    """Of one response. Each method that takes something in gives the events that tell of it."""

    def __init__(
        self,
        response_id: str,
        model: str,
        settings: Json,
        name_call: NameCall,
        tell_logprobs: TellLogprobs,
        *,
        background: bool,
        kept: bool = True,
        called: Mapping[str, Called] | None = None,
    ) -> None:
        """`kept`: its items can be referred to later. `called`: of `ResponsePlan`."""
        self.id = response_id
        self.status: Status = "queued" if background else "in_progress"
        self.created = int(time.time())
        self._model = model
        self._settings = settings
        self._background = background
        self._kept = kept
        self._name_call = name_call
        self._tell_logprobs = tell_logprobs
        self._number = 0
        self._called = called or {}
        self._output: list[Json] = []
        self._calls: list[Json] = []  # those that are whole, as a turn of a chat makes them
        self._open: _Text | _Call | None = None
        self._untold: list[Row] = []  # of tokens since the last text that was told
        self._usage: Json | None = None
        self._error: Json | None = None
        self._incomplete: Json | None = None
        self._completed: int | None = None

    # --- what is told ---

    def told(self) -> Json:
        """The response as it is now."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": self._completed,
            "status": self.status,
            "background": self._background,
            "error": self._error,
            "incomplete_details": self._incomplete,
            "model": self._model,
            "output": list(self._output),
            "usage": self._usage,
            **self._settings,
        }

    def message(self) -> Json | None:
        """What was said, as a turn of the conversation; None: nothing."""
        turn: Json = {"role": "assistant", "content": None}
        for item in self._output:
            if item["type"] in _TEXT:
                name = "reasoning_content" if item["type"] == "reasoning" else "content"
                turn[name] = (turn.get(name) or "") + "".join(part["text"] for part in item["content"])
        if self._calls:
            turn["tool_calls"] = self._calls
        return turn if len(turn) > 2 or turn["content"] is not None else None

    # --- what comes ---

    def begin(self) -> bytes:
        created = self._event("response.created", response=self.told())
        kind = "response.queued" if self.status == "queued" else "response.in_progress"
        return created + self._event(kind, response=self.told())

    def add(self, delta: Delta) -> bytes:
        self._untold += delta.logprobs
        events: list[bytes] = []
        if self.status == "queued":
            self.status = "in_progress"
            events.append(self._event("response.in_progress", response=self.told()))
        for one in in_order(delta):
            if isinstance(one, Reasoning):
                events += self._text("reasoning", one.text)
            elif isinstance(one, Content):
                events += self._text("message", one.text)
            else:
                events += self._call(one)
        return b"".join(events)

    def finish(self, end: Finished, usage: Json) -> bytes:
        """The end of the generation."""
        self._usage = usage
        if end.reason == "length":
            self.status, self._incomplete = "incomplete", {"reason": "max_output_tokens"}
        else:
            self.status = "cancelled" if end.reason == "abort" else "completed"
        whole = self.status == "completed" and not isinstance(self._open, _Call)  # its own end completes a call
        events = self._close("completed" if whole else "incomplete")
        if not self._output and self.status == "completed":  # an answer has a message, if an empty one
            events = [*self._text("message", ""), *self._close("completed")]
        self._completed = int(time.time()) if self.status == "completed" else None
        kind = "incomplete" if self.status == "cancelled" else self.status
        return b"".join(events) + self._event(f"response.{kind}", response=self.told())

    def fail(self, error: ApiError) -> bytes:
        """The end by an error."""
        events = self._close("incomplete")
        self.status = "failed"
        code = "rate_limit_exceeded" if error.status == 429 else "invalid_prompt" if error.status == 400 else "server_error"
        self._error = {"code": code, "message": error.message}
        return b"".join(events) + self._event("response.failed", response=self.told())

    # --- items ---

    def _text(self, kind: Literal["reasoning", "message"], text: str) -> list[bytes]:
        events: list[bytes] = []
        item = self._open
        if not isinstance(item, _Text) or item.kind != kind:
            events += self._close("completed")
            self._open = item = _Text(kind, self._new_id(kind), len(self._output))
            events.append(self._added(item))
            events.append(self._event("response.content_part.added", **self._where(item), part=item.part(empty=True)))
        item.text.append(text)
        if text:
            logprobs = {"logprobs": self._take_logprobs(item)} if kind == "message" else {}
            events.append(self._event(f"{_TEXT[kind]}.delta", **self._where(item), delta=text, **logprobs))
        return events

    def _call(self, one: ToolEvent) -> list[bytes]:
        if isinstance(one, ToolStart):
            events = self._close("completed")
            called = self._called.get(one.name) or Called(kind=FUNCTION.tool, name=one.name)
            kind = KINDS[called.kind]
            self._open = _Call(kind, self._new_id(kind.call), len(self._output), self._name_call(one), one.name, called)
            return [*events, self._added(self._open)]
        if isinstance(one, ToolArgs):
            assert isinstance(self._open, _Call)
            return self._arguments(self._open, self._open.add(one.fragment))
        return self._close("completed")

    def _arguments(self, item: _Call, text: str) -> list[bytes]:
        """The event that tells of a piece of a call's arguments; none where there is nothing to tell."""
        item.text.append(text)
        if not text:
            return []
        return [self._event(f"{item.kind.event}.delta", item_id=item.id, output_index=item.place, delta=text)]

    def _new_id(self, kind: str) -> str:
        return item_id(kind, self.id, "output", len(self._output), kept=self._kept)

    def _added(self, item: _Text | _Call) -> bytes:
        return self._event("response.output_item.added", output_index=item.place, item=item.told("in_progress", empty=True))

    def _close(self, status: str) -> list[bytes]:
        item, self._open = self._open, None
        if item is None:
            return []
        events: list[bytes] = []
        if isinstance(item, _Call):
            events += self._arguments(item, item.rest())
            status = status if item.whole else "incomplete"  # an agent runs what is complete
            if item.kind.event:
                named = {"name": item.called.name} if item.kind is FUNCTION else {}
                told = {**named, item.kind.called_with: "".join(item.text)}
                events.append(self._event(f"{item.kind.event}.done", item_id=item.id, output_index=item.place, **told))
            if status == "completed":  # no template could say half a call
                self._calls.append(item.message())
        else:
            logprobs = {}
            if item.kind == "message":
                self._take_logprobs(item)
                logprobs = {"logprobs": item.logprobs}
            events.append(self._event(f"{_TEXT[item.kind]}.done", **self._where(item), text="".join(item.text), **logprobs))
            events.append(self._event("response.content_part.done", **self._where(item), part=item.part()))
        told = item.told(status)
        self._output.append(told)
        events.append(self._event("response.output_item.done", output_index=item.place, item=told))
        return events

    def _take_logprobs(self, item: _Text) -> list[Json]:
        """What is told beside a text."""
        untold, self._untold = self._untold, []
        told = self._tell_logprobs(untold)
        item.logprobs += told
        return told

    def _where(self, item: _Text) -> Json:
        return {"item_id": item.id, "output_index": item.place, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        made = event(kind, self._number, **fields)
        self._number += 1
        return made
