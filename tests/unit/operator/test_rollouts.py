"""A rollout: what is told of it while it goes on, and when it fails."""

from __future__ import annotations

import pytest

from tests.unit.operator.conftest import a_server, merge
from tests.unit.operator.servers import READY, SERVER, conditions, container, crashed, deployment, observe, pod, ready, running


def test_a_rollout_that_goes_on_while_enough_pods_serve_is_ready():
    three = a_server(replicas=3)
    old = [pod(three, f"tiny-old{n}", revision="0123456789", **READY) for n in range(3)]
    new = pod(three, "tiny-new", age=5, phase="Running", containerStatuses=[container(running())])
    plan = observe(three, deployment(three), *old, new)
    assert (plan.status["phase"], plan.status["ready"], plan.status["readyReplicas"], plan.status["updatedReplicas"]) == (
        "Updating",
        "3/3",
        3,
        1,
    )
    assert (ready(plan)["status"], ready(plan)["reason"]) == ("True", "RollingOut")
    assert ready(plan)["observedGeneration"] == 1  # `kubectl wait` after an edit does not take the answer to the spec before it
    assert "3 of 3 replicas take requests; 0 of them run" in ready(plan)["message"]
    assert conditions(plan)["Available"]["status"] == "True"
    assert conditions(plan)["Degraded"]["status"] == "False"
    assert (conditions(plan)["Progressing"]["status"], conditions(plan)["Progressing"]["reason"]) == ("True", "RollingOut")
    assert "0123456789" in conditions(plan)["Progressing"]["message"]
    assert plan.requeue_after_s == 10


@pytest.mark.parametrize(("unavailable", "truth"), [(0, "False"), (1, "True"), ("33%", "False"), ("34%", "True")])
def test_a_rollout_may_take_away_as_many_pods_as_the_spec_lets_it(unavailable, truth):
    three = a_server(replicas=3, rollout={"maxUnavailable": unavailable})
    old = [pod(three, f"tiny-old{n}", revision="0123456789", **READY) for n in range(2)]
    plan = observe(three, deployment(three), *old)
    assert plan.status["ready"] == "2/3"
    assert (ready(plan)["status"], ready(plan)["reason"]) == (truth, "RollingOut")
    settled = [pod(three, f"tiny-{n}", **READY) for n in range(2)]
    assert ready(observe(three, deployment(three), *settled))["status"] != "True"  # no rollout takes that one away


def test_a_rollout_that_fails_beside_pods_that_serve_is_degraded_and_says_why():
    old = pod(SERVER, "tiny-old", revision="0123456789", **READY)
    plan = observe(SERVER, deployment(SERVER), old, pod(SERVER, "tiny-new", **crashed(65, "no weights")))
    assert (ready(plan)["status"], plan.status["phase"]) == ("True", "Degraded")
    assert "no weights" in conditions(plan)["Degraded"]["message"]
    for kind in ("Ready", "Progressing"):
        assert "see condition Degraded" in conditions(plan)[kind]["message"]
    warnings = [event for event in plan.events if event.type == "Warning"]
    assert ["no weights" in event.message for event in warnings] == [True]  # told, and once
    late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    plan = observe(SERVER, deployment(SERVER, conditions=[late]), old)
    assert plan.status["phase"] == "Degraded"
    assert conditions(plan)["Progressing"]["reason"] == "DeadlineExceeded"


def test_a_deadline_that_an_earlier_revision_missed_is_not_held_against_a_new_one():
    late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    stale = merge(deployment(SERVER, conditions=[late]), {"metadata": {"generation": 2}})
    assert conditions(observe(SERVER, stale, pod(SERVER, **READY)))["Progressing"]["reason"] == "UpToDate"
    assert observe(SERVER, stale, pod(SERVER, **crashed(64))).status["phase"] != "Failed"


def test_a_server_without_a_deployment_runs_nowhere():
    for server in (SERVER, a_server(replicas=0)):
        plan = observe(server)
        found = conditions(plan)["Progressing"]
        assert (found["status"], found["reason"]) == ("True", "Creating")
        assert "currentRevision" not in plan.status
    refused = observe(a_server(runtime={"quantization": "awq"}))
    assert conditions(refused)["Progressing"]["reason"] == "Unsupported"


def test_a_rollout_past_its_deadline_without_a_ready_pod_has_failed():
    late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    plan = observe(SERVER, deployment(SERVER, conditions=[late]), pod(SERVER, **crashed(64)))
    assert plan.status["phase"] == "Failed"
    assert conditions(plan)["Progressing"]["reason"] == "DeadlineExceeded"
