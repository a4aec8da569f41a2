"""A batch from its plan to its merge: what follows on what, whatever is deleted, lost, suspended or cancelled in between."""

from __future__ import annotations

import json
from typing import Any

import pytest

from banyan_operator.plan import Manifest, Outcome, Ref
from banyan_operator.times import stamp
from tests.unit.operator.batches import (
    AT,
    BATCH,
    COMPLETE,
    COUNTED,
    FAILED,
    NOW,
    PLAN_WORDS,
    PROGRESS,
    PUBLISHED,
    SUSPENDED,
    WORKED,
    after,
    condition,
    ended,
    job,
    named,
    observe,
    planned,
    pod,
    published,
    reasons,
    running,
)
from tests.unit.operator.conftest import Turn, a_batch, merge

ON_S3: dict[str, Any] = {"output": {"uri": "s3://batches/out/"}}
MANY = a_batch(**ON_S3, workers=4)
SILENT = {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}
GONE = {"metadata": {"deletionTimestamp": stamp(NOW + 60)}}


def made(plan: Turn) -> dict[str, Manifest]:
    """The Jobs that are to be applied, by phase."""
    return {one["metadata"]["name"].rpartition("-")[2]: one for one in plan.apply if one["kind"] == "Job"}


def later(plan: Turn, before: Manifest) -> Manifest:
    """The resource with the status that the plan wrote, if it wrote one."""
    return before if plan.report.status is None else after(plan, before)


def args(one: Manifest) -> list[str]:
    found: list[str] = one["spec"]["template"]["spec"]["containers"][0]["args"]
    return found


def test_a_batch_is_planned_then_worked_on_then_merged():
    first = observe(MANY)
    assert list(made(first)) == ["plan"]
    assert (first.status["phase"], condition(first, "Planned")["reason"]) == ("Pending", "Planning")
    planning = observe(after(first, MANY), job(MANY, phase="plan", active=1), running(of="plan"))
    assert made(planning) == {}
    assert (planning.status["phase"], condition(planning, "Running")["reason"]) == ("Planning", "Planning")
    plan_over = job(MANY, phase="plan", **COMPLETE), ended(0, PLAN_WORDS, of="plan")
    ready = observe(after(planning, MANY), *plan_over)
    assert list(made(ready)) == ["work"]
    assert made(ready)["work"]["spec"]["parallelism"] == 4
    assert (ready.status["phase"], ready.status["requests"], ready.status["progressPercent"]) == ("Planning", "0/1000", 0)
    assert ready.status["shards"] == {"total": 4, "completed": 0, "running": 0}
    assert ready.status["planTime"] == stamp(NOW - 5)
    assert (condition(ready, "Planned")["status"], condition(ready, "Planned")["message"]) == ("True", "1000 requests in 4 shards.")
    one = PLAN_WORDS | {"requestCounts": {"total": 20, "completed": 0, "failed": 0}, "shards": 1}
    assert (
        condition(observe(BATCH, job(phase="plan", **COMPLETE), ended(0, one, of="plan")), "Planned")["message"]
        == "20 requests in 1 shard."
    )
    assert (condition(ready, "Fenced")["status"], condition(ready, "Fenced")["reason"]) == ("True", "ConditionalWrites")
    working = observe(after(ready, MANY), *plan_over, job(MANY, active=4, ready=4), *map(running, range(4)), progress=PROGRESS)
    assert working.status["phase"] == "Running"
    assert working.status["workers"] == {"desired": 4, "active": 4, "ready": 4, "failed": 0}
    assert condition(working, "Running")["message"] == "4 of 4 workers are there."
    worked = job(MANY, **COMPLETE), ended(0, WORKED)
    merging = observe(after(working, MANY), *plan_over, *worked)
    assert list(made(merging)) == ["merge"]
    over = observe(after(merging, MANY), *plan_over, *worked, *published())
    assert over.status["phase"] == "Succeeded"
    assert over.status["shards"] == {"total": 4, "completed": 4, "running": 0}
    assert condition(over, "Planned")["message"] == "1000 requests in 4 shards."
    kinds = [plan.status["phase"] for plan in (first, planning, ready, working, merging, over)]
    assert kinds == ["Pending", "Planning", "Planning", "Running", "Merging", "Succeeded"]


def test_a_pod_template_that_replaces_the_workers_arguments_is_an_invalid_spec_by_field_and_remedy():
    plan = observe(merge(MANY, {"spec": {"podTemplate": {"spec": {"containers": [{"name": "worker", "args": ["--overwrite"]}]}}}}))
    accepted = condition(plan, "Accepted")
    assert (made(plan), accepted["status"], accepted["reason"]) == ({}, "False", "InvalidSpec")
    (event,) = [one for one in plan.events if one.reason == "InvalidSpec"]
    for text in (accepted["message"], event.message):
        for part in ("spec.podTemplate.spec.containers[0].args", "--overwrite"):
            assert part in text


def test_what_went_wrong_before_a_plan_succeeded_is_not_told_of_the_work():
    failed = merge(ended(1, {}, of="plan", index=0), {"metadata": {"name": "nightly--plan-0-y", "creationTimestamp": stamp(NOW - 30)}})
    plan = observe(BATCH, job(phase="plan", **COMPLETE), failed, ended(0, PLAN_WORDS, of="plan"))
    assert condition(plan, "Running")["reason"] == "Starting"


@pytest.mark.parametrize(("age", "suspend", "told"), [(59, False, False), (300, False, True), (300, True, False)])
@pytest.mark.parametrize("stamped", ["startTime", "creationTimestamp"])
def test_a_job_that_nobody_makes_a_pod_for_is_told(age: int, suspend: bool, told: bool, stamped: str) -> None:
    begun = job(phase="plan", suspend=suspend, **({"startTime": stamp(NOW - age)} if stamped == "startTime" else {}))
    begun["metadata"]["creationTimestamp"] = stamp(NOW - age)
    said = condition(observe(BATCH, begun), "Running")["message"]
    assert ("kubectl -n team annotate job nightly--plan looked-at=1" in said) == told
    assert "annotate" not in condition(observe(BATCH, begun, pod({"waiting": {}}, "Pending", of="plan")), "Running")["message"]


def test_a_plan_that_is_remembered_is_not_made_again_when_its_job_is_gone():
    plan = observe(planned(), now=NOW + 1, server=None)
    assert list(made(observe(planned()))) == ["work"]
    assert condition(plan, "Planned")["message"] == "1000 requests in 4 shards."
    assert condition(plan, "Fenced")["status"] == "True"
    assert plan.status["shards"]["total"] == 4


def test_a_plan_whose_report_was_never_seen_is_followed_by_the_work_all_the_same():
    over = job(phase="plan", **COMPLETE)
    assert made(observe(BATCH, over, now=NOW + 50)) == {}
    late = observe(BATCH, over, now=NOW + 57)
    assert list(made(late)) == ["work"]
    assert condition(late, "Planned")["status"] == "True"
    assert not any(one["type"] == "Fenced" for one in late.status["conditions"])


def test_a_plan_on_a_storage_without_conditional_writes_says_so():
    words = {"code": "conditional_writes_unsupported", "message": "s3://out ignores If-None-Match"}
    refused = observe(BATCH, job(phase="plan", **FAILED), ended(64, words, of="plan"))
    assert (refused.status["phase"], condition(refused, "Failed")["reason"]) == ("Failed", "ConditionalWritesUnsupported")
    assert (condition(refused, "Accepted")["status"], condition(refused, "Fenced")["status"]) == ("False", "False")
    allowed = observe(BATCH, job(phase="plan", **COMPLETE), ended(0, PLAN_WORDS | {"fenced": False}, of="plan"))
    assert (condition(allowed, "Fenced")["reason"], list(made(allowed))) == ("ConditionalWritesUnsupported", ["work"])


# --- workers ---


def test_workers_are_added_and_taken_away_while_they_work():
    for workers in (1, 7):
        changed = merge(MANY, {"spec": {"workers": workers}})
        plan = observe(changed, job(MANY, active=4), *map(running, range(4)), progress=PROGRESS)
        spec = made(plan)["work"]["spec"]
        assert (spec["completions"], spec["parallelism"], spec["suspend"]) == (workers, workers, False)
        assert plan.status["workers"]["desired"] == workers


def test_a_worker_that_has_not_read_the_plan_takes_no_shards_away():
    unread = PROGRESS | {"completed": 0, "failed": 0, "shards": {"total": 0, "completed": 0, "running": 0}}
    before = observe(MANY, job(MANY, active=1), running(0), progress={"nightly--work-0-x": PROGRESS})
    plan = observe(after(before, MANY), job(MANY, active=1), running(0), progress={"nightly--work-0-x": unread})
    assert plan.status["shards"]["total"] == before.status["shards"]["total"] > 0


def test_a_worker_that_ended_because_it_was_told_to_has_not_failed():
    told = observe(MANY, job(MANY, active=1), ended(143, {"code": "interrupted", "message": "stopped by SIGTERM"}), running(1))
    assert "lastFailure" not in told.status or told.status["lastFailure"] is None
    failed = observe(MANY, job(MANY, active=1), ended(75, {"code": "storage_unavailable", "message": "away"}), running(1))
    assert failed.status["lastFailure"]["reason"] == "StorageUnavailable"


def test_progress_is_that_of_the_worker_that_knows_most_and_rates_add_up():
    slow = PROGRESS | {"completed": 10, "failed": 0, "tokensPerSecond": 14.4, "requestsPerSecond": 0.01, "usage": {"totalTokens": 3}}
    slow |= {"shards": {"total": 4, "completed": 0, "running": 1}}
    said = {"nightly--work-0-x": slow, "nightly--work-1-x": PROGRESS, "nightly--work-9-x": PROGRESS | {"completed": 999}}
    plan = observe(MANY, job(MANY, active=2), running(0), running(1), progress=said)
    assert plan.status["requests"] == "412/1000", "the third is no pod of ours"
    assert plan.status["tokensPerSecond"] == 200
    assert plan.status["requestsPerHour"] == 720
    assert plan.status["usage"]["totalTokens"] == 15
    assert plan.status["shards"] == {"total": 4, "completed": 1, "running": 3}, "each tells of those that it works on itself"
    assert plan.status["shardsText"] == "1/4"
    back = observe(after(plan, MANY), job(MANY, active=2), running(0), running(1), progress={"nightly--work-0-x": slow})
    assert back.status["requests"] == "412/1000", "the one that knows more did not answer this time"
    assert back.status["shards"]["completed"] == 1


def test_the_end_is_foretold_from_a_mean_that_halves_what_is_five_minutes_old():
    def said(done: int, rate: float) -> dict[str, Any]:
        return PROGRESS | {"completed": done, "failed": 0, "requestsPerSecond": rate}

    begun = observe(BATCH, job(active=1), running(), progress=said(40, 1.0))
    few = observe(after(begun), job(active=1), running(), progress=said(49, 1.0), now=NOW + 100)
    assert "eta" not in few.status
    early = observe(after(begun), job(active=1), running(), progress=said(60, 1.0), now=NOW + 5)
    assert "eta" not in early.status
    known = observe(after(begun), job(active=1), running(), progress=said(100, 1.0), now=NOW + 10)
    assert (known.status["etaText"], known.status["eta"]) == ("15m", stamp(NOW + 910))
    slower = observe(after(known), job(active=1), running(), progress=said(101, 0.2), now=NOW + 310)
    assert slower.status["requestsPerHour"] == 2160  # half of 3600 and half of 720
    idle = observe(after(slower), job(active=1), running(), progress=said(101, 0.0), now=NOW + 320)
    assert idle.status["requestsPerHour"] == 2160


def test_work_in_which_nothing_was_done_for_half_an_hour_is_stalled_and_told_once():
    begun = after(observe(BATCH, job(active=1), running(), progress=PROGRESS))
    for later, stalled in ((1700, False), (1801, True)):
        plan = observe(begun, job(active=1), running(), progress=PROGRESS, now=NOW + later)
        assert any(one["type"] == "Stalled" for one in plan.status["conditions"]) == stalled
    assert condition(plan, "Stalled")["status"] == "True"
    assert reasons(plan) == ["NoProgress"]
    assert reasons(observe(after(plan), job(active=1), running(), progress=PROGRESS, now=NOW + 1900)) == []
    moved = observe(after(plan), job(active=1), running(), progress=PROGRESS | {"completed": 401}, now=NOW + 1910)
    assert not any(one["type"] == "Stalled" for one in moved.status["conditions"])


def test_work_that_was_suspended_for_long_is_not_stalled_when_it_goes_on():
    begun = after(observe(BATCH, job(active=1), running(), progress=PROGRESS))
    suspended = after(observe(a_batch(suspend=True) | {"status": begun["status"]}, job(suspend=True, **SUSPENDED), now=NOW + 10))
    again = after(observe(suspended, job(active=1), running(), progress=PROGRESS, now=NOW + 7200))
    plan = observe(again, job(active=1), running(), progress=PROGRESS, now=NOW + 7210)
    assert plan.report.status is None or not any(one["type"] == "Stalled" for one in plan.status["conditions"])


# --- suspend, cancel, lost nodes ---


def test_nothing_is_begun_while_it_is_suspended_and_nothing_is_lost():
    waits = a_batch(suspend=True) | {"status": planned()["status"]}
    assert made(observe(waits)) == {}
    assert observe(waits).status["phase"] == "Suspended"
    worked = job(**COMPLETE), ended(0, WORKED)
    held = observe(a_batch(suspend=True), *worked)
    assert (made(held), held.status["phase"]) == ({}, "Suspended")
    assert list(made(observe(after(held), *worked))) == ["merge"]
    for phase in ("plan", "merge"):
        stopped = observe(a_batch(suspend=True), *(worked if phase == "merge" else ()), job(phase=phase, active=1), running(of=phase))
        assert made(stopped)[phase]["spec"]["suspend"] is True


def test_a_cancel_ends_suspended_work_with_what_was_done():
    manifest = a_batch(suspend=True, cancel=True)
    at_rest = job(suspend=True, **SUSPENDED)
    plan = observe(manifest, at_rest)
    assert "--partial=cancelled" in args(made(plan)["merge"])
    assert made(plan)["merge"]["spec"]["suspend"] is False
    held = job(phase="merge", partial="cancelled", suspend=True, **SUSPENDED)
    assert made(observe(manifest, at_rest, held))["merge"]["spec"]["suspend"] is False


def test_a_cancel_while_it_is_planned_ends_without_results():
    cancelled = a_batch(cancel=True)
    stops = observe(cancelled, job(phase="plan", active=1), running(of="plan"))
    assert made(stops)["plan"]["spec"]["suspend"] is True
    assert stops.status["phase"] == "Cancelling"
    over = observe(after(stops, cancelled), job(phase="plan", suspend=True, **SUSPENDED))
    assert (over.status["phase"], over.apply) == ("Cancelled", ())
    assert condition(over, "Complete")["reason"] == "Cancelled"


def test_a_cancel_between_plan_and_work_publishes_that_nothing_was_done():
    for still_there in ((), (job(phase="plan", **COMPLETE), ended(0, PLAN_WORDS, of="plan"))):
        plan = observe(a_batch(cancel=True) | {"status": planned()["status"]}, *still_there)
        assert "--partial=cancelled" in args(made(plan)["merge"])
        assert plan.status["phase"] == "Cancelling"


def test_a_cancel_that_comes_while_finished_work_is_merged_changes_nothing():
    worked = job(**COMPLETE), ended(0, WORKED)
    cancelled = a_batch(cancel=True)
    going = observe(cancelled, *worked, job(phase="merge", active=1), running(of="merge"))
    assert (made(going), going.status["phase"]) == ({}, "Merging")
    assert observe(cancelled, *worked, *published()).status["phase"] == "Succeeded"


def test_a_merge_of_cancelled_work_does_not_wait_for_a_node_that_is_lost():
    """What a worker there still writes, the storage refuses."""
    cancelled = merge(MANY, {"spec": {"cancel": True}}) | {"status": planned()["status"]}
    lost = merge(merge(running(), SILENT), GONE)
    still = job(MANY, suspend=True, **SUSPENDED, terminating=1)
    assert "--partial=cancelled" in args(made(observe(cancelled, still, lost))["merge"])
    on_a_volume = a_batch(cancel=True) | {"status": planned()["status"]}
    assert made(observe(on_a_volume, job(suspend=True, **SUSPENDED, terminating=1), lost)) == {}, "nodes need not share its locks"
    assert made(observe(cancelled, still, merge(running(1), GONE))) == {}
    assert made(observe(cancelled, merge(still, {"status": {"terminating": 2}}), lost, merge(running(1), GONE))) == {}
    assert made(observe(cancelled, merge(still, {"status": {"terminating": 2}}), lost)) == {}, "one of them is not seen yet"


def test_without_conditional_writes_a_lost_node_is_waited_for():
    unfenced = PLAN_WORDS | {"fenced": False}
    told = after(observe(BATCH, job(phase="plan", **COMPLETE), ended(0, unfenced, of="plan")))
    cancelled = a_batch(cancel=True) | {"status": told["status"]}
    lost = merge(merge(running(), SILENT), GONE)
    waits = observe(cancelled, job(suspend=True, **SUSPENDED, terminating=1), lost)
    assert (made(waits), waits.status["phase"]) == ({}, "Cancelling")
    assert "n7" in condition(waits, "Running")["message"]


@pytest.mark.parametrize("phase", ["plan", "work", "merge"])
def test_a_pod_that_was_evicted_from_a_lost_node_is_given_up_so_that_another_comes(phase: str):
    resource = MANY if phase == "plan" else MANY | {"status": planned()["status"]}
    before = [] if phase == "plan" else [job(phase="plan", **COMPLETE), ended(0, PLAN_WORDS, of="plan")]
    before += [job(MANY, **COMPLETE), ended(0, WORKED)] if phase == "merge" else []
    lost = merge(running(of=phase), SILENT)

    def given_up(*pods: Manifest, now: float = NOW) -> list[Manifest]:
        return list(observe(resource, *before, job(MANY, phase=phase, active=1), *pods, now=now).plan.status)

    assert given_up(lost) == [], "its node may come back until it is evicted"
    assert given_up(merge(running(of=phase), GONE)) == [], "its node ends it"
    (told,) = given_up(merge(lost, GONE))
    assert (told["kind"], told["metadata"]["name"], told["status"]["phase"]) == ("Pod", lost["metadata"]["name"], "Failed")
    assert {one["type"]: one["status"] for one in told["status"]["conditions"]} == {"Ready": "False", "DisruptionTarget": "True"}
    assert given_up(merge(lost, GONE | {"status": {**lost["status"], **told["status"]}})) == [], "once"


def test_a_pod_that_never_became_ready_is_given_up_when_its_node_has_let_its_grace_pass():
    starting = merge(merge(running(), {"status": {"phase": "Pending", "conditions": [], "containerStatuses": []}}), GONE)
    resource = MANY | {"status": planned()["status"]}
    assert observe(resource, job(MANY, active=1), starting, now=NOW + 61).plan.status == ()
    (told,) = observe(resource, job(MANY, active=1), starting, now=NOW + 120).plan.status
    assert told["status"]["phase"] == "Failed"


def test_without_conditional_writes_no_pod_is_given_up_and_the_status_says_what_to_do():
    unfenced = PLAN_WORDS | {"fenced": False}
    told = after(observe(BATCH, job(phase="plan", **COMPLETE), ended(0, unfenced, of="plan")))
    waits = observe(told, job(terminating=1), merge(merge(running(), SILENT), GONE))
    assert waits.plan.status == ()
    assert condition(waits, "Running")["reason"] == "NodeLost"
    for command in ("kubectl delete node n7", "kubectl taint nodes n7 node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"):
        assert command in condition(waits, "Running")["message"]


def test_other_workers_go_on_when_a_node_is_lost():
    plan = observe(MANY, job(MANY, active=2), merge(running(0), SILENT), running(1), progress=PROGRESS)
    assert (plan.status["phase"], condition(plan, "Running")["status"]) == ("Running", "True")
    assert "n7" in condition(plan, "Running")["message"]


@pytest.mark.parametrize("decided", ["SuccessCriteriaMet", "FailureTarget"])
def test_work_whose_end_is_decided_is_merged_though_pods_on_a_lost_node_never_end(decided: str):
    """The Job's own end comes only with theirs."""
    told = [{"type": decided, "status": "True", **AT}]
    last = ended(0, WORKED) if decided == "SuccessCriteriaMet" else ended(65, {"code": "input_changed", "message": "it changed"})
    lost = merge(merge(running(1), SILENT), GONE)
    work = job(MANY, conditions=told, terminating=1)
    plan = observe(MANY, work, last, lost, now=NOW + 120)
    assert list(made(plan)) == ["merge"]
    assert made(observe(MANY, work, last, merge(running(1), GONE), now=NOW + 120)) == {}, "that one will end"
    assert made(observe(MANY, merge(work, {"status": {"terminating": 2}}), last, lost, now=NOW + 120)) == {}, "one of them is not seen yet"


# --- what is deleted by hand ---


@pytest.mark.parametrize("phase", ["plan", "work", "merge"])
def test_a_job_that_is_deleted_by_hand_is_made_again_three_times(phase):
    before: tuple[Manifest, ...] = () if phase == "plan" else (job(**COMPLETE), ended(0, WORKED)) if phase == "merge" else ()
    now = BATCH if phase == "plan" else planned()
    for number in range(4):
        again = observe(now, *before)
        assert list(made(again)) == [phase], f"deleted {number} times"
        uid = {"metadata": {"uid": f"uid-{number}"}}
        twice = observe(later(again, now), *before, merge(job(phase=phase, active=1), uid))
        now = later(twice, now)
        assert observe(now, *before, merge(job(phase=phase, active=1), uid)).report.status is None, "seen before"
    over = observe(now, *before)
    if phase == "work":  # what the workers did before is published
        assert list(made(over)) == ["merge"]
        assert "--partial=failed" in args(made(over)["merge"])
        merge_job = merge(made(over)["merge"], {"metadata": {"uid": "m"}}) | {"status": COMPLETE}
        report = merge(ended(0, PUBLISHED | {"code": "failed"}, of="merge"), {})
        report["metadata"]["ownerReferences"][0]["uid"] = "m"
        over = observe(after(over), merge_job, report)
    assert made(over) == {}
    assert (over.status["phase"], condition(over, "Failed")["reason"]) == ("Failed", "InternalError")


# --- what is removed as soon as it has ended (ttlSecondsAfterFinished: 0, somebody's or a policy's) ---


def test_a_batch_whose_jobs_are_removed_as_soon_as_they_have_ended_goes_on_and_succeeds():
    gone = [job(phase="plan", **COMPLETE), ended(0, PLAN_WORDS, of="plan")]
    plan = observe(BATCH, remains=tuple(gone))
    assert list(made(plan)) == ["work"]
    assert condition(plan, "Planned")["message"] == "1000 requests in 4 shards."
    gone += [job(**COMPLETE), ended(0, WORKED)]
    plan = observe(after(plan), remains=tuple(gone))
    assert (list(made(plan)), plan.status["phase"]) == (["merge"], "Merging")
    gone += published()
    plan = observe(after(plan), remains=tuple(gone))
    assert (made(plan), plan.status["phase"], plan.status["progressPercent"]) == ({}, "Succeeded", 100)
    assert plan.status["requestCounts"]["completed"] == 988


def test_a_merge_that_was_made_as_often_as_it_may_be_and_has_published_is_a_success():
    now = planned()
    now["status"]["jobs"]["merge"] = ["a", "b", "c", "d"]
    over = observe(now, remains=published())
    assert (made(over), over.status["phase"]) == ({}, "Succeeded")
    assert observe(now).status["phase"] == "Failed", "nobody knows that it has published"


def test_a_job_that_failed_and_was_removed_has_failed_for_its_own_reason():
    gone = (job(phase="plan", **FAILED), ended(65, {"code": "input_not_found", "message": "no such object"}, of="plan"))
    over = observe(BATCH, remains=gone)
    assert (made(over), over.status["phase"], condition(over, "Failed")["reason"]) == ({}, "Failed", "InputNotFound")


@pytest.mark.parametrize("phase", ["plan", "work", "merge"])
def test_a_job_that_is_removed_in_the_foreground_when_it_has_ended_goes_after_its_pods_and_is_not_made_again(phase: str):
    words = {"plan": PLAN_WORDS, "work": WORKED, "merge": PUBLISHED}[phase]
    going = merge(job(phase=phase, **COMPLETE), {"metadata": {"deletionTimestamp": stamp(NOW), "finalizers": ["foregroundDeletion"]}})
    plan = observe(BATCH if phase == "plan" else planned(), going, remains=(ended(0, words, of=phase),), now=NOW + 30)
    assert list(made(plan)) == {"plan": ["work"], "work": ["merge"], "merge": []}[phase]
    told = " ".join(one["message"] for one in plan.status["conditions"])
    assert "is made again" not in told
    assert "was never seen" not in told
    assert plan.status["phase"] == {"plan": "Pending", "work": "Merging", "merge": "Succeeded"}[phase]


def test_a_pod_that_is_there_and_was_taken_for_gone_is_one():
    going = merge(job(**COUNTED), {"metadata": {"deletionTimestamp": stamp(NOW)}, "status": {"failed": 2}})
    twice = ended(1, {"code": "X", "message": "m"})
    assert made(observe(planned(), going, twice, remains=(twice,))) == {}, "of two failures one is known"
    assert list(made(observe(planned(), going, twice, remains=(named(twice, "nightly--work-1-x", NOW - 60),)))) == ["merge"]


@pytest.mark.parametrize("gone", [False, True])
def test_work_that_failed_as_its_job_was_deleted_in_the_foreground_is_made_again(gone: bool):
    """With no failure to spare the Job's controller takes the pods that the garbage collector ends for failures."""
    deleted = {"metadata": {"deletionTimestamp": stamp(NOW - 9)}}
    going, ends = merge(job(**COUNTED), deleted), merge(ended(143, {"code": "interrupted", "message": "stopped"}), deleted)
    if gone:
        assert list(made(observe(planned(), remains=(ends, going)))) == ["work"]
        return
    plan = observe(planned(), going, ends)
    assert made(plan) == {}
    crashed = merge(ended(1, {"code": "X", "message": "m"}), deleted)
    assert list(made(observe(planned(), going, crashed))) == ["merge"], "that one failed by itself"
    assert list(made(observe(planned(), job(**COUNTED), ends))) == ["merge"], "a pod alone was deleted"


def killed(reason: str = "Error") -> Manifest:
    """A worker that ended by SIGKILL."""
    state = {"terminated": {"exitCode": 137, "reason": reason, "finishedAt": stamp(NOW - 5)}}
    return pod(state, "Failed")


def test_work_that_was_killed_as_its_job_was_deleted_in_the_foreground_is_made_again():
    """Its grace was over, or was none (--force)."""
    deleted = {"metadata": {"deletionTimestamp": stamp(NOW - 9)}}
    going, ends = merge(job(**COUNTED), deleted), merge(killed(), deleted)
    plan = observe(planned(), going, ends)
    assert (made(plan), plan.status["phase"]) == ({}, "Running")
    assert list(made(observe(planned(), remains=(ends, going)))) == ["work"]
    for why, children in {
        "the pod was not deleted": (going, killed()),
        "the Job was not deleted": (job(**COUNTED), ends),
        "it took too much memory": (going, merge(killed("OOMKilled"), deleted)),
        "its Job had failed before": (merge(going, {"metadata": {"deletionTimestamp": stamp(NOW - 2)}}), ends),
    }.items():
        assert list(made(observe(planned(), *children))) == ["merge"], why


def test_a_job_that_is_there_counts_and_not_one_that_went_nor_that_of_an_earlier_batch():
    before = (job(phase="plan", **FAILED), ended(1, {}, of="plan"))
    again = merge(job(phase="plan", active=1), {"metadata": {"uid": "again"}})
    assert observe(BATCH, again, remains=before).status["phase"] != "Failed"
    others = merge(before[0], {})
    others["metadata"]["ownerReferences"][0]["uid"] = "of-another"
    assert list(made(observe(BATCH, remains=(others,)))) == ["plan"]


def test_a_batch_whose_merge_is_heard_late_to_have_published_is_over_once_the_work_that_was_made_again_stands_still():
    plan = observe(planned(), job(active=1), running(), remains=published())
    assert (list(made(plan)), made(plan)["work"]["spec"]["suspend"], plan.status["phase"]) == (["work"], True, "Merging")
    stopping = observe(after(plan), job(suspend=True), running(), remains=published())
    assert (made(stopping), later(stopping, after(plan))["status"]["phase"]) == ({}, "Merging")
    assert observe(after(plan), job(suspend=True, **SUSPENDED), remains=published()).status["phase"] == "Succeeded"
    assert observe(after(plan), job(**COMPLETE), ended(0, WORKED), remains=published()).status["phase"] == "Succeeded"


def test_work_is_not_made_again_once_there_is_a_merge():
    assert made(observe(planned(), job(phase="merge", active=1), running(of="merge"))) == {}


# --- merges ---


def test_work_in_which_all_lines_failed_is_published_and_has_failed():
    worked = job(**COMPLETE), ended(0, WORKED)
    counts = {"total": 1000, "completed": 0, "failed": 1000}
    plan = observe(BATCH, *worked, *published(code=65, code_word="all_lines_failed", requestCounts=counts))
    assert (plan.status["phase"], condition(plan, "Failed")["reason"]) == ("Failed", "AllLinesFailed")
    assert condition(plan, "Accepted")["status"] == "True"
    assert plan.status["requestCounts"] == counts


@pytest.mark.parametrize(
    ("said", "code", "phase", "reason"),
    [
        ("cancelled", 0, "Cancelled", "Cancelled"),
        ("expired", 0, "Expired", "Expired"),
        ("failed", 0, "Failed", "WorkersFailed"),
        ("too_many_errors", 79, "Failed", "TooManyErrors"),
    ],
)
def test_a_run_that_was_published_before_it_was_whole_is_no_success_whoever_ended_it(said: str, code: int, phase: str, reason: str) -> None:
    """Its work and its merge find the results there, and have nothing to do: of a run that was gone on with, or whose Jobs went unseen."""
    counts = {"total": 1000, "completed": 388, "failed": 12}
    begun = planned()
    begun["status"]["shards"] = {"total": 4, "completed": 1, "running": 0}
    worked = job(**COMPLETE), ended(0, PUBLISHED | {"code": said, "requestCounts": counts})
    merging = observe(begun, *worked)
    over = observe(after(merging), *worked, *published(code=code, code_word=said, requestCounts=counts))
    assert (over.status["phase"], condition(over, "Complete")["reason"]) == (phase, reason)
    assert (over.status["progressPercent"], over.status["shards"]["completed"]) == (40, 1)
    assert "600 of 1000" in condition(over, phase)["message"]
    assert "spec.input.failedOf" in condition(over, phase)["message"]
    assert condition(over, "Accepted")["status"] == "True"


@pytest.mark.parametrize("partial", [None, "cancelled", "expired"])
def test_a_merge_that_fails_fails_the_batch(partial):
    over = job(suspend=True, **SUSPENDED) if partial else job(**COMPLETE)
    plan = observe(a_batch(cancel=partial is not None), over, *published(partial, 77, "storage_denied", message="403"))
    assert (plan.status["phase"], condition(plan, "Failed")["reason"]) == ("Failed", "MergeFailed")
    assert "403" in condition(plan, "Failed")["message"]


def test_work_that_failed_and_could_not_be_published_either_has_failed_for_its_own_reason():
    failing = observe(planned(), job(**FAILED), ended(65, {"code": "input_changed", "message": "in.jsonl"}))
    merge_job = merge(made(failing)["merge"], {"metadata": {"uid": "uid-merge"}}) | {"status": FAILED}
    over = observe(after(failing), merge_job, ended(77, {"code": "storage_denied", "message": "403"}, of="merge"))
    assert condition(over, "Failed")["reason"] == "InputChanged"
    assert "403" in condition(over, "Failed")["message"]


def test_nothing_but_a_jobs_end_makes_a_merge():
    done = [{"type": "SuccessCriteriaMet", "status": "True", **AT}]
    assert made(observe(BATCH, job(conditions=done, active=1), ended(0, WORKED), running(1))) == {}
    failing = Outcome(failed={Ref("batch/v1", "Job", "nightly--merge"): "503"})
    plan = observe(BATCH, job(**COMPLETE), ended(0, WORKED), outcome=failing)
    assert plan.status["phase"] == "Merging"
    assert "Job nightly--merge (503)" in condition(plan, "Running")["message"]


def test_all_jobs_of_a_finished_batch_are_kept_ten_minutes_and_then_go():
    all_of_it = job(phase="plan", **COMPLETE), job(**COMPLETE), job(phase="merge", **COMPLETE)
    over = after(observe(BATCH, *all_of_it, ended(0, PUBLISHED, of="merge")))
    assert observe(over, *all_of_it, now=NOW + 500).delete == ()
    names = [one["metadata"]["name"] for one in observe(over, *all_of_it, now=NOW + 600).delete]
    assert names == ["nightly--merge", "nightly--plan", "nightly--work"]


# --- what pods of any image leave behind ---


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"code": "A" * 2000, "message": "m"}),
        json.dumps({"code": {"a": 1}, "message": ["m"], "requestCounts": [1], "shards": -4, "fenced": "yes"}),
        json.dumps({"code": "", "requestCounts": {"total": 10**30, "completed": -1, "failed": "3"}, "usage": 7}),
        "[" * 4000,
        "9" * 4090,
        "\x00",
    ],
    ids=["long code", "other types", "other numbers", "nested", "number", "NUL"],
)
@pytest.mark.parametrize("phase", ["plan", "work", "merge"])
def test_last_words_of_whatever_form_leave_a_status_that_can_be_written(phase: str, text: str):
    pod = ended(65, {}, of=phase)
    pod["status"]["containerStatuses"][0]["state"]["terminated"]["message"] = text
    over = observe(planned() if phase != "plan" else BATCH, job(phase=phase, **FAILED), pod)
    assert over.status["lastFailure"]["reason"] == "InputInvalid"


# --- what else is wrong with it ---


def test_work_is_suspended_though_something_it_refers_to_is_gone():
    keyed = a_batch(apiKeySecretRef={"name": "key", "key": "token"})
    gone = frozenset({Ref("v1", "Secret", "key")})
    begun = after(observe(keyed, job(keyed, active=1), running(), progress=PROGRESS), keyed)
    halted = observe(merge(begun, {"spec": {"suspend": True}}), job(keyed, active=1), running(), missing=gone)
    assert [one["kind"] for one in halted.apply] == ["Job"]
    assert made(halted)["work"]["spec"]["suspend"] is True
    assert (condition(halted, "Accepted")["reason"], halted.delete) == ("SecretNotFound", ())


def test_what_is_cancelled_is_not_told_to_be_suspended_while_it_is_published():
    batch = a_batch(suspend=True, cancel=True) | {"status": planned()["status"]}
    worked = job(batch, suspend=True, **SUSPENDED)
    for merging in ((), (job(batch, phase="merge", partial="cancelled", active=1), running(of="merge"))):
        plan = observe(batch, worked, *merging)
        assert plan.status["phase"] == "Cancelling"
        assert (condition(plan, "Suspended")["status"], condition(plan, "Suspended")["reason"]) == ("False", "Ending")


def test_a_merge_that_is_over_is_not_suspended_while_its_report_is_waited_for():
    plan = observe(a_batch(suspend=True), job(**COMPLETE), ended(0, WORKED), job(phase="merge", **COMPLETE))
    assert plan.status["phase"] == "Merging"
    assert reasons(plan) == reasons(observe(a_batch(), job(**COMPLETE), ended(0, WORKED), job(phase="merge", **COMPLETE)))


def test_a_cancel_is_over_when_it_was_asked_for_and_not_when_its_last_pod_failed():
    failed = ended(75, {"code": "storage_unavailable"}, of="plan")
    failed["status"]["containerStatuses"][0]["state"]["terminated"]["finishedAt"] = stamp(NOW - 86400)
    over = observe(a_batch(cancel=True, ttlSecondsAfterFinished=3600), job(phase="plan", suspend=True, **SUSPENDED), failed)
    assert (over.status["phase"], over.status["completionTime"]) == ("Cancelled", stamp(NOW))


def test_a_deadline_that_has_passed_when_the_start_is_first_heard_of_is_looked_at_soon():
    begun = job(phase="plan", suspend=True, **SUSPENDED), ended(75, {"code": "storage_unavailable"}, of="plan")
    plan = observe(a_batch(suspend=True, deadlineSeconds=60), *begun, now=NOW + 1900)
    assert (plan.status["phase"], plan.requeue_after_s) == ("Suspended", 1.0)


def test_what_was_counted_stands_when_nothing_can_be_published():
    batch = after(observe(MANY, job(MANY, active=1), running(), progress=PROGRESS), MANY)
    failed = job(batch, **FAILED), ended(65, {"code": "input_changed", "message": "changed"})
    words = {"code": "input_changed", "requestCounts": {"total": 1000, "completed": 0, "failed": 0}, "usage": {"totalTokens": 0}}
    over = observe(batch, *failed, job(batch, phase="merge", partial="failed", **FAILED), ended(65, words, of="merge"))
    assert over.status["phase"] == "Failed"
    assert (over.status["requests"], over.status["progressPercent"], over.status["usage"]["totalTokens"]) == ("412/1000", 41, 15)
    assert over.status["shards"] == {"total": 4, "completed": 1, "running": 0}


def test_of_work_that_is_cancelled_no_more_shards_are_complete_than_were():
    batch = after(observe(MANY, job(MANY, active=1), running(), progress=PROGRESS), MANY)
    stopped = merge(batch, {"spec": {"cancel": True}})
    over = observe(stopped, job(batch, suspend=True, **SUSPENDED), *published("cancelled", code_word="cancelled"))
    assert (over.status["phase"], over.status["shardsText"]) == ("Cancelled", "1/4")


def test_work_that_was_deleted_too_often_is_not_merged_while_it_is_suspended():
    spent = planned()
    spent["status"]["jobs"] = {"plan": ["p"], "work": ["1", "2", "3", "4"]}
    assert list(made(observe(spent))) == ["merge"]
    assert made(observe(merge(spent, {"spec": {"suspend": True}}))) == {}


@pytest.mark.parametrize(
    "text", ['{"reason": "no reason!", "message": "m", "refusal": false}', '{"reason": "", "message": "", "refusal": 1}', "[]", "[" * 9000]
)
def test_a_merge_whose_annotation_somebody_changed_ends_all_the_same(text: str):
    changed = merge(job(phase="merge", partial="failed", **COMPLETE), {"metadata": {"annotations": {"serving.banyan.dev/because": text}}})
    over = observe(BATCH, changed, ended(0, PUBLISHED | {"code": "failed"}, of="merge"))
    assert (over.status["phase"], condition(over, "Failed")["reason"]) == ("Failed", "WorkersFailed")
