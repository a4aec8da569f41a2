"""`helm upgrade` from the last released chart and operator to these: what serves goes on serving, and no pod is restarted for it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.cluster.batches import Bucket, batch_job, lines, secret
from tests.e2e.cluster.kubectl import Kubectl, Manifest, is_true, phase
from tests.e2e.cluster.pace import seconds_per_token, tokens_for
from tests.e2e.cluster.volumes import Volumes, claim
from tests.e2e.conftest import (
    DEPLOYMENT,
    LEASES,
    MODEL,
    OPERATOR_IMAGE,
    RELEASE,
    ROOT,
    RUNTIME_IMAGE,
    TIMES,
    helm,
    inference_server,
    leader,
    restricted,
    wait_for_service_account,
)
from tests.support.s3.servers import S3Server

NAMESPACE = "banyan-upgraded"
TEAM = "team-upgraded"
NEXT_IMAGE = "localhost/banyan-runtime:next"  # on no node: a pod that is made anew from it would not start

CACHED = inference_server("cached", cache={"type": "PersistentVolumeClaim", "size": "1Gi"})

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Installation:
    system: Kubectl
    team: Kubectl

    def pods(self) -> dict[str, tuple[str, int]]:
        """By name: uid, and how often its containers were restarted."""
        found = self.team.items("pods", "app.kubernetes.io/part-of=banyan")
        return {pod["metadata"]["name"]: (pod["metadata"]["uid"], restarts(pod)) for pod in found}

    def upgrade(self, *values: str) -> None:
        chart = str(ROOT / "charts" / "banyan")
        repository, _, tag = OPERATOR_IMAGE.rpartition(":")
        images = [
            f"image.repository={repository},image.tag={tag}",
            f"runtime.image.repository={NEXT_IMAGE.rpartition(':')[0]},runtime.image.tag=next",
        ]
        sets = [word for value in (*images, *values) for word in ("--set", value)]
        helm("upgrade", RELEASE, chart, "--namespace", NAMESPACE, "--wait", "--timeout", "2m", *sets)

    def acts(self, server: str) -> None:
        """Wait until the operator has carried out a change of a server that concerns no pod."""
        mark = str(time.monotonic_ns())
        self.team.patch(f"isrv/{server}", {"spec": {"service": {"annotations": {"example.com/mark": mark}}}})
        self.team.until(f"service/{server}", lambda one: one["metadata"]["annotations"].get("example.com/mark") == mark, 60)
        self.team.until(f"isrv/{server}", lambda one: one["status"]["observedGeneration"] == one["metadata"]["generation"], 30)


def operators(system: Kubectl) -> list[str]:
    """Pods of the present operator. One of the release may go on leading for as long as it takes to end."""
    pods = system.items("pods", "app.kubernetes.io/component=operator")
    return [pod["metadata"]["name"] for pod in pods if pod["spec"]["containers"][0]["image"] == OPERATOR_IMAGE]


def recorded(team: Kubectl, server: str) -> None:
    """Wait until the operator has recorded what a server's pods run."""
    deadline = time.monotonic() + 60
    while not team.items("controllerrevisions", f"serving.banyan.dev/server={server}"):
        assert time.monotonic() < deadline, f"nothing is recorded for {server}: {Kubectl(NAMESPACE)('logs', f'deployment/{DEPLOYMENT}')}"
        time.sleep(0.3)


def restarts(pod: Manifest) -> int:
    statuses = [*pod["status"].get("containerStatuses", ()), *pod["status"].get("initContainerStatuses", ())]
    return sum(status["restartCount"] for status in statuses)


@pytest.fixture(scope="module")
def upgraded(bare_cluster: None, volumes: Volumes, s3: S3Server) -> Iterator[tuple[Installation, dict[str, tuple[str, int]]]]:
    """Two servers and a batch at work under the released operator, which is then upgraded; and the pods as they were before."""
    released = os.environ.get("BANYAN_TEST_RELEASED")
    if not released:
        pytest.skip("BANYAN_TEST_RELEASED is not set: the last release (a folder with its chart, its operator's image loaded)")
    system, team = Kubectl(NAMESPACE), Kubectl(TEAM)
    system.apply(restricted(NAMESPACE), restricted(TEAM))
    wait_for_service_account(team)
    old_values = ["image.repository=localhost/banyan-operator,image.tag=released"]
    old_values += ["runtime.image.repository={},runtime.image.tag={}".format(*RUNTIME_IMAGE.rsplit(":", 1))]
    old_values += ["runtime.imagePullSecrets={pull-one}"]
    sets = [word for value in old_values for word in ("--set", value)]
    chart = str(Path(released) / "charts" / "banyan")
    helm("install", RELEASE, chart, "--namespace", NAMESPACE, "--wait", "--timeout", "2m", *sets)
    installation = Installation(system, team)
    team.apply(claim("models"))
    volumes.fill(team, "models", {MODEL: ROOT / "examples" / "models" / "tiny-chat"})
    bucket = Bucket(s3)
    team("apply", "--server-side", "-f", "-", stdin=json.dumps(CACHED))
    team.apply(inference_server("pair", replicas=2), secret("store"))
    for name in ("pair", "cached"):
        team.until(f"isrv/{name}", is_true("Ready"), 120)
    # It goes on for half an hour, and is cancelled.
    bucket.put("in.jsonl", lines(3000, tokens_for(1.2, seconds_per_token(team, "pair")), exactly=True))
    team.apply(batch_job("long", bucket, s3, serverRef={"name": "pair"}, maxConcurrency=2))
    team.until("bj/long", lambda one: one["status"].get("requestCounts", {}).get("completed", 0) > 0, 90)
    before = installation.pods()
    assert len(before) == 4
    began = time.monotonic()
    installation.upgrade("runtime.imagePullSecrets[0].name=pull-two")
    TIMES["helm upgrade from the last release until the new operator is ready"] = time.monotonic() - began
    # It leads once the old one has given its lease back, and records what it finds before anything is edited.
    LEASES.until("lease/banyan-operator", lambda one: leader(one) in operators(system), 90)
    TIMES["helm upgrade from the last release until the new operator leads"] = time.monotonic() - began
    for name in ("pair", "cached"):
        recorded(team, name)
        installation.acts(name)
    yield installation, before
    for one in ("isrv", "bj"):
        team("delete", one, "--all", "--wait=false")
    team.pods_left("app.kubernetes.io/part-of=banyan", 0, 120)
    team("delete", "namespace", TEAM, "--wait=false")


Upgraded = tuple[Installation, dict[str, tuple[str, int]]]


def test_an_upgrade_of_the_operator_restarts_no_pod(upgraded: Upgraded) -> None:
    installation, before = upgraded
    time.sleep(5)  # a rollout that was set off would show by now
    assert installation.pods() == before
    for name in ("pair", "cached"):
        assert len(installation.team.items("replicasets", f"serving.banyan.dev/server={name}")) == 1
        installation.team.until(f"isrv/{name}", is_true("Ready"), 30)


def test_a_batch_goes_on_under_the_new_operator(upgraded: Upgraded) -> None:
    team = upgraded[0].team
    done = team.get("bj/long")["status"]["requestCounts"]["completed"]
    team.until("bj/long", lambda one: one["status"]["requestCounts"]["completed"] > done, 60)
    team.patch("bj/long", {"spec": {"cancel": True}})
    job = team.until("bj/long", phase("Cancelled", "Failed", "Succeeded"), 60)
    assert job["status"]["phase"] == "Cancelled"
    assert job["status"]["requestCounts"]["completed"] >= done


def test_scaling_after_the_upgrade_restarts_nothing_and_adds_what_runs_already(upgraded: Upgraded) -> None:
    installation, before = upgraded
    team = installation.team
    pair = {name: pod for name, pod in before.items() if name.startswith("pair-")}
    team("scale", "isrv/pair", "--replicas=3")
    team.until("isrv/pair", lambda one: is_true("Ready")(one) and one["status"]["readyReplicas"] == 3, 90)
    assert installation.pods().items() >= pair.items()
    images = {pod["spec"]["containers"][0]["image"] for pod in team.items("pods", "serving.banyan.dev/server=pair")}
    assert images == {RUNTIME_IMAGE}


def test_what_was_applied_before_the_upgrade_can_be_applied_again(upgraded: Upgraded) -> None:
    installation, _ = upgraded
    before = installation.pods()
    changed = {**CACHED, "spec": {**CACHED["spec"], "drain": {"preStopSeconds": 2, "terminationGracePeriodSeconds": 30}, "paused": False}}
    installation.team("apply", "--server-side", "-f", "-", stdin=json.dumps(changed))
    installation.team.apply(inference_server("pair", replicas=3))
    installation.acts("cached")
    assert installation.pods() == before


def test_changed_pull_secrets_of_the_chart_restart_nothing_not_even_when_scaled(upgraded: Upgraded) -> None:
    installation = upgraded[0]
    before = installation.pods()
    installation.upgrade("runtime.imagePullSecrets[0].name=pull-three,runtime.imagePullSecrets[1].name=pull-four")
    installation.acts("cached")
    installation.team("scale", "isrv/pair", "--replicas=2")
    installation.team.until("isrv/pair", lambda one: is_true("Ready")(one) and one["status"]["readyReplicas"] == 2, 60)
    installation.team.pods_left("serving.banyan.dev/server=pair", 2)
    assert installation.pods().items() <= before.items()


def test_a_server_that_asks_for_the_present_defaults_gets_them_and_may_go_back(upgraded: Upgraded) -> None:
    installation = upgraded[0]
    team, before = installation.team, installation.pods()
    team.patch("isrv/cached", {"spec": {"rollout": {"refresh": "today"}}})

    def pod(deployment: Manifest) -> Manifest:
        found: Manifest = deployment["spec"]["template"]["spec"]
        return found

    wanted = [{"name": "pull-three"}, {"name": "pull-four"}]
    found = team.until("deployment/cached", lambda one: pod(one)["containers"][0]["image"] == NEXT_IMAGE, 30)
    assert pod(found)["imagePullSecrets"] == wanted
    team.patch("isrv/cached", {"spec": {"rollout": {"refresh": None}}})
    found = team.until("deployment/cached", lambda one: pod(one)["containers"][0]["image"] == RUNTIME_IMAGE, 30)
    assert pod(found)["imagePullSecrets"] == [{"name": "pull-one"}]
    team.until("isrv/cached", is_true("Ready"), 60)
    team.pods_left("serving.banyan.dev/server=cached", 1)
    assert {name: uid for name, uid in before.items() if name.startswith("cached-")}.items() <= installation.pods().items()


def test_the_new_operator_wrote_no_error(upgraded: Upgraded) -> None:
    log = upgraded[0].system("logs", f"deployment/{DEPLOYMENT}")
    assert "Traceback" not in log
    assert " ERROR " not in log


def test_uninstalling_leaves_no_lease_and_the_servers_alone(upgraded: Upgraded) -> None:
    installation = upgraded[0]
    before = installation.pods()
    helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--wait", "--timeout", "1m")
    time.sleep(3)  # the operator has ended: it could make the lease anew no more
    leases = json.loads(Kubectl("default")("get", "leases", "--all-namespaces", "-o", "json"))["items"]
    ours = [one for one in leases if one["metadata"]["name"] == "banyan-operator" and one["metadata"]["namespace"] != NAMESPACE]
    assert ours == []
    assert installation.pods() == before
