"""How a batch goes on, as its status tells it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from banyan_operator.observed.batch import bar
from banyan_operator.plan import Manifest, Outcome, Ref
from banyan_operator.times import stamp
from tests.unit.operator.batches import (
    BATCH,
    COMPLETE,
    NOW,
    PLAN_WORDS,
    PROGRESS,
    PUBLISHED,
    SERVING,
    SUSPENDED,
    WORKED,
    after,
    condition,
    ended,
    job,
    observe,
    planned,
    pod,
    published,
    reasons,
    running,
)
from tests.unit.operator.conftest import Turn, a_batch, a_server, an_own_server_batch, anything, merge, spoilt


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
    plan = observe(after(before), job(active=1), running(), now=NOW + 60)
    assert plan.status["requestCounts"]["completed"] == 400
    assert condition(plan, "ProgressKnown")["reason"] == "WorkersUnreachable"


def test_a_worker_that_has_just_begun_need_not_answer_yet():
    plan = observe(BATCH, job(active=1), running())
    assert (condition(plan, "ProgressKnown")["status"], condition(plan, "ProgressKnown")["reason"]) == ("Unknown", "Starting")
    assert not plan.events or "WorkersUnreachable" not in reasons(plan)


def test_a_pod_whose_worker_has_ended_is_not_being_started():
    before = after(observe(BATCH, job(active=1), running(), progress=PROGRESS))
    ends = merge(ended(0, WORKED), {"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "False"}]}})
    plan = observe(before, job(active=1), ends)
    assert (plan.status["phase"], condition(plan, "Running")["reason"]) == ("Running", "WaitingForReport")
    assert not plan.events


def agrees(told: Mapping[str, Any] | None, said: Any) -> bool:
    """Whether each number that the status holds was said: none is made up, none taken from what is no number."""
    numbers = {name: number for name, number in (told or {}).items() if number is not None}
    said = said if isinstance(said, Mapping) else {}
    return all(not isinstance(said.get(name), bool) and said.get(name) == number for name, number in numbers.items())


@given(said=spoilt(PROGRESS))
@example(said=PROGRESS | {"total": "soon"})
@example(said=PROGRESS | {"tokensPerSecond": "many", "requestsPerSecond": [], "shards": 4})
@example(said=PROGRESS | {"completed": 1e20, "tokensPerSecond": float("nan"), "requestsPerSecond": float("inf")})
@example(said=PROGRESS | {"failed": True, "shards": [], "usage": 2**70, "phase": {}})
def test_what_a_worker_says_that_cannot_be_counts_as_not_said(said):
    world = (job(active=1), running())
    plan = observe(BATCH, *world, progress={"nightly--work-0-x": said})
    assert plan.status["phase"] == "Running"
    assert agrees(plan.status.get("requestCounts"), said)
    assert agrees(plan.status.get("usage"), said.get("usage"))
    counts = {name: PROGRESS[name] for name in ("total", "completed", "failed")}
    if {name: said.get(name) for name in counts} == counts:  # what is beside a spoilt value stays
        assert plan.status["requestCounts"] == counts
    if said.get("usage") == PROGRESS["usage"]:
        assert plan.status["usage"] == PROGRESS["usage"]
    known = observe(after(observe(BATCH, *world, progress=PROGRESS)), *world, progress={"nightly--work-0-x": said}).report.status
    if known is not None:  # else it is as it was
        counts = known["requestCounts"]
        assert counts.get("completed", 0) + counts.get("failed", 0) >= 412
        assert known["usage"]["totalTokens"] >= 15


@given(words=spoilt({name: PUBLISHED[name] for name in ("message", "requestCounts", "usage")}))
@example(words={"requestCounts": {"total": float("inf")}, "usage": {"totalTokens": -5e12}})
@example(words={"requestCounts": {"total": True}, "usage": {"totalTokens": 2**70}})
def test_last_words_that_cannot_be_are_not_taken_into_the_status(words):
    plan = observe(BATCH, job(**COMPLETE), job(phase="merge", **COMPLETE), ended(0, {"code": "succeeded", **words}, of="merge"))
    assert plan.status["phase"] == "Succeeded"
    assert agrees(plan.status.get("requestCounts"), words.get("requestCounts"))
    assert agrees(plan.status.get("usage"), words.get("usage"))


@given(text=st.text(max_size=60) | anything("code", "requestCounts").map(json.dumps))
@example(text="{")
@example(text='{"code": "succeeded"')
def test_last_words_that_are_no_object_count_nothing(text):
    dead = {"terminated": {"exitCode": 0, "reason": "Completed", "message": text, "finishedAt": stamp(NOW - 5)}}
    merge_pod = pod(dead, "Succeeded", name="nightly--merge-0-x", of="merge")
    plan = observe(BATCH, job(**COMPLETE), job(phase="merge", **COMPLETE), merge_pod)
    assert not plan.status.get("requestCounts")
    assert not plan.status.get("usage")


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


# --- lost nodes ---


def test_a_worker_on_a_lost_node_does_not_run_as_far_as_anybody_knows():
    before = after(observe(BATCH, job(active=1), running(), progress=PROGRESS))
    silent = merge(running(), {"status": {"conditions": [{"type": "Ready", "status": "False"}]}})
    plan = observe(before, job(active=1), silent)
    assert (condition(plan, "Running")["status"], condition(plan, "Running")["reason"]) == ("Unknown", "NodeLost")
    for words in ("node n7", "nightly--work-0-x", "300 s"):
        assert words in condition(plan, "Running")["message"]
    assert plan.status["phase"] == "Running"
    assert plan.status["requests"] == "412/1000"
    assert reasons(plan) == ["NodeLost"]
    evicted = merge(silent, {"metadata": {"deletionTimestamp": stamp(NOW + 250)}})
    target = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager", "message": "node is unreachable"}
    evicted["status"]["conditions"] = [*silent["status"]["conditions"], target]
    gone = observe(after(plan), job(terminating=1), evicted, now=NOW + 260)
    assert condition(gone, "Running")["reason"] == "NodeLost"
    assert "node n7" in condition(gone, "Running")["message"]
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
    assert "n7" in condition(plan, "Running")["message"]


# --- waiting for a server ---


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (None, "tiny"),
        (a_server() | {"status": {"conditions": [{"type": "Accepted", "status": "False", "message": "bad uri"}]}}, "bad uri"),
        (a_server() | {"status": {"conditions": [{"type": "Ready", "status": "False", "message": "loading 40 %"}]}}, "loading 40 %"),
        (a_server(), "tiny"),
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


def test_what_cannot_be_written_is_told_once_beside_an_image_that_cannot_be_pulled():
    def seen(text: str) -> tuple[Manifest, ...]:
        return job(phase="plan", **COMPLETE), job(active=1), pod({"waiting": {"reason": "ImagePullBackOff", "message": text}}, "Pending")

    failing = Outcome(failed={Ref("v1", "ServiceAccount", "nightly"): "503 try later"})
    now, said = after(observe(planned(), *seen('Failed to pull image "i": manifest unknown'), outcome=failing)), set()
    for _ in range(3):
        one = observe(now, *seen('Back-off pulling image "i"'), outcome=failing)
        now = after(one) if one.report.status is not None else now
        said.add(next(known["message"] for known in now["status"]["conditions"] if known["type"] == "Running"))
    assert len(said) == 1
    assert "manifest unknown" in said.pop()
