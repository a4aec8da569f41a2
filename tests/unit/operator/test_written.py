"""What came of the operator's writes, as a server's status tells it: rights, fights, what failed, monitors."""

from __future__ import annotations

from typing import Any

import pytest

from banyan_operator.plan import Outcome, Ref
from tests.unit.operator.conftest import a_server, merge
from tests.unit.operator.servers import NOW, READY, SERVER, after, conditions, deployment, observe, pod, ready
from tests.unit.operator.test_desired import render


def test_a_right_that_the_operator_lacks_is_not_blamed_on_the_spec():
    denied = Outcome(forbidden={Ref("networking.k8s.io/v1", "NetworkPolicy", "tiny"): "cannot patch resource"})
    plan = observe(SERVER, deployment(SERVER), pod(SERVER, **READY), outcome=denied)
    assert (conditions(plan)["Accepted"]["status"], conditions(plan)["Accepted"]["reason"]) == ("False", "OperatorForbidden")
    assert "NetworkPolicy tiny" in conditions(plan)["Accepted"]["message"]
    assert (plan.status["phase"], ready(plan)["status"]) == ("Ready", "True")
    assert conditions(plan)["Progressing"]["reason"] == "UpToDate"
    plan = observe(SERVER, outcome=Outcome(forbidden={Ref("apps/v1", "Deployment", "tiny"): "cannot patch resource"}))
    assert (plan.status["phase"], ready(plan)["reason"]) == ("Pending", "OperatorForbidden")
    assert conditions(plan)["Progressing"]["reason"] == "OperatorForbidden"


DENIED = Outcome(forbidden={Ref("apps/v1", "Deployment", "tiny"): "cannot patch resource"})


@pytest.mark.parametrize("spec", [{"runtime": {"contextLength": 4096}}, {"replicas": 2}], ids=["other pods", "fewer pods"])
def test_a_change_that_the_operator_may_not_carry_out_is_not_told_as_a_rollout(spec: dict[str, Any]):
    three = merge(SERVER, {"spec": {"replicas": 3}})
    pods = [pod(three, f"tiny-{n}", **READY) for n in range(3)]
    before = observe(three, deployment(three), *pods)
    edited = after(before, merge(three, {"spec": spec, "metadata": {"generation": 2}}))
    plan = observe(edited, deployment(three), *pods, outcome=DENIED)
    assert (plan.status["phase"], conditions(plan)["Accepted"]["reason"]) == ("Degraded", "OperatorForbidden")
    assert (conditions(plan)["Progressing"]["status"], conditions(plan)["Progressing"]["reason"]) == ("False", "OperatorForbidden")
    assert (ready(plan)["status"], ready(plan)["reason"]) == ("True", "OperatorForbidden")  # what was made before serves
    assert "not carried out" in ready(plan)["message"]
    assert [(event.type, event.reason) for event in plan.events] == [("Warning", "OperatorForbidden")]
    told = edited | {"status": dict(plan.status)}
    again = observe(told, deployment(three), *pods, outcome=DENIED)
    assert (again.report.status, again.events) == (None, ())
    down = observe(told, deployment(three), outcome=DENIED)
    assert (down.status["phase"], ready(down)["status"], ready(down)["reason"]) == ("Pending", "False", "OperatorForbidden")


def test_a_right_that_is_missing_for_a_server_that_serves_is_told_once_in_an_event():
    serving = after(observe(SERVER, deployment(SERVER), pod(SERVER, **READY)), SERVER)
    denied = Outcome(forbidden={Ref("networking.k8s.io/v1", "NetworkPolicy", "tiny"): "cannot patch resource"})
    plan = observe(serving, deployment(SERVER), pod(SERVER, **READY), outcome=denied)
    assert [(event.type, event.reason) for event in plan.events] == [("Warning", "OperatorForbidden")]
    assert observe(after(plan, SERVER), deployment(SERVER), pod(SERVER, **READY), outcome=denied).events == ()


def test_a_server_whose_address_is_somebody_elses_is_not_available():
    taken = Outcome(taken={Ref("v1", "Service", "tiny"): "nobody"})
    plan = observe(SERVER, deployment(SERVER), pod(SERVER, **READY), outcome=taken)
    assert (conditions(plan)["Available"]["status"], conditions(plan)["Available"]["reason"]) == ("False", "NameConflict")


def test_what_could_not_be_written_for_now_is_told_where_the_progress_is():
    away = Outcome(failed={Ref("apps/v1", "Deployment", "tiny"): "503 etcd is away"})
    plan = observe(SERVER, deployment(SERVER), pod(SERVER, **READY), outcome=away)
    assert conditions(plan)["Accepted"]["status"] == "True"
    assert "Deployment tiny (503 etcd is away)" in conditions(plan)["Progressing"]["message"]
    assert "RolloutStarted" not in [event.reason for event in plan.events]


def test_a_fight_over_an_object_is_told_once_and_forgotten_when_it_is_over():
    fight = Outcome(contested={Ref("apps/v1", "Deployment", "tiny")})
    first = observe(SERVER, deployment(SERVER), pod(SERVER, **READY), outcome=fight)
    assert conditions(first)["Contested"]["reason"] == "DriftLoop"
    assert "Deployment tiny" in conditions(first)["Contested"]["message"]
    assert [event.reason for event in first.events].count("DriftLoop") == 1
    told = after(first, SERVER)
    between = observe(told, deployment(SERVER), pod(SERVER, **READY), now=NOW + 60)  # put back once, and not spoiled again yet
    assert between.report.status is None
    assert between.requeue_after_s is not None
    again = observe(told, deployment(SERVER), pod(SERVER, **READY), now=NOW + 120, outcome=fight)
    assert "DriftLoop" not in [event.reason for event in again.events]
    over = observe(told, deployment(SERVER), pod(SERVER, **READY), now=NOW + 601)
    assert "Contested" not in conditions(over)


# --- monitors ---


def test_a_monitor_without_its_api_is_told_and_holds_nothing_up():
    server = a_server(metrics={"podMonitor": {"enabled": True}})
    plan = observe(server, deployment(server), pod(server, **READY), absent=frozenset({"PodMonitor"}))
    found = conditions(plan)["Monitored"]
    assert (found["status"], found["reason"]) == ("False", "MissingAPI")
    assert "PodMonitor" in found["message"]
    assert (ready(plan)["status"], plan.status["phase"], conditions(plan)["Accepted"]["status"]) == ("True", "Ready", "True")
    assert all(child["kind"] != "PodMonitor" for child in plan.apply)
    made = observe(after(plan, server), deployment(server), pod(server, **READY))
    assert conditions(made)["Monitored"]["status"] == "False"  # applied now, and there once it is seen
    monitor = next(child for child in render(server) if child["kind"] == "PodMonitor")
    later = observe(after(plan, server), deployment(server), pod(server, **READY), monitor)
    assert (conditions(later)["Monitored"]["status"], conditions(later)["Monitored"]["reason"]) == ("True", "Applied")
    assert "Monitored" not in conditions(observe(SERVER, deployment(SERVER), pod(SERVER, **READY), absent=frozenset({"PodMonitor"})))


def test_a_monitor_that_is_refused_or_taken_holds_nothing_up():
    server = a_server(metrics={"podMonitor": {"enabled": True}})
    monitor = next(child for child in render(server) if child["kind"] == "PodMonitor")
    said = Outcome(refused={Ref.of(monitor): "admission webhook denied"})
    plan = observe(server, deployment(server), pod(server, **READY), outcome=said)
    assert conditions(plan)["Monitored"]["reason"] == "NotWritten"
    assert "admission webhook denied" in conditions(plan)["Monitored"]["message"]
    assert (conditions(plan)["Accepted"]["status"], ready(plan)["status"]) == ("True", "True")
    theirs = merge(monitor, {"metadata": {"ownerReferences": [{"uid": "x", "controller": True, "kind": "Y", "name": "z"}]}})
    plan = observe(server, theirs)
    assert conditions(plan)["Monitored"]["reason"] == "NotWritten"
    assert "belongs to Y z" in conditions(plan)["Monitored"]["message"]
    assert "Deployment" in [child["kind"] for child in plan.apply]
    assert conditions(plan)["Accepted"]["status"] == "True"
