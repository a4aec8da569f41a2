from __future__ import annotations

import asyncio
import random
import time

from hypothesis import given
from hypothesis import strategies as st

from banyan_operator.cluster.queue import OUTDATED, Backlog, WorkQueue
from banyan_operator.kube.objects import Key

A, B, C = (Key("InferenceServer", "team", name) for name in "abc")


def test_a_key_added_twice_is_worked_on_once() -> None:
    backlog = Backlog()
    backlog.add(A, 0)
    backlog.add(A, 1)
    assert backlog.take(3) == (A, 3)
    assert backlog.take(3) is None


def test_a_key_added_while_in_work_runs_once_more_afterwards() -> None:
    backlog = Backlog()
    backlog.add(A, 0)
    backlog.take(0)
    backlog.add(A, 1)
    backlog.add(A, 2)
    assert backlog.take(2) is None
    backlog.done(A, 3)
    assert backlog.take(3) == (A, 0)
    backlog.done(A, 4)
    assert backlog.take(4) is None


def test_of_several_delays_the_earliest_counts() -> None:
    backlog = Backlog()
    backlog.add_at(A, 10)
    backlog.add_at(A, 5)
    backlog.add_at(A, 20)
    backlog.advance(4.9)
    assert backlog.take(4.9) is None
    backlog.advance(5)
    assert backlog.take(5) == (A, 0)
    backlog.done(A, 5)
    backlog.advance(100)
    assert backlog.take(100) is None


def test_a_look_that_succeeds_ends_the_waiting_for_what_earlier_ones_asked_for() -> None:
    now = [0.0]
    queue = WorkQueue(lambda: now[0])
    queue.add_after(A, 30)  # refused by a quota: look again
    queue.add_after(B, 40)
    queue.add(A)  # an event, and by then there is room
    assert queue.backlog.take(1) == (A, 1)
    queue.succeeded(A)
    queue.done(A)
    assert queue.backlog.next_due() == 40
    queue.add_after(A, 60)
    for second, due in ((30, None), (40, (B, 0)), (59, None), (60, (A, 0))):
        queue.backlog.advance(second)
        assert queue.backlog.take(second) == due


def test_times_that_no_longer_count_take_no_memory() -> None:
    queue = WorkQueue(lambda: 0.0)
    queue.add_after(B, 7200)
    for _ in range(10 * OUTDATED):
        queue.succeeded(A)
        queue.add_after(A, 3600)  # a deadline far away
    assert len(queue.backlog.delayed) < 2 * OUTDATED
    assert queue.backlog.next_due() == 3600
    queue.backlog.advance(7200)
    assert [queue.backlog.take(7200), queue.backlog.take(7200), queue.backlog.take(7200)] == [(A, 0), (B, 0), None]


def test_failures_wait_twice_as_long_each_time_up_to_five_minutes() -> None:
    backlog = Backlog(jitter=lambda: 1.0)
    assert [backlog.retry_delay(A, conflict=False) for _ in range(11)] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    backlog.succeeded(A)
    assert backlog.retry_delay(A, conflict=False) == 1


def test_conflicts_cost_a_second_until_there_are_too_many_in_a_row() -> None:
    backlog = Backlog(jitter=lambda: 1.0)
    delays = [backlog.retry_delay(A, conflict=True) for _ in range(8)]
    assert delays == [1, 1, 1, 1, 1, 1, 2, 4]


def test_what_the_server_asked_to_leave_alone_is_left_alone_whatever_is_heard() -> None:
    now = [0.0]
    queue = WorkQueue(lambda: now[0], jitter=lambda: 1.0)
    backlog = queue.backlog
    queue.add(A)
    assert backlog.take(0) == (A, 0)
    queue.add(A)  # an event, while it is at work
    assert queue.retry(A, not_before_s=30) == 30  # Retry-After: 30
    queue.done(A)
    queue.add(A)
    queue.add_after(A, 1)
    for second in range(30):
        now[0] = second
        backlog.advance(second)
        assert backlog.take(second) is None
    backlog.advance(30)
    assert backlog.take(30) == (A, 0)
    queue.succeeded(A)
    queue.done(A)
    queue.add(A)
    assert backlog.take(31) is not None  # and then it is as any other


def test_a_workers_end_arrives_whatever_the_queue_does() -> None:
    """500 keys, workers that come and go, and a cancellation at a random moment: each worker ends."""

    async def scenario(seed: int) -> None:
        random_ = random.Random(seed)
        queue = WorkQueue(time.monotonic)
        for number in range(random_.choice([4, 500])):
            queue.add_after(Key("InferenceServer", "team", f"s{number}"), random_.random() * 0.01)

        async def work() -> None:
            while True:
                key, _ = await queue.get()
                await asyncio.sleep(0)
                queue.done(key)
                queue.add_after(key, random_.random() * 0.001)

        workers = [asyncio.create_task(work()) for _ in range(8)]
        await asyncio.sleep(random_.random() * 0.02)
        for worker in workers:
            worker.cancel()
        _, left = await asyncio.wait(workers, timeout=5)
        assert not left, seed

    for seed in range(60):
        asyncio.run(scenario(seed))


STEPS = st.lists(st.tuples(st.sampled_from(["add", "add_at", "take", "done"]), st.sampled_from([A, B, C]), st.floats(0, 5)), max_size=60)


@given(STEPS)
def test_no_key_is_lost_and_none_is_worked_on_twice_at_a_time(steps: list[tuple[str, Key, float]]) -> None:
    backlog = Backlog()
    now = 0.0
    wanted: set[Key] = set()  # asked for since it was last taken
    working: set[Key] = set()
    for what, key, amount in steps:
        now += amount
        backlog.advance(now)
        if what == "add":
            backlog.add(key, now)
            wanted.add(key)
        elif what == "add_at":
            backlog.add_at(key, now + amount)
            wanted.add(key)
        elif what == "take":
            taken = backlog.take(now)
            if taken is not None:
                assert taken[0] not in working
                working.add(taken[0])
                if taken[0] not in backlog.due:
                    wanted.discard(taken[0])
        elif key in working:
            backlog.done(key, now)
            working.discard(key)
    for key in sorted(working):
        backlog.done(key, now)
    backlog.advance(now + 100)
    left = set()
    while (taken := backlog.take(now + 100)) is not None:
        left.add(taken[0])
        backlog.done(taken[0], now + 100)
    assert wanted <= left


def test_a_worker_that_waits_wakes_for_an_add_and_for_a_delay() -> None:
    async def scenario() -> tuple[Key, Key, float]:
        queue = WorkQueue(time.monotonic)
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        queue.add(A)
        first, _ = await waiting
        began = time.monotonic()
        queue.add_after(B, 0.05)
        second, _ = await queue.get()
        return first, second, time.monotonic() - began

    first, second, took = asyncio.run(scenario())
    assert (first, second) == (A, B)
    assert 0.04 < took < 5


def test_a_wait_that_is_given_up_loses_no_key() -> None:
    async def scenario() -> int:
        queue = WorkQueue(time.monotonic)
        seen = 0
        for _ in range(30):
            waiting = asyncio.create_task(queue.get())
            await asyncio.sleep(0)
            asyncio.get_running_loop().call_soon(waiting.cancel)
            asyncio.get_running_loop().call_soon(queue.add, A)
            try:
                key, _ = await waiting
            except asyncio.CancelledError:
                key, _ = await queue.get()
            queue.done(key)
            seen += 1
        return seen

    assert asyncio.run(scenario()) == 30
