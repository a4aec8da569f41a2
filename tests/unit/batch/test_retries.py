"""Whose fault a failed try is, decided without clock or network."""

from __future__ import annotations

import pytest

from banyan_runtime.batch.retries import Health, RetryPolicy, Tries, Trouble, backoff_s, hopeless, judge, note, trouble_of

POLICY = RetryPolicy(max_attempts=5, max_backoff_s=60, line_budget_s=3600, silence_s=600)


class Line:
    """One line among others, with a circuit that opens when it is told to."""

    def __init__(self) -> None:
        self.health = Health()
        self.tries = Tries(0.0)
        self.openings = 0

    def meets(self, trouble: Trouble, now: float, *, then_pass: int = 0, then_fail: int = 0, alone: bool = False) -> str | None:
        """A try fails at `now`; others pass and fail before it is judged. Why it is given up, if it is."""
        self.health.met(trouble, now)
        note(self.tries, trouble, self.health, now=now, openings=self.openings, alone=alone)
        for _ in range(then_pass):
            self.health.passed()
        for _ in range(then_fail):
            self.health.met(Trouble.FAILED, now)
        judge(self.tries, self.health, self.openings)
        return hopeless(self.tries, POLICY, now)


@pytest.mark.parametrize("trouble", [Trouble.FAILED, Trouble.BROKEN])
def test_a_line_that_fails_while_others_pass_is_given_up_after_its_attempts(trouble: Trouble) -> None:
    line = Line()
    reasons = [line.meets(trouble, float(n), then_pass=3) for n in range(5)]
    assert reasons == [None, None, None, None, "gave up after 5 attempts"]


@pytest.mark.parametrize("trouble", list(Trouble))
def test_a_line_that_fails_while_nothing_passes_is_never_given_up(trouble: Trouble) -> None:
    line = Line()
    assert {line.meets(trouble, float(n), then_fail=3) for n in range(10_000)} == {None}
    assert line.tries.charged == 0


def test_what_passed_before_a_failure_is_no_evidence_against_the_line() -> None:
    line = Line()
    for _ in range(100):
        line.health.passed()
    assert {line.meets(Trouble.FAILED, float(n)) for n in range(100)} == {None}


def test_a_refusal_is_the_lines_own_only_if_what_was_sent_later_was_answered() -> None:
    health, tries = Health(), Tries(0.0)
    health.met(Trouble.REFUSED, 10.0)
    note(tries, Trouble.REFUSED, health, now=10.0, openings=0, own=True)
    health.passed(sent_at=9.0)
    assert not judge(tries, health, 0), "what was on its way already says nothing of what the server does now"
    health.passed(sent_at=11.0)
    assert judge(tries, health, 0)
    assert tries.charged == 1


def test_what_passed_after_an_outage_is_no_evidence_against_a_line_that_failed_in_it() -> None:
    line = Line()
    for n in range(20):
        line.health.met(Trouble.FAILED, float(n))
        note(line.tries, Trouble.FAILED, line.health, now=float(n), openings=line.openings)
        line.openings += 1
        line.health.passed()
        assert not judge(line.tries, line.health, line.openings)
    assert hopeless(line.tries, POLICY, 100.0) is None


def test_the_time_of_an_outage_is_not_part_of_a_lines_hour() -> None:
    line = Line()
    assert line.meets(Trouble.BUSY, 1.0, then_pass=1) is None
    line.openings += 1
    assert line.meets(Trouble.BUSY, 7200.0, then_pass=1) is None
    assert line.meets(Trouble.BUSY, 7200.0 + 3601.0) is not None


def test_a_line_is_not_charged_while_more_fails_than_passes() -> None:
    line = Line()
    assert {line.meets(Trouble.FAILED, float(n), then_pass=2, then_fail=3) for n in range(100)} == {None}


def test_where_nothing_else_passes_the_servers_word_counts_but_only_over_a_minute() -> None:
    line = Line()
    reasons = []
    for n in range(7):
        now = 15.0 * n
        line.health.met(Trouble.FAILED, now)
        note(line.tries, Trouble.FAILED, line.health, now=now, openings=1)
        assert not judge(line.tries, line.health, 1), "nobody knows yet"
        line.health.said(True, now + 1)
        assert judge(line.tries, line.health, 1)
        reasons.append(hopeless(line.tries, POLICY, now + (1 if n < 4 else -1)))
    assert reasons[:4] == [None] * 4
    assert reasons[4] is None, "five attempts, but within a minute: that may be a short outage"
    assert None not in reasons[5:]


def test_a_server_that_was_ill_in_between_says_nothing_against_the_line() -> None:
    line = Line()
    line.meets(Trouble.CUT, 1.0)
    line.health.met(Trouble.UNREACHABLE, 2.0)
    line.health.said(True, 30.0)
    assert not judge(line.tries, line.health, 0)


def test_a_line_that_kills_its_connection_while_others_pass_is_poison() -> None:
    line = Line()
    reasons = [line.meets(Trouble.CUT, float(n), then_pass=3) for n in range(3)]
    assert [reason is None for reason in reasons] == [True, True, False]


def test_a_line_that_kills_its_connection_as_the_only_one_sent_is_poison() -> None:
    line = Line()
    for n in range(3):
        assert line.meets(Trouble.CUT, float(n)) is None
    assert line.tries.suspect, "it is tried alone from now on"
    reasons = [line.meets(Trouble.CUT, 10.0 + n, alone=True) for n in range(3)]
    assert [reason is None for reason in reasons] == [True, True, False]


def test_a_busy_server_costs_no_attempts_but_a_line_refused_for_an_hour_while_others_pass_gives_up() -> None:
    line = Line()
    assert {line.meets(Trouble.BUSY, float(now), then_pass=1) for now in range(0, 3600, 10)} == {None}
    assert line.tries.charged == 0
    assert line.meets(Trouble.BUSY, 3601.0) is not None


def test_waits_grow_and_are_never_shorter_than_the_server_asks() -> None:
    tries = Tries(0.0)
    waits = []
    for _ in range(8):
        tries.total += 1
        waits.append(backoff_s(tries, POLICY, jitter=1.0))
    assert waits == [2, 4, 8, 16, 32, 60, 60, 60]
    assert backoff_s(Tries(0.0, total=1), POLICY, jitter=0.0, asked_s=7) == 7
    assert backoff_s(Tries(0.0, total=1), POLICY, jitter=0.0, asked_s=7000) == 60


def test_a_503_for_want_of_room_is_not_a_server_that_is_away() -> None:
    full = b'{"error":{"message":"The request queue is full.","code":"queue_full"}}'
    assert trouble_of(503, full) is Trouble.BUSY
    assert trouble_of(429) is Trouble.BUSY
    assert trouble_of(503, b'{"error":{"code":"unavailable"}}') is Trouble.AWAY
    assert trouble_of(503, b'{"error":{"code":"out_of_memory"}}') is Trouble.FAILED, "one of its lines takes too much"
    assert trouble_of(503, b"<html>") is Trouble.AWAY
    assert [trouble_of(status) for status in (200, 400, 401, 404, 413, 422)] == [None] * 6
    assert trouble_of(500) is trouble_of(502) is trouble_of(408) is Trouble.FAILED


def test_silence_lasts_from_the_first_trouble_to_the_next_answer() -> None:
    health = Health()
    assert health.silent_s(1000.0) == 0, "nothing was tried"
    health.met(Trouble.BUSY, 1000.0)
    health.met(Trouble.FAILED, 1500.0)
    assert health.silent_s(1601.0) == 601
    health.passed()
    assert health.silent_s(9999.0) == 0
