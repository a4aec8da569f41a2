"""A response while it is generated: from deltas to items, and to the events that tell of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from banyan_runtime.front.chat.events import Content, Reasoning, ToolArgs, ToolEvent, ToolStart
from banyan_runtime.front.chat.messages import object_of
from banyan_runtime.front.deltas import ContentRows, Delta, Finished, in_order
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.event_stream import named
from banyan_runtime.front.logprobs import Row
from banyan_runtime.front.openai.calls import NameCall
from banyan_runtime.front.openai.responses.ids import item_id

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ENDED: Final[frozenset[Status]] = frozenset({"completed", "incomplete", "failed", "cancelled"})
_encode: Final = msgspec.json.Encoder().encode
Json = dict[str, Any]
TellLogprobs = Callable[[Sequence[Row]], list[Json]]
"""What an answer says of the log probabilities of some tokens."""


def event(kind: str, number: int, **fields: Any) -> bytes:
    return named(kind, _encode({"type": kind, "sequence_number": number, **fields}))


@dataclass(slots=True)
class _Item:
    """An output item that is being written."""

    kind: Literal["reasoning", "message", "function_call"]
    id: str
    place: int  # among the response's items
    text: list[str] = field(default_factory=list)  # of a call: its arguments
    logprobs: list[Json] = field(default_factory=list)
    name: str = ""
    call_id: str = ""

    def told(self, status: str, *, empty: bool = False) -> Json:
        """The item as it is now, or as it was when it began."""
        if self.kind == "function_call":
            call = {"id": self.id, "type": self.kind, "status": status, "call_id": self.call_id, "name": self.name}
            return {**call, "arguments": "" if empty else "".join(self.text)}
        content = [] if empty else [self.part()]
        if self.kind == "reasoning":
            return {"id": self.id, "type": self.kind, "status": status, "summary": [], "content": content}
        return {"id": self.id, "type": self.kind, "status": status, "role": "assistant", "content": content}

    def part(self, *, empty: bool = False) -> Json:
        text = "" if empty else "".join(self.text)
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": [] if empty else self.logprobs}


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
    ) -> None:
        """`kept`: its items can be referred to later."""
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
        self._output: list[Json] = []
        self._open: _Item | None = None
        self._rows = ContentRows()
        self._untold: list[Row] = []  # tokens of text that has
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
            if item["type"] == "function_call":
                if item["status"] != "completed":
                    continue  # no template could say half a call
                call = {"name": item["name"], "arguments": item["arguments"]}
                turn.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": call})
                continue
            name = "reasoning_content" if item["type"] == "reasoning" else "content"
            turn[name] = (turn.get(name) or "") + "".join(part["text"] for part in item["content"])
        return turn if len(turn) > 2 or turn["content"] is not None else None

    # --- what comes ---

    def begin(self) -> bytes:
        created = self._event("response.created", response=self.told())
        kind = "response.queued" if self.status == "queued" else "response.in_progress"
        return created + self._event(kind, response=self.told())

    def add(self, delta: Delta) -> bytes:
        self._untold += self._rows.of(delta)
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
        whole = self.status == "completed" and (self._open is None or self._open.kind != "function_call")  # its own end completes a call
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
        if self._open is None or self._open.kind != kind:
            events += self._close("completed")
            item = self._begin(kind)
            events.append(self._added(item))
            events.append(self._event("response.content_part.added", **self._where(item), part=item.part(empty=True)))
        item = self._opened
        item.text.append(text)
        if text:
            logprobs = {"logprobs": self._take_logprobs(item)} if kind == "message" else {}
            events.append(self._event(f"{_TEXT[kind]}.delta", **self._where(item), delta=text, **logprobs))
        return events

    def _call(self, one: ToolEvent) -> list[bytes]:
        if isinstance(one, ToolStart):
            events = self._close("completed")
            item = self._begin("function_call")
            item.name, item.call_id = one.name, self._name_call(one)
            return [*events, self._added(item)]
        item = self._opened
        if isinstance(one, ToolArgs):
            item.text.append(one.fragment)
            where = {"item_id": item.id, "output_index": item.place}
            return [self._event("response.function_call_arguments.delta", **where, delta=one.fragment)]
        return self._close("completed")

    def _begin(self, kind: Literal["reasoning", "message", "function_call"]) -> _Item:
        self._open = _Item(kind, item_id(kind, self.id, "output", len(self._output), kept=self._kept), len(self._output))
        return self._open

    def _added(self, item: _Item) -> bytes:
        return self._event("response.output_item.added", output_index=item.place, item=item.told("in_progress", empty=True))

    def _close(self, status: str) -> list[bytes]:
        item, self._open = self._open, None
        if item is None:
            return []
        events: list[bytes] = []
        text = "".join(item.text)
        if item.kind == "function_call":
            status = status if object_of(text) is not None else "incomplete"  # an agent runs what is complete
            where = {"item_id": item.id, "output_index": item.place}
            events.append(self._event("response.function_call_arguments.done", **where, name=item.name, arguments=text))
        else:
            logprobs = {}
            if item.kind == "message":
                logprobs = {"logprobs": item.logprobs}
            events.append(self._event(f"{_TEXT[item.kind]}.done", **self._where(item), text=text, **logprobs))
            events.append(self._event("response.content_part.done", **self._where(item), part=item.part()))
        told = item.told(status)
        self._output.append(told)
        events.append(self._event("response.output_item.done", output_index=item.place, item=told))
        return events

    def _take_logprobs(self, item: _Item) -> list[Json]:
        """What is told beside a text."""
        untold, self._untold = self._untold, []
        told = self._tell_logprobs(untold)
        item.logprobs += told
        return told

    @property
    def _opened(self) -> _Item:
        assert self._open is not None
        return self._open

    def _where(self, item: _Item) -> Json:
        return {"item_id": item.id, "output_index": item.place, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        made = event(kind, self._number, **fields)
        self._number += 1
        return made
