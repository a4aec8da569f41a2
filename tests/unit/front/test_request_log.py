"""What --log-requests writes, level by level."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from banyan_runtime import wire
from banyan_runtime.config import ServerConfig
from banyan_runtime.front.chat.events import ToolArgs, ToolEnd, ToolStart
from banyan_runtime.front.deltas import Delta, Finished
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.plan import GenerateRequest
from banyan_runtime.front.request_log import BEGINNING, LOGGER, Discreet, RequestLog, request_log, warn

PROMPT = "prompt " * BEGINNING
END = Finished("stop", None, 0, 0, None)


class Reader:
    """A consumer that counts what reaches it."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.ends: list[ApiError | None] = []

    def add(self, index: int, delta: Delta) -> None:
        self.deltas.append(delta)

    def end(self, error: ApiError | None) -> None:
        self.ends.append(error)


class Plans:
    async def plan(self, endpoint: str, body: bytes | bytearray, request_id: str) -> Any:
        return request_id


def requests(number: int) -> list[GenerateRequest]:
    return [GenerateRequest(token_ids=wire.pack_ids([1]), sampling=wire.Sampling(max_new_tokens=7))] * number


def written(level: int) -> RequestLog:
    return request_log(config(level))


def config(level: int) -> ServerConfig:
    return ServerConfig(model_path="tiny", log_requests=True, log_requests_level=level)


def said(caplog: pytest.LogCaptureFixture, kind: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER and record.getMessage().startswith(kind)]


def answer(log: RequestLog) -> Reader:
    """One request and its answer in two deltas, with a call of a tool."""
    assert asyncio.run(log.preparer(Plans()).plan("chat", PROMPT.encode(), "r")) == "r"  # type: ignore[arg-type, comparison-overlap]
    reader = Reader()
    consumer, _ = log.follow(requests(1), ["chatcmpl-1"], reader)
    consumer.add(0, Delta("so ", "thought", [1], 1, tools=[ToolStart(0, "look"), ToolArgs(0, '{"a":')]))
    consumer.add(0, Delta("far", "", [2], 2, finished=END, tools=[ToolArgs(0, "1}"), ToolEnd(0)]))
    consumer.end(None)
    return reader


@pytest.mark.parametrize("level", [0, 1])
def test_up_to_level_1_sizes_are_told_and_no_texts(level: int, caplog: pytest.LogCaptureFixture) -> None:
    reader = answer(written(level))
    assert (len(reader.deltas), reader.ends) == (2, [None])
    assert said(caplog, "Received") == [f"Received . endpoint: chat, bytes: {len(PROMPT)}"]
    assert said(caplog, "Answered") == ["Answered chatcmpl-1. reason: stop, #reasoning: 7, #content: 6, #tools: 44"]
    assert [('"max_new_tokens": 7' in line) for line in said(caplog, "Started")] == [True] * level


@pytest.mark.parametrize(("level", "shown"), [(2, PROMPT[:BEGINNING]), (3, PROMPT)])
def test_level_2_shows_beginnings_and_level_3_everything(level: int, shown: str, caplog: pytest.LogCaptureFixture) -> None:
    answer(written(level))
    assert said(caplog, "Received")[0].endswith(f", body: {shown}")
    assert said(caplog, "Answered")[0].endswith(
        ', reasoning: "thought", content: "so far", tools: "[{\\"name\\": \\"look\\", \\"arguments\\": \\"{\\\\\\"a\\\\\\":1}\\"}]"'
    )


@pytest.mark.parametrize(("level", "levels"), [(1, []), (2, [logging.WARNING]), (3, [logging.WARNING])])
def test_that_texts_are_written_a_server_warns_of(level: int, levels: list[int], caplog: pytest.LogCaptureFixture) -> None:
    warn(config(level))
    assert [record.levelno for record in caplog.records] == levels


def test_a_sequence_that_fails_or_that_nobody_waits_for_is_told_once_with_what_there_was(caplog: pytest.LogCaptureFixture) -> None:
    consumer, unheard = written(3).follow(requests(3), ["one", "two", "three"], Reader())
    for index in range(3):
        consumer.add(index, Delta(f"text {index}", "", [1], 1, finished=END if index == 0 else None))
    consumer.end(ApiError(503, "no memory", code="kv_exhausted"))
    unheard()
    assert [line.partition(". reason: ")[::2] for line in said(caplog, "Answered")] == [
        ("Answered one", 'stop, #reasoning: 0, #content: 6, #tools: 0, content: "text 0"'),
        ("Answered two", 'error (kv_exhausted), #reasoning: 0, #content: 6, #tools: 0, content: "text 1"'),
        ("Answered three", 'error (kv_exhausted), #reasoning: 0, #content: 6, #tools: 0, content: "text 2"'),
    ]


def test_without_the_option_nothing_is_looked_at() -> None:
    log = request_log(ServerConfig(model_path="tiny"))
    assert isinstance(log, Discreet)
    reader, plans = Reader(), Plans()
    assert log.follow(requests(1), ["one"], reader)[0] is reader
    assert log.preparer(plans) is plans  # type: ignore[arg-type, comparison-overlap]
