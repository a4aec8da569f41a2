"""Runs that end early: cancelled, expired, failed, or with too many errors."""

from __future__ import annotations

import re

import pytest

from banyan_runtime.batch.documents import Keys, Stop
from tests.component.batch.conftest import Bench
from tests.support.server.scripted import line

JOB = ["--run-id", "job", "--shard-requests", "10", "--checkpoint-seconds", "0.2"]
CODES = {"cancelled": "batch_cancelled", "expired": "batch_expired", "failed": "batch_failed"}


def test_a_run_that_is_ended_while_workers_still_work_publishes_every_line(bench: Bench) -> None:
    why = "cancelled"
    bench.give([line(f"id-{i}", "slow 600" if i >= 100 else f"line {i}") for i in range(120)])
    workers = [bench.start(*JOB, "--workers", "2", "--phase", "work", JOB_COMPLETION_INDEX=str(i)) for i in range(2)]
    bench.eventually(lambda: bench.server.tries.total() > 30)
    merge = bench.run(*JOB, "--phase", "merge", "--partial", why)
    manifest = bench.check()
    assert (merge.words["code"], manifest["outcome"]) == (why, why)
    counts = merge.words["requestCounts"]
    assert counts["total"] == 120
    assert 0 < counts["completed"] < 120
    lacking = [entry for entry in bench.entries("errors.jsonl") if entry["error"]["code"] == CODES[why]]
    assert len(lacking) == 120 - counts["completed"]
    before = bench.results
    for worker in workers:
        assert worker.wait() in (75, 0), worker.said
        assert "Traceback" not in worker.said
    again = bench.run(*JOB, "--phase", "merge", "--partial", "expired")
    assert again.words["code"] == why
    assert bench.results == before
    sent = bench.server.tries.total()
    bench.run(*JOB)
    assert bench.server.tries.total() == sent


def test_a_run_of_one_process_that_is_ended_by_another_publishes_what_there_is(bench: Bench) -> None:
    bench.give([line(f"id-{i}", "slow 600" if i >= 100 else f"line {i}") for i in range(120)])
    child = bench.start(*JOB)
    bench.eventually(lambda: bench.server.tries.total() > 30)
    bench.run(*JOB, "--phase", "merge", "--partial", "cancelled")
    assert child.wait() == 0, child.said
    assert child.words["code"] == "cancelled"
    bench.check()


@pytest.mark.long
@pytest.mark.parametrize("why", list(CODES))
def test_what_a_run_that_was_ended_early_lacks_is_not_planned_again_by_its_name(bench: Bench, why: str) -> None:
    bench.give(30)
    bench.run(*JOB, "--phase", "merge", "--partial", why)
    refused = bench.run(*JOB, "--phase", "plan", exit_code=65)
    assert refused.words["code"] == "run_ended"
    assert all(part in refused.words["message"] for part in ("job", "30 of 30"))
    assert bench.run(*JOB, "--phase", "work").words["code"] == why, "whoever comes late to it finds what it came to"
    bench.check()


def test_what_was_ended_and_not_published_is_published_before_it_is_planned_again(bench: Bench) -> None:
    """Its merge was killed behind its first word, say."""
    bench.give(30)
    bench.run(*JOB, "--phase", "plan")
    where = bench.output.child(Keys("job").stop)
    where.store.put(where.key, Stop("cancelled", "nonce").encode())
    refused = bench.run(*JOB, "--phase", "plan", exit_code=65)
    assert refused.words["code"] == "run_ended"
    assert "30 of 30" in refused.words["message"]
    bench.check()


@pytest.mark.long
def test_two_partial_merges_at_once_that_race_with_the_last_checkpoint_make_one_result(bench: Bench) -> None:
    bench.give(40)
    bench.server.delay_s = 0.05
    worker = bench.start(*JOB, "--phase", "work")
    bench.eventually(lambda: bench.server.tries.total() > 34)
    merges = [bench.start(*JOB, "--phase", "merge", "--partial", why) for why in ("cancelled", "expired")]
    assert [child.wait() for child in merges] == [0, 0], [child.said for child in merges]
    outcome = bench.check()["outcome"]
    assert outcome in ("cancelled", "expired", "completed")
    assert len({child.words["code"] for child in merges}) == 1
    assert worker.wait() in (0, 75), worker.said


@pytest.mark.long
@pytest.mark.parametrize("why", list(CODES))
def test_a_run_that_is_ended_before_anything_was_begun(bench: Bench, why: str) -> None:
    bench.give(30)
    child = bench.run(*JOB, "--phase", "merge", "--partial", why)
    assert child.words["requestCounts"] == {"total": 30, "completed": 0, "failed": 0}
    assert child.words["code"] == why
    assert {entry["error"]["code"] for entry in bench.entries("errors.jsonl")} == {CODES[why]}
    bench.check()
    assert bench.server.tries.total() == 0


def test_too_many_errors_end_a_run_with_what_there_is(bench: Bench) -> None:
    bench.give([line(f"id-{i}", "status 400" if i % 2 else f"hello {i}") for i in range(400)])
    bench.server.delay_s = 0.01
    child = bench.run("--shard-requests", "50", "--max-error-percent", "10", exit_code=79)
    assert child.words["code"] == "too_many_errors"
    manifest = bench.check()
    assert manifest["outcome"] == "too-many-errors"
    counts = manifest["requestCounts"]
    assert counts["completed"] + counts["failed"] < 400
    assert counts["failed"] > 40


@pytest.mark.long
def test_too_many_errors_end_all_workers_and_the_merge_says_so(bench: Bench) -> None:
    bench.give([line(f"id-{i}", "status 400" if i % 2 else f"hello {i}") for i in range(400)])
    bench.server.delay_s = 0.05
    words = [*JOB, "--workers", "2", "--max-error-percent", "10"]
    workers = [bench.start(*words, "--phase", "work", JOB_COMPLETION_INDEX=str(i)) for i in range(2)]
    assert sorted(child.wait() for child in workers)[-1] == 79, [child.said for child in workers]
    assert all(child.words["code"] in ("too_many_errors", "unfinished") for child in workers)
    merge = bench.run(*words, "--phase", "merge", "--partial", "too-many-errors", exit_code=79)
    assert merge.words["code"] == "too_many_errors"
    bench.check()


def test_a_share_of_errors_that_is_allowed_ends_nothing(bench: Bench) -> None:
    bench.give([line(f"id-{i}", "status 400" if i % 10 == 0 else f"hello {i}") for i in range(100)])
    child = bench.run("--max-error-percent", "10")
    assert child.words["requestCounts"] == {"total": 100, "completed": 90, "failed": 10}
    bench.check()


def test_a_run_whose_every_line_failed_has_failed_and_says_where_the_reasons_are(bench: Bench) -> None:
    bench.give([line(f"id-{i}", "status 400") for i in range(20)])
    child = bench.run(exit_code=65)
    assert child.words["code"] == "all_lines_failed"
    assert child.words["requestCounts"] == {"total": 20, "completed": 0, "failed": 20}
    assert "400: " in child.words["message"]
    assert bench.output.child("errors.jsonl").uri in child.words["message"]
    bench.check()


def test_all_bad_lines_are_counted_duplicates_too(bench: Bench) -> None:
    lines = [*(line(f"id-{i}", "hello") for i in range(20)), "{broken", "[]", line("id-1", "again"), line("id-2", "again")]
    bench.give(lines)
    child = bench.run("--on-invalid-line", "fail", exit_code=65)
    assert child.words["code"] == "invalid_line"
    assert re.search(r"\b4 ", child.words["message"])
    assert "line 21" in child.words["message"]
    assert bench.keys() == []
    bench.run()
    assert bench.check()["requestCounts"] == {"total": 24, "completed": 20, "failed": 4}


@pytest.mark.long
@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_an_input_that_is_gone_costs_nothing_of_what_is_finished(bench: Bench, change: str) -> None:
    bench.give(120)
    given, known = bench.given(), bench.known()
    bench.server.delay_s = 0.05
    worker = bench.start(*JOB, "--phase", "work", JOB_COMPLETION_INDEX="0")
    bench.eventually(lambda: bench.server.tries.total() > 30)
    where = bench.place.child("in.jsonl")
    if change == "replaced":
        where.store.put(where.key, b"another\n")
    else:
        where.store.delete(where.key)
    assert worker.wait() == 65, worker.said
    assert worker.words["code"] == {"replaced": "input_changed", "removed": "input_not_found"}[change]
    assert all(part in worker.words["message"] for part in known)
    merge = bench.run(*JOB, "--phase", "merge", "--partial", "failed")
    counts = merge.words["requestCounts"]
    output, errors = bench.entries("output.jsonl"), bench.entries("errors.jsonl")
    assert len(output) == counts["completed"] >= 30
    assert len(output) + len(errors) == counts["total"] == 120
    assert {entry["error"]["code"] for entry in errors} == {"batch_failed"}
    assert {entry["custom_id"] for entry in output} == {f"id-{n}" for n in range(len(output))}
    assert len({entry["id"] for entry in output + errors}) == 120
    unnamed = [entry["error"] for entry in errors if entry["custom_id"] is None]
    assert [error["line"] for error in unnamed] == list(range(121 - len(unnamed), 121))
    first = bench.output.uri
    refused = bench.run("--retry-failed", first, "--output", bench.place.child("whole/").uri, exit_code=65)
    assert all(part in refused.words["message"] for part in known)
    where.store.put(where.key, given)
    sent = bench.server.tries.total()
    whole = bench.run("--retry-failed", first, "--output", bench.place.child("whole/").uri)
    assert whole.words["requestCounts"] == {"total": 120, "completed": 120, "failed": 0}
    assert bench.server.tries.total() - sent == 120 - counts["completed"], "what was finished is not run again"
