"""The decision after each try of a line."""

from __future__ import annotations

import itertools

import pytest

from banyan_runtime.batch.retries import Decision, Kind, RetryPolicy, Tries, classify, decide, needs_readiness

POLICY = RetryPolicy()
SITUATIONS = list(itertools.product((False, True), repeat=2))  # nothing or something succeeded, the server is not ready or ready


@pytest.mark.parametrize(
    ("kind", "decisions"),
    [
        (Kind.ANSWERED, "answer answer answer answer"),
        (Kind.BUSY, "free free free free"),
        (Kind.AWAY, "free free free free"),
        (Kind.FAILED, "free charged free charged"),
        (Kind.REFUSED, "free fail-job free charged"),
        (Kind.MODEL_MISSING, "free fail-job answer answer"),
    ],
)
def test_every_reply_has_one_decision_in_every_situation(kind: Kind, decisions: str) -> None:
    words = {
        "answer": Decision.ANSWER,
        "free": Decision.RETRY_FREE,
        "charged": Decision.RETRY_CHARGED,
        "fail-job": Decision.FAIL_JOB,
    }
    found = [decide(kind, succeeded=succeeded, ready=ready) for succeeded, ready in SITUATIONS]
    assert found == [words[word] for word in decisions.split()]
    assert [needs_readiness(kind, succeeded=False), needs_readiness(kind, succeeded=True)] == [
        found[0] is not found[1],
        found[2] is not found[3],
    ]


@pytest.mark.parametrize(
    ("kind", "answers"),
    [
        (Kind.ANSWERED, [(200,), (400,), (413,), (422,), (404, "", "previous_response_id")]),
        (Kind.BUSY, [(429,), (503, "queue_full"), (503, "server_overloaded")]),
        (Kind.AWAY, [(503,), (503, "unavailable")]),
        (Kind.FAILED, [(408,), (500,), (502,), (504,), (503, "out_of_memory")]),
        (Kind.REFUSED, [(301,), (401,), (403,), (404,), (405,)]),
    ],
)
def test_answers_are_classified_by_status_and_code(kind: Kind, answers: list[tuple[int, str, str]]) -> None:
    assert {classify(*answer) for answer in answers} == {kind}
    assert classify(404, "model_not_found", missing_model=True) is Kind.MODEL_MISSING


def test_only_charged_tries_count_as_attempts() -> None:
    tries = Tries()
    for _ in range(1000):
        tries.add(Kind.AWAY, Decision.RETRY_FREE, 0.0)
    for _ in range(5):
        assert tries.exhausted(POLICY, 0.0) is None
        tries.add(Kind.FAILED, Decision.RETRY_CHARGED, 0.0)
    assert tries.exhausted(POLICY, 0.0) is not None


def test_a_line_for_which_the_server_is_busy_for_an_hour_is_given_up_unless_it_was_away_meanwhile() -> None:
    tries = Tries()
    tries.add(Kind.BUSY, Decision.RETRY_FREE, 0.0)
    assert tries.exhausted(POLICY, 3600.0) is None
    assert tries.exhausted(POLICY, 3601.0) is not None
    tries.add(Kind.AWAY, Decision.RETRY_FREE, 3000.0)
    tries.add(Kind.BUSY, Decision.RETRY_FREE, 3500.0)
    assert tries.exhausted(POLICY, 7000.0) is None


def test_a_line_after_whose_failures_the_server_is_not_ready_is_suspect() -> None:
    tries = Tries()
    for kind, decision in [(Kind.AWAY, Decision.RETRY_FREE), (Kind.FAILED, Decision.RETRY_CHARGED)] * 5:
        tries.add(kind, decision, 0.0)
    assert not tries.suspect
    for _ in range(3):
        tries.add(Kind.FAILED, Decision.RETRY_FREE, 0.0)
    assert tries.suspect


def test_waits_grow_and_are_never_shorter_than_the_server_asks() -> None:
    assert [Tries(total).backoff_s(POLICY, jitter=1.0) for total in range(1, 9)] == [2, 4, 8, 16, 32, 60, 60, 60]
    assert [Tries(1).backoff_s(POLICY, jitter=0.0, asked_s=asked) for asked in (0, 7, 7000)] == [1, 7, 60]
