from __future__ import annotations

from typing import Any

from banyan_operator.cluster.store import Store
from banyan_operator.kube import kinds
from banyan_operator.kube.kinds import Key

SERVER = Key("InferenceServer", "team", "smollm2")


def manifest(kind: str, name: str, version: int, uid: str = "u1", labels: dict[str, str] | None = None, **rest: Any) -> dict[str, Any]:
    meta = {"name": name, "namespace": "team", "uid": uid, "resourceVersion": str(version), "labels": labels or {}}
    api = {"Deployment": "apps/v1", "Pod": "v1"}.get(kind, "serving.banyan.dev/v1alpha1")
    return {"apiVersion": api, "kind": kind, "metadata": meta, **rest}


def child(kind: str, name: str, version: int, uid: str = "u1", **rest: Any) -> dict[str, Any]:
    return manifest(kind, name, version, uid, {"serving.banyan.dev/server": "smollm2"}, **rest)


def test_an_older_sighting_does_not_replace_a_newer_one() -> None:
    store = Store()
    assert store.put(child("Deployment", "smollm2", 20, spec={"replicas": 2}))
    assert not store.put(child("Deployment", "smollm2", 19, spec={"replicas": 1}))
    assert not store.put(child("Deployment", "smollm2", 20, spec={"replicas": 2}))
    assert store.children(SERVER)[0]["spec"] == {"replicas": 2}


def test_an_object_that_was_made_anew_replaces_the_old_one_whatever_its_version() -> None:
    store = Store()
    store.put(child("Deployment", "smollm2", 20, "old"))
    assert store.put(child("Deployment", "smollm2", 5, "new"))
    assert not store.remove(child("Deployment", "smollm2", 21, "old"))
    assert store.children(SERVER)[0]["metadata"]["uid"] == "new"


def test_the_late_answer_to_a_write_does_not_bring_a_deleted_object_back() -> None:
    store = Store()
    store.put(child("Deployment", "smollm2", 20))
    store.remove(child("Deployment", "smollm2", 22))
    assert not store.put(child("Deployment", "smollm2", 21))
    assert store.children(SERVER) == ()


def test_a_child_that_loses_its_label_is_nobodys() -> None:
    store = Store()
    store.put(child("Deployment", "smollm2", 20))
    store.put(manifest("Deployment", "smollm2", 21))
    assert store.children(SERVER) == ()


def test_a_list_repairs_what_the_watches_missed() -> None:
    store = Store()
    store.put(child("Deployment", "same", 10, "a"))
    store.put(child("Deployment", "changed", 10, "b"))
    store.put(child("Deployment", "gone", 10, "c"))
    store.put(child("Deployment", "younger-than-the-list", 40, "d"))
    store.put(child("Pod", "another-kind", 10, "e"))
    listed = [child("Deployment", "same", 10, "a"), child("Deployment", "changed", 11, "b"), child("Deployment", "new", 12, "f")]
    repaired = store.replace(kinds.DEPLOYMENT, None, listed, 30)
    assert sorted(one["metadata"]["name"] for one in repaired) == ["changed", "gone", "new"]
    assert [one["metadata"]["name"] for one in store.children(SERVER)] == [
        "changed",
        "new",
        "same",
        "younger-than-the-list",
        "another-kind",
    ]
    assert store.replace(kinds.DEPLOYMENT, None, listed, 30) == []


def test_a_list_of_one_namespace_leaves_the_others_alone() -> None:
    store = Store()
    store.put(child("Deployment", "smollm2", 10))
    assert store.replace(kinds.DEPLOYMENT, "elsewhere", [], 30) == []
    assert len(store.children(SERVER)) == 1


def test_of_pods_only_what_is_read_is_kept() -> None:
    store = Store()
    container = {"name": "server", "image": "i", "env": [{"name": "A", "value": "secret"}], "livenessProbe": {}}
    spec = {"nodeName": "n", "volumes": [{"name": "v"}], "containers": [container]}
    pod = child("Pod", "p", 1, spec=spec, status={"phase": "Running"})
    pod["metadata"]["managedFields"] = [{"manager": "kubelet"}]
    store.put(pod)
    kept = store.children(SERVER)[0]
    assert kept["spec"] == {"nodeName": "n", "containers": [{"name": "server", "image": "i"}]}
    assert kept["status"] == {"phase": "Running"}
    assert "managedFields" not in kept["metadata"]


def test_the_batch_jobs_of_a_server_are_found() -> None:
    store = Store()
    store.put(manifest("BatchJob", "nightly", 1, spec={"serverRef": {"name": "smollm2"}}))
    store.put(manifest("BatchJob", "other", 1, spec={"serverRef": {"name": "else"}}))
    store.put(manifest("BatchJob", "own", 1, spec={"server": {}}))
    assert store.users_of_server("team", "smollm2") == [Key("BatchJob", "team", "nightly")]
    assert store.users_of_server("elsewhere", "smollm2") == []
