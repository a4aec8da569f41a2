"""A batch that is suspended, cancelled, or past its deadline."""

from __future__ import annotations

import pytest

from banyan_operator.plan import Manifest, Outcome, Ref
from banyan_operator.times import stamp
from tests.unit.operator.batches import (
    AT,
    BATCH,
    COMPLETE,
    NOW,
    PROGRESS,
    SUSPENDED,
    WORKED,
    after,
    condition,
    ended,
    job,
    observe,
    published,
    reasons,
    running,
)
from tests.unit.operator.conftest import a_batch, merge


def test_a_suspended_batch_makes_no_job_and_stops_one_that_runs():
    suspended = a_batch(suspend=True)
    plan = observe(suspended)
    assert [child["kind"] for child in plan.apply] == ["ServiceAccount"]
    assert (plan.status["phase"], condition(plan, "Suspended")["status"]) == ("Suspended", "True")
    plan = observe(suspended, job(active=1), running())
    (work,) = (child for child in plan.apply if child["kind"] == "Job")
    assert work["spec"]["suspend"] is True


def test_suspending_changes_nothing_else_of_the_job():
    """A Job's other fields cannot be changed: the API server would refuse the whole apply."""
    live = job(active=1)
    edited = a_batch(suspend=True, maxConcurrency=3, image="other:2")
    (work,) = (child for child in observe(edited, live, running()).apply if child["kind"] == "Job")
    assert work["spec"] == live["spec"] | {"suspend": True}


def test_a_resumed_batch_runs_again():
    suspended = after(observe(a_batch(suspend=True), job(suspend=True, **SUSPENDED)))
    plan = observe(BATCH | {"status": suspended["status"]}, job(suspend=True, **SUSPENDED), now=NOW)
    (work,) = (child for child in plan.apply if child["kind"] == "Job")
    assert work["spec"]["suspend"] is False
    assert "Resumed" in reasons(plan)


def test_a_batch_that_is_suspended_is_so_when_nothing_runs_any_more():
    suspended = a_batch(suspend=True)
    stopping = observe(suspended, job(suspend=True, terminating=1), running())
    assert (condition(stopping, "Suspended")["status"], condition(stopping, "Suspended")["reason"]) == ("False", "Suspending")
    assert "nightly--work-0-x" in condition(stopping, "Suspended")["message"]
    stopped = observe(after(stopping, suspended), job(suspend=True, **SUSPENDED))
    assert (stopped.status["phase"], condition(stopped, "Suspended")["status"]) == ("Suspended", "True")


def stopped(completed: int, index: int = 0) -> Manifest:
    """A worker that was suspended, and says how far the run was when it ended."""
    counts = {"total": 1000, "completed": completed, "failed": 12}
    words = {"code": "interrupted", "message": "stopped", "requestCounts": counts, "usage": {"totalTokens": 2 * completed}}
    return merge(ended(143, words, index=index), {"metadata": {"deletionTimestamp": stamp(NOW)}})


@pytest.mark.parametrize("gone", [False, True])
def test_a_batch_that_is_suspended_shows_what_its_workers_had_done_when_they_ended(gone: bool) -> None:
    """They went on after they were asked last. Their pods are deleted: what they said is seen on their way, or of what remains of them."""
    suspended = a_batch(suspend=True)
    before = after(observe(BATCH, job(active=1), running(), progress=PROGRESS))
    pods = stopped(640), stopped(700, index=1)
    rests = job(suspend=True, **SUSPENDED)
    plan = observe(suspended | {"status": before["status"]}, rests, *(() if gone else pods), remains=pods if gone else ())
    assert (plan.status["phase"], plan.status["requests"]) == ("Suspended", "712/1000")
    assert plan.status["usage"]["totalTokens"] == 1400
    again = observe(after(plan, BATCH), job(active=1), running(), progress=PROGRESS | {"completed": 650})
    assert again.status["requests"] == "712/1000"


def test_a_batch_whose_job_is_not_heard_to_be_suspended_is_not_told_to_be_so_and_then_to_go_on():
    """Its controller may be about to make a pod."""
    manifest, prior = a_batch(suspend=True), after(observe(BATCH, job()))
    suspending = observe(manifest | {"status": prior["status"]}, job(suspend=True))
    assert suspending.status["phase"] != "Suspended"
    assert condition(suspending, "Suspended")["reason"] == "Suspending"
    came = observe(after(suspending, manifest), job(suspend=True, active=1), running())
    gone = observe(after(came, manifest), job(suspend=True, **SUSPENDED))
    assert [plan.status["phase"] == "Suspended" for plan in (came, gone)] == [False, True]
    assert [reasons(plan).count("Suspended") for plan in (suspending, came, gone)] == [0, 0, 1]
    assert "Resumed" not in [reason for plan in (suspending, came, gone) for reason in reasons(plan)]


def test_a_cancelled_batch_first_stops_then_is_over_with_its_counts():
    before = after(observe(BATCH, job(active=1), running(), progress=PROGRESS))
    cancelled = a_batch(cancel=True) | {"status": before["status"]}
    plan = observe(cancelled, job(active=1), running(), progress=PROGRESS)
    assert plan.status["phase"] == "Cancelling"
    assert [child["kind"] for child in plan.apply] == ["Job"]
    assert plan.apply[0]["spec"]["suspend"] is True
    leaving = merge(running(), {"metadata": {"deletionTimestamp": stamp(NOW + 60)}})
    not_yet = [
        (job(suspend=True),),  # written, and not heard by the Job's controller
        (job(suspend=True, **SUSPENDED, terminating=1),),
        (job(suspend=True, **SUSPENDED, active=1),),
        (job(suspend=True, **SUSPENDED), leaving),
        (job(**SUSPENDED),),  # resumed by somebody: to be suspended again
    ]
    for children in not_yet:
        assert observe(after(plan, cancelled), *children).status["phase"] == "Cancelling", children
    assert "nightly--work-0-x" in condition(observe(after(plan, cancelled), *not_yet[3]), "Running")["message"]
    at_rest = job(suspend=True, **SUSPENDED)
    merging = observe(after(plan, cancelled), at_rest)
    (merge_job,) = (one for one in merging.apply if one["kind"] == "Job")
    assert "--partial=cancelled" in merge_job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert merging.status["phase"] == "Cancelling"
    counts = {"total": 1000, "completed": 399, "failed": 601}
    done = observe(after(merging, cancelled), at_rest, *published("cancelled", code_word="cancelled", requestCounts=counts))
    assert done.status["phase"] == "Cancelled"
    assert done.status["requestCounts"] == counts
    assert (condition(done, "Complete")["status"], condition(done, "Complete")["reason"]) == ("False", "Cancelled")
    assert condition(done, "Cancelled")["status"] == "True"
    assert reasons(done) == ["Cancelled"]


@pytest.mark.parametrize("asked", [{"cancel": True}, {"suspend": True}])
def test_a_job_that_was_just_resumed_is_suspended_once_its_controller_knows_so_that_an_old_condition_ends_nothing(asked):
    """The controller may make a pod that nobody has seen yet, while its condition still tells of the suspension before."""
    manifest = a_batch(**asked)
    resumed = job(**SUSPENDED)
    plan = observe(manifest, resumed)
    assert "Job" not in [one["kind"] for one in plan.apply]
    assert plan.status["phase"] != "Cancelled"
    assert condition(plan, "Suspended")["status"] == "False"
    known = job(active=1, conditions=[{"type": "Suspended", "status": "False", **AT}])
    (work,) = (one for one in observe(after(plan, manifest), known).apply if one["kind"] == "Job")
    assert work["spec"]["suspend"] is True
    stops = observe(after(plan, manifest), known | {"spec": work["spec"]}, running())
    assert condition(stops, "Suspended")["status"] == "False"
    assert stops.status["phase"] != "Cancelled"


def test_a_cancel_is_not_over_while_the_pods_of_a_deleted_job_run():
    """Somebody deleted the Job; the garbage collector has not come to its pod yet."""
    assert observe(a_batch(cancel=True), running()).status["phase"] == "Cancelling"


def test_a_cancel_whose_write_failed_goes_on():
    cancelled = a_batch(cancel=True)
    failing = Outcome(failed={Ref("batch/v1", "Job", "nightly--work"): "503"})
    plan = observe(cancelled, job(active=1), running(), outcome=failing)
    assert plan.status["phase"] == "Cancelling"
    assert "Job nightly--work (503)" in condition(plan, "Running")["message"]
    again = observe(after(plan, cancelled), job(active=1), running())
    assert again.apply[0]["spec"]["suspend"] is True
    assert observe(cancelled, job(suspend=True, **SUSPENDED), *published("cancelled"), outcome=failing).status["phase"] == "Cancelling"


def test_a_job_that_completes_while_it_is_cancelled_has_succeeded():
    before = after(observe(BATCH, job(active=1), running(), progress=PROGRESS))
    cancelling = after(observe(a_batch(cancel=True) | {"status": before["status"]}, job(active=1), running()), a_batch(cancel=True))
    worked = job(suspend=True, **COMPLETE), ended(0, WORKED)
    plan = observe(cancelling, *worked)
    (merge_job,) = (one for one in plan.apply if one["kind"] == "Job")
    assert not any(one.startswith("--partial") for one in merge_job["spec"]["template"]["spec"]["containers"][0]["args"])
    plan = observe(after(plan, a_batch(cancel=True)), *worked, *published())
    assert (plan.status["phase"], plan.status["requests"]) == ("Succeeded", "1000/1000")


def test_a_batch_cancelled_before_it_began_ends_at_once_and_makes_nothing():
    plan = observe(a_batch(cancel=True))
    assert plan.status["phase"] == "Cancelled"
    assert plan.apply == ()


def test_a_cancel_stops_work_whose_spec_no_longer_holds():
    plan = observe(a_batch(cancel=True), job(active=1), running(), missing=frozenset({Ref("v1", "PersistentVolumeClaim", "batches")}))
    assert [child["kind"] for child in plan.apply] == ["Job"]
    assert plan.delete == ()


def test_a_job_that_appears_after_the_end_does_not_run_on():
    """A create whose answer was lost, and then a cancel: the Job is seen when all is over."""
    over = after(observe(a_batch(cancel=True)), a_batch(cancel=True))
    assert [Ref.of(one).kind for one in observe(over, job(active=1), running()).delete] == ["Job"]


def test_a_batch_past_its_deadline_is_stopped_and_expires():
    limited = a_batch(deadlineSeconds=60)
    begun = after(observe(limited, job(limited, active=1), running(), progress=PROGRESS), limited)
    assert begun["status"]["startTime"] == stamp(NOW - 50)
    early = observe(begun, job(limited, active=1), running(), now=NOW + 5)
    assert early.requeue_after_s == pytest.approx(5)
    late = observe(begun, job(limited, active=1), running(), now=NOW + 11)
    assert late.status["phase"] == "Cancelling"
    assert late.requeue_after_s == 10  # a deadline that has passed makes nobody look each second
    at_rest = job(limited, suspend=True, **SUSPENDED)
    merging = observe(after(late, limited), at_rest, now=NOW + 20)
    (merge_job,) = (one for one in merging.apply if one["kind"] == "Job")
    assert "--partial=expired" in merge_job["spec"]["template"]["spec"]["containers"][0]["args"]
    gone = observe(after(merging, limited), at_rest, *published("expired"), now=NOW + 20)
    assert gone.status["phase"] == "Expired"
    assert condition(gone, "Complete")["reason"] == "Expired"
