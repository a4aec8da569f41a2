"""Why a server is not ready, row by row of the table, in words a user can act on."""

from __future__ import annotations

from typing import Any

import pytest

from banyan_operator.observed.diagnosis import View, worst
from banyan_operator.observed.pods import pods_of
from banyan_operator.plan import Manifest
from banyan_operator.times import stamp
from tests.unit.operator.conftest import a_server, merge
from tests.unit.operator.servers import (
    GPU,
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
    running,
    unschedulable,
    waiting,
)

TABLE: list[tuple[str, Manifest, dict[str, Any], list[str]]] = [
    ("InsufficientAccelerators", GPU, unschedulable("0/3 nodes: 3 Insufficient nvidia.com/gpu."), ["1 x nvidia.com/gpu"]),
    (
        "InsufficientAccelerators",
        GPU,
        unschedulable(
            "0/3 nodes: 1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, 1 node(s) had untolerated taint "
            "{team: vision}, 1 Insufficient nvidia.com/gpu."
        ),
        ["team", "spec.scheduling.tolerations"],
    ),
    (
        "InsufficientAccelerators",
        GPU,
        unschedulable("0/3 nodes: 2 node(s) had untolerated taint(s), 1 Insufficient nvidia.com/gpu."),
        ["kubectl describe node", "spec.scheduling.tolerations"],
    ),
    (
        "InsufficientAccelerators",
        GPU,
        unschedulable("0/3 nodes: 2 node(s) had untolerated taint {karpenter.sh/disrupted: }, 1 Insufficient nvidia.com/gpu."),
        ["!spec.scheduling.tolerations"],
    ),
    ("Unschedulable", SERVER, unschedulable("0/3 nodes: 3 Insufficient memory."), ["3 Insufficient memory", "resources.requests"]),
    (
        "VolumeNotReady",
        SERVER,
        unschedulable('0/1 nodes: persistentvolumeclaim "models" not found.'),
        ['"models" not found'],
    ),
    ("ImagePullFailed", SERVER, waiting("ImagePullBackOff", "Back-off: 401 Unauthorized"), ["banyan-runtime:0.1", "imagePullSecrets"]),
    ("ImagePullFailed", SERVER, waiting("ErrImagePull", "not found"), ["banyan-runtime:0.1"]),
    ("ImagePullFailed", SERVER, waiting("InvalidImageName"), ["banyan-runtime:0.1"]),
    ("ConfigMissing", SERVER, waiting("CreateContainerConfigError", 'secret "x" not found'), ['secret "x" not found']),
    ("ContainerStartFailed", SERVER, waiting("CreateContainerError", "no such file"), ["no such file"]),
    ("ContainerStartFailed", SERVER, crashed(128, "exec: not found", "StartError"), ["exec: not found"]),
    (
        "RuntimeConfigInvalid",
        SERVER,
        crashed(64, '{"code":"invalid_flag","field":"--page-size","value":"3","message":"is wrong"}'),
        ["--page-size=3", "spec.runtime"],
    ),
    ("RuntimeConfigInvalid", SERVER, crashed(64), ["spec.runtime"]),
    ("OOMKilled", SERVER, crashed(137, "", "OOMKilled"), ["4Gi", "resources.limits.memory"]),
    ("OOMKilled", SERVER, crashed(137), ["4Gi"]),
    (
        "ModelInvalid",
        SERVER,
        crashed(65, '{"code":"invalid_model","message":"config.json is missing"}'),
        ["config.json is missing", "spec.model.uri"],
    ),
    ("ModelAccessDenied", SERVER, crashed(77, '{"code":"storage_denied","message":"403"}'), ["spec.security.fsGroup"]),
    ("ModelAccessDenied", a_server(model={"uri": "hf://org/m"}), crashed(77), ["spec.model.huggingFace.tokenSecretRef"]),
    ("ModelAccessDenied", a_server(model={"uri": "s3://models/m"}), crashed(77), ["spec.model.s3.credentialsSecretRef", "!fsGroup"]),
    (
        "ModelDownloadFailed",
        a_server(model={"uri": "hf://org/m"}),
        crashed(75, '{"code":"source_unreachable","message":"no answer"}'),
        ["no answer"],
    ),
    (
        "CacheNotWritable",
        SERVER,
        crashed(77, '{"code":"cache_not_writable","message":"/cache: no"}'),
        ["/cache: no", "spec.security.fsGroup"],
    ),
    ("TemporaryFailure", SERVER, crashed(75, '{"code":"unavailable","message":"can\'t start new thread"}'), ["can't start"]),
    ("AcceleratorOutOfMemory", GPU, crashed(70, '{"code":"out_of_memory","message":"x"}'), ["memoryPercent", "contextLength"]),
    ("CrashLoop", SERVER, crashed(70, '{"code":"host_out_of_memory","message":"this machine ran out of memory"}'), ["this machine"]),
    ("CrashLoop", SERVER, crashed(1, "Traceback ...\nKeyError: 'x'"), ["exit code 1", "KeyError: 'x'", "kubectl logs tiny-x -c server"]),
    ("CrashLoop", SERVER, {"phase": "Running", "containerStatuses": [container(ended(139))]}, ["exit code 139"]),
    ("LoadingSlow", SERVER, {"phase": "Running", "containerStatuses": [container(running(901))]}, ["901 s", "startupTimeoutSeconds"]),
    ("Loading", SERVER, {"phase": "Running", "containerStatuses": [container(running())]}, ["loading 43 %, 3 of 7 files"]),
    ("NotReady", SERVER, {"phase": "Running", "containerStatuses": [container(running(), started=True)]}, []),
    ("Starting", SERVER, waiting("ContainerCreating"), ["ContainerCreating"]),
    ("Disrupted", SERVER, {"phase": "Failed", "reason": "Evicted", "message": "low on memory"}, ["Evicted: low on memory"]),
]


@pytest.mark.parametrize(("reason", "server", "status", "words"), TABLE)
def test_each_state_of_a_pod_has_its_reason_and_next_step(reason, server, status, words):
    plan = observe(server, deployment(server), pod(server, **status), readyz={"state": "loading", "percent": 43, "detail": "3 of 7 files"})
    found = ready(plan)
    assert (found["status"], found["reason"]) == ("False", reason)
    assert "pod tiny-x" in found["message"]
    for word in words:  # values, fields, and what Kubernetes or the runtime said
        assert (word.removeprefix("!") in found["message"]) != word.startswith("!")


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


def in_local_mode(server, seen):
    view = View(now=NOW, startup_timeout_s=1800, accelerators="", local=True, model_uri=server["spec"]["model"]["uri"])
    owner = {"metadata": {"uid": seen["metadata"]["ownerReferences"][0]["uid"]}}
    return worst(pods_of([owner], [seen]), view)


def test_a_killed_process_of_local_mode_is_no_memory_matter():
    found = in_local_mode(SERVER, pod(SERVER, **crashed(137)))
    assert found.reason == "CrashLoop"
    assert "137" in found.message


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("pvc://models/tiny", ("banyan-runtime models fetch tiny", "--volume models=DIR")),
        ("pvc://weights/tiny", ("claim weights", "--volume weights=DIR")),
    ],
)
def test_a_claim_of_local_mode_without_the_model_is_told_as_the_folder_that_it_is(uri, words):
    server = a_server(model={"uri": uri})
    missing = pod(server, **crashed(65, '{"code":"model_not_found","message":"no such folder"}'))
    found = in_local_mode(server, missing)
    assert found.reason == "ModelInvalid"
    assert all(word in found.message for word in words), found.message
    in_a_cluster = ready(observe(server, deployment(server), missing))["message"]
    assert "spec.model.uri" in in_a_cluster
    assert "--volume" not in in_a_cluster


def test_the_worst_pod_decides_not_the_newest():
    loading = pod(SERVER, "tiny-new", age=5, phase="Running", containerStatuses=[container(running())])
    broken = pod(SERVER, "tiny-old", age=50, **crashed(64))
    two = a_server(replicas=2, resources={"limits": {"memory": "4Gi"}})
    assert ready(observe(two, deployment(two), loading, broken))["reason"] == "RuntimeConfigInvalid"


def test_a_cause_stays_until_the_next_attempt_has_come_up():
    again = container(running(), lastState=ended(65, "no weights"), restartCount=2)
    found = ready(observe(SERVER, deployment(SERVER), pod(SERVER, phase="Running", containerStatuses=[again])))
    assert found["reason"] == "ModelInvalid"


def test_a_new_pod_without_an_accelerator_during_a_rollout_points_at_max_surge():
    old = pod(GPU, "tiny-old", revision="0123456789", **READY)
    new = pod(GPU, "tiny-new", **unschedulable("Insufficient nvidia.com/gpu"))
    plan = observe(GPU, deployment(GPU), old, new)
    assert ready(plan)["reason"] == "RollingOut"
    assert "spec.rollout.maxSurge" in conditions(plan)["Degraded"]["message"]


def test_a_new_pod_that_old_ones_leave_no_room_points_at_max_surge_too():
    """Such as one that never got ready, and holds what the corrected one needs."""
    old = pod(SERVER, "tiny-old", revision="0123456789", **crashed(65))
    new = pod(SERVER, "tiny-new", **unschedulable("0/1 nodes are available: 1 Insufficient cpu."))
    hint = "spec.rollout.maxSurge"
    assert hint in ready(observe(SERVER, deployment(SERVER), old, new))["message"]
    assert hint not in ready(observe(SERVER, deployment(SERVER), new))["message"]


def test_a_default_image_that_cannot_be_pulled_points_at_refresh():
    """It stays recorded for the spec after the chart names another."""
    asked = waiting("ErrImagePull", "not found")
    assert "spec.rollout.refresh" in ready(observe(SERVER, deployment(SERVER), pod(SERVER, **asked)))["message"]
    own = a_server(runtime={"image": "registry.example/own:1"})
    assert "refresh" not in ready(observe(own, deployment(own), pod(own, **asked)))["message"]


SILENT = READY | {"conditions": [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]}


def test_a_claim_that_gets_no_volume_is_named_with_its_own_event():
    waits = pod(SERVER, **unschedulable("0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims."))
    claim = {"kind": "PersistentVolumeClaim", "name": "tiny--cache"}
    event = {"reason": "ProvisioningFailed", "message": 'storageclass.storage.k8s.io "fast" not found', "involvedObject": claim}
    found = ready(observe(SERVER, deployment(SERVER), waits, events=(event,)))
    assert found["reason"] == "VolumeNotReady"
    assert all(word in found["message"] for word in ("tiny--cache", '"fast"', "kubectl get storageclass"))


def test_a_lost_node_is_named_with_what_happens_next():
    plan = observe(SERVER, deployment(SERVER), pod(SERVER, **SILENT))
    assert (ready(plan)["status"], ready(plan)["reason"]) == ("False", "NodeLost")
    for words in ("node n7", "pod tiny-x", "300 s"):
        assert words in ready(plan)["message"]
    two = a_server(replicas=2)
    plan = observe(two, deployment(two), pod(two, "tiny-a", **READY), pod(two, "tiny-b", **SILENT))
    assert (plan.status["phase"], plan.status["ready"]) == ("Degraded", "1/2")
    assert conditions(plan)["Degraded"]["reason"] == "SomeReplicasUnavailable"
    assert "node n7" in ready(plan)["message"]
    patient = merge(
        pod(SERVER, **SILENT),
        {"spec": {"tolerations": [{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute", "tolerationSeconds": 30}]}},
    )
    assert "30 s" in ready(observe(SERVER, deployment(SERVER), patient))["message"]


@pytest.mark.parametrize(
    "ready_condition",
    [{"type": "Ready", "status": "False", "reason": "ReadinessGatesNotReady"}, {"type": "Ready", "status": "True"}],
)
def test_a_pod_that_its_kubelet_speaks_for_is_not_lost(ready_condition):
    alive = pod(SERVER, **(SILENT | {"conditions": [ready_condition]}))
    assert ready(observe(SERVER, deployment(SERVER), alive))["reason"] != "NodeLost"


def test_a_pod_that_was_given_up_with_its_node_was_taken_away():
    """The garbage collector of pods ends one in name only: what its kubelet last said of the containers stands."""
    target = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC", "message": "node does not exist"}
    gone = pod(SERVER, **(SILENT | {"phase": "Failed", "conditions": [{"type": "Ready", "status": "False"}, target]}))
    assert ready(observe(SERVER, deployment(SERVER), gone))["reason"] == "Disrupted"


def test_why_an_image_cannot_be_pulled_stays_while_the_kubelet_waits():
    answer = 'failed to resolve reference "registry.example/banyan-runtime:0.1": not found'
    first = observe(SERVER, deployment(SERVER), pod(SERVER, **waiting("ErrImagePull", answer)))
    backing_off = pod(SERVER, **waiting("ImagePullBackOff", 'Back-off pulling image "registry.example/banyan-runtime:0.1"'))
    again = observe(after(first, SERVER), deployment(SERVER), backing_off)
    assert again.report.status is None  # the same words: nothing to write
    event = {"reason": "Failed", "message": f"Failed to pull image: {answer}", "involvedObject": {"name": "tiny-x"}}
    late = observe(SERVER, deployment(SERVER), backing_off)
    assert "Back-off" in ready(late)["message"]
    assert answer in ready(observe(after(late, SERVER), deployment(SERVER), backing_off, events=(event,)))["message"]
