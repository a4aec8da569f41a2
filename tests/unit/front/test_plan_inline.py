"""Which requests are planned on the event loop itself, and that nobody can tell."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from banyan_runtime.front.errors import ApiError
from banyan_runtime.front.plan import Endpoint, Plan
from banyan_runtime.front.prepare.planner import Planner
from banyan_runtime.front.prepare.worker_pool import FEW, SMALL_BYTES, WorkerPool

IDS = {"prompt": [5, 6, 7], "max_tokens": 4, "stream": True}


class Worker:
    """Every worker of a pool: plans what it is sent, once it may go on."""

    gone, trouble = False, ""

    def __init__(self, planner: Planner) -> None:
        self.bodies: list[bytes] = []
        self.go_on = asyncio.Event()
        self.go_on.set()
        self._planner = planner

    async def fork(self) -> Worker:
        return self

    async def plan(self, endpoint: Endpoint, body: bytes | bytearray, request_id: str) -> Plan:
        self.bodies.append(bytes(body))
        await self.go_on.wait()
        return self._planner.plan(endpoint, body, request_id)

    def close(self) -> None: ...


def pool_of(worker: Worker, planner: Planner, served: int = 0) -> WorkerPool:
    pool = WorkerPool(worker)
    pool.plan_inline(planner, lambda: served)
    return pool


def planned(planner: Planner, body: dict[str, Any], *, endpoint: Endpoint = "completions", served: int = 0) -> tuple[Plan, bool]:
    """The plan, and whether it was made at once."""
    worker = Worker(planner)
    made = asyncio.run(pool_of(worker, planner, served).plan(endpoint, json.dumps(body).encode(), "request"))
    return made, not worker.bodies


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
        {**IDS, "nobody_knows": 1},
    ],
)
def test_what_may_take_long_is_planned_beside_the_loop(planner: Planner, body: dict[str, Any]) -> None:
    worker = Worker(planner)
    raw = json.dumps(body).encode()
    try:
        asyncio.run(pool_of(worker, planner).plan("completions", raw, "request"))
    except ApiError:
        pass  # as it may be here: it has no grammars
    assert worker.bodies == [raw]


def test_everything_else_is_planned_beside_the_loop(planner: Planner) -> None:
    assert (planned(planner, IDS, served=FEW - 1))[1]
    assert not (planned(planner, IDS, served=FEW))[1]
    assert not (planned(planner, {"messages": [{"role": "user", "content": "Hello"}]}, endpoint="chat"))[1]
    assert not (planned(planner, {"input_ids": [5, 6]}, endpoint="generate"))[1]


def test_nobody_overtakes_those_who_wait_for_a_place_beside_the_loop(planner: Planner) -> None:
    async def ask() -> None:
        worker = Worker(planner)
        worker.go_on.clear()
        pool = pool_of(worker, planner)
        slow, quick = (json.dumps(body).encode() for body in ({**IDS, "n": 2}, IDS))
        waiting = [asyncio.create_task(pool.plan("completions", slow, "request")) for _ in range(FEW)]
        await asyncio.sleep(0.05)
        late = asyncio.create_task(pool.plan("completions", quick, "request"))
        await asyncio.sleep(0.05)
        assert not late.done()
        worker.go_on.set()
        await asyncio.gather(*waiting, late)
        await pool.plan("completions", quick, "request")
        assert worker.bodies.count(quick) == 1

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
