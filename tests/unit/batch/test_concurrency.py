"""How much is in flight, decided without clock or network, against a simulated server."""

from __future__ import annotations

import heapq
import random

import pytest

from banyan_runtime.batch.concurrency import Concurrency


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
                self.concurrency.passed(self.now, full=self.in_flight >= self.concurrency.limit)
                self.done += 1
            else:
                self.concurrency.refused(epoch)
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


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("capacity", [64, 500])
def test_a_server_that_never_refuses_is_filled_but_not_buried(capacity: int, seed: int) -> None:
    server = Simulated(Concurrency(maximum=4096), capacity, queue=10**9, seed=seed)
    rate, limit = server.run(300)
    assert rate > 0.9 * capacity
    assert limit < 2.5 * capacity, "what is beyond the capacity only waits in the server's queue"


def test_a_server_that_grows_gets_more() -> None:
    concurrency = Concurrency(maximum=4096)
    server = Simulated(concurrency, 64, queue=10**9, seed=1)
    server.run(100)
    before = concurrency.limit
    server._workers += [server.now] * 448
    heapq.heapify(server._workers)
    rate, limit = server.run(300)
    assert limit > 2 * before
    assert rate > 300


def test_one_cohort_of_refusals_is_one_decrease() -> None:
    concurrency = Concurrency(maximum=64)
    sent_in = concurrency.epoch
    for _ in range(20):
        concurrency.refused(sent_in)
    assert concurrency.limit == 22
    for _ in range(100):
        concurrency.refused(concurrency.epoch)
    assert concurrency.limit == 1


def test_the_limit_starts_with_each_endpoints_share_and_never_passes_the_maximum() -> None:
    concurrency = Concurrency(maximum=100)
    assert concurrency.limit == 32
    concurrency.joined(1)
    assert concurrency.limit == 64
    concurrency.joined(5)
    assert concurrency.limit == 100
    for n in range(10_000):
        concurrency.passed(n * 0.001)
        assert concurrency.limit <= 100


def test_too_few_lines_say_nothing_about_the_server() -> None:
    concurrency = Concurrency(maximum=4096)
    for n in range(10_000):
        concurrency.passed(n * 0.001, full=False)
    assert concurrency.limit == 32
