"""How long a request may take."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time

import pytest
from starlette.requests import Request

from banyan_runtime.config import ServerConfig
from banyan_runtime.front.auth import INTERNAL
from banyan_runtime.front.deadline import Deadline
from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.transport import EXCHANGE


def left(given: str | None = None, *, general: float | None = None, own: bool = False) -> float:
    """Seconds from receipt to the deadline."""
    headers = [] if given is None else [(b"x-request-timeout", given.encode())]
    request = Request({"type": "http", "headers": headers, **({INTERNAL: True} if own else {})})
    return Deadline.of(ServerConfig(model_path="m", request_timeout=general), request, 100.0).at - 100.0


def test_the_shorter_of_both_limits_counts_and_without_one_there_is_no_end() -> None:
    assert (left(), left("5"), left(general=7), left("5", general=7), left("9", general=7)) == (math.inf, 5, 7, 5, 7)


def test_the_servers_own_batches_have_the_time_that_they_ask_for() -> None:
    assert (left(general=7, own=True), left("9", general=7, own=True)) == (math.inf, 9)


@pytest.mark.parametrize("over", [0.05, -5.0])
def test_what_waits_beyond_the_deadline_is_ended_and_a_deadline_in_the_past_is_one(over: float) -> None:
    async def scenario() -> None:
        deadline = Deadline(time.monotonic() + over)
        with pytest.raises(ApiError) as refusal:
            await deadline.wait(asyncio.sleep(60))
        assert (refusal.value.status, refusal.value.code) == (503, "timeout")
        async with contextlib.AsyncExitStack() as stack:
            expired = asyncio.Event()
            deadline.watch(Request({"type": "http", EXCHANGE: stack}), expired.set)
            await asyncio.wait_for(expired.wait(), 5)

    asyncio.run(scenario())


def test_a_request_that_is_over_is_not_ended_again() -> None:
    async def scenario() -> bool:
        expired = asyncio.Event()
        async with contextlib.AsyncExitStack() as stack:
            Deadline(time.monotonic() + 0.05).watch(Request({"type": "http", EXCHANGE: stack}), expired.set)
        await asyncio.sleep(0.2)
        return expired.is_set()

    assert not asyncio.run(scenario())
