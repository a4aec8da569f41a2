"""Which requests are planned on the event loop itself, and that nobody can tell."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.plan import Endpoint, Plan
from banyan_runtime.front.prepare.at_once import FEW, SMALL_BYTES, AtOnce
from banyan_runtime.front.prepare.planner import Planner

IDS = {"prompt": [5, 6, 7], "max_tokens": 4, "stream": True}


class Beside:
    """Plans what is left to it, and notes it."""

    def __init__(self, planner: Planner) -> None:
        self.bodies: list[bytes] = []
        self._planner = planner

    async def plan(self, endpoint: Endpoint, body: bytes | bytearray, request_id: str) -> Plan:
        self.bodies.append(bytes(body))
        return self._planner.plan(endpoint, body, request_id)


class Waiting(Beside):
    """Plans nothing until it may go on."""

    def __init__(self, planner: Planner) -> None:
        super().__init__(planner)
        self.go_on = asyncio.Event()

    async def plan(self, endpoint: Endpoint, body: bytes | bytearray, request_id: str) -> Plan:
        plan = await super().plan(endpoint, body, request_id)
        await self.go_on.wait()
        return plan


def planned(planner: Planner, body: dict[str, Any], *, endpoint: Endpoint = "completions", served: int = 0) -> tuple[Plan, bool]:
    """The plan, and whether it was made at once."""
    beside = Beside(planner)
    raw = json.dumps(body).encode()
    made = asyncio.run(AtOnce(beside, planner, lambda: served).plan(endpoint, raw, "request"))
    return made, not beside.bodies


def test_a_small_prompt_of_ids_is_planned_at_once_and_as_ever(planner: Planner) -> None:
    for body in (IDS, {**IDS, "temperature": 0.5, "stop": ["x"], "seed": 1}, {**IDS, "stream_options": {"include_usage": True}}):
        made, at_once = planned(planner, body)
        assert at_once
        assert made == planner.plan("completions", json.dumps(body).encode(), "request")


@pytest.mark.parametrize(
    "body",
    [
        {**IDS, "prompt": "a text"},
        {**IDS, "prompt": [[1, 2], [3]]},
        {**IDS, "prompt": ["a text"]},
        {**IDS, "prompt": [5] * SMALL_BYTES},
        {**IDS, "n": 2},
        {**IDS, "echo": True},
        {**IDS, "regex": "a+"},
        {**IDS, "response_format": {"type": "json_object"}},
        {**IDS, "stop_regex": "a+"},
        {**IDS, "nobody_knows": 1},
    ],
)
def test_what_may_take_long_is_planned_beside_the_loop(planner: Planner, body: dict[str, Any]) -> None:
    beside = Beside(planner)
    raw = json.dumps(body).encode()
    try:
        asyncio.run(AtOnce(beside, planner, lambda: 0).plan("completions", raw, "request"))
    except ApiError:
        pass  # as it may be here: it has no grammars
    assert beside.bodies == [raw]


def test_everything_else_is_planned_beside_the_loop(planner: Planner) -> None:
    assert (planned(planner, IDS, served=FEW - 1))[1]
    assert not (planned(planner, IDS, served=FEW))[1]
    assert not (planned(planner, {"messages": [{"role": "user", "content": "Hello"}]}, endpoint="chat"))[1]
    assert not (planned(planner, {"input_ids": [5, 6]}, endpoint="generate"))[1]


def test_nobody_overtakes_those_who_wait_for_a_place_beside_the_loop(planner: Planner) -> None:
    async def ask() -> None:
        beside = Waiting(planner)
        preparer = AtOnce(beside, planner, lambda: 0)
        slow, quick = (json.dumps(body).encode() for body in ({**IDS, "n": 2}, IDS))
        waiting = [asyncio.create_task(preparer.plan("completions", slow, "request")) for _ in range(FEW)]
        await asyncio.sleep(0)
        late = asyncio.create_task(preparer.plan("completions", quick, "request"))
        await asyncio.sleep(0)
        assert beside.bodies[FEW:] == [quick]
        beside.go_on.set()
        await asyncio.gather(*waiting, late)
        await preparer.plan("completions", quick, "request")
        assert len(beside.bodies) == FEW + 1

    asyncio.run(ask())


@pytest.mark.parametrize(
    "body", [{**IDS, "max_tokens": -1}, {**IDS, "model": "none"}, {**IDS, "prompt": [10**9]}, {**IDS, "prompt": [5, "a"]}]
)
def test_what_is_wrong_is_said_as_ever(planner: Planner, body: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as at_once:
        planned(planner, body)
    with pytest.raises(ApiError) as beside:
        planned(planner, body, served=FEW)
    assert at_once.value.body() == beside.value.body()
    assert at_once.value.status == beside.value.status
