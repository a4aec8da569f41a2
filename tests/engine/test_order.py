"""Who goes first, and whose turn a step is."""

from __future__ import annotations

import pytest

from banyan_runtime.engine.policy import OVERDUE_BATCHES
from tests.engine.session import Session, limits


def test_first_come_is_first_served() -> None:
    session = Session(limits(max_running=1))
    for number in range(5):
        session.submit([number, 1], 2)
    session.drain()
    assert session.started == [1, 2, 3, 4, 5]


def test_longest_prefix_match_takes_what_is_cached_first() -> None:
    session = Session(limits(max_running=1, policy="lpm"))
    session.submit([7] * 40, 2)
    session.drain()
    session.submit([1, 2, 3], 2)
    session.submit([7] * 20, 2)
    session.submit([7] * 30, 2)
    session.drain()
    assert session.started[1:] == [4, 3, 2]


def test_longest_prefix_match_lets_one_of_a_family_go_ahead_of_the_rest() -> None:
    session = Session(limits(max_running=2, policy="lpm"))
    family = list(range(40))
    session.submit([*family, 1], 2)
    session.submit([*family, 2], 2)
    session.submit([45, 46], 2)
    session.drain()
    assert session.started == [1, 3, 2]


def test_longest_prefix_match_serves_a_long_queue_in_the_order_of_arrival() -> None:
    session = Session(limits(max_running=1, policy="lpm"))
    session.submit([7] * 40, 2)
    session.drain()
    for number in range(129):
        session.submit([number % 50, 1], 1)
    session.submit([7] * 30, 1)
    session.turn()
    session.turn()
    assert session.started[1] == 2


def test_longest_prefix_match_starves_nobody() -> None:
    session = Session(limits(max_running=1, policy="lpm"))
    session.submit([7] * 40, 1)
    session.drain()
    unlucky = session.submit([1, 2, 3], 1)
    batches = 0
    while not session.ended(unlucky):
        while len(session.engine.scheduler.queue) < 3:
            session.submit([7] * 30, 1)
        session.turn()
        batches += 1
        assert batches < 3 * OVERDUE_BATCHES
    assert batches > OVERDUE_BATCHES


@pytest.mark.parametrize("rules", ["fair", "sglang"])
def test_decode_steps_may_run_in_a_row_before_prompts_are_looked_at(rules: str) -> None:
    session = Session(limits(continuous_decodes=5, scheduling_rules=rules))
    session.submit([1], 40)
    session.turn()
    session.turn()
    for number in range(3):
        session.submit([2 + number], 40)
        for _ in range(6):
            session.turn()
    kinds = "".join(phase[0] for phase, _, _ in session.runner.log)
    assert kinds.startswith("pdddddpdddddpdddddp")


@pytest.mark.parametrize(("rules", "kinds"), [("fair", "pdpdpddddd"), ("sglang", "pppppddddd")])
def test_arrivals_stop_running_requests_for_a_step_at_most(rules: str, kinds: str) -> None:
    """Those who arrive meanwhile share the next step of prompts."""
    session = Session(limits(scheduling_rules=rules))
    for number in range(5):
        session.submit([number, 1], 20)
        session.turn()
    for _ in range(5):
        session.turn()
    assert "".join(phase[0] for phase, _, _ in session.runner.log).startswith(kinds)
