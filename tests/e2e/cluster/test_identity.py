"""Whose an object is: names that are used again at once, and names that look alike."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.e2e.cluster.batches import MODEL, Bucket, batch_job, lines, secret
from tests.e2e.cluster.kubectl import Kubectl, is_true, phase
from tests.e2e.conftest import ROOT, chart_values, helm
from tests.support.s3.servers import S3Server

ROUNDS = 8


def test_a_server_that_is_deleted_and_made_again_at_once_runs(team: Kubectl, server: Callable[..., str]) -> None:
    name = server("again")
    for number in range(1, ROUNDS):
        team("delete", "isrv", name)
        server(name, runtime={"maxRunningRequests": number})
    found = team.until(f"isrv/{name}", is_true("Ready"), 120)
    deployment = team.get(f"deployment/{name}")
    assert deployment["metadata"]["ownerReferences"][0]["uid"] == found["metadata"]["uid"]
    team.pods_left(f"serving.banyan.dev/server={name}", 1)
    (pod,) = team.items("pods", f"serving.banyan.dev/server={name}")
    assert f"--max-running-requests={ROUNDS - 1}" in json.dumps(pod["spec"]["containers"][0]["args"])


def test_a_batch_that_is_deleted_and_made_again_at_once_runs(
    team: Kubectl, server: Callable[..., str], s3: S3Server, bucket: Bucket
) -> None:
    team.until(f"isrv/{server('answers')}", is_true("Ready"), 120)
    bucket.put("in.jsonl", lines(2))
    team.apply(secret("store"))
    job = batch_job("again", bucket, s3, serverRef={"name": "answers"}, output={"uri": f"s3://{bucket.name}/out/", "overwrite": True})
    team.apply(job)
    team.until("bj/again", phase("Succeeded"), 90)
    for number in range(ROUNDS):  # after an end, and in the middle of things
        if number == ROUNDS - 1:
            bucket.put("in.jsonl", lines(5))
        team("delete", "bj", "again")
        team.apply(job)
    found = team.until("bj/again", phase("Succeeded", "Failed"), 120)
    assert found["status"]["phase"] == "Succeeded", found["status"]
    assert found["status"]["requestCounts"] == {"total": 5, "completed": 5, "failed": 0}
    assert found["status"]["runID"] == found["metadata"]["uid"].replace("-", "")[:12]


def test_resources_whose_names_look_alike_do_not_share_a_child(
    team: Kubectl, server: Callable[..., str], s3: S3Server, bucket: Bucket
) -> None:
    cache = {"type": "PersistentVolumeClaim", "size": "1Gi"}
    bucket.put("in.jsonl", lines(3))
    own = {"model": {"uri": f"pvc://models/{MODEL}", "servedNames": [MODEL]}, "resources": {"limits": {"memory": "2Gi"}}, "cache": cache}
    for name, spec in (("x", {"cache": cache}), ("x-pods", {}), ("x-cache", {"cache": cache}), ("x-work", {})):
        server(name, **spec)
    team.apply(secret("store"), batch_job("x", bucket, s3, server=own))
    for name in ("x", "x-pods", "x-cache", "x-work"):
        team.until(f"isrv/{name}", is_true("Ready"), 150)
    job = team.until("bj/x", phase("Succeeded", "Failed"), 150)
    assert job["status"]["phase"] == "Succeeded", job["status"]
    uids = {one["metadata"]["uid"]: f"{one['kind']} {one['metadata']['name']}" for one in (*team.items("isrv"), *team.items("bj"))}
    for kind, wanted in (("services", 8), ("pvc", 3)):
        owners = [uids.get(owner["uid"]) for one in team.items(kind) for owner in one["metadata"].get("ownerReferences", ())]
        of_x = [owner for owner in owners if owner is not None and owner.partition(" ")[2] in ("x", "x-pods", "x-cache", "x-work")]
        assert len(of_x) == wanted, (kind, owners)
    for name in ("x", "x-pods", "x-cache", "x-work"):
        assert team.get(f"service/{name}")["spec"]["selector"]["app.kubernetes.io/instance"] == name
        assert is_true("Ready")(team.get(f"isrv/{name}"))
    team("delete", "bj", "x")


def test_an_operator_for_what_another_release_looks_after_is_refused(system: Kubectl) -> None:
    with pytest.raises(AssertionError, match=r"Lease .*banyan-operator.* exists and cannot be imported"):
        helm(
            *("install", "second", str(ROOT / "charts" / "banyan"), "--namespace", "default"),
            *chart_values(),
        )
    assert system.find("deployment/banyan-operator") is not None
