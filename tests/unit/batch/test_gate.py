"""The turns that lines wait for."""

from __future__ import annotations

import asyncio
from collections import deque

from banyan_runtime.batch.breaker import OPENS_AFTER, Breaker, State
from banyan_runtime.batch.concurrency import Concurrency
from banyan_runtime.batch.gate import Gate, Turn
from banyan_runtime.batch.retries import POISON_CUTS, Tries


def gate(limit: int = 2, *, first_s: float = 0.01) -> Gate:
    """`first_s`: until an open circuit lets the first line try."""
    return Gate(Concurrency(maximum=limit), Breaker(first_s=first_s, most_s=2 * first_s))


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_oldest_line_goes_first_and_no_more_than_the_limit() -> None:
    async def run() -> list[int]:
        gates, order, turns = gate(), [], deque[Turn]()

        async def line(n: int) -> None:
            turns.append(await gates.enter(n, Tries(0.0)))
            order.append(n)

        tasks = [asyncio.create_task(line(n)) for n in (5, 4, 3, 2, 1)]
        await settled()
        assert gates.in_flight == 2
        while turns:
            gates.leave(turns.popleft())
            await settled()
        await asyncio.wait(tasks)
        return order

    assert asyncio.run(run()) == [5, 4, 1, 2, 3]


def test_a_line_that_is_cancelled_while_it_gets_its_turn_passes_it_on() -> None:
    async def run() -> None:
        gates = gate(1)
        first = await gates.enter(0, Tries(0.0))
        second, third = (asyncio.create_task(gates.enter(n, Tries(0.0))) for n in (1, 2))
        await settled()
        gates.leave(first)
        second.cancel()
        assert isinstance(await third, Turn)
        assert gates.in_flight == 1

    asyncio.run(run())


def test_while_the_circuit_is_open_one_line_is_sent_the_suspect_first_then_the_one_tried_least() -> None:
    async def run() -> None:
        gates = gate(10, first_s=0.5)  # by then all lines wait
        first = await gates.enter(0, Tries(0.0))
        for _ in range(OPENS_AFTER):
            gates.troubled(first)
        gates.leave(first)
        sent: list[str] = []
        turns: deque[Turn] = deque()
        arrived = asyncio.Event()

        async def line(name: str, order: int, tries: Tries) -> None:
            turns.append(await gates.enter(order, tries))
            sent.append(name)
            arrived.set()

        lines = [("tired", 0, Tries(0.0, total=9)), ("fresh", 1, Tries(0.0)), ("suspect", 2, Tries(0.0, total=3, all_cuts=POISON_CUTS))]
        tasks = [asyncio.create_task(line(*each)) for each in lines]
        for expected in (["suspect"], ["suspect", "fresh"]):
            await arrived.wait()
            arrived.clear()
            await settled()
            assert sent == expected, "one at a time"
            gates.troubled(turns[0])
            gates.leave(turns.popleft())
        await arrived.wait()
        gates.passed(turns[0])
        assert gates.breaker.state is State.CLOSED
        await asyncio.wait(tasks)

    asyncio.run(run())


def test_a_probe_that_is_cancelled_lets_another_line_try() -> None:
    async def run() -> None:
        gates = gate(10)
        first = await gates.enter(0, Tries(0.0))
        for _ in range(OPENS_AFTER):
            gates.troubled(first)
        gates.leave(first)
        probe = await gates.enter(1, Tries(0.0))
        assert probe.probe
        waiting = asyncio.create_task(gates.enter(2, Tries(0.0)))
        await settled()
        gates.leave(probe)
        assert (await waiting).probe

    asyncio.run(run())
