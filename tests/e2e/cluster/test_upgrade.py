"""`helm upgrade` to another operator image and other values: what serves and what works goes on, and no pod is restarted for it."""

from __future__ import annotations

import time

import pytest

from tests.e2e.cluster.batches import MODEL, Bucket, batch_job, lines, secret
from tests.e2e.cluster.kubectl import Kubectl, Manifest, is_true
from tests.e2e.cluster.pace import seconds_per_token, tokens_for
from tests.e2e.cluster.test_changes import Asker, sdk
from tests.e2e.cluster.volumes import Volumes, claim
from tests.e2e.conftest import (
    DEPLOYMENT,
    LEASES,
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
NEXT_OPERATOR = "localhost/banyan-operator:next"  # the same under another tag, by .ci/test-cluster
NEXT_RUNTIME = "localhost/banyan-runtime:next"  # on no node: a pod that is made anew from it would not start

pytestmark = pytest.mark.timeout(600)


def values(operator: str, runtime: str, pull_secret: str) -> list[str]:
    found = [f"runtime.imagePullSecrets[0].name={pull_secret}"]
    for prefix, image in (("image", operator), ("runtime.image", runtime)):
        repository, _, tag = image.rpartition(":")
        found += [f"{prefix}.repository={repository}", f"{prefix}.tag={tag}"]
    return [word for value in found for word in ("--set", value)]


def pods(team: Kubectl) -> dict[str, tuple[str, int]]:
    """By name: uid, and how often its containers were restarted."""
    found = team.items("pods", "app.kubernetes.io/part-of=banyan")
    return {pod["metadata"]["name"]: (pod["metadata"]["uid"], restarts(pod)) for pod in found}


def restarts(pod: Manifest) -> int:
    statuses = [*pod["status"].get("containerStatuses", ()), *pod["status"].get("initContainerStatuses", ())]
    return sum(status["restartCount"] for status in statuses)


def operators(system: Kubectl, image: str) -> list[str]:
    """Pods of this image. One of the image before may go on leading for as long as it takes to end."""
    found = system.items("pods", "app.kubernetes.io/component=operator")
    return [pod["metadata"]["name"] for pod in found if pod["spec"]["containers"][0]["image"] == image]


def completed(job: Manifest) -> int:
    found: int = (job.get("status") or {}).get("requestCounts", {}).get("completed", 0)
    return found


def test_an_upgrade_restarts_no_pod_while_a_server_answers_and_a_batch_runs(bare_cluster: None, volumes: Volumes, s3: S3Server) -> None:
    system, team, bucket = Kubectl(NAMESPACE), Kubectl(TEAM), Bucket(s3)
    system.apply(restricted(NAMESPACE), restricted(TEAM))
    wait_for_service_account(team)
    chart = [RELEASE, str(ROOT / "charts" / "banyan"), "--namespace", NAMESPACE, "--wait", "--timeout", "2m"]
    helm("install", *chart, *values(OPERATOR_IMAGE, RUNTIME_IMAGE, "pull-one"))
    team.apply(claim("models"))
    volumes.fill(team, "models", {MODEL: ROOT / "examples" / "models" / "tiny-chat"})
    team.apply(inference_server("pair", replicas=2), secret("store"))
    team.until("isrv/pair", is_true("Ready"), 120)
    # It goes on for half an hour: its end would make a pod from the new image.
    bucket.put("in.jsonl", lines(3000, tokens_for(1.2, seconds_per_token(team, "pair")), exactly=True))
    team.apply(batch_job("long", bucket, s3, serverRef={"name": "pair"}, maxConcurrency=2))
    team.until("bj/long", completed, 90)
    before = pods(team)
    assert len([name for name in before if name.startswith("pair-")]) == 2

    with team.url("pair") as url:
        asker = Asker(sdk(url))
        asker.start()
        began = time.monotonic()
        helm("upgrade", *chart, *values(NEXT_OPERATOR, NEXT_RUNTIME, "pull-two"))
        LEASES.until("lease/banyan-operator", lambda one: leader(one) in operators(system, NEXT_OPERATOR), 90)
        TIMES["helm upgrade until the new operator leads"] = time.monotonic() - began
        # A change that concerns no pod, and one more pod of the revision that runs.
        team.patch("isrv/pair", {"spec": {"replicas": 3, "service": {"annotations": {"example.com/mark": "next"}}}})
        team.until("service/pair", lambda one: (one["metadata"].get("annotations") or {}).get("example.com/mark") == "next", 60)
        team.until("isrv/pair", lambda one: is_true("Ready")(one) and one["status"]["readyReplicas"] == 3, 90)
        done = completed(team.get("bj/long"))
        team.until("bj/long", lambda one: completed(one) > done, 60)
        asker.stop()
    assert asker.failures == []
    assert asker.answers
    assert pods(team).items() >= before.items()
    assert {pod["spec"]["containers"][0]["image"] for pod in team.items("pods", "serving.banyan.dev/server=pair")} == {RUNTIME_IMAGE}
    log = system("logs", f"deployment/{DEPLOYMENT}")
    assert "Traceback" not in log
    assert " ERROR " not in log

    running = pods(team)
    helm("uninstall", RELEASE, "--namespace", NAMESPACE, "--wait", "--timeout", "1m")
    system.pods_left("app.kubernetes.io/component=operator", 0, 60)
    assert LEASES.find("lease/banyan-operator") is None
    assert pods(team).items() >= running.items()
    team("delete", "isrv,bj", "--all", "--wait=false")
    team.pods_left("app.kubernetes.io/part-of=banyan", 0, 120)
    team("delete", "namespace", TEAM, "--wait=false")
