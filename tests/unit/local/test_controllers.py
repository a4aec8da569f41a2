"""Deployment, ReplicaSet and Job by a fake clock: pods that get ready, end and fail as the test says."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from banyan_operator import api
from banyan_operator.desired import batch, server
from banyan_operator.desired.batchjob import Order
from banyan_operator.kube.objects import is_true, key_of
from banyan_operator.local.controllers import actions, deployment, job, replicaset
from banyan_operator.local.objects import Objects
from banyan_operator.local.world import CARRIED_OUT
from banyan_operator.plan import Manifest
from banyan_operator.times import stamp
from tests.unit.operator import test_desired
from tests.unit.operator.conftest import LOCAL, a_batch, a_server, an_own_server_batch, merge


class Cluster:
    """The controllers over a store, with pods that need `ready_after` s to get ready and `end_after` s to go."""

    def __init__(self, *, ready_after: float = 5.0, end_after: float = 3.0) -> None:
        self.now = 1_000_000.0
        numbers = itertools.count()
        self.objects = Objects(lambda: self.now, lambda: f"uid-{next(numbers)}")
        self.ready_after, self.end_after = ready_after, end_after
        self.broken: Callable[[Manifest], bool] = lambda pod: False
        self.born: dict[str, float] = {}
        self.leaving: dict[str, float] = {}
        self._names = itertools.count()
        self.watch: Callable[[], None] = lambda: None

    def pods(self) -> list[Manifest]:
        return self.objects.of_kind("Pod")

    def active(self) -> list[Manifest]:
        return [pod for pod in self.pods() if actions.is_active(pod)]

    def ready(self) -> list[Manifest]:
        return [pod for pod in self.active() if is_true(pod, "Ready")]

    def status(self, kind: str, name: str) -> dict[str, Any]:
        found = next(item for item in self.objects.of_kind(kind) if item["metadata"]["name"] == name)
        return dict(found.get("status", {}))

    def condition(self, kind: str, name: str, condition: str) -> dict[str, Any] | None:
        return next((c for c in self.status(kind, name).get("conditions", []) if c["type"] == condition), None)

    def finish(self, pod: Manifest, code: int, container: str = "worker") -> None:
        ended = {"name": container, "state": {"terminated": {"exitCode": code, "reason": "x", "finishedAt": stamp(self.now)}}}
        status = {"phase": "Failed" if code else "Succeeded", "conditions": [], "containerStatuses": [ended]}
        self.objects.set_status(key_of(pod), status)

    def settle(self) -> None:
        for _ in range(50):
            version = self.objects.version
            self._kubelet()
            for item in self.objects.of_kind("Deployment"):
                self._act(deployment.decide(item, self.objects.controlled_by(item, "ReplicaSet"), self.now))
            for item in self.objects.of_kind("ReplicaSet"):
                self._act(replicaset.decide(item, self.objects.controlled_by(item, "Pod")))
            for item in self.objects.of_kind("Job"):
                self._act(job.decide(item, self.objects.controlled_by(item, "Pod"), self.now))
            self.objects.collect()
            self.watch()
            if self.objects.version == version:
                return
        raise AssertionError("the controllers do not settle")

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now += 1
            self.settle()

    def _act(self, decided: list[actions.Action]) -> None:
        for action in decided:
            match action:
                case actions.Create(manifest):
                    metadata = dict(manifest["metadata"])
                    if "generateName" in metadata:
                        metadata["name"] = f"{metadata.pop('generateName')}{next(self._names)}"
                    self.objects.apply({**manifest, "metadata": metadata})
                case actions.Replace(manifest):
                    self.objects.apply(manifest)
                case actions.Delete(key):
                    self.objects.delete(key)
                case actions.SetStatus(key, status):
                    self.objects.set_status(key, status)

    def _kubelet(self) -> None:
        for pod in self.pods():
            uid = pod["metadata"]["uid"]
            born = self.born.setdefault(uid, self.now)
            if actions.is_deleted(pod):
                if actions.is_finished(pod) or self.now >= self.leaving.setdefault(uid, self.now) + self.end_after:
                    self.objects.remove(key_of(pod))
                continue
            if not actions.is_finished(pod):
                ready = self.now - born >= self.ready_after and not self.broken(pod)
                conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
                self.objects.set_status(key_of(pod), {"phase": "Running", "conditions": conditions, "containerStatuses": []})


def a_deployment(image: str = "one", replicas: int = 3, **limits: Any) -> Manifest:
    rolling = {"maxSurge": 1, "maxUnavailable": 0, **limits}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web", "annotations": {}},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": "web"}},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": rolling},
            "progressDeadlineSeconds": 60,
            "revisionHistoryLimit": 2,
            "template": {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [{"name": "server", "image": image}]}},
        },
    }


def images(pods: list[Manifest]) -> list[str]:
    return sorted(pod["spec"]["containers"][0]["image"] for pod in pods)


def test_a_deployment_makes_its_replicas_and_says_when_they_are_available() -> None:
    cluster = Cluster()
    cluster.objects.apply(a_deployment())
    cluster.settle()
    assert len(cluster.active()) == 3
    assert cluster.condition("Deployment", "web", "Available") == {
        "type": "Available",
        "status": "False",
        "reason": "MinimumReplicasUnavailable",
        "message": "Deployment does not have minimum availability.",
        "lastTransitionTime": stamp(1_000_000),
    }
    cluster.pass_time(6)
    status = cluster.status("Deployment", "web")
    assert (status["replicas"], status["readyReplicas"], status["updatedReplicas"], status["availableReplicas"]) == (3, 3, 3, 3)
    progressing = cluster.condition("Deployment", "web", "Progressing")
    assert progressing is not None
    assert progressing["reason"] == "NewReplicaSetAvailable"


@pytest.mark.parametrize(("surge", "unavailable"), [(1, 0), (0, 1), (2, 1), ("25%", "25%"), ("100%", 0)])
def test_a_rolling_update_keeps_to_its_limits_all_the_way(surge: int | str, unavailable: int | str) -> None:
    cluster = Cluster()
    cluster.objects.apply(a_deployment("one", 4, maxSurge=surge, maxUnavailable=unavailable))
    cluster.pass_time(10)
    most = 4 + (int(surge.removesuffix("%")) * 4 // 100 if isinstance(surge, str) else surge)
    least = 4 - (int(unavailable.removesuffix("%")) * 4 // 100 if isinstance(unavailable, str) else unavailable)
    seen: list[tuple[int, int]] = []
    cluster.watch = lambda: seen.append((len(cluster.active()), len(cluster.ready())))
    cluster.objects.apply(a_deployment("two", 4, maxSurge=surge, maxUnavailable=unavailable))
    cluster.pass_time(120)
    assert images(cluster.pods()) == ["two"] * 4
    assert max(active for active, _ in seen) <= most
    assert min(ready for _, ready in seen) >= least


def test_a_rollout_to_pods_that_never_get_ready_stops_with_the_old_ones_serving_and_misses_its_deadline() -> None:
    cluster = Cluster()
    cluster.objects.apply(a_deployment("one", 2, maxSurge=1, maxUnavailable=0))
    cluster.pass_time(10)
    cluster.broken = lambda pod: bool(pod["spec"]["containers"][0]["image"] == "bad")
    cluster.objects.apply(a_deployment("bad", 2, maxSurge=1, maxUnavailable=0))
    cluster.pass_time(70)
    assert images(cluster.ready()) == ["one", "one"]
    assert images(cluster.active()) == ["bad", "one", "one"]
    progressing = cluster.condition("Deployment", "web", "Progressing")
    assert progressing is not None
    assert (progressing["status"], progressing["reason"]) == ("False", "ProgressDeadlineExceeded")
    cluster.objects.apply(a_deployment("one", 2, maxSurge=1, maxUnavailable=0))
    cluster.pass_time(20)
    assert images(cluster.pods()) == ["one", "one"], "back to the first template, whose ReplicaSet is used again"
    assert len(cluster.objects.of_kind("ReplicaSet")) == 2


def test_old_replicasets_are_kept_up_to_the_limit() -> None:
    cluster = Cluster(ready_after=0, end_after=0)
    for number in range(6):
        cluster.objects.apply(a_deployment(str(number), 1, maxSurge=1, maxUnavailable=0))
        cluster.pass_time(5)
    assert len(cluster.objects.of_kind("ReplicaSet")) == 3


def test_a_pod_that_is_deleted_by_hand_is_replaced_and_scaling_down_gives_up_unready_pods_first() -> None:
    cluster = Cluster()
    cluster.objects.apply(a_deployment(replicas=3))
    cluster.pass_time(10)
    cluster.objects.delete(key_of(cluster.pods()[0]))
    cluster.settle()
    young = cluster.active()[-1]["metadata"]["name"]
    cluster.objects.apply(a_deployment(replicas=2))
    cluster.settle()
    assert young not in [pod["metadata"]["name"] for pod in cluster.active()]
    assert len(cluster.ready()) == 2


def test_deleting_a_deployment_takes_its_replicasets_and_pods_with_it() -> None:
    cluster = Cluster()
    cluster.objects.apply(a_deployment())
    cluster.pass_time(10)
    cluster.objects.delete(key_of(a_deployment()))
    cluster.pass_time(10)
    assert list(cluster.objects) == []


def a_job(**spec: Any) -> Manifest:
    template = {"metadata": {"labels": {}}, "spec": {"restartPolicy": "Never", "containers": [{"name": "worker", "image": "x"}]}}
    rules = [{"action": "FailJob", "onExitCodes": {"containerName": "worker", "operator": "In", "values": [64, 77]}}]
    usual = {
        "completionMode": "Indexed",
        "completions": 1,
        "parallelism": 1,
        "backoffLimitPerIndex": 3,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
        "suspend": False,
        "template": template,
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "work"}, "spec": {**usual, **spec}}


def test_a_job_is_complete_when_its_pod_succeeded() -> None:
    cluster = Cluster()
    cluster.objects.apply(a_job(successPolicy={"rules": [{"succeededCount": 1}]}))
    cluster.settle()
    assert cluster.status("Job", "work")["active"] == 1
    cluster.finish(cluster.active()[0], 0)
    cluster.settle()
    status = cluster.status("Job", "work")
    assert [c["type"] for c in status["conditions"]] == ["SuccessCriteriaMet", "Complete"]
    assert status["succeeded"] == 1
    assert "completionTime" in status


def test_a_failed_pod_is_retried_after_10_20_40_seconds_until_the_limit_of_its_index() -> None:
    cluster = Cluster()
    cluster.objects.apply(a_job())
    cluster.settle()
    waits = []
    for _ in range(3):
        cluster.finish(cluster.active()[0], 1)
        failed = cluster.now
        while not cluster.active():
            cluster.pass_time(1)
        waits.append(cluster.now - failed)
    assert waits == [10, 20, 40]
    cluster.finish(cluster.active()[0], 1)
    cluster.pass_time(400)
    status = cluster.status("Job", "work")
    assert status["failed"] == 4
    failed_condition = cluster.condition("Job", "work", "Failed")
    assert failed_condition is not None
    assert failed_condition["reason"] == "FailedIndexes"


def test_an_exit_code_that_no_retry_can_mend_fails_the_job_at_once() -> None:
    cluster = Cluster()
    cluster.objects.apply(a_job())
    cluster.settle()
    cluster.finish(cluster.active()[0], 77)
    cluster.pass_time(100)
    failed = cluster.condition("Job", "work", "Failed")
    assert failed is not None
    assert failed["reason"] == "PodFailurePolicy"
    assert "exit code 77" in failed["message"]
    assert len(cluster.pods()) == 1


def test_suspending_ends_the_pods_without_counting_failures_and_resuming_starts_new_ones() -> None:
    cluster = Cluster()
    cluster.objects.apply(a_job())
    cluster.pass_time(2)
    cluster.objects.apply(a_job(suspend=True))
    cluster.pass_time(10)
    status = cluster.status("Job", "work")
    assert (cluster.pods(), "failed" in status, "startTime" in status) == ([], False, False)
    suspended = cluster.condition("Job", "work", "Suspended")
    assert suspended is not None
    assert suspended["status"] == "True"
    cluster.objects.apply(a_job(suspend=False))
    cluster.pass_time(2)
    assert len(cluster.active()) == 1


def test_a_worker_is_replaced_only_when_its_processes_are_gone() -> None:
    cluster = Cluster(end_after=20)
    cluster.objects.apply(a_job())
    cluster.pass_time(2)
    cluster.objects.delete(key_of(cluster.active()[0]))
    most = 0
    for _ in range(30):
        cluster.pass_time(1)
        most = max(most, len(cluster.pods()))
    assert most == 1
    assert len(cluster.active()) == 1


def test_an_eviction_counts_for_nothing_where_the_policy_ignores_it() -> None:
    cluster = Cluster()
    condition = {"type": "DisruptionTarget", "status": "True"}
    rules = [{"action": "Ignore", "onPodConditions": [condition]}]
    cluster.objects.apply(a_job(backoffLimitPerIndex=0, podFailurePolicy={"rules": rules}))
    cluster.settle()
    evicted = cluster.active()[0]
    cluster.objects.set_status(key_of(evicted), {"phase": "Failed", "conditions": [condition], "containerStatuses": []})
    cluster.pass_time(1)
    assert len(cluster.active()) == 1
    cluster.finish(cluster.active()[0], 1)
    cluster.pass_time(1)
    assert cluster.condition("Job", "work", "Failed") is not None


def test_all_of_a_recreated_deployments_pods_are_gone_before_the_first_new_one_comes() -> None:
    cluster = Cluster()

    def recreated(image: str) -> Manifest:
        made = a_deployment(image, 2)
        return {**made, "spec": {**made["spec"], "strategy": {"type": "Recreate"}}}

    cluster.objects.apply(recreated("one"))
    cluster.pass_time(10)
    mixed: list[list[str]] = []
    cluster.watch = lambda: mixed.append(images(cluster.active()))
    cluster.objects.apply(recreated("two"))
    cluster.pass_time(20)
    assert images(cluster.ready()) == ["two", "two"]
    assert not any("one" in seen and "two" in seen for seen in mixed)


# --- what the operator renders, and what the controllers carry out ---


def rendered() -> Iterator[Manifest]:
    """Every child of every form that the operator renders for this machine."""
    strategies: list[dict[str, Any]] = [{"strategy": "Recreate"}, {"maxSurge": "25%"}, {"maxSurge": 0, "maxUnavailable": "50%"}, {}]
    caches: list[dict[str, Any]] = [{"type": "None"}, {"type": "PersistentVolumeClaim", "size": "1Gi", "accessMode": "ReadWriteMany"}, {}]
    for strategy, cache, replicas in itertools.product(strategies, caches, (0, 1, 3)):
        spec = {"rollout": {**strategy, "refresh": "2026-01-01"}, "cache": cache, "replicas": replicas, "paused": bool(replicas)}
        yield from children(merge(test_desired.EVERYTHING, {"spec": spec}))
        yield from children(a_server(**spec))
    for workers, limit, suspend in itertools.product((1, 4), (0, 6), (False, True)):
        spec = {"workers": workers, "workerBackoffLimit": limit, "suspend": suspend, "deadlineSeconds": 60, "ttlSecondsAfterFinished": 60}
        spec["output"] = {"uri": "s3://results/out/"}
        for made in (a_batch, an_own_server_batch):
            yield from children(made(**spec))


def children(manifest: Manifest) -> Iterator[Manifest]:
    """As they are made, and as they are made of what exists already: a Job that exists is suspended and resumed as it is."""
    resource = api.parse(manifest)
    if isinstance(resource, api.InferenceServer):
        yield from server.children(resource, LOCAL)
        return
    url, all_jobs = "http://127.0.0.1:20000", [Order("plan"), Order("work"), Order("merge", partial="cancelled")]
    first = batch.children(resource, LOCAL, all_jobs, server_url=url)
    yield from first
    more = api.parse(merge(manifest, {"spec": {"workers": 7}}))
    assert isinstance(more, api.BatchJob)
    yield from batch.children(more, LOCAL, [Order(one.phase, suspend=True) for one in all_jobs], server_url=url, live=first)


def test_every_field_that_the_operator_renders_for_its_children_is_carried_out() -> None:
    kinds = set()
    for manifest in rendered():
        kinds.add(manifest["kind"])
        cluster = Cluster(ready_after=0)
        cluster.objects.apply(manifest)
        cluster.settle()
    assert kinds == CARRIED_OUT


@pytest.mark.parametrize(
    ("manifest", "field"),
    [
        (a_job(ttlSecondsAfterFinished=20), "Job.spec.ttlSecondsAfterFinished"),
        (a_job(activeDeadlineSeconds=20), "Job.spec.activeDeadlineSeconds"),
        (a_job(successPolicy={"rules": [{"succeededIndexes": "0"}]}), "Job.spec.successPolicy.rules.succeededIndexes"),
        (a_job(podFailurePolicy={"rules": [{"action": "FailIndex"}]}), "action FailIndex"),
        ({**a_deployment(), "spec": {**a_deployment()["spec"], "paused": True}}, "Deployment.spec.paused"),
        ({**a_deployment(), "spec": {**a_deployment()["spec"], "minReadySeconds": 5}}, "Deployment.spec.minReadySeconds"),
    ],
)
def test_a_field_that_no_controller_carries_out_is_a_bug_that_says_so(manifest: Manifest, field: str) -> None:
    cluster = Cluster()
    cluster.objects.apply(manifest)
    with pytest.raises(AssertionError, match=field):
        cluster.settle()


@pytest.mark.matrix(gate=2)
@pytest.mark.parametrize("seed", range(8))
def test_an_indexed_job_with_random_failures_runs_every_index_to_its_end_and_never_one_twice_at_a_time(seed: int) -> None:
    luck = random.Random(seed)
    cluster = Cluster()
    cluster.objects.apply(a_job(completions=5, parallelism=3, backoffLimitPerIndex=20))
    for _ in range(6000):
        cluster.pass_time(1)
        indexes = [pod["metadata"]["annotations"][job.INDEX] for pod in cluster.pods() if not actions.is_finished(pod)]
        assert len(indexes) == len(set(indexes)) <= 3
        for pod in cluster.active():
            if luck.random() < 0.1:
                cluster.finish(pod, luck.choice([0, 1, 137]))
        if cluster.condition("Job", "work", "Complete"):
            break
    assert cluster.status("Job", "work")["succeeded"] == 5
