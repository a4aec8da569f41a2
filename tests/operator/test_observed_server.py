"""Why a server is not ready, row by row of the table, in words a user can act on."""

from __future__ import annotations

from typing import Any

import pytest

from banyan_operator.desired.metadata import SPEC_HASH
from banyan_operator.plan import Manifest, Outcome, Ref, World
from banyan_operator.times import rough, stamp
from tests.operator.conftest import DONE, LOCAL, SETTINGS, Turn, a_server, controlled, merge, turn
from tests.operator.test_desired import render, workload

NOW = 1_700_000_000.0
WAYS_TO_FAIL = ("refused", "forbidden", "taken", "failed")


def deployment(manifest: Manifest, **status: Any) -> Manifest:
    live: Manifest = merge(workload(render(manifest)), {"metadata": {"uid": "d", "generation": 1}})
    live["status"] = {"observedGeneration": 1, "conditions": []} | status
    return live


def replica_set(owner: Manifest, revision: str | None = None, **status: Any) -> Manifest:
    """Of a Deployment, for its own pods or those of an earlier revision."""
    template = owner["spec"]["template"]
    if revision is not None:
        template = merge(template, {"metadata": {"annotations": {SPEC_HASH: revision}}})
    revision = template["metadata"]["annotations"][SPEC_HASH]
    meta = {"name": f"tiny-{revision}", "uid": f"rs-{owner['metadata']['uid']}-{revision}", "labels": template["metadata"]["labels"]}
    one = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": meta, "spec": {"template": template}, "status": status}
    return controlled(one, owner)


def pod(manifest: Manifest, name: str = "tiny-x", *, age: float = 30, revision: str | None = None, **status: Any) -> Manifest:
    """A pod of the ReplicaSet of `revision`; `observe` puts that beside it."""
    above = replica_set(deployment(manifest), revision)
    template = above["spec"]["template"]
    one = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "uid": f"uid-{name}", **template["metadata"], "creationTimestamp": stamp(NOW - age)},
        "spec": {**template["spec"], "nodeName": "n7"},
        "status": {"phase": "Pending", "conditions": []} | status,
    }
    return controlled(one, above)


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


def around(*children: Manifest) -> tuple[Manifest, ...]:
    """`children`, and the ReplicaSets of the pods among them."""
    known = {child["metadata"].get("uid") for child in children}
    sets: dict[str, Manifest] = {}
    for above in (child for child in children if child["kind"] == "Deployment"):
        for one in (child for child in children if child["kind"] == "Pod"):
            found = replica_set(above, one["metadata"]["annotations"][SPEC_HASH])
            sets[found["metadata"]["uid"]] = found
    return (*children, *(one for uid, one in sets.items() if uid not in known))


def observe(manifest: Manifest, *children: Manifest, settings: Any = SETTINGS, outcome: Outcome = DONE, **world: Any) -> Turn:
    return turn(manifest, World(**({"now": NOW} | world), children=around(*children)), settings, outcome)


def after(turned: Turn, manifest: Manifest) -> Manifest:
    return manifest | {"status": dict(turned.status)}


def conditions(plan: Turn) -> dict[str, dict[str, Any]]:
    return {one["type"]: one for one in plan.status["conditions"]}


def ready(plan: Turn) -> dict[str, Any]:
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
    ("TemporaryFailure", SERVER, crashed(75, '{"code":"NoThreads","message":"can\'t start new thread"}'), ["can't start", "started again"]),
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
    for kind in ("Ready", "Progressing", "Degraded"):
        assert "no weights" in conditions(plan)[kind]["message"]
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


@pytest.mark.parametrize("value", ["8k", 1.5, -1, True, 2**40, float("nan"), [], {}, "x" * 9000])
@pytest.mark.parametrize("field", ["state", "percent", "detail", "version", "model", "contextLength"])
def test_what_a_server_says_that_cannot_be_counts_as_not_said(field, value):
    body: dict[str, Any] = {"state": "ready", "percent": 100, "detail": "", "model": {"contextLength": 2048}, "version": "0.1.0"}
    body |= {"model": {"contextLength": value}} if field == "contextLength" else {field: value}
    loading = {"phase": "Running", "containerStatuses": [container(running())]}
    for status in (READY, loading):
        plan = observe(SERVER, deployment(SERVER), pod(SERVER, **status), readyz=body)
        assert plan.status["phase"] == ("Ready" if status is READY else "Loading")
        assert plan.status["model"].get("contextLength") == (None if field in ("model", "contextLength") else 2048)


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


@pytest.mark.parametrize("outcome", [DONE, *(Outcome(**{why: {Ref("apps/v1", "Deployment", "tiny"): "no"}}) for why in WAYS_TO_FAIL)])
def test_zero_replicas_without_a_deployment_are_not_ready(outcome):
    plan = observe(a_server(replicas=0), outcome=outcome)
    assert ready(plan)["status"] != "True"
    assert plan.status["phase"] in ("Pending", "Failed")


def test_a_default_image_that_cannot_be_pulled_points_at_refresh():
    """It stays recorded for the spec after the chart names another."""
    asked = waiting("ErrImagePull", "not found")
    assert "spec.rollout.refresh" in ready(observe(SERVER, deployment(SERVER), pod(SERVER, **asked)))["message"]
    own = a_server(runtime={"image": "registry.example/own:1"})
    assert "refresh" not in ready(observe(own, deployment(own), pod(own, **asked)))["message"]


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


# --- lost nodes, images, rights ---

SILENT = READY | {"conditions": [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]}


def test_a_lost_node_is_named_with_what_happens_next():
    plan = observe(SERVER, deployment(SERVER), pod(SERVER, **SILENT))
    assert (ready(plan)["status"], ready(plan)["reason"]) == ("False", "NodeLost")
    for words in ("node n7", "pod tiny-x", "evicted and replaced after 300 s"):
        assert words in ready(plan)["message"]
    two = a_server(replicas=2)
    plan = observe(two, deployment(two), pod(two, "tiny-a", **READY), pod(two, "tiny-b", **SILENT))
    assert (plan.status["phase"], plan.status["ready"]) == ("Degraded", "1/2")
    assert "node n7" in conditions(plan)["Degraded"]["message"]
    patient = merge(
        pod(SERVER, **SILENT),
        {"spec": {"tolerations": [{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute", "tolerationSeconds": 30}]}},
    )
    assert "after 30 s" in ready(observe(SERVER, deployment(SERVER), patient))["message"]


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


def test_what_could_not_be_written_for_now_is_told_where_the_progress_is():
    away = Outcome(failed={Ref("apps/v1", "Deployment", "tiny"): "503 etcd is away"})
    plan = observe(SERVER, deployment(SERVER), pod(SERVER, **READY), outcome=away)
    assert conditions(plan)["Accepted"]["status"] == "True"
    assert "Deployment tiny (503 etcd is away)" in conditions(plan)["Progressing"]["message"]
    assert "RolloutStarted" not in [event.reason for event in plan.events]


def test_a_fight_over_an_object_is_told_once_and_forgotten_when_it_is_over():
    fight = Outcome(contested=frozenset({Ref("apps/v1", "Deployment", "tiny")}))
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
