"""How a batch goes on, as its status tells it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from banyan_operator.observed.batch import bar
from banyan_operator.plan import Manifest, Plan, Ref, World
from banyan_operator.reconcile import reconcile
from banyan_operator.times import stamp
from tests.operator.conftest import LOCAL, SETTINGS, a_batch, a_server, an_own_server_batch, merge
from tests.operator.test_desired import render, workload

NOW = 1_700_000_000.0
BATCH = a_batch()
SERVING = a_server() | {"status": {"conditions": [{"type": "Accepted", "status": "True"}, {"type": "Available", "status": "True"}]}}
PROGRESS = {
    "phase": "running",
    "total": 1000,
    "completed": 400,
    "failed": 12,
    "tokensPerSecond": 185.6,
    "etaSeconds": 3120,
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


def job(manifest: Manifest = BATCH, *, suspend: bool = False, **status: Any) -> Manifest:
    live = merge(workload(render(manifest)), {"metadata": {"uid": "j", "generation": 1}, "spec": {"suspend": suspend}})
    live["spec"] |= {"selector": {"matchLabels": {"batch.kubernetes.io/controller-uid": "j"}}, "backoffLimit": 2147483647}
    return live | {"status": status}


def pod(state: dict[str, Any], phase: str, manifest: Manifest = BATCH, name: str = "nightly-work-0-x") -> Manifest:
    template = workload(render(manifest))["spec"]["template"]
    one = {"name": "worker", "image": "i", "ready": phase == "Running", "started": phase == "Running", "restartCount": 0, "state": state}
    ready = [{"type": "Ready", "status": "True"}] if phase == "Running" else []
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**template["metadata"], "name": name, "creationTimestamp": stamp(NOW - 60)},
        "spec": template["spec"],
        "status": {"phase": phase, "conditions": ready, "containerStatuses": [one]},
    }


def running() -> Manifest:
    return pod({"running": {"startedAt": stamp(NOW - 50)}}, "Running")


def ended(code: int, words: dict[str, Any]) -> Manifest:
    state = {"terminated": {"exitCode": code, "reason": "Error", "message": json.dumps(words), "finishedAt": stamp(NOW - 5)}}
    return pod(state, "Succeeded" if code == 0 else "Failed")


def observe(manifest: Manifest, *children: Manifest, settings: Any = SETTINGS, **world: Any) -> Plan:
    return reconcile(manifest, World(now=NOW, children=children, **({"server": SERVING} | world)), settings)


def after(plan: Plan, manifest: Manifest = BATCH) -> Manifest:
    """The same resource with the status that the plan wrote."""
    assert plan.status is not None
    return manifest | {"status": json.loads(json.dumps(plan.status))}


def condition(plan: Plan, kind: str) -> dict[str, Any]:
    assert plan.status is not None
    found: dict[str, Any] = next(one for one in plan.status["conditions"] if one["type"] == kind)
    return found


def reasons(plan: Plan) -> list[str]:
    return [event.reason for event in plan.events]


COMPLETE = {"conditions": [{"type": "Complete", "status": "True"}]}
FAILED = {"conditions": [{"type": "Failed", "status": "True", "message": "Job has failed indexes"}], "failed": 1}


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
    assert (status["progressPercent"], status["progress"]) == (41, "########------------  41%")
    assert status["requests"] == "412/1000"
    assert (status["tokensPerSecond"], status["etaText"]) == (186, "52m")
    assert status["workers"] == {"desired": 1, "active": 1, "ready": 1, "failed": 0}
    assert status["usage"]["totalTokens"] == 15
    assert status["startTime"] == stamp(NOW - 50)
    assert condition(plan, "Running")["reason"] == "WorkersRunning"
    assert condition(plan, "ProgressKnown")["status"] == "True"
    assert reasons(plan) == ["Started"]
    assert plan.requeue_after_s == 10


def test_a_worker_that_does_not_answer_keeps_the_counts_that_are_known():
    before = observe(BATCH, job(active=1), running(), progress=PROGRESS)
    plan = observe(after(before), job(active=1), running())
    assert plan.status["requestCounts"]["completed"] == 400
    assert condition(plan, "ProgressKnown")["reason"] == "WorkersUnreachable"


def test_publishing_is_merging_and_never_a_hundred_percent():
    done = PROGRESS | {"phase": "publishing", "completed": 988, "etaSeconds": None}
    plan = observe(BATCH, job(active=1), running(), progress=done)
    assert (plan.status["phase"], plan.status["progressPercent"]) == ("Merging", 99)
    assert "etaText" not in plan.status


def test_a_published_batch_has_succeeded_with_the_workers_own_counts():
    before = after(observe(BATCH, job(active=1), running(), progress=PROGRESS))
    plan = observe(before, job(**COMPLETE), ended(0, PUBLISHED))
    status = plan.status
    assert (status["phase"], status["progressPercent"], status["progress"]) == ("Succeeded", 100, "#################### 100%")
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
    plan = observe(BATCH, job(**COMPLETE), ended(0, PUBLISHED), settings=LOCAL)
    assert plan.status["outputURI"] == "/data/out/output.jsonl"
    assert plan.status["manifestURI"] == "/data/out/manifest.json"


@pytest.mark.parametrize(
    ("code", "words", "accepted", "failed", "said"),
    [
        (65, {"code": "InputNotFound", "message": "s3://b/x: no such key"}, "InputNotFound", "PlanFailed", "no such key"),
        (65, {"code": "OutputExists", "message": "results of run 12"}, "OutputExists", "PlanFailed", "spec.output"),
        (77, {"code": "AccessDenied", "message": "403"}, "AccessDenied", "PlanFailed", "credentials"),
        (64, {"code": "InvalidSpec", "message": "--server=x"}, "InvalidSpec", "PlanFailed", "--server=x"),
        (69, {"code": "ServerGone", "message": "no answer"}, "Accepted", "WorkersFailed", "no answer"),
        (1, {}, "Accepted", "WorkersFailed", "exit code 1"),
    ],
)
def test_a_failed_batch_says_whose_turn_it_is(code, words, accepted, failed, said):
    plan = observe(BATCH, job(**FAILED), ended(code, words))
    assert plan.status["phase"] == "Failed"
    assert condition(plan, "Failed")["reason"] == failed
    assert said in condition(plan, "Failed")["message"]
    assert condition(plan, "Accepted")["reason"] == accepted
    assert condition(plan, "Complete")["status"] == "False"
    assert plan.status["lastFailure"]["exitCode"] == code
    assert "Failed" in reasons(plan)


def test_a_failure_whose_pod_is_gone_still_has_words():
    plan = observe(BATCH, job(**FAILED))
    assert "Job has failed indexes" in condition(plan, "Failed")["message"]


def test_between_two_attempts_it_still_runs_and_says_what_went_wrong():
    before = after(observe(BATCH, job(active=1), running(), progress=PROGRESS))
    plan = observe(before, job(failed=1), ended(75, {"code": "StorageUnavailable", "message": "S3 is down"}))
    assert plan.status["phase"] == "Running"
    assert condition(plan, "Running")["reason"] == "StorageUnavailable"
    assert "S3 is down" in condition(plan, "Running")["message"]
    assert plan.status["workers"]["failed"] == 1


def test_what_is_over_changes_no_more():
    over = after(observe(BATCH, job(**COMPLETE), ended(0, PUBLISHED)))
    plan = reconcile(over, World(now=NOW + 60, children=()), SETTINGS)
    assert (plan.apply, plan.delete, plan.status) == ((), (), None)


def test_a_finished_job_is_kept_ten_minutes_for_its_logs():
    over = after(observe(BATCH, job(**COMPLETE), ended(0, PUBLISHED)))
    early = reconcile(over, World(now=NOW + 500, children=(job(**COMPLETE),)), SETTINGS)
    assert early.delete == ()
    assert early.requeue_after_s == pytest.approx(95)
    late = reconcile(over, World(now=NOW + 600, children=(job(**COMPLETE),)), SETTINGS)
    assert late.delete == (Ref("batch/v1", "Job", "nightly-work"),)


def test_a_finished_batch_with_a_ttl_deletes_itself():
    short = a_batch(ttlSecondsAfterFinished=30)
    over = after(observe(short, job(short, **COMPLETE), ended(0, PUBLISHED)), short)
    assert reconcile(over, World(now=NOW + 10), SETTINGS).requeue_after_s == pytest.approx(15)
    assert reconcile(over, World(now=NOW + 31), SETTINGS).delete == (Ref("serving.banyan.dev/v1alpha1", "BatchJob", "nightly"),)


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
    plan = reconcile(BATCH | {"status": suspended["status"]}, World(now=NOW, children=(job(suspend=True),), server=SERVING), SETTINGS)
    (work,) = (child for child in plan.apply if child["kind"] == "Job")
    assert work["spec"]["suspend"] is False
    assert "Resumed" in reasons(plan)


def test_a_cancelled_batch_first_stops_then_is_over_with_its_counts():
    before = after(observe(BATCH, job(active=1), running(), progress=PROGRESS))
    cancelled = a_batch(cancel=True) | {"status": before["status"]}
    plan = observe(cancelled, job(active=1), running(), progress=PROGRESS)
    assert plan.status["phase"] == "Cancelling"
    assert next(child for child in plan.apply if child["kind"] == "Job")["spec"]["suspend"] is True
    plan = observe(after(plan, cancelled), job(suspend=True))
    assert plan.status["phase"] == "Cancelled"
    assert plan.status["requestCounts"]["completed"] == 400
    assert condition(plan, "Complete")["reason"] == "Cancelled"
    assert reasons(plan) == ["Cancelled"]


def test_a_batch_cancelled_before_it_began_never_makes_a_job():
    plan = observe(a_batch(cancel=True))
    assert plan.status["phase"] == "Cancelled"
    assert all(child["kind"] != "Job" for child in plan.apply)


def test_what_was_published_before_the_cancel_has_succeeded():
    assert observe(a_batch(cancel=True), job(**COMPLETE), ended(0, PUBLISHED)).status["phase"] == "Succeeded"


def test_a_batch_past_its_deadline_is_stopped_and_expires():
    limited = a_batch(deadlineSeconds=60)
    begun = after(observe(limited, job(limited, active=1), running(), progress=PROGRESS), limited)
    assert begun["status"]["startTime"] == stamp(NOW - 50)
    early = reconcile(begun, World(now=NOW + 5, children=(job(limited, active=1), running()), server=SERVING), SETTINGS)
    assert early.requeue_after_s == pytest.approx(5)
    late = reconcile(begun, World(now=NOW + 11, children=(job(limited, active=1), running()), server=SERVING), SETTINGS)
    assert late.status["phase"] == "Cancelling"
    gone = reconcile(after(late, limited), World(now=NOW + 20, children=(job(limited, suspend=True),), server=SERVING), SETTINGS)
    assert gone.status["phase"] == "Expired"
    assert "Nothing was published" in condition(gone, "Complete")["message"]


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
    plan = observe(BATCH, server=server)
    assert all(child["kind"] != "Job" for child in plan.apply)
    assert plan.status["phase"] == "Pending"
    assert condition(plan, "Running")["reason"] == "WaitingForServer"
    assert words in condition(plan, "Running")["message"]
    assert plan.requeue_after_s == 5


def test_work_is_suspended_when_its_server_is_deleted_but_not_when_it_stumbles():
    (work,) = (child for child in observe(BATCH, job(active=1), running(), server=None).apply if child["kind"] == "Job")
    assert work["spec"]["suspend"] is True
    stumbling = a_server() | {"status": {"conditions": [{"type": "Available", "status": "False"}]}}
    plan = observe(BATCH, job(active=1), running(), server=stumbling, progress=PROGRESS)
    assert all(child["kind"] != "Job" for child in plan.apply)
    assert plan.status["phase"] == "Running"


def test_the_worker_is_sent_to_the_address_that_the_driver_knows():
    def url(plan: Plan) -> str:
        (container,) = plan.apply[-1]["spec"]["template"]["spec"]["containers"]
        return str(next(one["value"] for one in container["env"] if one["name"] == "BANYAN_SERVER_URL"))

    assert url(observe(BATCH, server_url="http://127.0.0.1:20001")) == "http://127.0.0.1:20001"
    port = merge(SERVING, {"spec": {"service": {"port": 8080}}})
    assert url(observe(BATCH, server=port)) == "http://tiny.team.svc:8080"


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
    assert bar(0) == "--------------------   0%"
    assert bar(41) == "########------------  41%"
    assert bar(100) == "#################### 100%"
