"""The decisions of a run, driven without clock, network or storage."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan_runtime.batch.protocol import RUN_METADATA, Condition, Publish, Published, Refuse, Window, plan_publication
from banyan_runtime.batch.records import ERRORS, MANIFEST, OUTPUT, Record
from banyan_runtime.batch.retries import (
    Again,
    Concurrency,
    GiveUp,
    Health,
    RetryPolicy,
    ServerLost,
    Tries,
    Trouble,
    next_try,
)
from banyan_runtime.storage.store import ObjectInfo

POLICY = RetryPolicy(max_attempts=5, max_backoff_s=60, line_budget_s=3600, silence_s=600)


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 2000), st.integers(0, 200))
def test_lines_finished_in_any_order_are_given_out_in_input_order_once_each(seed: int, max_lines: int, max_bytes: int, total: int) -> None:
    chance = random.Random(seed)
    window = Window(max_lines=max_lines, max_bytes=max_bytes)
    under_way: list[int] = []
    written: list[bytes] = []
    while len(written) < total:
        if window.begun < total and window.has_room and chance.random() < 0.6:
            under_way.append(window.begin(chance.randrange(100)))
        elif under_way:
            ordinal = under_way.pop(chance.randrange(len(under_way)))
            window.finish(ordinal, Record("output", b"%d" % ordinal))
        if chance.random() < 0.5:
            written += [record.line for record in window.take()]
        assert window.open <= max_lines
    assert written == [b"%d" % ordinal for ordinal in range(total)]
    assert window.watermark == total
    assert window.open == 0


def test_a_slow_line_holds_back_new_lines_once_the_window_is_full() -> None:
    window = Window(max_lines=100, max_bytes=1000)
    slow = window.begin(10)
    begun = 1
    while window.has_room:
        window.finish(window.begin(10), Record("output", b"x" * 30))
        begun += 1
    assert begun < 100, "the finished lines behind the slow one fill the bytes"
    assert window.take() == []
    window.finish(slow, Record("error", b"x"))
    assert len(window.take()) == begun
    assert window.has_room


def test_a_line_has_one_outcome() -> None:
    window = Window(max_lines=4, max_bytes=100)
    ordinal = window.begin(1)
    window.finish(ordinal, Record("output", b"x"))
    with pytest.raises(AssertionError):
        window.finish(ordinal, Record("error", b"y"))


def test_failures_of_a_line_are_counted_and_waited_between_longer_and_longer() -> None:
    tries, health = Tries(0.0, 0), Health()
    waits = []
    for attempt in range(1, 6):
        decision = next_try(tries, Trouble.FAILED, health, POLICY, now=float(attempt), jitter=1.0)
        if isinstance(decision, Again):
            waits.append(decision.after_s)
    assert waits == [2, 4, 8, 16]
    assert decision == GiveUp("gave up after 5 attempts")


def test_a_busy_server_is_waited_for_as_long_as_it_asks_without_counting() -> None:
    tries, health = Tries(0.0, 0), Health()
    for second in range(100):
        health.passed()
        decision = next_try(tries, Trouble.BUSY, health, POLICY, now=float(second), jitter=0.0, retry_after_s=7)
        assert decision == Again(7)
    assert tries.counted == 0


def test_a_line_that_is_refused_for_an_hour_while_others_pass_gives_up() -> None:
    tries, health = Tries(0.0, 0), Health()
    health.passed()
    assert isinstance(next_try(tries, Trouble.BUSY, health, POLICY, now=3000.0, jitter=0.0), Again)
    health.passed()
    assert isinstance(next_try(tries, Trouble.BUSY, health, POLICY, now=3601.0, jitter=0.0), GiveUp)


def test_a_line_that_kills_its_connection_while_others_pass_is_poison() -> None:
    tries, health = Tries(0.0, 0), Health()
    decisions = []
    for second in range(3):
        health.passed()
        decisions.append(next_try(tries, Trouble.BROKEN, health, POLICY, now=float(second), jitter=0.0))
    assert [type(decision) for decision in decisions] == [Again, Again, GiveUp]


def test_a_restart_of_the_server_costs_no_line_its_attempts() -> None:
    tries, health = Tries(0.0, 0), Health()
    assert isinstance(next_try(tries, Trouble.BROKEN, health, POLICY, now=0.0, jitter=0.0), Again)
    for second in range(1, 500):
        assert isinstance(next_try(tries, Trouble.UNREACHABLE, health, POLICY, now=float(second), jitter=0.0), Again)
    assert tries.counted == 1


def test_a_server_that_serves_nothing_for_too_long_is_lost() -> None:
    tries, health = Tries(0.0, 0), Health()
    assert isinstance(next_try(tries, Trouble.UNREACHABLE, health, POLICY, now=1000.0, jitter=0.0), Again)
    assert isinstance(next_try(tries, Trouble.BUSY, health, POLICY, now=1600.0, jitter=0.0), Again)
    assert next_try(tries, Trouble.UNREACHABLE, health, POLICY, now=1601.0, jitter=0.0) == ServerLost(601.0)


def test_a_server_that_fails_every_line_for_too_long_is_lost() -> None:
    health, decisions = Health(), []
    for second in range(0, 700, 7):
        tries = Tries(float(second), 0, counted=4)
        decisions.append(next_try(tries, Trouble.FAILED, health, POLICY, now=float(second), jitter=0.0))
    assert isinstance(decisions[0], GiveUp)
    assert isinstance(decisions[-1], ServerLost)


def test_one_last_line_that_always_times_out_does_not_cost_the_others_their_results() -> None:
    health = Health()
    health.passed()
    tries = Tries(0.0, 1)
    decisions = [next_try(tries, Trouble.BROKEN, health, POLICY, now=1800.0 * n, jitter=0.0) for n in range(1, 6)]
    assert isinstance(decisions[-1], GiveUp)


def test_a_job_is_misconfigured_when_all_of_its_first_lines_are_refused() -> None:
    health = Health()
    assert [health.answered(404, total_lines=1000) for _ in range(8)] == [False] * 7 + [True]
    assert Health().answered(401, total_lines=1)
    health = Health()
    health.answered(404, total_lines=1000)
    health.answered(200, total_lines=1000)
    assert not any(health.answered(404, total_lines=1000) for _ in range(50))


def test_concurrency_shrinks_once_a_cohort_and_grows_back() -> None:
    concurrency = Concurrency(maximum=64, start=32)
    sent_in = concurrency.epoch
    for _ in range(20):
        concurrency.refused(sent_in)
    assert concurrency.limit == 22
    for _ in range(2000):
        concurrency.passed()
    assert concurrency.limit == 64
    for _ in range(100):
        concurrency.refused(concurrency.epoch)
    assert concurrency.limit == 1


def _info(name: str, run: str | None = None) -> ObjectInfo:
    return ObjectInfo(name, 1, f"tag-{name}", {RUN_METADATA: run} if run else {})


def _found(**objects: ObjectInfo) -> dict[str, ObjectInfo | None]:
    names = {"output": OUTPUT, "errors": ERRORS, "manifest": MANIFEST}
    return {name: objects.get(key) for key, name in names.items()}


def test_an_empty_place_is_written_only_where_nothing_is() -> None:
    plan = plan_publication(_found(), run="me", published_run=None, overwrite=False)
    assert plan == Publish(dict.fromkeys((OUTPUT, ERRORS, MANIFEST), Condition(if_none_match=True)))


def test_a_published_run_is_left_alone_even_where_overwriting_is_allowed() -> None:
    found = _found(output=_info(OUTPUT, "me"), errors=_info(ERRORS, "me"), manifest=_info(MANIFEST, "me"))
    assert plan_publication(found, run="me", published_run="me", overwrite=True) == Published()
    assert plan_publication(found, run="other", published_run="me", overwrite=False) == Refuse(MANIFEST)


def test_somebodys_file_without_a_run_is_refused_and_replaced_only_when_allowed() -> None:
    found = _found(output=_info(OUTPUT))
    assert plan_publication(found, run="me", published_run=None, overwrite=False) == Refuse(OUTPUT)
    plan = plan_publication(found, run="me", published_run=None, overwrite=True)
    assert isinstance(plan, Publish)
    assert plan.conditions[OUTPUT] == Condition(if_match=f"tag-{OUTPUT}")
    assert plan.conditions[ERRORS] == Condition(if_none_match=True)


def test_a_half_published_run_is_replaced() -> None:
    plan = plan_publication(_found(output=_info(OUTPUT, "dead")), run="me", published_run=None, overwrite=False)
    assert isinstance(plan, Publish)
