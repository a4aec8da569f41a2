"""How a batch goes on, as its status tells it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from banyan_operator import api
from banyan_operator.desired import batch
from banyan_operator.desired.batchjob import Because, Order
from banyan_operator.observed.batch import bar
from banyan_operator.plan import Manifest, Outcome, Ref, World
from banyan_operator.times import stamp
from tests.operator.conftest import DONE, LOCAL, SETTINGS, Turn, a_batch, a_server, an_own_server_batch, controlled, merge, turn
from tests.operator.test_desired import URL, workload

NOW = 1_700_000_000.0
BATCH = a_batch()
SERVING = a_server() | {"status": {"conditions": [{"type": "Accepted", "status": "True"}, {"type": "Available", "status": "True"}]}}
PROGRESS = {
    "phase": "running",
    "total": 1000,
    "completed": 400,
    "failed": 12,
    "tokensPerSecond": 185.6,
    "requestsPerSecond": 0.19,
    "shards": {"total": 4, "completed": 1, "running": 2},
    "usage": {"promptTokens": 10, "cachedTokens": 2, "completionTokens": 5, "totalTokens": 15},
}
PUBLISHED = {
    "code": "Succeeded",
    "message": "done",
    "requestCounts": {"total": 1000, "completed": 988, "failed": 12},
    "usage": {"promptTokens": 20, "cachedTokens": 4, "completionTokens": 10, "totalTokens": 30},
    "output": "/data/out/output.jsonl",
    "errors": "/data/out/errors.jsonl",
    "manifest": "/data/out/manifest.json",
}


def job(manifest: Manifest = BATCH, *, phase: str = "work", suspend: bool = False, partial: Any = None, **status: Any) -> Manifest:
    """The Job of one phase as it is in the cluster."""
    parsed = api.parse(merge(manifest, {"spec": {"suspend": False}}))
    assert isinstance(parsed, api.BatchJob)
    order = Order(phase, partial=partial)  # type: ignore[arg-type]
    made = workload(batch.children(parsed, SETTINGS, [order], server_url=URL), phase)
    live: Manifest = merge(made, {"metadata": {"uid": f"uid-{phase}", "generation": 1}, "spec": {"suspend": suspend}})
    live["spec"] |= {
        "selector": {"matchLabels": {"batch.kubernetes.io/controller-uid": live["metadata"]["uid"]}},
        "backoffLimit": 2147483647,
    }
    return live | {"status": status}


def pod(state: dict[str, Any], phase: str, manifest: Manifest = BATCH, name: str = "nightly--work-0-x", of: str = "work") -> Manifest:
    template = job(manifest, phase=of)["spec"]["template"]
    one = {"name": "worker", "image": "i", "ready": phase == "Running", "started": phase == "Running", "restartCount": 0, "state": state}
    ready = [{"type": "Ready", "status": "True"}] if phase == "Running" else []
    found = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**template["metadata"], "name": name, "uid": f"uid-{name}", "creationTimestamp": stamp(NOW - 60)},
        "spec": {**template["spec"], "nodeName": "n7"},
        "status": {"phase": phase, "conditions": ready, "containerStatuses": [one]},
    }
    return controlled(found, job(manifest, phase=of))


def running(index: int = 0, of: str = "work") -> Manifest:
    return pod({"running": {"startedAt": stamp(NOW - 50)}}, "Running", name=f"nightly--{of}-{index}-x", of=of)


def ended(code: int, words: dict[str, Any], of: str = "work", index: int = 0) -> Manifest:
    state = {"terminated": {"exitCode": code, "reason": "Error", "message": json.dumps(words), "finishedAt": stamp(NOW - 5)}}
    return pod(state, "Succeeded" if code == 0 else "Failed", name=f"nightly--{of}-{index}-x", of=of)


PLAN_WORDS = {"code": "Planned", "message": "", "requestCounts": {"total": 1000, "completed": 0, "failed": 0}, "shards": 4, "fenced": True}
WORKED = {"code": "Worked", "message": "", "requestCounts": {"total": 1000, "completed": 988, "failed": 12}, "usage": {"totalTokens": 30}}


def planned(manifest: Manifest = BATCH) -> Manifest:
    """The resource whose plan was made, by its status."""
    return after(observe(manifest, job(manifest, phase="plan", **COMPLETE), ended(0, PLAN_WORDS, of="plan")), manifest)


def published(partial: Any = None, code: int = 0, code_word: str = "Succeeded", **words: Any) -> tuple[Manifest, ...]:
    """The merge, over."""
    status = COMPLETE if code == 0 else FAILED
    return job(phase="merge", partial=partial, **status), ended(code, PUBLISHED | {"code": code_word} | words, of="merge")


def observe(
    manifest: Manifest, *children: Manifest, settings: Any = SETTINGS, outcome: Outcome = DONE, progress: Any = None, **world: Any
) -> Turn:
    """`progress`: what the first worker says, or by pod name what each does."""
    said = progress or {}
    said = said if all(name.startswith("nightly--") for name in said) else {"nightly--work-0-x": said}
    return turn(manifest, World(children=children, progress=said, **({"now": NOW, "server": SERVING} | world)), settings, outcome)


def after(plan: Turn, manifest: Manifest = BATCH) -> Manifest:
    """The same resource with the status that the plan wrote."""
    return manifest | {"status": json.loads(json.dumps(plan.status))}


def condition(plan: Turn, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in plan.status["conditions"] if one["type"] == kind)
    return found


def reasons(plan: Turn) -> list[str]:
    return [event.reason for event in plan.events]


AT = {"lastTransitionTime": stamp(NOW - 4)}
COMPLETE = {"conditions": [{"type": "Complete", "status": "True", **AT}], "completionTime": stamp(NOW - 4)}
COUNTED = {"conditions": [{"type": "Failed", "status": "True", "message": "Job has failed indexes", **AT}], "failed": 1}
FAILED = merge(COUNTED, {})
FAILED["conditions"][0]["reason"] = "PodFailurePolicy"
SUSPENDED = {"conditions": [{"type": "Suspended", "status": "True", **AT}]}


def test_a_new_batch_makes_its_job():
    plan = observe(BATCH)
    assert [child["kind"] for child in plan.apply] == ["ServiceAccount", "Job"]
    assert plan.apply[-1]["spec"]["suspend"] is False
    assert plan.status["phase"] == "Pending"
    assert plan.status["outputURI"] == "pvc://batches/out/output.jsonl"


def test_a_running_batch_shows_its_progress():
    plan = observe(BATCH, job(active=1, ready=1), running(), progress=PROGRESS)
    status = plan.status
    assert status["phase"] == "Running"
    assert status["requestCounts"] == {"total": 1000, "completed": 400, "failed": 12}
    assert (status["progressPercent"], status["progress"]) == (41, "####------  41%")
    assert status["requests"] == "412/1000"
    assert status["tokensPerSecond"] == 186
    assert status["shards"] == {"total": 4, "completed": 1, "running": 2}
    assert status["workers"] == {"desired": 1, "active": 1, "ready": 1, "failed": 0}
    assert status["usage"]["totalTokens"] == 15
    assert status["startTime"] == stamp(NOW - 50)
    assert condition(plan, "Running")["reason"] == "WorkersRunning"
    assert condition(plan, "ProgressKnown")["status"] == "True"
    assert reasons(plan) == ["Started", "Planned"]
    assert plan.requeue_after_s == 10


def test_a_worker_that_does_not_answer_keeps_the_counts_that_are_known():
    before = observe(BATCH, job(active=1), running(), progress=PROGRESS)
    plan = observe(after(before), job(active=1), running())
    assert plan.status["requestCounts"]["completed"] == 400
    assert condition(plan, "ProgressKnown")["reason"] == "WorkersUnreachable"


NO_NUMBERS: list[Any] = ["soon", 1e20, float("inf"), float("nan"), -5e12, True, [], {}, 2**70]


@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize("field", ["phase", "total", "completed", "failed", "tokensPerSecond", "requestsPerSecond", "shards", "usage"])
def test_what_a_worker_says_that_cannot_be_counts_as_not_said(field, value):
    plan = observe(BATCH, job(active=1), running(), progress=PROGRESS | {field: value})
    assert plan.status["phase"] == "Running"
    assert (field == "requestsPerSecond") == ("requestsPerHour" not in plan.status)
    assert (field == "shards") == ("shards" not in plan.status)
    assert (field == "tokensPerSecond") == ("tokensPerSecond" not in plan.status)
    assert (field in ("total", "completed", "failed")) == (
        plan.status.get("requestCounts") != {"total": 1000, "completed": 400, "failed": 12}
    )
    known = observe(after(observe(BATCH, job(active=1), running(), progress=PROGRESS)), job(active=1), running(), progress={field: value})
    assert known.status["usage"]["totalTokens"] == 15


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_last_words_that_cannot_be_are_not_taken_into_the_status(value):
    words = {"requestCounts": {"total": value}, "usage": {"totalTokens": value}}
    plan = observe(BATCH, job(**COMPLETE), *published(**words))
    assert plan.status["phase"] == "Succeeded"
    assert not plan.status.get("usage")
    assert "total" not in (plan.status.get("requestCounts") or {})


def test_merging_is_never_a_hundred_percent():
    worked = ended(0, WORKED)
    plan = observe(BATCH, job(**COMPLETE), worked)
    assert [one["metadata"]["name"] for one in plan.apply if one["kind"] == "Job"] == ["nightly--merge"]
    assert (plan.status["phase"], plan.status["progressPercent"]) == ("Merging", 99)
    merging = observe(after(plan), job(**COMPLETE), worked, job(phase="merge", active=1), running(of="merge"))
    assert (merging.status["phase"], merging.status["progressPercent"]) == ("Merging", 99)
    assert condition(merging, "Running")["reason"] == "Merging"
    assert merging.status["workers"] == {"desired": 0, "active": 0, "ready": 0, "failed": 0}
    assert "etaText" not in merging.status


def test_a_published_batch_has_succeeded_with_the_workers_own_counts():
    before = after(observe(BATCH, job(active=1), running(), progress=PROGRESS))
    plan = observe(before, job(**COMPLETE), *published())
    status = plan.status
    assert (status["phase"], status["progressPercent"], status["progress"]) == ("Succeeded", 100, "########## 100%")
    assert status["requestCounts"] == PUBLISHED["requestCounts"]
    assert status["usage"]["totalTokens"] == 30
    assert status["completionTime"] == stamp(NOW - 5)
    assert status["outputURI"] == "pvc://batches/out/output.jsonl"
    assert condition(plan, "Complete")["reason"] == "Succeeded"
    assert condition(plan, "Failed")["status"] == "False"
    assert reasons(plan) == ["Completed"]
    assert "988 completed, 12 failed of 1000" in plan.events[0].message
    assert not plan.apply


def test_in_local_mode_the_uris_are_files_that_one_can_open():
    plan = observe(BATCH, job(**COMPLETE), *published(), settings=LOCAL)
    assert plan.status["outputURI"] == "/data/out/output.jsonl"
    assert plan.status["manifestURI"] == "/data/out/manifest.json"


REFUSALS: list[tuple[int, dict[str, Any], str, str, str]] = [
    (65, {"code": "InputNotFound", "message": "s3://b/x: no such key"}, "InputNotFound", "InputNotFound", "no such key"),
    (65, {"code": "OutputExists", "message": "results of run 12"}, "OutputExists", "OutputExists", "spec.output"),
    (77, {"code": "AccessDenied", "message": "403"}, "AccessDenied", "AccessDenied", "credentials"),
    (64, {"code": "InvalidSpec", "message": "--server=x"}, "InvalidSpec", "InvalidSpec", "--server=x"),
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


def test_a_plan_that_failed_before_it_counted_shows_no_numbers():
    words = {"code": "InputNotFound", "message": "s3://b/x", "requestCounts": {"total": 0, "completed": 0, "failed": 0}}
    status = observe(BATCH, job(phase="plan", **FAILED), ended(65, words, of="plan")).status
    assert status["phase"] == "Failed"
    assert "requests" not in status
    assert not status.get("requestCounts")


@pytest.mark.parametrize(
    ("code", "words", "accepted", "failed", "said"),
    [
        *REFUSALS,
        (69, {"code": "ServerGone", "message": "no answer"}, "Accepted", "ServerGone", "no answer"),
        (1, {}, "Accepted", "WorkersFailed", "exit code 1"),
        (79, {"code": "TooManyErrors", "message": "60 of 100"}, "Accepted", "TooManyErrors", "60 of 100"),
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
    said_by_merge = ended(0, PUBLISHED | {"code": "Failed", "requestCounts": {"total": 1000, "completed": 400, "failed": 600}}, of="merge")
    for children in ((*failing, live, said_by_merge), (live, said_by_merge)):  # the work's Job may be gone by then
        over = observe(after(plan), *children)
        assert over.status["phase"] == "Failed"
        assert condition(over, "Failed")["reason"] == failed
        assert said in condition(over, "Failed")["message"]
        assert "What was done is published" in condition(over, "Failed")["message"]
        assert condition(over, "Accepted")["reason"] == accepted
        assert over.status["requests"] == "1000/1000"
        assert over.apply == ()


# --- the end is told with the deciding pod's words ---


def test_a_job_that_is_complete_is_not_over_before_its_pods_report_was_seen():
    before = after(observe(BATCH, job(active=1), running(), progress=PROGRESS))
    merge_job, report = published()
    waits = observe(before, job(**COMPLETE), ended(0, WORKED), merge_job, running(of="merge"))
    assert (waits.status["phase"], waits.status["requests"]) == ("Merging", "1000/1000")
    assert (condition(waits, "Complete")["status"], condition(waits, "Complete")["reason"]) == ("False", "WaitingForReport")
    assert "waiting for the worker's pod" in condition(waits, "Complete")["message"]
    assert "completionTime" not in waits.status
    assert [one["kind"] for one in waits.apply] == ["ServiceAccount"]
    seen = observe(after(waits), job(**COMPLETE), merge_job, report)
    assert (seen.status["phase"], seen.status["requests"]) == ("Succeeded", "1000/1000")


def test_a_failed_job_is_not_over_before_the_pod_that_failed_last_was_seen_to_end():
    first = ended(75, {"code": "StorageUnavailable", "message": "S3 is down"})
    second = merge(running(), {"metadata": {"name": "nightly--work-0-y", "uid": "y", "creationTimestamp": stamp(NOW - 30)}})
    failed = merge(job(**COUNTED), {"status": {"failed": 2}})
    for children in ((failed, first, second), (failed, first)):  # its end is not seen yet; nor that it was made
        waits = observe(BATCH, *children)
        assert waits.status["phase"] == "Running"
        assert condition(waits, "Failed")["status"] == "False"
        assert condition(waits, "Complete")["reason"] == "WaitingForReport"
    last = merge(ended(69, {"code": "ServerGone", "message": "no answer"}), {"metadata": {"name": "nightly--work-0-y", "uid": "y"}})
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
    decided = ended(65, {"code": "InputChanged", "message": "in.jsonl"})
    others = [merge(ended(143, {"code": "Interrupted", "message": "SIGTERM"}, index=index), {}) for index in (1, 2)]
    for one in others:
        one["status"]["containerStatuses"][0]["state"]["terminated"]["finishedAt"] = stamp(NOW - 1)
    assert because(observe(BATCH, merge(job(**FAILED), {"status": {"failed": 3}}), decided, *others)) == "InputChanged"


def test_a_pod_that_was_taken_away_is_not_the_one_that_failed():
    taken = ended(143, {"code": "Interrupted", "message": "SIGTERM"})
    taken["status"]["conditions"] = [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]
    assert observe(BATCH, job(**FAILED), taken).status["phase"] == "Running"
    last = merge(ended(65, {"code": "InputInvalid", "message": "line 7"}), {"metadata": {"name": "nightly--work-0-y", "uid": "y"}})
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
    assert late.status["requestCounts"]["completed"] == 400
    assert "was never seen: counts are as last known" in condition(late, kind)["message"]
    if phase == "Failed":
        assert condition(late, "Failed")["reason"] == "MergeFailed"
        assert "Job has failed indexes" in condition(late, kind)["message"]


@pytest.mark.parametrize("early", ["SuccessCriteriaMet", "FailureTarget"])
def test_a_job_whose_last_pods_are_still_stopping_is_not_over(early):
    words = ended(0, PUBLISHED) if early == "SuccessCriteriaMet" else ended(65, {"code": "InputInvalid", "message": "line 7"})
    plan = observe(BATCH, job(conditions=[{"type": early, "status": "True", **AT}]), words, now=NOW + 3600)
    assert plan.status["phase"] == "Running"
    assert "last pods are being stopped" in condition(plan, "Running")["message"]


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


def test_nothing_is_over_while_a_write_has_failed():
    failing = Outcome(failed={Ref("v1", "ServiceAccount", "nightly--batch"): "503"})
    plan = observe(BATCH, job(**COMPLETE), *published(), outcome=failing)
    assert plan.status["phase"] == "Merging"


def test_between_two_attempts_it_still_runs_and_says_what_went_wrong():
    before = after(observe(BATCH, job(active=1), running(), progress=PROGRESS))
    plan = observe(before, job(failed=1), ended(75, {"code": "StorageUnavailable", "message": "S3 is down"}))
    assert plan.status["phase"] == "Running"
    assert condition(plan, "Running")["reason"] == "StorageUnavailable"
    assert "S3 is down" in condition(plan, "Running")["message"]
    assert plan.status["workers"]["failed"] == 1


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


# --- suspend, cancel, deadline ---


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
    suspended = after(observe(a_batch(suspend=True), job(suspend=True)))
    plan = observe(BATCH | {"status": suspended["status"]}, job(suspend=True), now=NOW)
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
    done = observe(after(merging, cancelled), at_rest, *published("cancelled", code_word="Cancelled", requestCounts=counts))
    assert done.status["phase"] == "Cancelled"
    assert done.status["requestCounts"] == counts
    assert (condition(done, "Complete")["status"], condition(done, "Complete")["reason"]) == ("True", "Cancelled")
    assert "What was done by then is published" in condition(done, "Complete")["message"]
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
    assert "What was done by then is published" in condition(gone, "Complete")["message"]


# --- lost nodes ---


def test_a_worker_on_a_lost_node_does_not_run_as_far_as_anybody_knows():
    before = after(observe(BATCH, job(active=1), running(), progress=PROGRESS))
    silent = merge(running(), {"status": {"conditions": [{"type": "Ready", "status": "False"}]}})
    plan = observe(before, job(active=1), silent)
    assert (condition(plan, "Running")["status"], condition(plan, "Running")["reason"]) == ("Unknown", "NodeLost")
    for words in ("node n7", "nightly--work-0-x", "evicted after 300 s", "until node n7 is back"):
        assert words in condition(plan, "Running")["message"]
    assert plan.status["phase"] == "Pending"
    assert plan.status["requests"] == "412/1000"
    assert reasons(plan) == ["NodeLost"]
    evicted = merge(silent, {"metadata": {"deletionTimestamp": stamp(NOW + 250)}})
    target = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager", "message": "node is unreachable"}
    evicted["status"]["conditions"] = [*silent["status"]["conditions"], target]
    gone = observe(after(plan), job(terminating=1), evicted, now=NOW + 260)
    assert condition(gone, "Running")["reason"] == "NodeLost"
    for words in ("was evicted", "The work waits until node n7 is back", "deleted by hand", "two must not write to one output"):
        assert words in condition(gone, "Running")["message"]
    back = observe(after(gone), job(active=1), merge(running(), {"metadata": {"name": "nightly--work-0-y"}}), progress=PROGRESS)
    assert condition(back, "Running")["status"] == "True"


def test_a_pod_that_was_given_up_with_its_node_runs_no_worker():
    given_up = merge(
        running(),
        {"status": {"phase": "Failed", "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}]}},
    )
    plan = observe(BATCH, job(active=1), given_up)
    assert condition(plan, "Running")["status"] == "False"
    assert condition(plan, "Running")["reason"] == "Disrupted"


def test_a_cancel_waits_for_a_worker_on_a_lost_node_and_says_so():
    silent = merge(
        running(), {"metadata": {"deletionTimestamp": stamp(NOW)}, "status": {"conditions": [{"type": "Ready", "status": "False"}]}}
    )
    plan = observe(a_batch(cancel=True), job(suspend=True, **SUSPENDED), silent)
    assert plan.status["phase"] == "Cancelling"
    assert "on node n7, which does not answer" in condition(plan, "Running")["message"]


# --- waiting for a server ---


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (None, "does not exist in namespace team. Create it"),
        (a_server() | {"status": {"conditions": [{"type": "Accepted", "status": "False", "message": "bad uri"}]}}, "bad uri"),
        (a_server() | {"status": {"conditions": [{"type": "Available", "status": "False", "message": "loading 40 %"}]}}, "loading 40 %"),
        (a_server(), "takes no requests yet"),
    ],
)
def test_work_does_not_begin_before_its_server_serves(server, words):
    assert [one["metadata"]["name"] for one in observe(BATCH, server=server).apply if one["kind"] == "Job"] == ["nightly--plan"]
    plan = observe(planned(), job(phase="plan", **COMPLETE), ended(0, PLAN_WORDS, of="plan"), server=server)
    assert all(child["kind"] != "Job" for child in plan.apply)
    assert plan.status["phase"] == "Pending"
    assert condition(plan, "Running")["reason"] == "WaitingForServer"
    assert words in condition(plan, "Running")["message"]
    assert plan.requeue_after_s == 5


def test_work_is_suspended_when_its_server_is_deleted():
    (work,) = (child for child in observe(BATCH, job(active=1), running(), server=None).apply if child["kind"] == "Job")
    assert work["spec"]["suspend"] is True


@pytest.mark.parametrize(
    "kind", ["Available", "Accepted"]
)  # not accepted: by an operator of another version, or a bad edit; its pods serve on
def test_work_that_has_begun_is_not_stopped_when_its_server_stumbles(kind):
    stumbling = a_server() | {"status": {"conditions": [{"type": kind, "status": "False"}]}}
    plan = observe(BATCH, job(active=1), running(), server=stumbling, progress=PROGRESS)
    assert all(child["kind"] != "Job" for child in plan.apply)
    assert plan.status["phase"] == "Running"


def test_the_worker_is_sent_to_the_address_that_the_driver_knows():
    def url(plan: Turn) -> str:
        (container,) = plan.apply[-1]["spec"]["template"]["spec"]["containers"]
        return str(next(one["value"] for one in container["env"] if one["name"] == "BANYAN_SERVER_URL"))

    assert url(observe(planned(), server_url="http://127.0.0.1:20001")) == "http://127.0.0.1:20001"
    port = merge(SERVING, {"spec": {"service": {"port": 8080}}})
    assert url(observe(planned(), server=port)) == "http://tiny--pods.team.svc:8000"  # of the pods, each by its own address


def test_a_batch_with_its_own_server_tells_that_it_loads():
    own = an_own_server_batch()
    loading = pod({"waiting": {"reason": "PodInitializing"}}, "Pending", own)
    loading["status"]["initContainerStatuses"] = [
        {
            "name": "server",
            "image": "i",
            "ready": False,
            "started": False,
            "restartCount": 0,
            "state": {"running": {"startedAt": stamp(NOW - 9)}},
        }
    ]
    plan = observe(own, job(own, active=1), loading, server=None)
    assert plan.status["phase"] == "Pending"
    assert condition(plan, "Running")["reason"] == "Loading"
    assert condition(plan, "Complete")["reason"] == "Loading"


def test_the_bar_has_twenty_cells():
    assert bar(0) == "----------   0%"
    assert bar(41) == "####------  41%"
    assert bar(100) == "########## 100%"


def orphaned(manifest: Manifest) -> Manifest:
    """As `kubectl delete --cascade=orphan` of its owner leaves it."""
    return merge(manifest, {"metadata": {"ownerReferences": None}})


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (merge(running(), {"metadata": {"deletionTimestamp": stamp(NOW + 100)}}), "Waiting for pod nightly--work-0-x to end."),
        (merge(orphaned(running()), {"metadata": {"labels": {"batch.kubernetes.io/job-name": "nightly--work"}}}), "delete the pod"),
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
