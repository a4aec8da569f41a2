"""Thousands of turns of the operator in a cluster that fails: users edit and delete, pods crash, children are spoiled, the
operator dies half way through its plans. It must converge, then write nothing more, and never touch what is not its own.
"""

from __future__ import annotations

import copy
from typing import Any

import jsonschema
import pytest

from banyan_operator.observed.batch import TERMINAL
from tests.operator.conftest import a_batch, a_server, an_own_server_batch
from tests.operator.test_crds import schema
from tests.operator.world import Cluster, Place, resources

FOREIGN: dict[Place, dict[str, Any]] = {
    ("Service", "mine"): {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "mine", "labels": {"app": "x"}},
        "spec": {"type": "ClusterIP"},
    },
    # carries our label, but nobody owns it: not ours to delete
    ("ServiceAccount", "kept"): {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": "kept", "labels": {"serving.banyan.dev/server": "a"}},
    },
}
GOOD_EDITS: list[dict[str, Any]] = [
    {"replicas": 0},
    {"replicas": 1},
    {"replicas": 3},
    {"runtime": {"contextLength": 4096}},
    {"runtime": {"contextLength": 8192}},
    {"cache": {"type": "PersistentVolumeClaim", "size": "10Gi", "accessMode": "ReadWriteMany"}},
    {"cache": None},
    {"service": {"port": 8080}},
    {"ingress": {"hosts": ["a.example"]}},
]
BAD_EDITS: list[dict[str, Any]] = [
    {"paused": True},
    {"model": {"uri": "s3://not/built"}},
    {"model": {"uri": "pvc://absent/x"}},
    {"replicas": -1},
    {"podTemplate": {"spec": {"containers": "broken"}}},
]
REPAIR: dict[str, Any] = {"paused": False, "replicas": 2, "model": {"uri": "pvc://models/x"}, "podTemplate": None, "ingress": None}
BATCH_EDITS: list[dict[str, Any]] = [{"suspend": True}, {"suspend": False}, {"maxConcurrency": 8}, {"cancel": True}, {"image": "other:1"}]


def disturb(cluster: Cluster) -> None:
    """Something happens that the operator did not ask for."""
    pick = cluster.random
    kind = pick.random()
    name = pick.choice("abc")
    job = cluster.objects.get(("BatchJob", f"{name}-batch-job"))
    if kind < 0.15:
        cluster.edit("InferenceServer", name, pick.choice(GOOD_EDITS))
    elif kind < 0.2:
        cluster.edit("InferenceServer", name, pick.choice(BAD_EDITS))
    elif kind < 0.3:
        cluster.edit("InferenceServer", name, REPAIR)
    elif kind < 0.4:
        cluster.edit("BatchJob", f"{name}-batch-job", pick.choice(BATCH_EDITS[: pick.choice([3, 5])]))
    elif kind < 0.45 or (job is not None and job.get("status", {}).get("phase") in TERMINAL):
        cluster.delete("BatchJob", f"{name}-batch-job")
    elif kind < 0.48:
        cluster.delete("InferenceServer", name)
    elif kind < 0.7:
        child = pick.choice([one for one in cluster.objects.values() if one["kind"] not in ("InferenceServer", "BatchJob")])
        place = (child["kind"], child["metadata"]["name"])
        if place in FOREIGN:
            return
        if kind < 0.55:
            cluster.delete(*place)
        elif child["kind"] == "Deployment":
            child["spec"]["replicas"] = 7
            child["spec"]["template"]["spec"]["containers"][0]["image"] = "evil"
        elif child["kind"] in ("Service", "ServiceAccount"):
            child["metadata"]["labels"] = {key: value for key, value in child["metadata"]["labels"].items() if key.startswith("serving")}


def populate(cluster: Cluster) -> None:
    for name in "abc":
        if ("InferenceServer", name) not in cluster.objects:
            cluster.create(a_server(name))
        job = f"{name}-batch-job"
        if ("BatchJob", job) not in cluster.objects:
            own = an_own_server_batch(job) if name == "c" else a_batch(job, serverRef={"name": name})
            cluster.create(own)


def turn(cluster: Cluster) -> None:
    cluster.now += cluster.random.uniform(1, 10)
    cluster.controllers()
    for resource in list(resources(cluster)):
        if not cluster.faults or cluster.random.random() < 0.7:
            cluster.reconcile(resource["kind"], resource["metadata"]["name"])


def check(cluster: Cluster, ended: dict[str, str], foreign: dict[Place, Any]) -> None:
    for place, was in foreign.items():
        assert cluster.objects[place] == was, "a foreign object was touched"
    for resource in resources(cluster):
        status = resource.get("status")
        if status is None:
            continue
        uid, phase = resource["metadata"]["uid"], status["phase"]
        if resource["kind"] == "BatchJob":
            assert ended.get(uid, phase) == phase, "a job that was over has changed"
            if phase in TERMINAL:
                ended[uid] = phase
                truths = [one["status"] for one in status["conditions"] if one["type"] in ("Complete", "Failed")]
                assert truths.count("True") == 1
        if cluster.random.random() < 0.05:
            jsonschema.validate(status, schema(resource["kind"])["properties"]["status"])


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_it_converges_and_then_writes_nothing(seed):
    cluster = Cluster(seed)
    foreign = {place: copy.deepcopy(cluster.create(manifest)) for place, manifest in FOREIGN.items()}
    ended: dict[str, str] = {}
    for _ in range(120):
        populate(cluster)
        turn(cluster)
        disturb(cluster)
        check(cluster, ended, foreign)
    cluster.faults = False
    populate(cluster)
    for name in "abc":
        cluster.edit("InferenceServer", name, REPAIR)
        cluster.edit("BatchJob", f"{name}-batch-job", {"suspend": False})
    for _ in range(50):
        turn(cluster)
        check(cluster, ended, foreign)
    for resource in resources(cluster):
        wanted = ("Ready",) if resource["kind"] == "InferenceServer" else TERMINAL
        assert resource["status"]["phase"] in wanted, resource["status"]
    before = cluster.writes
    for _ in range(5):
        turn(cluster)
    assert cluster.writes == before, "it writes although nothing changes"


def test_a_conflicting_object_is_left_alone_and_named():
    cluster = Cluster(0)
    cluster.faults = False
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"type": "ClusterIP"}}
    was = copy.deepcopy(cluster.create(service))
    server = cluster.create(a_server("a"))
    for _ in range(5):
        turn(cluster)
    assert cluster.objects["Service", "a"] == was
    assert ("Deployment", "a") not in cluster.objects
    accepted = next(one for one in server["status"]["conditions"] if one["type"] == "Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "NameConflict")
    assert "Service a" in accepted["message"]
    cluster.objects["Service", "a"]["metadata"]["annotations"] = {"serving.banyan.dev/adopt": "true"}
    for _ in range(8):
        turn(cluster)
    assert server["status"]["phase"] == "Ready"
