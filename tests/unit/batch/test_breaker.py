"""The circuit between a run and a server that may be away."""

from __future__ import annotations

import random

from banyan_runtime.batch.breaker import OPENS_AFTER, Breaker, State


def opened(now: float = 0.0, *, asked_s: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(OPENS_AFTER):
        breaker.troubled(now, asked_s=asked_s)
    return breaker


def probes(breaker: Breaker, until: float) -> list[float]:
    """When lines are sent, if each of them fails at once."""
    found, now = [], 0.0
    while now < until:
        if breaker.probe(now):
            found.append(now)
            breaker.troubled(now, probe=True)
        now += breaker.wait_s(now)
    return found


def test_troubles_in_a_row_open_the_circuit_but_not_with_an_answer_between_them() -> None:
    breaker = Breaker()
    for _ in range(100):
        for _ in range(OPENS_AFTER - 1):
            breaker.troubled(0.0)
        breaker.passed()
    assert (breaker.state, breaker.openings) == (State.CLOSED, 0)
    assert (opened().state, opened().openings) == (State.OPEN, 1)


def test_the_server_is_tried_with_one_line_less_and_less_often() -> None:
    assert probes(opened(), 150) == [1, 3, 7, 15, 31, 61, 91, 121]


def test_only_one_line_is_out_at_a_time_and_others_that_fail_meanwhile_change_nothing() -> None:
    breaker = opened()
    assert not breaker.probe(0.5)
    assert breaker.probe(1.0)
    assert not breaker.probe(100.0)
    breaker.troubled(100.0)
    assert breaker.state is State.HALF_OPEN
    breaker.troubled(100.0, probe=True)
    assert breaker.state is State.OPEN


def test_an_answer_closes_the_circuit_whoever_got_it() -> None:
    breaker = opened()
    breaker.passed()
    assert breaker.state is State.CLOSED
    for _ in range(OPENS_AFTER):
        breaker.troubled(50.0)
    assert (breaker.openings, breaker.wait_s(50.0)) == (2, 1.0), "a new outage, waited for from the beginning"


def test_a_server_that_asks_for_time_gets_it() -> None:
    assert opened(asked_s=20).wait_s(0.0) == 20
    breaker = opened()
    assert breaker.probe(1.0)
    breaker.troubled(1.0, probe=True, asked_s=12)
    assert breaker.wait_s(1.0) == 12
    breaker.healthy(1.0)
    assert breaker.wait_s(1.0) == 12


def test_a_server_that_says_it_is_well_is_tried_without_growing_waits() -> None:
    breaker, found, now = opened(), [], 0.0
    while now < 10:
        if breaker.probe(now):
            found.append(now)
            breaker.troubled(now, probe=True)
            breaker.healthy(now)
        now += breaker.wait_s(now)
    assert found == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_probe_that_was_called_off_is_replaced_at_once() -> None:
    breaker = opened()
    assert breaker.probe(1.0)
    breaker.probe_lost()
    assert breaker.probe(1.0)


def test_whatever_happens_the_next_probe_is_never_more_than_half_a_minute_away() -> None:
    for seed in range(300):
        chance = random.Random(seed)
        breaker, now, out = Breaker(), 0.0, False
        for _ in range(200):
            now += chance.expovariate(1.0)
            match chance.randrange(6):
                case 0 | 1:
                    breaker.troubled(now)
                case 2 if out:
                    breaker.troubled(now, probe=True)
                    out = False
                case 3:
                    out = breaker.probe(now) or out
                case 4 if chance.random() < 0.3:
                    breaker.passed()
                    out = False
                case 5:
                    breaker.healthy(now)
            assert (breaker.state is State.HALF_OPEN) == out
            assert breaker.wait_s(now) <= 30
