"""One response under way, whoever listens: a client that waits for the whole of it, one or several that read its events, or nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from banyan_runtime.front.answers import Arrival, Start, ignored, rejection
from banyan_runtime.front.context import Context
from banyan_runtime.front.deltas import Delta
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.generation import Call
from banyan_runtime.front.generation_group import GenerationGroup
from banyan_runtime.front.logprobs import chat_content
from banyan_runtime.front.openai.calls import call_names
from banyan_runtime.front.openai.responses.assembly import ENDED, Assembly, Json
from banyan_runtime.front.openai.responses.events import EventLog
from banyan_runtime.front.openai.responses.store import Record
from banyan_runtime.front.openai.serving import Usage
from banyan_runtime.front.plan import ResponsePlan

Listener = Callable[[bytes, bool], None]
"""Takes events, and whether they are the last."""


class Run:
    """The consumer of a response's deltas."""

    def __init__(self, context: Context, arrival: Arrival, plan: ResponsePlan) -> None:
        """Start it. Raises ApiError."""
        assert context.text is not None
        tokenizer, top = context.text.needed_tokenizer, plan.top_logprobs

        def tell_logprobs(rows: Any) -> list[Json]:
            told: list[Json] = msgspec.json.decode(b"".join(chat_content(tokenizer, rows, top))) if rows and top >= 0 else []
            return told

        self.id = plan.id
        self.error: ApiError | None = None
        self.background = plan.background
        self.headers = ignored(plan.envelope.ignored)
        settings = msgspec.json.decode(plan.settings)
        name_call, kept = call_names(plan.requests[0].tools), plan.store and context.responses.keeps
        self.assembly = Assembly(
            self.id,
            plan.envelope.model,
            settings,
            name_call,
            tell_logprobs,
            background=plan.background,
            kept=kept,
            called=plan.called,
        )
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._context = context
        self._store = plan.store
        self._items = msgspec.Raw(plan.items)
        self._messages = plan.messages
        self._usage = Usage(plan)
        self._listeners: dict[Listener, None] = {}
        self.log = EventLog() if plan.background else None  # for those who come to listen later
        self.opening = self.assembly.begin()
        self._note(self.opening)
        call = Call(endpoint="responses", streaming=plan.envelope.stream, received=arrival.received, key=arrival.key)
        self.group: GenerationGroup | None = Start(context, call, plan.requests, [self.id], ()).group(self)

    @property
    def may_be_refused(self) -> bool:
        """Whether the engine may have no room for it, as far as one could tell when it began."""
        return self.group is not None and self.group.may_be_refused

    # --- for those who listen ---

    def listen(self, listener: Listener, after: int | None = None) -> None:
        """Hear the events that come; of those that were, the ones behind number `after`, as far as they are known."""
        events = b"" if self.log is None or after is None else self.log.after(after) or b""
        if self.over.done():
            listener(events, True)
            return
        if events:
            listener(events, False)
        self._listeners[listener] = None

    def leave(self, listener: Listener) -> None:
        self._listeners.pop(listener, None)

    def told(self) -> bytes:
        return msgspec.json.encode(self.assembly.told())

    # --- its end, from outside ---

    def abort(self) -> None:
        """End it in the engine; its end is told as that of a cancelled response."""
        if self.group is not None:
            self.group.abort()

    def discard(self) -> None:
        """It was deleted: it ends as one that is cancelled, for its readers too, and nothing of it is kept."""
        self._store = False
        self.abort()

    def expire(self) -> None:
        if self.group is not None:
            self.group.expire()

    def close(self) -> None:
        """Nobody wants it any more: it ends in the engine, and nothing of it is kept."""
        group, self.group = self.group, None
        if group is not None:
            group.close()
        if not self.over.done():
            self._end(b"")

    # --- the consumer ---

    def add(self, index: int, delta: Delta) -> None:
        self._tell(self.assembly.add(delta))
        if delta.finished is not None:
            usage = self._usage.of([(delta.finished, delta.completion_tokens)])
            self._tell(self.assembly.finish(delta.finished, _usage(usage)))

    def end(self, error: ApiError | None) -> None:
        self.error = error
        events = b"" if error is None else self.assembly.fail(error)
        if error is not None and self.background and (reason := rejection(self._context, error)) is not None:
            self._context.metrics.rejected(reason)  # one that a client waits for is counted where it is answered
        self._note(events)
        self.save()
        self.group = None
        self._end(events)

    def _end(self, events: bytes) -> None:
        self.over.set_result(None)
        listeners, self._listeners = self._listeners, {}
        for listener in listeners:
            listener(events, True)

    def save(self) -> None:
        """Write it down as it is now, if it is to be kept."""
        if not self._store or (self.error is not None and not self.background):
            return
        messages, said = self._messages, self.assembly.message()
        if said is not None and self.assembly.status in ENDED:
            messages = messages[:-1] + (b"," if len(messages) > 2 else b"") + msgspec.json.encode(said) + b"]"
        record = Record(msgspec.Raw(self.told()), self._items, msgspec.Raw(messages), self.background)
        self._context.responses.save(self.id, record)

    def _tell(self, events: bytes) -> None:
        if events:
            self._note(events)
            for listener in self._listeners:
                listener(events, False)

    def _note(self, events: bytes) -> None:
        if self.log is not None:
            self.log.add(events)


def _usage(usage: Json) -> Json:
    details, thought = usage["prompt_tokens_details"] or {}, usage["completion_tokens_details"] or {}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": details.get("cached_tokens", 0), "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thought.get("reasoning_tokens", 0)},
        "total_tokens": usage["total_tokens"],
    }
