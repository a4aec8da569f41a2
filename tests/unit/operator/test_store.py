from __future__ import annotations

import sys
from typing import Any

import pytest

from banyan_operator.cluster.store import Store
from banyan_operator.kube import kinds
from banyan_operator.kube.objects import Key

SERVER = Key("InferenceServer", "team", "smollm2")


def manifest(kind: str, name: str, version: int, uid: str = "u1", labels: dict[str, str] | None = None, **rest: Any) -> dict[str, Any]:
    meta = {"name": name, "namespace": "team", "uid": uid, "resourceVersion": str(version), "labels": labels or {}}
    api = {"Deployment": "apps/v1", "Pod": "v1"}.get(kind, "serving.banyan.dev/v1alpha1")
    return {"apiVersion": api, "kind": kind, "metadata": meta, **rest}


def child(kind: str, name: str, version: int, uid: str = "u1", **rest: Any) -> dict[str, Any]:
    return manifest(kind, name, version, uid, {"serving.banyan.dev/server": "smollm2"}, **rest)


OWNED = {"apiVersion": "serving.banyan.dev/v1alpha1", "kind": "InferenceServer", "name": "smollm2", "uid": "s", "controller": True}


def test_an_older_sighting_does_not_replace_a_newer_one() -> None:
    store = Store()
    assert store.note(child("Deployment", "smollm2", 20, spec={"replicas": 2})) == {SERVER}
    assert not store.note(child("Deployment", "smollm2", 19, spec={"replicas": 1}))
    assert not store.note(child("Deployment", "smollm2", 20, spec={"replicas": 2}))
    assert store.children(SERVER)[0]["spec"] == {"replicas": 2}


def test_an_object_that_was_made_anew_replaces_the_old_one_and_the_end_of_the_old_one_does_not_take_it_away() -> None:
    store = Store()
    store.note(child("Deployment", "smollm2", 20, "old"))
    assert store.note(child("Deployment", "smollm2", 23, "new")) == {SERVER}
    assert not store.note_gone(child("Deployment", "smollm2", 22, "old"))
    assert store.children(SERVER)[0]["metadata"]["uid"] == "new"


def test_the_late_answer_to_a_write_does_not_bring_a_deleted_object_back() -> None:
    store = Store()
    store.note(child("Deployment", "smollm2", 20))
    assert store.note_gone(child("Deployment", "smollm2", 22)) == {SERVER}
    assert not store.note(child("Deployment", "smollm2", 21))
    assert store.children(SERVER) == ()


def test_an_object_that_lost_our_label_is_seen_again_once_it_has_it_back() -> None:
    store = Store()
    store.note(child("Deployment", "smollm2", 20))
    assert store.note_gone(child("Deployment", "smollm2", 22)) == {SERVER}  # which is how a watch by label shows it
    assert store.note(child("Deployment", "smollm2", 23)) == {SERVER}
    assert len(store.children(SERVER)) == 1


def test_a_child_that_loses_its_owner_label_concerns_its_owner_and_stays_its_child_by_its_reference() -> None:
    store = Store()
    owned = child("Deployment", "smollm2", 20)
    owned["metadata"]["ownerReferences"] = [OWNED]
    store.note(owned)
    bare = manifest("Deployment", "smollm2", 21)
    bare["metadata"]["ownerReferences"] = [OWNED]
    assert store.note(bare) == {SERVER}
    assert len(store.children(SERVER)) == 1
    assert store.note(manifest("Deployment", "smollm2", 22)) == {SERVER}  # it lost the reference too
    assert store.children(SERVER) == ()


def test_a_list_repairs_what_the_watches_missed() -> None:
    store = Store()
    store.note(child("Deployment", "same", 10, "a"))
    store.note(child("Deployment", "changed", 10, "b"))
    store.note(child("Deployment", "gone", 10, "c"))
    store.note(child("Deployment", "younger-than-the-list", 40, "d"))
    store.note(child("Pod", "another-kind", 10, "e"))
    listed = [child("Deployment", "same", 10, "a"), child("Deployment", "changed", 11, "b"), child("Deployment", "new", 12, "f")]
    concerned, repaired = store.note_list(kinds.DEPLOYMENT, None, listed, 30)
    assert (concerned, repaired) == ({SERVER}, 3)
    names = [one["metadata"]["name"] for one in store.children(SERVER)]
    assert names == ["changed", "new", "same", "younger-than-the-list", "another-kind"]
    assert store.note_list(kinds.DEPLOYMENT, None, listed, 30) == (frozenset(), 0)
    store.note(child("Deployment", "gone", 25, "c"))  # a watch that lags behind the list
    assert [one["metadata"]["name"] for one in store.children(SERVER)] == names


def test_a_list_of_one_namespace_leaves_the_others_alone() -> None:
    store = Store()
    store.note(child("Deployment", "smollm2", 10))
    assert store.note_list(kinds.DEPLOYMENT, "elsewhere", [], 30) == (frozenset(), 0)
    assert len(store.children(SERVER)) == 1


def test_of_pods_only_what_is_read_is_kept() -> None:
    store = Store()
    container = {"name": "server", "image": "i", "env": [{"name": "A", "value": "secret"}], "livenessProbe": {}}
    spec = {"nodeName": "n", "volumes": [{"name": "v"}], "containers": [container]}
    pod = child("Pod", "p", 1, spec=spec, status={"phase": "Running"})
    pod["metadata"]["managedFields"] = [{"manager": "kubelet"}]
    store.note(pod)
    kept = store.children(SERVER)[0]
    assert kept["spec"] == {"nodeName": "n", "containers": [{"name": "server", "image": "i"}]}
    assert kept["status"] == {"phase": "Running"}
    assert "managedFields" not in kept["metadata"]


def server(version: int, available: str = "True", **rest: Any) -> dict[str, Any]:
    status = {"phase": "Ready", "conditions": [{"type": "Available", "status": available}], **rest}
    return manifest("InferenceServer", "smollm2", version, "s", spec={}, status=status)


def test_a_server_concerns_the_batch_jobs_that_use_it_when_that_matters_to_them() -> None:
    store = Store()
    store.note(manifest("BatchJob", "nightly", 1, "n", spec={"serverRef": {"name": "smollm2"}}))
    store.note(manifest("BatchJob", "other", 1, "o", spec={"serverRef": {"name": "else"}}))
    store.note(manifest("BatchJob", "own", 1, "p", spec={"server": {}}))
    nightly = Key("BatchJob", "team", "nightly")
    assert store.note(server(2)) == {SERVER, nightly}
    assert store.note(server(3, readyReplicas=3)) == {SERVER}
    assert store.note(server(4, available="False")) == {SERVER, nightly}
    assert store.note_gone(server(5)) == {SERVER, nightly}


def test_our_own_status_concerns_nobody_and_somebody_elses_the_resource() -> None:
    store = Store()
    store.note(server(1))
    assert store.note(server(2, readyReplicas=3), own=True) == frozenset()
    assert store.note(server(3, readyReplicas=4)) == {SERVER}


def test_a_sighting_costs_the_same_whatever_else_is_known() -> None:
    """Counted in steps of the interpreter, not in time."""

    def steps(others: int) -> int:
        store = Store()
        for number in range(others):
            other = manifest("Deployment", f"d{number}", 1, f"u{number}", {"serving.banyan.dev/server": f"s{number}"})
            store.note(other)
            store.note(manifest("InferenceServer", f"s{number}", 1, f"r{number}"))
        counted = 0

        def count(*_: Any) -> Any:
            nonlocal counted
            counted += 1
            return count

        before = sys.gettrace()  # of a coverage, which goes on
        sys.settrace(count)
        try:
            store.note(child("Deployment", "smollm2", 20))
            store.note(server(21))
        finally:
            sys.settrace(before)
        return counted

    assert steps(10_000) < 1.5 * steps(10), "but for a few keys whose hashes collide"


BATCH = Key("BatchJob", "team", "nightly")
OVER = {"conditions": [{"type": "Complete", "status": "True"}]}


def the_batch(version: int, uid: str = "b", **rest: Any) -> dict[str, Any]:
    return manifest("BatchJob", "nightly", version, uid, **rest)


def of_batch(kind: str, name: str, version: int, uid: str, of: str | None = "b", **rest: Any) -> dict[str, Any]:
    """`of`: the uid of what controls it; None: nobody does."""
    api = {"Job": "batch/v1", "Pod": "v1"}[kind]
    found = {**manifest(kind, name, version, uid, {"serving.banyan.dev/batchjob": "nightly"}, **rest), "apiVersion": api}
    above = {"kind": "BatchJob", "name": "nightly"} if kind == "Job" else {"kind": "Job", "name": "nightly--work"}
    if of is not None:
        found["metadata"]["ownerReferences"] = [{**above, "uid": of, "controller": True}]
    return found


def ended(name: str, version: int, of: str, code: int = 0) -> dict[str, Any]:
    worker = {"name": "worker", "state": {"terminated": {"exitCode": code}}}
    status = {"phase": "Failed" if code else "Succeeded", "containerStatuses": [worker]}
    return of_batch("Pod", name, version, name, of, status=status)


def kept(store: Store) -> list[str]:
    return [one["metadata"]["uid"] for one in store.remains(BATCH)]


def test_what_had_ended_when_it_went_is_kept_until_its_batch_is_over() -> None:
    store = Store()
    store.note(the_batch(1))
    store.note(of_batch("Job", "nightly--work", 2, "j", status={"active": 1}))
    assert store.note_gone(ended("p", 4, "j")) == {BATCH}, "no watch has shown it before: what it says is news"
    assert store.note_gone(of_batch("Job", "nightly--work", 5, "j", status=OVER)) == {BATCH}
    store.note_gone(of_batch("Job", "nightly--plan", 6, "k", status={"active": 1}))
    assert store.note_gone(of_batch("Pod", "q", 7, "q", "j", status={"phase": "Running"})) == frozenset()
    assert kept(store) == ["p", "j"]
    assert store.children(BATCH) == ()
    store.note(the_batch(8, status={"phase": "Succeeded"}))
    assert store.remains(BATCH) == ()
    store.note_gone(of_batch("Job", "nightly--merge", 9, "m", status=OVER))
    assert store.remains(BATCH) == ()


def test_what_had_ended_is_kept_where_a_list_shows_no_more_of_it_and_goes_with_its_batch() -> None:
    store = Store()
    store.note(the_batch(1))
    store.note(of_batch("Job", "nightly--work", 2, "j", status=OVER))
    store.note_list(kinds.JOB, None, [], 10)
    assert kept(store) == ["j"]
    store.note_gone(the_batch(11))
    assert store.remains(BATCH) == ()


def test_what_had_ended_goes_with_its_batch_though_only_another_of_the_name_is_seen() -> None:
    store = Store()
    store.note(the_batch(1))
    store.note_gone(of_batch("Job", "nightly--work", 2, "j", status=OVER))
    store.note(the_batch(3, "another"))
    assert store.remains(BATCH) == ()


def test_what_had_ended_is_kept_of_the_batchs_own_jobs_alone() -> None:
    store = Store()
    store.note(the_batch(1))
    store.note_gone(of_batch("Job", "nightly--work", 2, "of-another", "another", status=OVER))
    store.note_gone(of_batch("Job", "mine", 3, "of-another-name", status=OVER))
    store.note_gone(of_batch("Job", "nightly--work", 4, "of-nobody", None, status=OVER))  # our labels alone may be anybody's
    stranger = ended("p", 5, "s")
    stranger["metadata"]["ownerReferences"][0]["name"] = "mine"
    store.note_gone(stranger)
    assert kept(store) == []
    orphan = of_batch("Job", "nightly--work", 6, "orphan", None, status=OVER)
    orphan["metadata"]["annotations"] = {"serving.banyan.dev/applied-hash": "x"}
    orphan["metadata"]["labels"]["app.kubernetes.io/managed-by"] = "banyan-operator"
    store.note_gone(orphan)
    assert kept(store) == ["orphan"]


def test_how_a_job_ended_is_heard_after_a_list_has_shown_that_it_is_no_more() -> None:
    store = Store()
    store.note(the_batch(1))
    store.note(of_batch("Job", "nightly--work", 2, "j", status={"active": 1}))
    store.note_list(kinds.JOB, None, [], 10)
    store.note_gone(ended("p", 8, "j"))
    store.note_gone(of_batch("Job", "nightly--work", 9, "j", status=OVER))
    assert kept(store) == ["p", "j"]


def test_of_jobs_that_come_and_go_the_last_are_kept_with_their_pods() -> None:
    store = Store()
    store.note(the_batch(1))
    for number in range(9):
        store.note_gone(of_batch("Job", "nightly--work", 10 * number, f"j{number}", status=OVER))
        store.note_gone(ended(f"p{number}", 10 * number + 1, f"j{number}"))
    assert kept(store) == ["j7", "p7", "j8", "p8"]


def test_of_a_job_whose_pods_come_and_go_some_are_kept_and_those_of_others_stay() -> None:
    store = Store()
    store.note(the_batch(1))
    store.note_gone(of_batch("Job", "nightly--work", 2, "i", status=OVER))
    store.note_gone(ended("of-another", 3, "i"))
    store.note_gone(of_batch("Job", "nightly--work", 4, "j", status=OVER))
    for number in range(200):
        store.note_gone(ended(f"p{number}", 5 + number, "j", 1))
    found = kept(store)
    assert (found[:4], found[-1], len(found)) == (["i", "of-another", "j", "p136"], "p199", 67)


@pytest.mark.parametrize(("code", "others"), [(79, 143), (64, 1), (1, 143), (0, 143), (77, 0), (79, 79)])
def test_of_more_pods_than_are_kept_the_one_that_decided_is_among_them(code: int, others: int) -> None:
    store = Store()
    store.note(the_batch(1))
    store.note(of_batch("Job", "nightly--work", 2, "j", status={"active": 100}))
    store.note_gone(ended("decided", 3, "j", code))
    for number in range(99):
        store.note_gone(ended(f"p{number}", 4 + number, "j", others))
    assert ("decided" in kept(store)) == (code != others)
    assert len(kept(store)) == 64


def test_of_pods_that_have_succeeded_one_is_kept_whatever_comes_after_it() -> None:
    store = Store()
    store.note(the_batch(1))
    store.note(of_batch("Job", "nightly--work", 2, "j", status={"active": 100}))
    for number in range(300):
        store.note_gone(ended(f"p{number}", 4 + number, "j", 0 if number < 100 else 1))
    assert kept(store)[0] == "p99"
