"""When a batch is over, and how: with the words of the pod that decided it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from banyan_operator.desired.batchjob import Because
from banyan_operator.plan import Manifest, Outcome, Ref
from banyan_operator.times import stamp
from tests.unit.operator.batches import (
    AT,
    BATCH,
    COMPLETE,
    COUNTED,
    FAILED,
    NOW,
    PROGRESS,
    PUBLISHED,
    WORKED,
    after,
    condition,
    ended,
    job,
    named,
    observe,
    planned,
    published,
    reasons,
    running,
)
from tests.unit.operator.conftest import Turn, a_batch, merge

REFUSALS: list[tuple[int, dict[str, Any], str, str, str]] = [
    (65, {"code": "input_not_found", "message": "s3://b/x: no such key"}, "InputNotFound", "InputNotFound", "spec.input"),
    (65, {"code": "input_changed", "message": "s3://b/x: it was replaced"}, "InputChanged", "InputChanged", "spec.input.failedOf"),
    (65, {"code": "output_exists", "message": "results of run 12"}, "OutputExists", "OutputExists", "spec.output.overwrite"),
    (77, {"code": "storage_denied", "value": "s3://b/x", "message": "403"}, "AccessDenied", "AccessDenied", "spec.s3.credentialsSecretRef"),
    (
        77,
        {"code": "api_key_denied", "message": "the server refuses the API key (401)"},
        "AccessDenied",
        "AccessDenied",
        "spec.apiKeySecretRef",
    ),
    (
        77,
        {"code": "storage_denied", "value": "/data/x", "message": "permission denied"},
        "AccessDenied",
        "AccessDenied",
        "spec.security.fsGroup",
    ),
    (64, {"code": "invalid_flag", "message": "--server=x"}, "InvalidSpec", "InvalidSpec", "--server=x"),
]


@pytest.mark.parametrize(("code", "words", "accepted", "failed", "said"), [*REFUSALS, (1, {}, "Accepted", "PlanFailed", "exit code 1")])
def test_a_plan_that_fails_fails_the_batch_and_says_whose_turn_it_is(code, words, accepted, failed, said):
    plan = observe(BATCH, job(phase="plan", **FAILED), ended(code, words, of="plan"))
    assert plan.status["phase"] == "Failed"
    assert condition(plan, "Failed")["reason"] == failed
    assert said in condition(plan, "Failed")["message"]
    assert condition(plan, "Accepted")["reason"] == accepted
    assert condition(plan, "Planned")["reason"] == "PlanFailed"
    complete = condition(plan, "Complete")  # what `kubectl get -o wide` prints as REASON
    assert (complete["status"], complete["reason"]) == ("False", failed)
    assert plan.status["lastFailure"]["exitCode"] == code
    assert "Failed" in reasons(plan)
    assert not plan.apply


@pytest.mark.parametrize(
    ("named", "told"),
    [("--input", "spec.input.uri=s3://b/in: no"), ("--server", "--server=s3://b/in: no"), ("", "s3://b/in: no")],
)
def test_what_a_worker_says_of_its_options_is_told_by_the_fields_of_the_spec(named: str, told: str) -> None:
    said = {"code": "invalid_flag", "field": named, "value": "s3://b/in", "message": "no"}
    message = condition(observe(BATCH, job(phase="plan", **FAILED), ended(64, said, of="plan")), "Failed")["message"]
    assert f"): {told}." in message


@pytest.mark.parametrize(
    ("code", "reason"), [("results_damaged", "ResultsDamaged"), ("no_such_code", "InputInvalid"), (None, "InputInvalid")]
)
def test_the_exit_code_gives_the_reason_where_the_code_is_unknown(code: str | None, reason: str) -> None:
    words = {"message": "x"} if code is None else {"code": code, "message": "x"}
    assert condition(observe(BATCH, job(phase="plan", **FAILED), ended(65, words, of="plan")), "Failed")["reason"] == reason


def test_a_plan_that_failed_before_it_counted_shows_no_numbers():
    words = {"code": "input_not_found", "message": "s3://b/x", "requestCounts": {"total": 0, "completed": 0, "failed": 0}}
    status = observe(BATCH, job(phase="plan", **FAILED), ended(65, words, of="plan")).status
    assert status["phase"] == "Failed"
    assert "requests" not in status
    assert not status.get("requestCounts")


@pytest.mark.parametrize(
    ("code", "words", "accepted", "failed", "said"),
    [
        *REFUSALS,
        (69, {"code": "server_gone", "message": "no answer"}, "Accepted", "ServerGone", "no answer"),
        (75, {"code": "storage_unavailable", "message": "S3 is down"}, "Accepted", "StorageUnavailable", "S3 is down"),
        (143, {"code": "interrupted", "message": "stopped by X"}, "Accepted", "Interrupted", "stopped by X"),
        (1, {}, "Accepted", "WorkersFailed", "exit code 1"),
        (79, {"code": "too_many_errors", "message": "60 of 100"}, "Accepted", "TooManyErrors", "60 of 100"),
    ],
)
def test_work_that_fails_is_published_as_far_as_it_came_and_then_the_batch_has_failed(code, words, accepted, failed, said):
    failing = job(**FAILED), ended(code, words)
    plan = observe(planned(), *failing)
    (merge_job,) = (one for one in plan.apply if one["kind"] == "Job")
    partial = "too-many-errors" if code == 79 else "failed"
    assert f"--partial={partial}" in merge_job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert (plan.status["phase"], condition(plan, "Failed")["status"]) == ("Merging", "False")
    live = merge(merge_job, {"metadata": {"uid": "uid-merge"}}) | {"status": COMPLETE}
    said_by_merge = ended(0, PUBLISHED | {"code": "failed", "requestCounts": {"total": 1000, "completed": 400, "failed": 600}}, of="merge")
    for children in ((*failing, live, said_by_merge), (live, said_by_merge)):  # the work's Job may be gone by then
        over = observe(after(plan), *children)
        assert over.status["phase"] == "Failed"
        assert condition(over, "Failed")["reason"] == failed
        assert said in condition(over, "Failed")["message"]
        assert not re.search("is started again|nothing was published", condition(over, "Failed")["message"])
        assert condition(over, "Accepted")["reason"] == accepted
        assert (over.status["requests"], over.status["progressPercent"]) == ("1000/1000", 100)
        assert over.apply == ()


def test_a_job_that_is_complete_is_not_over_before_its_pods_report_was_seen():
    before = after(observe(BATCH, job(active=1), running(), progress=PROGRESS))
    merge_job, report = published()
    waits = observe(before, job(**COMPLETE), ended(0, WORKED), merge_job, running(of="merge"))
    assert (waits.status["phase"], waits.status["requests"]) == ("Merging", "1000/1000")
    assert (condition(waits, "Complete")["status"], condition(waits, "Complete")["reason"]) == ("False", "WaitingForReport")
    assert "completionTime" not in waits.status
    assert [one["kind"] for one in waits.apply] == ["ServiceAccount"]
    seen = observe(after(waits), job(**COMPLETE), merge_job, report)
    assert (seen.status["phase"], seen.status["requests"]) == ("Succeeded", "1000/1000")


def test_an_edit_of_a_batch_that_is_over_is_seen_and_changes_nothing():
    merge_job, report = published()
    done = after(observe(after(observe(BATCH, job(active=1), running(), progress=PROGRESS)), job(**COMPLETE), merge_job, report))
    assert done["status"]["phase"] == "Succeeded"
    assert observe(done, job(**COMPLETE)).report.status is None
    generation = done["metadata"]["generation"] + 1
    edited = merge(done, {"metadata": {"generation": generation}, "spec": {"cancel": True, "suspend": True}})
    seen = observe(edited, job(**COMPLETE))
    assert seen.status == done["status"] | {"observedGeneration": generation}
    assert reasons(seen) == []
    odd = merge(edited, {"spec": {"workers": "many"}})
    assert observe(odd, job(**COMPLETE)).status == seen.status


def test_a_failed_job_is_not_over_before_the_pod_that_failed_last_was_seen_to_end():
    first = ended(75, {"code": "storage_unavailable", "message": "S3 is down"})
    second = merge(running(), {"metadata": {"name": "nightly--work-0-y", "uid": "y", "creationTimestamp": stamp(NOW - 30)}})
    failed = merge(job(**COUNTED), {"status": {"failed": 2}})
    for children in ((failed, first, second), (failed, first)):  # its end is not seen yet; nor that it was made
        waits = observe(BATCH, *children)
        assert waits.status["phase"] == "Running"
        assert condition(waits, "Failed")["status"] == "False"
        assert condition(waits, "Complete")["reason"] == "WaitingForReport"
    last = merge(ended(69, {"code": "server_gone", "message": "no answer"}), {"metadata": {"name": "nightly--work-0-y", "uid": "y"}})
    last["status"]["containerStatuses"][0]["state"]["terminated"]["finishedAt"] = stamp(NOW - 3)
    assert because(observe(BATCH, failed, first, last)) == "ServerGone"


def because(plan: Turn) -> str:
    """The reason for which a merge is made of what was done."""
    (made,) = (one for one in plan.apply if one["kind"] == "Job")
    found = Because.of(made)
    assert found is not None
    return found.reason


def test_the_worker_whose_end_ended_the_job_is_the_one_that_failed_though_others_ended_later():
    """One exit code is final for all: the controller deletes the other pods, which save what they have and go."""
    decided = ended(65, {"code": "input_changed", "message": "in.jsonl"})
    others = [merge(ended(143, {"code": "interrupted", "message": "SIGTERM"}, index=index), {}) for index in (1, 2)]
    for one in others:
        one["status"]["containerStatuses"][0]["state"]["terminated"]["finishedAt"] = stamp(NOW - 1)
    assert because(observe(BATCH, merge(job(**FAILED), {"status": {"failed": 3}}), decided, *others)) == "InputChanged"


def test_a_pod_that_was_taken_away_is_not_the_one_that_failed():
    taken = ended(143, {"code": "interrupted", "message": "SIGTERM"})
    taken["status"]["conditions"] = [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]
    assert observe(BATCH, job(**FAILED), taken).status["phase"] == "Running"
    last = merge(ended(65, {"code": "input_invalid", "message": "line 7"}), {"metadata": {"name": "nightly--work-0-y", "uid": "y"}})
    assert because(observe(BATCH, job(**FAILED), taken, last)) == "InputInvalid"


@pytest.mark.parametrize(("job_status", "phase", "kind"), [(COMPLETE, "Succeeded", "Complete"), (FAILED, "Failed", "Failed")])
def test_a_report_is_waited_for_one_minute_and_then_the_status_says_that_it_never_came(job_status, phase, kind):
    before = after(observe(BATCH, job(active=1), running(), progress=PROGRESS))
    merge_job = job(phase="merge", **job_status)
    early = observe(before, job(**COMPLETE), merge_job, now=NOW + 50)
    assert early.status["phase"] == "Merging"
    assert early.requeue_after_s == pytest.approx(6)
    late = observe(after(early), job(**COMPLETE), merge_job, now=NOW + 57)
    assert late.status["phase"] == phase
    if phase == "Succeeded":
        assert "manifest.json" in condition(late, kind)["message"]
    else:
        assert late.status["requestCounts"]["completed"] == 400
        assert condition(late, "Failed")["reason"] == "MergeFailed"
        assert "Job has failed indexes" in condition(late, kind)["message"]


def merged_without_words(partial: Any = None) -> tuple[Manifest, ...]:
    """A merge that has published, and whose last words its node has lost."""
    merge_job, report = published(partial)
    del report["status"]["containerStatuses"][0]["state"]["terminated"]["message"]
    return merge_job, report


def test_counts_that_were_polled_are_none_that_a_run_ended_with():
    """All of it is published, and 412 of 1000 were done when it was last asked."""
    before = after(observe(BATCH, job(active=1), running(), progress=PROGRESS))
    plan = observe(before, job(**COMPLETE), *merged_without_words())
    status = plan.status
    assert (status["phase"], status["progressPercent"]) == ("Succeeded", 100)
    assert status["requestCounts"] == {"total": 1000}
    assert ("requests" in status, "usage" in status) == (False, False)
    told = condition(plan, "Complete")["message"]
    assert "manifest.json" in told
    assert [(event.reason, event.message) for event in plan.events] == [("Completed", told)]


def test_of_a_merge_that_is_waited_for_the_counts_stay_as_they_are():
    before = after(observe(BATCH, job(active=1), running(), progress=PROGRESS))
    waits = observe(before, job(**COMPLETE), job(phase="merge", **COMPLETE))
    assert (waits.status["phase"], waits.status["requests"]) == ("Merging", "412/1000")


def test_counts_that_were_polled_when_all_was_done_are_those_that_a_run_ended_with():
    done = PROGRESS | {"completed": 988, "failed": 12}
    before = after(observe(BATCH, job(active=1), running(), progress=done))
    plan = observe(before, job(**COMPLETE), *merged_without_words())
    assert plan.status["requestCounts"] == {"total": 1000, "completed": 988, "failed": 12}
    assert (plan.status["requests"], plan.status["usage"]["totalTokens"]) == ("1000/1000", 15)
    assert "988 completed, 12 failed of 1000" in plan.events[0].message


def test_what_is_known_of_a_run_that_ended_early_is_told_as_such_where_its_last_words_are_lost():
    before = after(observe(BATCH, job(active=1), running(), progress=PROGRESS))
    cancelled = a_batch(cancel=True) | {"status": before["status"]}
    at_rest = job(suspend=True, conditions=[{"type": "Suspended", "status": "True", **AT}])
    plan = observe(cancelled, at_rest, *merged_without_words("cancelled"))
    assert (plan.status["phase"], plan.status["requests"]) == ("Cancelled", "412/1000")
    assert "manifest.json" in condition(plan, "Cancelled")["message"]


@pytest.mark.parametrize("early", ["SuccessCriteriaMet", "FailureTarget"])
def test_a_job_whose_last_pods_are_still_stopping_is_not_over(early):
    words = ended(0, PUBLISHED) if early == "SuccessCriteriaMet" else ended(65, {"code": "input_invalid", "message": "line 7"})
    plan = observe(BATCH, job(conditions=[{"type": early, "status": "True", **AT}]), words, now=NOW + 3600)
    assert plan.status["phase"] == "Running"


def test_nothing_is_over_while_a_write_has_failed():
    failing = Outcome(failed={Ref("v1", "ServiceAccount", "nightly--batch"): "503"})
    plan = observe(BATCH, job(**COMPLETE), *published(), outcome=failing)
    assert plan.status["phase"] == "Merging"


def test_between_two_attempts_it_still_runs_and_says_what_went_wrong():
    before = after(observe(BATCH, job(active=1), running(), progress=PROGRESS))
    plan = observe(before, job(failed=1), ended(75, {"code": "storage_unavailable", "message": "S3 is down"}))
    assert plan.status["phase"] == "Running"
    assert condition(plan, "Running")["reason"] == "StorageUnavailable"
    assert "S3 is down" in condition(plan, "Running")["message"]
    assert plan.status["workers"]["failed"] == 1


CRASHED = ended(75, {"code": "storage_unavailable", "message": "S3 is down"})


@pytest.mark.parametrize(
    ("work", "others"),
    [
        (job(failed=1, startTime=stamp(NOW - 70)), [named(ended(0, WORKED), "nightly--work-0-y", NOW - 3)]),  # its successor is through
        (job(failed=1, startTime=stamp(NOW - 2)), []),  # the work goes on after a suspension; its next worker is not there yet
        (job(failed=1, suspend=True), []),
        (job(failed=1, conditions=[{"type": "Suspended", "status": "True", **AT}]), []),  # its controller has not seen yet that it goes on
    ],
    ids=["succeeded", "went on", "suspended", "going on"],
)
def test_a_failure_that_is_over_is_told_once(work: Manifest, others: list[Manifest]) -> None:
    before = after(observe(BATCH, job(active=1), running(), progress=PROGRESS))
    failed = observe(before, job(failed=1, startTime=stamp(NOW - 70)), CRASHED)
    assert reasons(failed) == ["StorageUnavailable"]
    recovered = after(
        observe(after(failed), job(active=1, failed=1), CRASHED, named(running(), "nightly--work-0-y", NOW - 2), progress=PROGRESS)
    )
    assert "StorageUnavailable" not in reasons(observe(recovered, work, CRASHED, *others))


def test_a_failure_since_the_work_went_on_is_told_whenever_its_pod_was_made():
    """A Job's start is noted by its controller behind the first pods."""
    before = after(observe(BATCH, job(active=1), running(), progress=PROGRESS))
    assert reasons(observe(before, job(failed=1, startTime=stamp(NOW - 59)), CRASHED)) == ["StorageUnavailable"]


def test_what_is_over_changes_no_more():
    over = after(observe(BATCH, job(**COMPLETE), *published()))
    plan = observe(over, now=NOW + 60)
    assert (plan.apply, plan.delete, plan.report.status) == ((), (), None)


def test_a_finished_job_is_kept_ten_minutes_for_its_logs():
    over = after(observe(BATCH, job(**COMPLETE), *published()))
    early = observe(over, job(**COMPLETE), now=NOW + 500)
    assert early.delete == ()
    assert early.requeue_after_s == pytest.approx(95)
    late = observe(over, job(**COMPLETE), now=NOW + 600)
    assert [Ref.of(one) for one in late.delete] == [Ref("batch/v1", "Job", "nightly--work")]


def test_a_finished_batch_with_a_ttl_deletes_itself():
    short = a_batch(ttlSecondsAfterFinished=30)
    over = after(observe(short, job(short, **COMPLETE), *published()), short)
    assert observe(over, now=NOW + 10).requeue_after_s == pytest.approx(15)
    assert observe(over, now=NOW + 31).delete == (over,)
