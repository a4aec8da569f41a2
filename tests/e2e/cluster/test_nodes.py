"""A node whose power is cut, under a server and under batches: who reads the status learns which node it is, and no line is lost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest

from banyan_operator.times import seconds
from tests.e2e.cluster.big_batches import LIMIT_S, LINES, ONE_THREAD, WORKERS, BigBatches
from tests.e2e.cluster.faults import LOST, cut_power, needs_parts, return_power
from tests.e2e.cluster.kubectl import Kubectl, Manifest, condition, is_true
from tests.e2e.cluster.pace import seconds_per_token
from tests.e2e.cluster.results import recorded
from tests.e2e.conftest import TIMES, inference_server
from tests.support.s3.servers import S3Server

pytestmark = [pytest.mark.timeout(600), needs_parts]

THERE = {"nodeSelector": {"kubernetes.io/hostname": LOST}}
IMPATIENT = {
    "tolerations": [
        {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 10}
        for taint in ("unreachable", "not-ready")
    ]
}
ELSEWHERE = {"nodeSelector": {"kubernetes.io/hostname": "node-0"}}
SPREAD = {
    "topologySpreadConstraints": [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"serving.banyan.dev/batchjob": "survivor"}},
        }
    ]
}


@contextlib.contextmanager
def there_alone(system: Kubectl) -> Iterator[None]:
    """What is scheduled meanwhile goes to the node that is to be lost."""
    system("cordon", "node-0")
    try:
        yield
    finally:
        system("uncordon", "node-0")


@pytest.fixture(scope="module")
def cut(team: Kubectl, system: Kubectl, s3: S3Server) -> Iterator[tuple[BigBatches, float]]:
    """Servers and batches at work, and the power of a node that is cut under them; when that was. It is back afterwards."""
    # The operator itself has to live: it goes to the other node first.
    system("cordon", LOST)
    system("delete", "pod", "-l", "app.kubernetes.io/component=operator")
    system.until("deployment/banyan-operator", lambda one: one["status"].get("readyReplicas") == 1, 60)
    system("uncordon", LOST)
    servers: dict[str, dict[str, object]] = {"there": {"scheduling": THERE}, "steady": {"scheduling": ELSEWHERE}, "both": {"replicas": 2}}
    team.apply(*(inference_server(name, runtime=ONE_THREAD, **spec) for name, spec in servers.items()))
    for name in servers:
        team.until(f"isrv/{name}", is_true("Ready"), 120)
    batches = BigBatches.new(team, s3, seconds_per_token(team, "steady"))
    with there_alone(system):
        batches.begin("stranded", "slow", serverRef={"name": "steady"}, scheduling=IMPATIENT)
        batches.until_some("stranded")
    batches.begin("survivor", "slow", serverRef={"name": "both"}, scheduling=SPREAD)
    batches.until_some("survivor")
    assert batches.nodes("stranded") == {LOST}
    batches.until_workers("survivor", WORKERS)
    assert LOST in batches.nodes("survivor")
    assert all(recorded(batches.bucket, name) < LINES for name in ("stranded", "survivor"))
    cut_power()
    yield batches, time.monotonic()
    return_power(team)
    for name in servers:
        team("delete", "isrv", name, "--wait=false")


def test_a_node_that_is_lost_is_named_by_the_server_and_the_batch_on_it(cut: tuple[BigBatches, float]) -> None:
    (team, began) = cut[0].team, cut[1]
    found = team.until("isrv/there", lambda one: LOST in condition(one, "Ready").get("message", ""), 120)
    TIMES["a node's power cut until a server's Ready names it"] = time.monotonic() - began
    assert condition(found, "Ready")["status"] == "False"
    assert condition(found, "Ready")["reason"] == "NodeLost"
    assert found["status"]["readyReplicas"] == 0
    # Its pods are given up one after another.
    job = team.until("bj/stranded", lambda one: LOST in condition(one, "Running").get("message", ""), 120)
    TIMES["a node's power cut until a batch's Running names it"] = time.monotonic() - began
    assert condition(job, "Running")["reason"] in ("NodeLost", "Disrupted")
    assert is_true("Ready")(team.get("isrv/steady"))


def test_a_batch_with_workers_on_both_nodes_is_finished_by_those_that_are_left(cut: tuple[BigBatches, float]) -> None:
    batches, began = cut
    batches.check("survivor")
    TIMES["a node's power cut until a batch of 2,000 lines has ended without it"] = time.monotonic() - began
    node = batches.team.get(f"node/{LOST}")
    assert condition(node, "Ready")["status"] != "True"


def moved(batches: BigBatches, name: str, component: str = "work") -> None:
    """Wait until pods of it have begun elsewhere, and see how long after the eviction that was."""
    team, label = batches.team, f"serving.banyan.dev/batchjob={name},app.kubernetes.io/component={component}"

    def pods(node: str) -> list[Manifest]:
        return [pod for pod in team.items("pods", label) if pod["spec"].get("nodeName") == node]

    deadline = time.monotonic() + 180
    while not (running := [pod for pod in pods("node-0") if pod["status"]["phase"] != "Pending"]):
        assert time.monotonic() < deadline, team.get(f"bj/{name}")["status"]
        time.sleep(0.5)
    lost = [pod for pod in pods(LOST) if pod["status"].get("reason") == "NodeLost"]
    assert lost
    evicted_at = min(seconds(condition(pod, "DisruptionTarget")["lastTransitionTime"]) for pod in lost)
    took_s = min(seconds(pod["status"]["startTime"]) for pod in running) - evicted_at
    TIMES[f"the eviction of a batch's {component} until another pod runs"] = took_s
    assert took_s < 60


def test_a_batch_all_of_whose_workers_are_lost_moves_and_ends_though_the_node_never_comes_back(cut: tuple[BigBatches, float]) -> None:
    batches, began = cut
    moved(batches, "stranded")
    batches.check("stranded")
    TIMES["a node's power cut until a batch all on it has ended elsewhere"] = time.monotonic() - began
    assert condition(batches.team.get(f"node/{LOST}"), "Ready")["status"] != "True"


def test_a_node_that_is_back_in_the_middle_of_it_spoils_nothing(cut: tuple[BigBatches, float], system: Kubectl) -> None:
    batches, _ = cut
    return_power(batches.team)
    with there_alone(system):
        batches.begin("met", "slow", serverRef={"name": "steady"}, scheduling=IMPATIENT)
        batches.until_some("met")
    assert batches.nodes("met") == {LOST}
    cut_power()
    moved(batches, "met")
    assert recorded(batches.bucket, "met") < LINES
    return_power(batches.team)
    batches.check("met")


def test_a_merge_moves_too(cut: tuple[BigBatches, float], system: Kubectl) -> None:
    batches, _ = cut
    label = "serving.banyan.dev/batchjob=merged,app.kubernetes.io/component=merge"
    deadline = time.monotonic() + LIMIT_S
    with there_alone(system):
        batches.begin("merged", serverRef={"name": "steady"}, scheduling=IMPATIENT)
        while not any(pod["status"]["phase"] == "Running" for pod in batches.team.items("pods", label)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        cut_power()
    (pod,) = batches.team.items("pods", label)
    assert pod["spec"]["nodeName"] == LOST
    moved(batches, "merged", "merge")
    batches.check("merged")
