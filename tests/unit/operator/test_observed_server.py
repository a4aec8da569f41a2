"""How a server is, as its status tells it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from banyan_operator.plan import Outcome, Ref, World
from banyan_operator.times import rough, stamp
from tests.unit.operator.conftest import DONE, a_server, merge, spoilt, turn
from tests.unit.operator.servers import (
    NOW,
    READY,
    SERVER,
    after,
    conditions,
    container,
    crashed,
    deployment,
    ended,
    observe,
    pod,
    ready,
    replica_set,
    running,
)
from tests.unit.operator.test_desired import render

WAYS_TO_FAIL = ("refused", "forbidden", "taken", "failed")


def test_a_server_whose_pods_all_run_is_ready_with_all_that_printing_needs():
    body = {"state": "ready", "percent": 100, "model": {"contextLength": 2048}, "version": "0.1.0"}
    plan = observe(SERVER, deployment(SERVER), pod(SERVER, **READY), readyz=body)
    status = plan.status
    assert (status["phase"], status["ready"], status["readyReplicas"]) == ("Ready", "1/1", 1)
    assert status["url"] == "http://tiny.team.svc"
    assert status["model"] == {"uri": "pvc://models/tiny-llama", "contextLength": 2048}
    assert status["runtimeVersion"] == "0.1.0"
    assert status["accelerator"] == "cpu"
    assert status["selector"].count("=") == 3
    assert status["currentRevision"] == status["updateRevision"]
    assert {kind: one["status"] for kind, one in conditions(plan).items()} == {
        "Accepted": "True",
        "Available": "True",
        "Progressing": "False",
        "Ready": "True",
        "Degraded": "False",
    }
    assert plan.requeue_after_s is None or plan.apply  # the other children are missing in this world


@pytest.mark.parametrize(("ready_for_s", "again_s"), [(0, 5), (40, 40), (86_400, 300)])
@pytest.mark.parametrize("body", [None, {"state": "loading", "percent": 98}])
def test_a_ready_server_whose_last_answer_is_of_before_is_looked_at_again(body, ready_for_s, again_s):
    """Nothing else would: a pod that is ready and well sends no more news."""
    world = (deployment(SERVER), pod(SERVER, **READY))
    told = after(observe(SERVER, *world, readyz=body, now=NOW - ready_for_s), SERVER)
    assert (told["status"]["phase"], told["status"]["model"].get("contextLength")) == ("Ready", None)
    assert observe(told, *world, readyz=body).requeue_after_s == again_s
    says = observe(told, *world, readyz={"state": "ready", "percent": 100, "model": {"contextLength": 2048}})
    assert (says.status["model"]["contextLength"], says.requeue_after_s) == (2048, None)


SAID: dict[str, Any] = {"state": "ready", "percent": 100, "detail": "", "model": {"contextLength": 2048}, "version": "0.1.0"}


@given(body=spoilt(SAID), loading=st.booleans())
@example(body=SAID | {"model": {"contextLength": "8k"}, "percent": float("nan")}, loading=True)
@example(body=SAID | {"model": {"contextLength": True}, "state": [], "version": "x" * 9000}, loading=False)
@example(body=SAID | {"model": {"contextLength": 2**40}, "detail": "x" * 9000, "percent": -1}, loading=True)
@example(body=SAID | {"model": {"contextLength": 1.5}}, loading=False)
def test_what_a_server_says_that_cannot_be_counts_as_not_said(body, loading):
    status = {"phase": "Running", "containerStatuses": [container(running())]} if loading else READY
    plan = observe(SERVER, deployment(SERVER), pod(SERVER, **status), readyz=body)
    assert plan.status["phase"] == ("Loading" if loading else "Ready")
    model = body.get("model")
    said = model.get("contextLength") if isinstance(model, dict) else None
    told = plan.status["model"].get("contextLength")
    assert told is None or (told == said and not isinstance(said, bool))
    assert plan.status.get("runtimeVersion") in (None, body.get("version"))


def test_one_of_two_failing_is_degraded_not_ready():
    two = a_server(replicas=2)
    plan = observe(two, deployment(two), pod(two, "tiny-a", **READY), pod(two, "tiny-b", **crashed(1)))
    assert plan.status["phase"] == "Degraded"
    assert plan.status["ready"] == "1/2"
    assert conditions(plan)["Degraded"]["reason"] == "SomeReplicasUnavailable"
    assert conditions(plan)["Available"]["status"] == "True"


UNREADY = {"phase": "Running", "containerStatuses": [container(running(), started=True)]}
LOADING = {"phase": "Running", "containerStatuses": [container(running())]}
RESTARTED = {"phase": "Running", "containerStatuses": [container(running(), lastState=ended(1), restartCount=1)]}


def test_a_server_that_took_requests_and_takes_none_is_degraded_one_just_started_is_loading():
    one = observe(SERVER, deployment(SERVER), pod(SERVER, **READY))
    one = observe(after(one, SERVER), deployment(SERVER), pod(SERVER, **UNREADY))
    assert (one.status["phase"], conditions(one)["Degraded"]["reason"], one.events) == ("Degraded", "NotReady", ())
    assert observe(after(one, SERVER), deployment(SERVER), pod(SERVER, **UNREADY)).report.status is None, "so it stays"
    one = observe(after(one, SERVER), deployment(SERVER), pod(SERVER, **READY))
    assert (one.status["phase"], conditions(one)["Degraded"]["status"]) == ("Ready", "False")
    for status, phase in ((LOADING, "Loading"), (UNREADY, "Loading"), (READY, "Ready")):  # its pod was replaced
        one = observe(after(one, SERVER), deployment(SERVER), pod(SERVER, "tiny-y", **status))
        assert one.status["phase"] == phase
        assert "Degraded" not in [event.reason for event in one.events]


def test_one_of_two_that_takes_no_requests_any_more_is_degraded():
    two = a_server(replicas=2)
    both = observe(two, deployment(two), pod(two, "tiny-a", **READY), pod(two, "tiny-b", **READY))
    plan = observe(after(both, two), deployment(two), pod(two, "tiny-a", **READY), pod(two, "tiny-b", **UNREADY))
    assert (plan.status["phase"], plan.status["ready"]) == ("Degraded", "1/2")


def test_a_server_that_crashes_over_and_over_has_one_phase_until_it_comes_up():
    one, told = observe(SERVER, deployment(SERVER), pod(SERVER, **LOADING)), []
    for status in (crashed(1), RESTARTED, crashed(1), RESTARTED):
        now = observe(after(one, SERVER), deployment(SERVER), pod(SERVER, **status))
        one = now if now.report.status is not None else one
        assert (one.status["phase"], conditions(one)["Degraded"]["reason"]) == ("Degraded", "CrashLoop")
        told += [event.reason for event in now.events]
    assert told == ["CrashLoop"]
    assert observe(after(one, SERVER), deployment(SERVER), pod(SERVER, **READY)).status["phase"] == "Ready"


def test_restarts_and_the_last_failure_are_kept_after_the_pod_is_gone():
    first = observe(SERVER, deployment(SERVER), pod(SERVER, **crashed(65, "no weights")))
    assert first.status["lastFailure"]["reason"] == "ModelInvalid"
    assert first.status["lastFailure"]["exitCode"] == 65
    assert first.status["restarts"] == 1
    again = observe(SERVER | {"status": dict(first.status)}, deployment(SERVER), pod(SERVER, **READY))
    assert again.status["lastFailure"] == first.status["lastFailure"] | {"message": ready(first)["message"]}


def test_what_several_conditions_could_say_at_length_one_says_in_the_same_words_through_all_restarts():
    said, one = set(), observe(SERVER, deployment(SERVER), pod(SERVER, **LOADING))
    for count in range(1, 5):
        for status in (
            crashed(65, "no weights"),
            {"phase": "Running", "containerStatuses": [container(running(), lastState=ended(65, "no weights"))]},
        ):
            broken = merge(pod(SERVER, **status), {})
            broken["status"]["containerStatuses"][0]["restartCount"] = count
            now = observe(after(one, SERVER), deployment(SERVER), broken)
            one = now if now.report.status is not None else one
            told = [one.status["lastFailure"], *one.status["conditions"]]
            assert [text["type"] for text in told if "no weights" in text["message"]] == ["Ready"]
            assert conditions(one)["Degraded"]["message"] == "ModelInvalid: see condition Ready."
            said.add(ready(one)["message"])
    assert len(said) == 1


def test_what_a_condition_said_for_others_is_not_lost_with_it():
    first = observe(SERVER, deployment(SERVER), pod(SERVER, **crashed(65, "no weights")))
    text = ready(first)["message"]
    unreadable = merge(after(first, SERVER), {"spec": {"model": {"uri": 5}}})
    going = merge(after(first, SERVER), {"metadata": {"deletionTimestamp": stamp(NOW)}})
    for resource in (unreadable, going):
        then = observe(resource, deployment(SERVER))
        assert ready(then)["reason"] != "ModelInvalid"
        assert (conditions(then)["Degraded"]["message"], then.status["lastFailure"]["message"]) == (text, text)


def test_a_server_is_ready_once_its_service_sends_requests_to_its_pods_and_stays_so_while_they_follow_each_other():
    ready_pod = pod(SERVER, **READY)
    labels = {"kubernetes.io/service-name": "tiny", "app.kubernetes.io/managed-by": "banyan-operator"}
    point = {"conditions": {"ready": False}, "targetRef": {"kind": "Pod", "name": ready_pod["metadata"]["name"]}}
    metadata = {"name": "tiny-a", "labels": labels}
    before = {"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "metadata": metadata, "endpoints": [point]}
    now = merge(before, {"endpoints": [point | {"conditions": {"ready": True}}]})
    waits = observe(SERVER, deployment(SERVER), ready_pod, before)
    assert (ready(waits)["status"], ready(waits)["reason"]) == ("False", "EndpointsPending")
    assert waits.requeue_after_s is not None
    assert waits.requeue_after_s <= 2
    assert not waits.events
    assert ready(observe(SERVER, deployment(SERVER), ready_pod, now))["status"] == "True"
    serving = after(observe(SERVER, deployment(SERVER), ready_pod, now), SERVER)
    assert observe(serving, deployment(SERVER), ready_pod, before, now=NOW + 60).report.status is None  # it is Ready as before
    young = merge(ready_pod, {"status": {"conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": stamp(NOW - 1)}]}})
    assert ready(observe(SERVER, deployment(SERVER), young, now))["reason"] == "EndpointsPending"
    ahead = merge(young, {"status": {"conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": stamp(NOW + 600)}]}})
    assert ready(observe(SERVER, deployment(SERVER), ahead, now))["status"] == "True"  # the node's clock is wrong


def test_zero_replicas_are_stopped_and_not_ready():
    none = a_server(replicas=0)
    plan = observe(none, deployment(none))
    assert (plan.status["phase"], plan.status["ready"]) == ("Stopped", "0/0")
    assert (ready(plan)["status"], ready(plan)["reason"]) == ("False", "ScaledToZero")
    assert not plan.events


@pytest.mark.parametrize("outcome", [DONE, *(Outcome(**{why: {Ref("apps/v1", "Deployment", "tiny"): "no"}}) for why in WAYS_TO_FAIL)])
def test_zero_replicas_without_a_deployment_are_not_ready(outcome):
    plan = observe(a_server(replicas=0), outcome=outcome)
    assert ready(plan)["status"] != "True"
    assert plan.status["phase"] in ("Pending", "Failed")


def test_an_ingress_without_an_address_keeps_the_server_from_being_ready():
    server = a_server(ingress={"hosts": ["llm.example.com"], "tlsSecretName": "tls", "className": "nginx"})
    ingress = next(child for child in render(server) if child["kind"] == "Ingress")
    plan = observe(server, deployment(server), pod(server, **READY), ingress)
    assert ready(plan)["reason"] == "RouteNotReady"
    assert "class nginx" in ready(plan)["message"]
    ingress["status"] = {"loadBalancer": {"ingress": [{"ip": "10.0.0.1"}]}}
    plan = observe(server, deployment(server), pod(server, **READY), ingress)
    assert ready(plan)["status"] == "True"
    assert plan.status["url"] == "https://llm.example.com"


def test_the_longest_names_that_a_spec_may_have_can_be_told():
    resource = "accelerators.internal.platform.example-corporation.com/" + "g" * 73
    host, path = ".".join(["h" * 62] * 4) + ".x", "/" + "p" * 255
    server = a_server(
        accelerator={"count": 1, "resourceName": resource},
        ingress={"hosts": [host], "path": path, "tlsSecretName": "tls", "className": "nginx"},
    )
    ingress = next(child for child in render(server) if child["kind"] == "Ingress")
    ingress["status"] = {"loadBalancer": {"ingress": [{"ip": "10.0.0.1"}]}}
    plan = observe(server, deployment(server), pod(server, **READY), ingress)
    assert plan.status["accelerator"] == f"1 x {resource}"
    assert plan.status["url"] == f"https://{host}{path}"


def test_a_server_all_of_which_runs_tells_of_a_service_that_is_being_deleted():
    service = next(child for child in render(SERVER) if child["kind"] == "Service" and child["metadata"]["name"] == "tiny")
    leaving = merge(service, {"metadata": {"deletionTimestamp": stamp(NOW), "uid": "s"}})
    plan = observe(SERVER, deployment(SERVER), pod(SERVER, **READY), leaving)
    progressing = conditions(plan)["Progressing"]
    assert (progressing["status"], progressing["reason"]) == ("True", "Recreating")
    assert "Service tiny" in progressing["message"]
    assert ready(plan)["status"] == "True"


@pytest.mark.parametrize(
    ("point", "host"),
    [({"hostname": "lb.example.com"}, "lb.example.com"), ({"ip": "192.0.2.7"}, "192.0.2.7"), ({"ip": "2001:db8::7"}, "[2001:db8::7]")],
)
def test_a_load_balancers_address_is_shown(point, host):
    server = a_server(service={"type": "LoadBalancer", "port": 8080})
    service = next(child for child in render(server) if child["kind"] == "Service" and child["metadata"]["name"] == "tiny")
    service["status"] = {"loadBalancer": {"ingress": [point]}}
    assert observe(server, deployment(server), pod(server, **READY), service).status["url"] == f"http://{host}:8080"


def test_a_transition_time_moves_only_with_the_status():
    loading = observe(SERVER, deployment(SERVER), pod(SERVER, phase="Running", containerStatuses=[container(running())]))
    later = observe(after(loading, SERVER), deployment(SERVER), pod(SERVER, **READY), now=NOW + 60)
    assert ready(loading)["lastTransitionTime"] == stamp(NOW)
    assert ready(later)["lastTransitionTime"] == stamp(NOW + 60)
    assert conditions(later)["Accepted"]["lastTransitionTime"] == stamp(NOW)


def test_an_unchanged_status_is_not_written():
    first = observe(SERVER, deployment(SERVER), pod(SERVER, **READY))
    again = observe(after(first, SERVER), deployment(SERVER), pod(SERVER, **READY), now=NOW + 60)
    assert again.report.status is None
    assert again.events == ()


@pytest.mark.parametrize(
    ("duration", "text"),
    [(0, "0s"), (45, "45s"), (61, "2m"), (59 * 60 + 1, "1h"), (4800, "1h20m"), (7200, "2h"), (86400 * 3 + 4 * 3600, "3d4h")],
)
def test_durations_are_rounded_up_to_two_units(duration, text):
    assert rough(duration) == text


# --- whose pods they are ---


def test_only_pods_of_the_servers_own_deployment_count():
    above = deployment(SERVER)
    orphan = merge(pod(SERVER, "stray", **READY), {"metadata": {"ownerReferences": None}})
    of_another = pod(SERVER, "other", **READY)
    other = merge(above, {"metadata": {"uid": "d2", "name": "theirs"}})
    of_another["metadata"]["ownerReferences"][0]["uid"] = replica_set(other)["metadata"]["uid"]
    plan = observe(SERVER, above, replica_set(above), replica_set(other), orphan, of_another)
    assert (plan.status["ready"], plan.status["replicas"]) == ("0/1", 0)
    assert (ready(plan)["status"], conditions(plan)["Available"]["status"]) == ("Unknown", "False")
    degraded = conditions(plan)["Degraded"]
    assert (degraded["status"], degraded["reason"]) == ("True", "ForeignPods")
    assert "other, stray" in degraded["message"]
    assert "ForeignPods" in [event.reason for event in plan.events]


def test_pods_of_a_deployment_that_lost_its_owner_count_while_it_is_put_back():
    lost = merge(deployment(SERVER), {"metadata": {"ownerReferences": None}})
    plan = observe(SERVER, lost, pod(SERVER, **READY))
    assert (plan.status["phase"], plan.status["ready"], ready(plan)["status"]) == ("Ready", "1/1", "True")
    assert conditions(plan)["Progressing"]["reason"] == "UpToDate"
    assert "ForeignPods" not in [event.reason for event in plan.events]


def test_pods_of_a_deployment_of_somebody_else_with_the_servers_name_do_not_count():
    foreign = merge(deployment(SERVER), {"metadata": {"ownerReferences": [{"uid": "x", "controller": True, "kind": "Y", "name": "z"}]}})
    plan = observe(SERVER, foreign, pod(SERVER, **READY))
    assert plan.status["ready"] == "0/1"
    assert conditions(plan)["Accepted"]["reason"] == "NameConflict"


def test_a_pod_whose_replica_set_is_not_seen_yet_is_nobodys_and_blamed_on_nobody():
    plan = turn(SERVER, World(now=NOW, children=(deployment(SERVER), pod(SERVER, **READY))))
    assert plan.status["ready"] == "0/1"
    assert conditions(plan)["Degraded"]["status"] == "False"


def test_a_server_that_is_being_deleted_tells_what_is_left_of_it():
    """Its children may go before it does: whoever deletes it in the foreground waits for them, and finalizers of others for it."""
    world = (deployment(SERVER), replica_set(deployment(SERVER)), pod(SERVER, **READY))
    before = after(observe(SERVER, *world), SERVER)
    assert before["status"]["ready"] == "1/1"
    going = merge(before, {"metadata": {"deletionTimestamp": stamp(NOW)}})
    for left, told, available in ((world, "1/1", "True"), (world[:2], "0/1", "False"), ((), "0/1", "False")):
        plan = observe(going, *left)
        assert (plan.status["ready"], conditions(plan)["Ready"]["status"], conditions(plan)["Available"]["status"]) == (
            told,
            "False",
            available,
        )
        assert plan.status["url"] == before["status"]["url"]
