"""Why a server is not ready, row by row of the table, in words a user can act on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from banyan_operator.desired.metadata import SPEC_HASH
from banyan_operator.plan import Manifest, Plan, World
from banyan_operator.reconcile import reconcile
from banyan_operator.times import rough, stamp
from tests.operator.conftest import LOCAL, SETTINGS, a_server, merge
from tests.operator.test_desired import render, workload

NOW = 1_700_000_000.0


def deployment(manifest: Manifest, **status: Any) -> Manifest:
    live = merge(workload(render(manifest)), {"metadata": {"uid": "d", "generation": 1}})
    live["status"] = {"observedGeneration": 1, "conditions": []} | status
    return live


def pod(manifest: Manifest, name: str = "tiny-x", *, age: float = 30, revision: str | None = None, **status: Any) -> Manifest:
    template = workload(render(manifest))["spec"]["template"]
    labels, annotations = template["metadata"]["labels"], dict(template["metadata"]["annotations"])
    if revision is not None:
        annotations[SPEC_HASH] = revision
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels, "annotations": annotations, "creationTimestamp": stamp(NOW - age)},
        "spec": template["spec"],
        "status": {"phase": "Pending", "conditions": []} | status,
    }


def container(state: dict[str, Any], **more: Any) -> dict[str, Any]:
    base = {"name": "server", "image": "registry.example/banyan-runtime:0.1", "ready": False, "started": False, "restartCount": 0}
    return base | {"state": state} | more


def ended(code: int, message: str = "", reason: str = "Error") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, "message": message, "finishedAt": stamp(NOW - 5)}}


def running(age: float = 10) -> dict[str, Any]:
    return {"running": {"startedAt": stamp(NOW - age)}}


def crashed(code: int, message: str = "", reason: str = "Error") -> dict[str, Any]:
    one = container({"waiting": {"reason": "CrashLoopBackOff"}}, lastState=ended(code, message, reason), restartCount=1)
    return {"phase": "Running", "containerStatuses": [one]}


READY = {
    "phase": "Running",
    "conditions": [{"type": "Ready", "status": "True"}],
    "containerStatuses": [container(running(), ready=True, started=True)],
}


def observe(manifest: Manifest, *children: Manifest, settings: Any = SETTINGS, **world: Any) -> Plan:
    return reconcile(manifest, World(now=NOW, children=children, **world), settings)


def conditions(plan: Plan) -> dict[str, dict[str, Any]]:
    assert plan.status is not None
    return {one["type"]: one for one in plan.status["conditions"]}


def ready(plan: Plan) -> dict[str, Any]:
    return conditions(plan)["Ready"]


SERVER = a_server(resources={"limits": {"memory": "4Gi"}})
GPU = a_server(accelerator={"count": 1})


def unschedulable(text: str) -> dict[str, Any]:
    return {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text}]}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"containerStatuses": [container({"waiting": {"reason": reason, "message": message}})]}


TABLE: list[tuple[str, Manifest, dict[str, Any], list[str]]] = [
    ("InsufficientAccelerators", GPU, unschedulable("0/3 nodes: 3 Insufficient nvidia.com/gpu."), ["1 x nvidia.com/gpu", "ask for fewer"]),
    ("Unschedulable", SERVER, unschedulable("0/3 nodes: 3 Insufficient memory."), ["3 Insufficient memory", "resources.requests"]),
    (
        "VolumeNotReady",
        SERVER,
        unschedulable('0/1 nodes: persistentvolumeclaim "models" not found.'),
        ['"models" not found', "Create the claim"],
    ),
    ("ImagePullFailed", SERVER, waiting("ImagePullBackOff", "Back-off: 401 Unauthorized"), ["banyan-runtime:0.1", "imagePullSecrets"]),
    ("ImagePullFailed", SERVER, waiting("ErrImagePull", "not found"), ["Check the image's name"]),
    ("ImagePullFailed", SERVER, waiting("InvalidImageName"), ["cannot be pulled"]),
    ("ConfigMissing", SERVER, waiting("CreateContainerConfigError", 'secret "x" not found'), ['secret "x" not found', "Create it"]),
    ("ContainerStartFailed", SERVER, waiting("CreateContainerError", "no such file"), ["no such file", "runtime image"]),
    ("ContainerStartFailed", SERVER, crashed(128, "exec: not found", "StartError"), ["exec: not found"]),
    (
        "RuntimeConfigInvalid",
        SERVER,
        crashed(64, '{"code":"ConfigError","message":"--page-size=3 is wrong"}'),
        ["--page-size=3", "spec.runtime"],
    ),
    ("RuntimeConfigInvalid", SERVER, crashed(78), ["spec.runtime"]),
    ("OOMKilled", SERVER, crashed(137, "", "OOMKilled"), ["4Gi", "resources.limits.memory"]),
    ("OOMKilled", SERVER, crashed(137), ["4Gi"]),
    (
        "ModelInvalid",
        SERVER,
        crashed(65, '{"code":"ModelError","message":"config.json is missing"}'),
        ["config.json is missing", "spec.model.uri"],
    ),
    ("ModelAccessDenied", SERVER, crashed(77, '{"code":"AccessError","message":"403"}'), ["credentials"]),
    ("ModelDownloadFailed", SERVER, crashed(69), ["spec.model.uri"]),
    ("ModelDownloadFailed", SERVER, crashed(74), ["spec.model.uri"]),
    ("AcceleratorOutOfMemory", GPU, crashed(70, '{"code":"cuda_oom","message":"out of memory"}'), ["memoryPercent", "contextLength"]),
    ("CrashLoop", SERVER, crashed(1, "Traceback ...\nKeyError: 'x'"), ["exit code 1", "KeyError: 'x'", "kubectl logs tiny-x -c server"]),
    ("CrashLoop", SERVER, {"phase": "Running", "containerStatuses": [container(ended(139))]}, ["exit code 139"]),
    ("LoadingSlow", SERVER, {"phase": "Running", "containerStatuses": [container(running(901))]}, ["901 s", "startupTimeoutSeconds"]),
    ("Loading", SERVER, {"phase": "Running", "containerStatuses": [container(running())]}, ["loading 43 %, 3 of 7 files"]),
    ("NotReady", SERVER, {"phase": "Running", "containerStatuses": [container(running(), started=True)]}, ["takes no requests"]),
    ("Starting", SERVER, waiting("ContainerCreating"), ["ContainerCreating"]),
    ("Disrupted", SERVER, {"phase": "Failed", "reason": "Evicted", "message": "low on memory"}, ["Evicted: low on memory", "replaced"]),
]


@pytest.mark.parametrize(("reason", "server", "status", "words"), TABLE)
def test_each_state_of_a_pod_has_its_reason_and_next_step(reason, server, status, words):
    plan = observe(server, deployment(server), pod(server, **status), readyz={"state": "loading", "percent": 43, "detail": "3 of 7 files"})
    found = ready(plan)
    assert (found["status"], found["reason"]) == ("False", reason)
    assert "pod tiny-x" in found["message"]
    for word in words:
        assert word in found["message"]


def test_a_volume_that_does_not_come_is_told_after_two_minutes_with_the_events_words():
    waits = pod(SERVER, age=130, **waiting("ContainerCreating"))
    event = {"reason": "FailedMount", "message": 'persistentvolumeclaim "models" not found', "involvedObject": {"name": "tiny-x"}}
    assert ready(observe(SERVER, deployment(SERVER), waits))["reason"] == "Starting"
    found = ready(observe(SERVER, deployment(SERVER), waits, events=(event,)))
    assert found["reason"] == "VolumeNotReady"
    assert "models" in found["message"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('pods "x" is forbidden: exceeded quota: q, requested: memory=4Gi', "QuotaExceeded"),
        ('pods "x" is forbidden: violates PodSecurity "restricted:latest": privileged', "PodSecurityDenied"),
        ("admission webhook denied", "PodsNotCreated"),
    ],
)
def test_pods_that_cannot_be_made_are_explained(text, reason):
    failure = {"type": "ReplicaFailure", "status": "True", "message": text}
    found = ready(observe(SERVER, deployment(SERVER, conditions=[failure])))
    assert found["reason"] == reason
    assert text.split(":")[-1].strip() in found["message"]


def test_a_pod_that_does_not_go_away_is_told():
    gone = pod(SERVER, phase="Running")
    gone["metadata"]["deletionTimestamp"] = stamp(NOW - 90)
    assert ready(observe(SERVER, deployment(SERVER), gone))["reason"] == "TerminationStuck"


def test_a_killed_process_of_local_mode_is_no_memory_matter():
    found = ready(observe(SERVER, deployment(SERVER), pod(SERVER, **crashed(137)), settings=LOCAL))
    assert found["reason"] == "CrashLoop"
    assert "(killed)" in found["message"]


def test_the_worst_pod_decides_not_the_newest():
    loading = pod(SERVER, "tiny-new", age=5, phase="Running", containerStatuses=[container(running())])
    broken = pod(SERVER, "tiny-old", age=50, **crashed(64))
    two = a_server(replicas=2, resources={"limits": {"memory": "4Gi"}})
    assert ready(observe(two, deployment(two), loading, broken))["reason"] == "RuntimeConfigInvalid"


def test_a_cause_stays_until_the_next_attempt_has_come_up():
    again = container(running(), lastState=ended(65, "no weights"), restartCount=2)
    found = ready(observe(SERVER, deployment(SERVER), pod(SERVER, phase="Running", containerStatuses=[again])))
    assert found["reason"] == "ModelInvalid"
    assert "started again" in found["message"]


def test_ready_counts_only_pods_of_the_wanted_revision():
    plan = observe(SERVER, deployment(SERVER), pod(SERVER, "tiny-old", revision="0123456789", **READY))
    assert plan.status["phase"] == "Updating"
    assert plan.status["ready"] == "0/1"
    assert ready(plan)["reason"] == "RollingOut"
    assert conditions(plan)["Available"]["status"] == "True"
    assert "0123456789" in conditions(plan)["Progressing"]["message"]


def test_a_new_pod_without_an_accelerator_during_a_rollout_points_at_max_surge():
    old = pod(GPU, "tiny-old", revision="0123456789", **READY)
    new = pod(GPU, "tiny-new", **unschedulable("Insufficient nvidia.com/gpu"))
    assert "spec.rollout.maxSurge to 0" in ready(observe(GPU, deployment(GPU), old, new))["message"]


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


def test_the_drivers_own_address_is_shown_where_it_has_one():
    plan = observe(SERVER, deployment(SERVER), pod(SERVER, **READY), settings=LOCAL, server_url="http://127.0.0.1:20001")
    assert plan.status["url"] == "http://127.0.0.1:20001"


def test_one_of_two_failing_is_degraded_not_ready():
    two = a_server(replicas=2)
    plan = observe(two, deployment(two), pod(two, "tiny-a", **READY), pod(two, "tiny-b", **crashed(1)))
    assert plan.status["phase"] == "Degraded"
    assert plan.status["ready"] == "1/2"
    assert conditions(plan)["Degraded"]["reason"] == "SomeReplicasUnavailable"
    assert conditions(plan)["Available"]["status"] == "True"


def test_restarts_and_the_last_failure_are_kept_after_the_pod_is_gone():
    first = observe(SERVER, deployment(SERVER), pod(SERVER, **crashed(65, "no weights")))
    assert first.status["lastFailure"]["reason"] == "ModelInvalid"
    assert first.status["lastFailure"]["exitCode"] == 65
    assert first.status["restarts"] == 1
    again = observe(SERVER | {"status": dict(first.status)}, deployment(SERVER), pod(SERVER, **READY))
    assert again.status["lastFailure"] == first.status["lastFailure"]


def test_a_rollout_past_its_deadline_without_a_ready_pod_has_failed():
    late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    plan = observe(SERVER, deployment(SERVER, conditions=[late]), pod(SERVER, **crashed(64)))
    assert plan.status["phase"] == "Failed"
    assert conditions(plan)["Progressing"]["reason"] == "DeadlineExceeded"


def test_zero_replicas_are_ready_and_stopped():
    none = a_server(replicas=0)
    plan = observe(none, deployment(none))
    assert (plan.status["phase"], plan.status["ready"]) == ("Stopped", "0/0")
    assert (ready(plan)["status"], ready(plan)["reason"]) == ("True", "ScaledToZero")


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
    local = observe(server, deployment(server), pod(server, **READY), settings=LOCAL)
    assert "RouteReady" not in conditions(local)
    assert "no effect in local mode" in conditions(local)["Accepted"]["message"]


def test_a_load_balancers_address_is_shown():
    server = a_server(service={"type": "LoadBalancer", "port": 8080})
    service = next(child for child in render(server) if child["kind"] == "Service" and child["metadata"]["name"] == "tiny")
    service["status"] = {"loadBalancer": {"ingress": [{"hostname": "lb.example.com"}]}}
    assert observe(server, deployment(server), pod(server, **READY), service).status["url"] == "http://lb.example.com:8080"


def test_a_transition_time_moves_only_with_the_status():
    loading = observe(SERVER, deployment(SERVER), pod(SERVER, phase="Running", containerStatuses=[container(running())]))
    world = World(now=NOW + 60, children=(deployment(SERVER), pod(SERVER, **READY)))
    later = reconcile(SERVER | {"status": dict(loading.status)}, world, SETTINGS)
    before, after = conditions(loading), conditions(later)
    assert before["Ready"]["lastTransitionTime"] == stamp(NOW)
    assert after["Ready"]["lastTransitionTime"] == stamp(NOW + 60)
    assert after["Accepted"]["lastTransitionTime"] == stamp(NOW)


def test_an_unchanged_status_is_not_written():
    first = observe(SERVER, deployment(SERVER), pod(SERVER, **READY))
    again = reconcile(
        SERVER | {"status": dict(first.status)},
        World(now=NOW + 60, children=(deployment(SERVER), pod(SERVER, **READY))),
        replace(SETTINGS),
    )
    assert again.status is None
    assert again.events == ()


@pytest.mark.parametrize(
    ("duration", "text"),
    [(0, "0s"), (45, "45s"), (61, "2m"), (59 * 60 + 1, "1h"), (4800, "1h20m"), (7200, "2h"), (86400 * 3 + 4 * 3600, "3d4h")],
)
def test_durations_are_rounded_up_to_two_units(duration, text):
    assert rough(duration) == text
