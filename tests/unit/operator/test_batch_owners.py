"""Jobs and pods of an earlier run, of somebody else, or of nobody: which count for a batch."""

from __future__ import annotations

import pytest

from banyan_operator.plan import Manifest
from banyan_operator.times import stamp
from tests.unit.operator.batches import (
    BATCH,
    COMPLETE,
    NOW,
    PROGRESS,
    PUBLISHED,
    condition,
    ended,
    job,
    observe,
    planned,
    published,
    running,
)
from tests.unit.operator.conftest import a_batch, merge


def test_the_words_of_an_earlier_jobs_pod_are_not_those_of_this_one():
    stale = ended(0, PUBLISHED)
    stale["metadata"]["ownerReferences"][0]["uid"] = "j0"
    assert observe(BATCH, job(**COMPLETE), stale).status["phase"] == "Running"
    theirs = observe(BATCH, job(active=1), stale, progress=PROGRESS)
    assert not theirs.status.get("requestCounts")


def test_a_job_of_somebody_else_ends_nothing():
    foreign = merge(job(**COMPLETE), {"metadata": {"ownerReferences": [{"uid": "x", "controller": True, "kind": "Y", "name": "z"}]}})
    plan = observe(BATCH, foreign, ended(0, PUBLISHED))
    assert plan.status["phase"] == "Pending"
    assert "completionTime" not in plan.status
    plan = observe(planned(), foreign, ended(0, PUBLISHED))
    assert (plan.status["phase"], condition(plan, "Accepted")["reason"]) == ("Pending", "NameConflict")


def test_a_status_of_another_run_is_ignored():
    over = observe(BATCH, job(**COMPLETE), *published()).status
    again = merge(BATCH, {"metadata": {"uid": "uid-of-the-next"}}) | {"status": dict(over)}
    plan = observe(again)
    assert plan.status["phase"] == "Pending"
    assert "Job" in [child["kind"] for child in plan.apply]
    assert "requestCounts" not in plan.status


def orphaned(manifest: Manifest) -> Manifest:
    """As `kubectl delete --cascade=orphan` of its owner leaves it."""
    return merge(manifest, {"metadata": {"ownerReferences": None}})


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (merge(running(), {"metadata": {"deletionTimestamp": stamp(NOW + 100)}}), "nightly--work-0-x"),
        (merge(orphaned(running()), {"metadata": {"labels": {"batch.kubernetes.io/job-name": "nightly--work"}}}), "nightly--work-0-x"),
    ],
    ids=["its job was deleted", "its job was deleted and left it behind"],
)
def test_no_worker_is_started_while_that_of_an_earlier_job_may_run(left: Manifest, said: str):
    plan = observe(BATCH, left)
    assert not [one for one in plan.apply if one["kind"] == "Job"], "two workers would write to one output"
    assert plan.status["phase"] == "Pending"
    assert condition(plan, "Running")["reason"] == "WaitingForPods"
    assert said in condition(plan, "Running")["message"]


def test_a_job_that_lost_its_owner_goes_on_and_gets_it_back():
    plan = observe(BATCH, orphaned(job()), running())
    (back,) = (one for one in plan.apply if one["kind"] == "Job")
    assert [owner["uid"] for owner in back["metadata"]["ownerReferences"]] == [BATCH["metadata"]["uid"]]
    assert (plan.status["phase"], back["spec"]["suspend"]) == ("Running", False)


def test_a_cancel_stops_a_job_that_lost_its_owner_before_it_is_over():
    plan = observe(a_batch(cancel=True), orphaned(job(active=1)), running())
    (stopped,) = (one for one in plan.apply if one["kind"] == "Job")
    assert (plan.status["phase"], stopped["spec"]["suspend"]) == ("Cancelling", True)


@pytest.mark.parametrize("cancel", [False, True])
def test_a_job_that_an_earlier_batch_of_this_name_left_behind_is_not_taken_over(cancel: bool):
    again = merge(a_batch(cancel=cancel), {"metadata": {"uid": "uid-of-another"}})
    plan = observe(again, orphaned(job()), running())
    assert not [one for one in plan.apply if one["kind"] == "Job"]
    assert condition(plan, "Accepted")["reason"] == "NameConflict"
    assert "kubectl delete job nightly--work" in condition(plan, "Accepted")["message"]
