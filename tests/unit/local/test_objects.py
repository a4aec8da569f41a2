"""The store of objects: what an API server refuses is refused here too, and what becomes of it reaches the resource's status."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from banyan_operator import api
from banyan_operator.desired import batch, server
from banyan_operator.desired.batchjob import Order
from banyan_operator.kube.objects import Key, condition, key_of, owner_reference
from banyan_operator.local import world
from banyan_operator.local.accelerators import Accelerators
from banyan_operator.local.asking import Asking
from banyan_operator.local.kubelet import Kubelet, Machine
from banyan_operator.local.objects import Conflict, Objects, Refused
from banyan_operator.local.ports import Ports
from banyan_operator.local.volumes import Volumes
from banyan_operator.local.world import LocalWorld
from banyan_operator.plan import Event, Manifest, Outcome, Plan, Report
from tests.unit.operator.conftest import LOCAL, a_server, an_own_server_batch


def children() -> dict[str, Manifest]:
    """One child of each kind, as the operator renders them."""
    cache = {"cache": {"type": "PersistentVolumeClaim", "size": "1Gi"}}
    resource = api.parse(a_server(**cache))
    job = api.parse(an_own_server_batch())
    assert isinstance(resource, api.InferenceServer)
    assert isinstance(job, api.BatchJob)
    made = (*server.children(resource, LOCAL), *batch.children(job, LOCAL, [Order("work")], server_url=None))
    return {one["kind"]: one for one in made}


def changed(kind: str, *path: str, to: Any) -> tuple[Manifest, Manifest]:
    """A child as it is, and with the value at `path` changed."""
    before = children()[kind]
    after = copy.deepcopy(before)
    place = after
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return before, after


JOB = 'Job.batch "nightly--work" is invalid: '


@pytest.mark.parametrize(
    ("kind", "path", "to", "words"),
    [
        (
            "Deployment",
            ("spec", "selector", "matchLabels"),
            {"a": "b"},
            'Deployment.apps "tiny" is invalid: spec.selector: field is immutable',
        ),
        ("Job", ("spec", "template", "spec", "restartPolicy"), "OnFailure", JOB + "spec.template: field is immutable"),
        ("Job", ("spec", "backoffLimitPerIndex"), 9, JOB + "spec.backoffLimitPerIndex: field is immutable"),
        ("Job", ("spec", "podFailurePolicy"), {"rules": []}, JOB + "spec.podFailurePolicy: field is immutable"),
        ("Job", ("spec", "successPolicy"), {"rules": []}, JOB + "spec.successPolicy: field is immutable"),
        (
            "Job",
            ("spec", "completions"),
            2,
            JOB + "spec.completions: Invalid value: 2: can only be modified in tandem with spec.parallelism",
        ),
        ("Service", ("spec", "clusterIP"), "10.0.0.1", "spec.clusterIPs[0]: Invalid value: '10.0.0.1': may not change once set"),
        ("PersistentVolumeClaim", ("spec", "accessModes"), ["ReadWriteMany"], "spec: Forbidden: spec is immutable after creation"),
        (
            "PersistentVolumeClaim",
            ("spec", "resources", "requests", "storage"),
            "1Mi",
            "field can not be less than status.capacity",
        ),
        ("ControllerRevision", ("data", "template"), {}, "data: field is immutable"),
    ],
)
def test_what_is_fixed_in_a_cluster_is_fixed_here(kind: str, path: tuple[str, ...], to: Any, words: str) -> None:
    objects = Objects(lambda: 0.0)
    before, after = changed(kind, *path, to=to)
    objects.apply(before)
    with pytest.raises(Refused) as refused:
        objects.apply(after)
    assert words in str(refused.value)
    kept = objects.get(key_of(before))
    assert kept is not None
    assert kept["metadata"]["generation"] == 1, "nothing of it was taken over"


@pytest.mark.parametrize(
    ("kind", "path", "to"),
    [
        ("Deployment", ("spec", "template"), {"metadata": {"labels": {}}, "spec": {}}),
        ("Deployment", ("spec", "replicas"), 7),
        ("Job", ("spec", "suspend"), True),
        ("Service", ("spec", "ports"), []),
        ("PersistentVolumeClaim", ("spec", "resources", "requests", "storage"), "2Gi"),
        ("ControllerRevision", ("revision",), 7),
        ("ControllerRevision", ("metadata", "labels"), {}),
    ],
)
def test_what_may_change_changes(kind: str, path: tuple[str, ...], to: Any) -> None:
    objects = Objects(lambda: 0.0)
    before, after = changed(kind, *path, to=to)
    objects.apply(before)
    place: Any = objects.apply(after)
    for step in path:
        place = place[step]
    assert place == to


def test_an_indexed_job_grows_where_parallelism_and_completions_go_together() -> None:
    objects = Objects(lambda: 0.0)
    job = children()["Job"]
    objects.apply(job)
    grown = objects.apply({**job, "spec": {**job["spec"], "completions": 3, "parallelism": 3}})
    assert grown["spec"]["completions"] == 3


def test_an_apply_that_means_another_object_of_the_name_is_a_conflict() -> None:
    objects = Objects(lambda: 0.0)
    service = children()["Service"]
    meant = {**service, "metadata": {**service["metadata"], "uid": "gone"}}
    with pytest.raises(Conflict, match="gone"):
        objects.apply(meant)
    made = objects.apply(service)
    with pytest.raises(Conflict, match="gone"):
        objects.apply(meant)
    assert objects.apply(made) is made, "the right uid is no obstacle"


# --- through the world to the status ---


@pytest.fixture
def a_world(tmp_path: Path) -> tuple[Objects, LocalWorld]:
    objects = Objects(lambda: 1_700_000_000.0)
    ports = Ports()
    machine = Machine(Volumes(tmp_path, tmp_path / "cache", {}, lambda: []), Accelerators([]), ports, tmp_path / "logs")

    def clock() -> float:
        return 1_700_000_000.0

    kubelet = Kubelet(objects, machine, clock, lambda: None, lambda _: None)
    return objects, LocalWorld(objects, kubelet, Asking(clock, lambda: None), ports, LOCAL, "test", clock, lambda _: None)


def turn(there: LocalWorld) -> None:
    async def once() -> None:
        await there.turn()
        await there.close()

    asyncio.run(once())


def a_stopped_server(objects: Objects) -> Manifest:
    wanted = a_server(replicas=0)
    del wanted["metadata"]["uid"]
    return objects.apply(wanted)


def test_a_refusal_is_told_in_the_status(a_world: tuple[Objects, LocalWorld]) -> None:
    objects, there = a_world
    resource = a_stopped_server(objects)
    turn(there)
    service = objects.get(Key("Service", "team", "tiny--pods"))
    assert service is not None
    objects.remove(key_of(service))
    objects.apply({**service, "metadata": {**service["metadata"], "uid": ""}, "spec": {**service["spec"], "clusterIP": "10.0.0.1"}})
    turn(there)
    accepted = condition(objects.get(key_of(resource)), "Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "InvalidSpec")
    assert "spec.clusterIP" in accepted["message"]


def test_an_object_of_somebody_else_is_not_taken_over(a_world: tuple[Objects, LocalWorld]) -> None:
    objects, there = a_world
    other = objects.apply({**a_server("other", replicas=0), "metadata": {"name": "other", "namespace": "team"}})
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "tiny--server", "namespace": "team"}}
    objects.apply({**account, "metadata": {**account["metadata"], "ownerReferences": [owner_reference(other)]}})
    resource = a_stopped_server(objects)
    turn(there)
    accepted = condition(objects.get(key_of(resource)), "Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "NameConflict")
    kept = objects.get(Key("ServiceAccount", "team", "tiny--server"))
    assert kept is not None
    assert "labels" not in kept["metadata"]


def test_what_a_server_runs_is_recorded_and_an_edit_that_no_pod_sees_changes_nothing_of_it(a_world: tuple[Objects, LocalWorld]) -> None:
    objects, there = a_world
    resource = a_stopped_server(objects)
    turn(there)
    (record,) = objects.of_kind("ControllerRevision")
    (deployment,) = objects.of_kind("Deployment")
    objects.apply({**resource, "spec": {**resource["spec"], "service": {"port": 8080}, "rollout": {"strategy": "Recreate"}}})
    turn(there)
    assert objects.of_kind("ControllerRevision") == [record]
    (now,) = objects.of_kind("Deployment")
    assert now["spec"]["strategy"] == {"type": "Recreate"}
    assert now["spec"]["template"] == deployment["spec"]["template"]
    objects.apply({**resource, "spec": {**resource["spec"], "runtime": {"contextLength": 512}}})
    turn(there)
    assert [one["revision"] for one in objects.of_kind("ControllerRevision")] == [1, 2], "the earlier one is kept beside it"


def test_a_conflict_is_reported_as_failed_and_the_next_turn_tries_again(
    a_world: tuple[Objects, LocalWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    objects, there = a_world
    a_stopped_server(objects)
    outcomes: list[Outcome] = []
    decide: Callable[..., Any] = world.decide

    class Late:
        """A decision whose objects were replaced in the meantime."""

        def __init__(self, plan: Plan) -> None:
            self.plan = Plan(tuple({**one, "metadata": {**one["metadata"], "uid": "gone"}} for one in plan.apply))

        def report(self, outcome: Outcome) -> Report:
            outcomes.append(outcome)
            return Report()

    with monkeypatch.context() as patched:
        patched.setattr(world, "decide", lambda *seen: Late(decide(*seen).plan))
        turn(there)
    assert all("gone" in words for words in outcomes[0].failed.values())
    assert {ref.kind for ref in outcomes[0].failed} >= {"Deployment", "Service"}
    assert not objects.of_kind("Deployment")
    turn(there)
    assert objects.of_kind("Deployment")


def test_a_trouble_is_told_once_in_ten_minutes_and_what_else_happens_each_time(
    a_world: tuple[Objects, LocalWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    objects, there = a_world
    key = key_of(a_stopped_server(objects))
    said: list[str] = []
    now = [0.0]
    monkeypatch.setattr(there, "_say", said.append)
    monkeypatch.setattr(there, "_clock", lambda: now[0])
    report = Report(events=(Event("Warning", "CrashLoop", "it ended"), Event("Normal", "Ready", "1/1")))
    for at, told in ((0.0, 2), (5.0, 3), (599.0, 4), (601.0, 6)):
        now[0] = at
        there._tell(key, report)
        assert len(said) == told
    there._tell(key, Report(events=(Event("Warning", "CrashLoop", "it ended otherwise"),)))
    assert len(said) == 7
    objects.remove(key)
    assert key_of(a_stopped_server(objects)) == key
    there._tell(key, report)
    assert len(said) == 9, "another one of the name"
