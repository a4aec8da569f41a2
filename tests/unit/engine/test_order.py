"""Who goes first, and whose turn a step is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from banyan_runtime.engine.policy import OVERDUE_BATCHES
from banyan_runtime.engine.rules import GATHERING_STEPS
from banyan_runtime.step import Step
from tests.unit.engine.session import Session, limits


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


def test_arrivals_stop_running_requests_for_a_step_at_most() -> None:
    """Those who arrive meanwhile share the next step of prompts."""
    session = Session(limits())
    for number in range(5):
        session.submit([number, 1], 20)
        session.turn()
    for _ in range(5):
        session.turn()
    assert "".join(phase[0] for phase, _, _ in session.runner.log).startswith("pdpdpddddd")


class Paid:
    """A session whose steps take `fixed` seconds and `each` more a token; it knows what they cost."""

    def __init__(self, fixed: float, each: float, **changes: Any) -> None:
        self.session = Session(limits(**({"pool_tokens": 4000, "max_running": 64} | changes)))
        self._fixed, self._each = fixed, each
        self.session.runner.watch = self._takes
        for length in (10, 200, 40, 100):
            self.session.submit([length % 50] * length, 1)
            self.session.drain()
        self.session.runner.log.clear()

    def _takes(self, step: Step) -> None:
        self.session.now += self._fixed + self._each * len(step.token_ids)

    def kinds(self, lengths: Sequence[int], turns: int) -> str:
        """The steps of so many turns beside somebody who runs, in the first of which a prompt of each length comes, one in each."""
        self.session.submit([1], 100)
        self.session.turn(0)
        for length in lengths:
            self.session.submit([length % 50] * length, 50)
            self.session.turn(0)
        for _ in range(turns - len(lengths)):
            self.session.turn(0)
        return "".join(phase[0] for phase, _, _ in self.session.runner.log)[1:]


def test_prompts_that_are_hardly_worth_a_step_wait_a_little_for_others() -> None:
    assert Paid(0.01, 0.0001).kinds([20, 20, 20, 20, 20, 20], 12) == "d" * GATHERING_STEPS + "p" + "d" * GATHERING_STEPS + "p" + "dd"
    assert Paid(0.01, 0.0001).kinds([250], 4) == "dpdd", "this one is worth one by itself"
    assert Paid(0.01, 0.001).kinds([30, 30, 30], 5) == "dpdpd", "so are these where tokens cost more"


def test_nobody_waits_for_others_where_nothing_runs_or_the_last_prompts_were_long_ago() -> None:
    paid = Paid(0.01, 0.0001)
    paid.session.submit([1] * 20, 30)
    paid.session.turn(0)
    assert paid.session.started[-1] == 5
    for _ in range(GATHERING_STEPS):
        paid.session.turn(0)
    paid.session.submit([2] * 20, 30)
    paid.session.turn(0)
    assert paid.session.started[-1] == 6
