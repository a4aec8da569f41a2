"""What requests ask and what they are answered, in the log, when that is asked for (--log-requests).

Nothing else ever logs a text of a request. The lines have a logger of their own, so that they can be told from all others.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgspec

from banyan_runtime.config import ServerConfig
from banyan_runtime.front.chat.events import ToolArgs, ToolStart
from banyan_runtime.front.current import Current, current
from banyan_runtime.front.deltas import Consumer, Delta
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.plan import Endpoint, GenerateRequest, Plan, Preparer

LOGGER: Final = "banyan.request_text"
SIZES, SAMPLING, BEGINNINGS, TEXTS = range(4)  # what --log-requests-level says
BEGINNING: Final = 2048  # characters
log = logging.getLogger(LOGGER)


Followed = tuple["Consumer", Callable[[], None]]
"""A consumer that does the same as another, and what to call when it hears nothing more."""


class RequestLog(Protocol):
    """Sees what requests ask and are answered."""

    def preparer(self, preparer: Preparer) -> Preparer:
        """One that does the same as `preparer`."""
        ...

    def follow(self, requests: Sequence[GenerateRequest], ids: Sequence[str], consumer: Consumer) -> Followed:
        """What stands for the consumer of these sequences."""
        ...


class Discreet:
    """Looks at nothing."""

    def preparer(self, preparer: Preparer) -> Preparer:
        return preparer

    def follow(self, requests: Sequence[GenerateRequest], ids: Sequence[str], consumer: Consumer) -> Followed:
        return consumer, lambda: None


class Written:
    """Writes down as much as the level says."""

    def __init__(self, level: int) -> None:
        self._level = level
        log.setLevel(logging.INFO)  # whatever --log-level says: it was asked for by name

    def preparer(self, preparer: Preparer) -> Preparer:
        return _Prepared(preparer, self)

    def follow(self, requests: Sequence[GenerateRequest], ids: Sequence[str], consumer: Consumer) -> Followed:
        if self._level >= SAMPLING:
            sampling = msgspec.json.encode(requests[0].sampling).decode()
            sampling = json.dumps(dict(zip(requests[0].sampling.__struct_fields__, json.loads(sampling), strict=True)))
            log.info("Started %s. sequences: %d, sampling: %s", ids[0], len(ids), sampling)
        answer = _Answer(self, ids, consumer)
        return answer, answer.over

    def asked(self, endpoint: str, body: bytes | bytearray) -> None:
        text = self._shown(body.decode(errors="backslashreplace")).replace("\n", " ").replace("\r", " ")
        log.info("Received %s. endpoint: %s, bytes: %d%s", current().id, endpoint, len(body), text and f", body: {text}")

    def answered(self, request: Current, sequence: str, reason: str, parts: dict[str, str]) -> None:
        shown = {name: self._shown(text) for name, text in parts.items() if text}
        texts = "".join(f", {name}: {json.dumps(text, ensure_ascii=False)}" for name, text in shown.items() if text)
        sizes = ", ".join(f"#{name}: {len(text)}" for name, text in parts.items())
        log.info("Answered %s. reason: %s, %s%s", sequence, reason, sizes, texts, extra=request.log_fields())

    def _shown(self, text: str) -> str:
        """What the level lets be seen of a text."""
        if self._level >= TEXTS:
            return text
        return text[:BEGINNING] if self._level >= BEGINNINGS else ""


class _Prepared:
    """A preparer whose bodies are written down."""

    def __init__(self, preparer: Preparer, written: Written) -> None:
        self._preparer = preparer
        self._written = written

    async def plan(self, endpoint: Endpoint, body: bytes | bytearray, request_id: str) -> Plan:
        if endpoint != "previous":  # the same body comes again
            self._written.asked(endpoint, body)
        return await self._preparer.plan(endpoint, body, request_id)


class _Answer:
    """A consumer that keeps what it passes on, until it is complete."""

    def __init__(self, written: Written, ids: Sequence[str], consumer: Consumer) -> None:
        self._written = written
        self._request = current()  # the engine's client calls us, for nobody in particular
        self._consumer = consumer
        self._ids = ids
        self._open: dict[int, list[Delta]] = {index: [] for index in range(len(ids))}

    def add(self, index: int, delta: Delta) -> None:
        self._open[index].append(delta)
        if delta.finished is not None:
            self._write(index, delta.finished.reason)
        self._consumer.add(index, delta)

    def end(self, error: ApiError | None) -> None:
        if error is not None:
            self._write_open(f"error ({error.code})")
        self._consumer.end(error)

    def over(self) -> None:
        """Nobody waits any longer; whoever did has had this much."""
        self._write_open("nobody waits any longer")

    def _write_open(self, reason: str) -> None:
        for index in tuple(self._open):
            self._write(index, reason)

    def _write(self, index: int, reason: str) -> None:
        deltas = self._open.pop(index)
        tools: list[dict[str, Any]] = []
        for event in (event for delta in deltas for event in delta.tools):
            if isinstance(event, ToolStart):
                tools.append({"name": event.name, "arguments": ""})
            elif isinstance(event, ToolArgs) and tools:
                tools[-1]["arguments"] += event.fragment
        parts = {
            "reasoning": "".join(delta.reasoning for delta in deltas),
            "content": "".join(delta.content for delta in deltas),
            "tools": json.dumps(tools, ensure_ascii=False) if tools else "",
        }
        self._written.answered(self._request, self._ids[index], reason, parts)


def warn(config: ServerConfig) -> None:
    """Say once what the log of a server is going to hold."""
    if config.log_requests and config.log_requests_level >= BEGINNINGS:
        log.warning("--log-requests: the texts of requests and answers go to the log")


def request_log(config: ServerConfig) -> RequestLog:
    """What --log-requests asks for."""
    return Written(config.log_requests_level) if config.log_requests else Discreet()
