"""How much is in flight and who goes next, without a network."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque

import pytest

from banyan_runtime.batch.concurrency import OPENS_AFTER, Breaker, Concurrency, Limiter, Turn
from banyan_runtime.batch.retries import Tries


class Simulated:
    """A server that works on `capacity` requests at a time, about a second each, keeps `queue` more, and refuses what is beyond."""

    def __init__(self, concurrency: Concurrency, capacity: int, *, queue: int, seed: int) -> None:
        self.concurrency = concurrency
        self.capacity = capacity
        self.queue = queue
        self.now = 0.0
        self.done = self.refused = self.in_flight = 0
        self._chance = random.Random(seed)
        self._workers = [0.0] * capacity
        self._ends: list[tuple[float, int, int, bool]] = []

    def run(self, seconds: float) -> tuple[float, float]:
        """Answers a second, and the mean limit, of the second half."""
        limits, done_then, half = [], 0, self.now + seconds / 2
        while self.now < half + seconds / 2:
            while self.in_flight < self.concurrency.limit:
                self._send()
            self.now, _, epoch, served = heapq.heappop(self._ends)
            if served:
                self.concurrency.passed()
                self.done += 1
            else:
                self.concurrency.busy(epoch)
                self.refused += 1
            self.in_flight -= 1
            if self.now < half:
                done_then = self.done
            else:
                limits.append(self.concurrency.limit)
        return (self.done - done_then) / (seconds / 2), sum(limits) / len(limits)

    def _send(self) -> None:
        self.in_flight += 1
        number = self.done + self.refused + self.in_flight
        if self.in_flight > self.capacity + self.queue:
            heapq.heappush(self._ends, (self.now + 0.01, number, self.concurrency.epoch, False))
            return
        end = max(self.now, heapq.heappop(self._workers)) + self._chance.uniform(0.5, 1.5)
        heapq.heappush(self._workers, end)
        heapq.heappush(self._ends, (end, number, self.concurrency.epoch, True))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("capacity", [8, 64, 500])
def test_a_server_with_a_short_queue_is_kept_busy_and_refuses_little(capacity: int, seed: int) -> None:
    server = Simulated(Concurrency(maximum=4096), capacity, queue=capacity // 4, seed=seed)
    rate, limit = server.run(300)
    assert rate > 0.8 * capacity
    assert limit < 1.3 * capacity
    assert server.refused < 0.15 * server.done


def test_one_cohort_of_busy_answers_is_one_decrease() -> None:
    concurrency = Concurrency(maximum=64)
    sent_in = concurrency.epoch
    for _ in range(20):
        concurrency.busy(sent_in)
    assert concurrency.limit == 22
    for _ in range(100):
        concurrency.busy(concurrency.epoch)
    assert concurrency.limit == 1


def test_the_limit_starts_with_each_addresss_share_and_never_passes_the_maximum() -> None:
    concurrency = Concurrency(maximum=100)
    assert concurrency.limit == 32
    concurrency.joined(1)
    assert concurrency.limit == 64
    for _ in range(10_000):
        concurrency.passed()
    assert concurrency.limit == 100


def opened(*, asked_s: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(OPENS_AFTER):
        assert not breaker.is_open
        breaker.failed(0.0, asked_s=asked_s)
    assert breaker.is_open
    return breaker


@pytest.mark.parametrize(("ready", "probes"), [(False, [1, 3, 7, 15, 31, 61, 91]), (True, [1, 2, 3, 4, 5, 6, 7])])
def test_a_server_is_probed_less_and_less_often_unless_it_says_that_it_is_ready(ready: bool, probes: list[float]) -> None:
    breaker, found = opened(), []
    for _ in probes:
        found.append(breaker.probe_at)
        breaker.failed(breaker.probe_at)  # requests sent before the breaker opened change nothing
        breaker.probe_failed(breaker.probe_at, ready=ready)
    assert found == probes


def test_a_breaker_closes_at_an_answer_and_counts_failures_anew() -> None:
    breaker = opened(asked_s=20)
    assert breaker.probe_at == 20, "the server asked for time"
    breaker.close()
    for _ in range(OPENS_AFTER - 1):
        breaker.failed(50.0)
    assert not breaker.is_open


def limiter(limit: int = 2, *, first_s: float = 0.01) -> Limiter:
    """`first_s`: until an open breaker lets the first line try."""
    return Limiter(Concurrency(maximum=limit), Breaker(first_s, 2 * first_s))


async def opened_limiter(*, first_s: float = 0.01) -> Limiter:
    found = limiter(10, first_s=first_s)
    turn = await found.enter(0, Tries())
    for _ in range(OPENS_AFTER):
        found.failed(turn, ready=False)
    found.leave(turn)
    return found


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_oldest_line_goes_first_and_no_more_than_the_limit() -> None:
    async def run() -> list[int]:
        queue, order, turns = limiter(), [], deque[Turn]()

        async def line(n: int) -> None:
            turns.append(await queue.enter(n, Tries()))
            order.append(n)

        tasks = [asyncio.create_task(line(n)) for n in (5, 4, 3, 2, 1)]
        await settled()
        assert queue.in_flight == 2
        while turns:
            queue.leave(turns.popleft())
            await settled()
        await asyncio.wait(tasks)
        return order

    assert asyncio.run(run()) == [5, 4, 1, 2, 3]


def test_a_line_that_is_cancelled_while_it_gets_its_turn_passes_it_on() -> None:
    async def run() -> None:
        queue = limiter(1)
        first = await queue.enter(0, Tries())
        second, third = (asyncio.create_task(queue.enter(n, Tries())) for n in (1, 2))
        await settled()
        queue.leave(first)
        second.cancel()
        assert isinstance(await third, Turn)
        assert queue.in_flight == 1

    asyncio.run(run())


def test_while_the_breaker_is_open_one_line_is_sent_the_suspect_first_then_the_one_tried_least() -> None:
    async def run() -> None:
        queue = await opened_limiter(first_s=0.5)  # by then all lines wait
        sent: list[str] = []
        turns: deque[Turn] = deque()
        arrived = asyncio.Event()

        async def line(name: str, order: int, tries: Tries) -> None:
            turns.append(await queue.enter(order, tries))
            sent.append(name)
            arrived.set()

        lines = [
            ("tired", 0, Tries(9)),
            ("fresh", 1, Tries()),
            ("suspect", 2, Tries(3, crashes=3)),
            ("other suspect", 3, Tries(4, crashes=3)),
        ]
        tasks = [asyncio.create_task(line(*each)) for each in lines]
        for expected in (["suspect"], ["suspect", "other suspect"], ["suspect", "other suspect", "fresh"]):
            await arrived.wait()
            arrived.clear()
            await settled()
            assert sent == expected, "one at a time"
            if expected == ["suspect"]:
                queue.passed(turns[0])
                assert queue.breaker.is_open, "the other suspect is sent alone too"
            else:
                queue.failed(turns[0], ready=True)
            queue.leave(turns.popleft())
        await arrived.wait()
        queue.passed(turns[0])
        assert not queue.breaker.is_open
        await asyncio.wait(tasks)

    asyncio.run(run())


@pytest.mark.parametrize("end", ["cancelled", "slow at a ready server", "slow at a server that is not ready"])
def test_a_probe_that_does_not_end_in_time_holds_back_no_other_line(end: str) -> None:
    async def run() -> None:
        queue = await opened_limiter()
        probe = await queue.enter(1, Tries())
        assert probe.probe
        waiting = asyncio.create_task(queue.enter(2, Tries()))
        await settled()
        if end == "cancelled":
            queue.leave(probe)
        else:
            queue.release(probe, ready="not" not in end)
        assert (await waiting).probe == (end != "slow at a ready server")

    asyncio.run(run())
