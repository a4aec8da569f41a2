"""BatchJobs whose pods read from and write to a real S3 server."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.cluster.batches import MODEL, Bucket, batch_job, request, secret
from tests.e2e.cluster.kubectl import Kubectl, KubectlError, Manifest, condition, is_true, phase
from tests.e2e.conftest import inference_server
from tests.support.s3.servers import S3Server

BAD_LINE = '{"custom_id": "broken", "method": "POST"'


@pytest.fixture(scope="module")
def ready_server(team: Kubectl) -> Iterator[str]:
    team.apply(inference_server("shared"))
    team.until("isrv/shared", is_true("Ready"), 120)
    yield "shared"
    team("delete", "isrv", "shared", "--wait=false")


def test_every_line_ends_in_exactly_one_of_output_and_errors_on_s3(team: Kubectl, ready_server: str, s3: S3Server, bucket: Bucket) -> None:
    bucket.put("in.jsonl", "\n".join([*(request(number) for number in range(30)), BAD_LINE]) + "\n")
    team.apply(secret("store"), batch_job("lines", bucket, s3, serverRef={"name": ready_server}))
    job = team.until("bj/lines", phase("Succeeded", "Failed"), 90)
    assert job["status"]["phase"] == "Succeeded", job["status"]
    assert job["status"]["requestCounts"] == {"total": 31, "completed": 30, "failed": 1}
    assert bucket.results() == {"output.jsonl", "errors.jsonl", "manifest.json"}
    assert [line["custom_id"] for line in bucket.lines("out/output.jsonl")] == [f"line-{number}" for number in range(30)]
    assert len(bucket.lines("out/errors.jsonl")) == 1
    assert job["status"]["outputURI"] == f"s3://{bucket.name}/out/output.jsonl"
    assert job["status"]["usage"]["completionTokens"] > 30


def test_a_batch_with_a_server_of_its_own_ends_with_its_pod(team: Kubectl, s3: S3Server, bucket: Bucket) -> None:
    bucket.put("in.jsonl", "\n".join(request(number) for number in range(5)) + "\n")
    own = {"model": {"uri": f"pvc://models/{MODEL}", "servedNames": [MODEL]}, "resources": {"limits": {"memory": "2Gi"}}}
    team.apply(secret("store"), batch_job("sidecar", bucket, s3, server=own))
    job = team.until("bj/sidecar", phase("Succeeded", "Failed"), 150)
    assert job["status"]["phase"] == "Succeeded", job["status"]
    assert len(bucket.lines("out/output.jsonl")) == 5
    pods = team.items("pods", "serving.banyan.dev/batchjob=sidecar")
    ended = {pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod["status"]["phase"] for pod in pods}
    assert ended == {"plan": "Succeeded", "work": "Succeeded", "merge": "Succeeded"}


def test_wrong_credentials_fail_the_batch_with_a_reason_and_without_retries(
    team: Kubectl, ready_server: str, s3: S3Server, bucket: Bucket
) -> None:
    bucket.put("in.jsonl", request(1) + "\n")
    team.apply(secret("wrong", value="not-the-secret"), batch_job("denied", bucket, s3, "wrong", serverRef={"name": ready_server}))
    job = team.until("bj/denied", phase("Failed", "Succeeded"), 90)
    assert job["status"]["phase"] == "Failed"
    failed = condition(job, "Failed")
    assert failed["status"] == "True"
    assert "denied" in failed["message"].lower(), failed
    assert "not-the-secret" not in json.dumps(job)
    assert len(team.items("pods", "serving.banyan.dev/batchjob=denied")) == 1


def test_the_status_of_every_batch_that_ended_has_all_counts(team: Kubectl, ready_server: str, s3: S3Server, bucket: Bucket) -> None:
    bucket.put("in.jsonl", "\n".join(request(number) for number in range(40)) + "\n")
    team.apply(secret("store"))
    names = [f"many-{number}" for number in range(6)]
    team.apply(
        *(
            batch_job(name, bucket, s3, serverRef={"name": ready_server}, output={"uri": f"s3://{bucket.name}/{name}/"}, maxConcurrency=40)
            for name in names
        )
    )
    for name in names:
        job = team.until(f"bj/{name}", phase("Succeeded", "Failed"), 150)
        assert job["status"]["phase"] == "Succeeded", job["status"]
        assert job["status"]["requestCounts"] == {"total": 40, "completed": 40, "failed": 0}
        assert job["status"]["usage"]["completionTokens"] > 40
        assert job["status"]["manifestURI"] == f"s3://{bucket.name}/{name}/manifest.json"


def test_a_batch_that_cannot_read_its_input_says_so_and_not_that_workers_failed(
    team: Kubectl, ready_server: str, s3: S3Server, bucket: Bucket
) -> None:
    team.apply(secret("store"), batch_job("nothing", bucket, s3, serverRef={"name": ready_server}))
    job = team.until("bj/nothing", phase("Failed", "Succeeded"), 90)
    failed = condition(job, "Failed")
    assert failed["status"] == "True"
    assert failed["reason"] != "WorkersFailed", failed
    assert f"s3://{bucket.name}/in.jsonl" in failed["message"], failed


def test_a_batch_waits_for_its_server_and_says_so(team: Kubectl, s3: S3Server, bucket: Bucket, server: Callable[..., str]) -> None:
    bucket.put("in.jsonl", request(1) + "\n")
    team.apply(secret("store"), batch_job("early", bucket, s3, serverRef={"name": "late"}))
    job = team.until("bj/early", lambda one: condition(one, "Running").get("reason") == "WaitingForServer", 20)
    assert "late does not exist" in condition(job, "Running")["message"]
    # Planning needs no server; nobody works before there is one.
    pods = team.items("pods", "serving.banyan.dev/batchjob=early")
    assert {pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in pods} <= {"plan"}
    server("late")
    job = team.until("bj/early", phase("Succeeded", "Failed"), 120)
    assert job["status"]["phase"] == "Succeeded", job["status"]


def test_batches_whose_jobs_are_removed_as_soon_as_they_have_ended_succeed(
    team: Kubectl, ready_server: str, s3: S3Server, bucket: Bucket
) -> None:
    """Somebody sets ttlSecondsAfterFinished: 0 on every Job: it goes with its pods in the moment in which it ends."""
    bucket.put("in.jsonl", "\n".join(request(number) for number in range(10)) + "\n")
    team.apply(secret("store"))
    names = [f"swept-{number}" for number in range(4)]
    for name in names:
        output = {"uri": f"s3://{bucket.name}/{name}/"}
        team.apply(batch_job(name, bucket, s3, serverRef={"name": ready_server}, output=output))
    deadline, jobs = time.monotonic() + 150, list[Manifest]()
    while not (jobs and all((one.get("status") or {}).get("phase") in ("Succeeded", "Failed") for one in jobs)):
        assert time.monotonic() < deadline, [one.get("status") for one in jobs]
        for one in team.items("jobs"):
            if one["metadata"]["name"].startswith("swept-") and one["spec"].get("ttlSecondsAfterFinished") != 0:
                with contextlib.suppress(KubectlError):  # it has gone since
                    team.patch(f"job/{one['metadata']['name']}", {"spec": {"ttlSecondsAfterFinished": 0}})
        jobs = [team.get(f"bj/{name}") for name in names]
    assert [one["status"]["phase"] for one in jobs] == ["Succeeded"] * 4, [one["status"]["conditions"] for one in jobs]
    assert [one["status"]["requestCounts"]["completed"] for one in jobs] == [10] * 4
    made = {name: {phase: len(uids) for phase, uids in one["status"]["jobs"].items()} for name, one in zip(names, jobs, strict=True)}
    assert made == {key: {"plan": 1, "work": 1, "merge": 1} for key in names}, "what has ended is not done again"
    left = [one["metadata"]["name"] for one in team.items("jobs") if one["metadata"]["name"].startswith("swept-")]
    assert len(left) < 12, "the test removed nothing"


def test_the_workers_of_a_batch_are_on_both_nodes(team: Kubectl, ready_server: str, s3: S3Server, bucket: Bucket) -> None:
    bucket.put("in.jsonl", "".join(f"{request(number, 64, exactly=True)}\n" for number in range(400)))
    cut = {"targetRequests": 10}
    team.apply(secret("store"), batch_job("wide", bucket, s3, serverRef={"name": ready_server}, workers=4, sharding=cut))
    deadline, nodes = time.monotonic() + 90, list[str]()
    while len(nodes) < 4:
        assert time.monotonic() < deadline, nodes
        pods = team.items("pods", "serving.banyan.dev/batchjob=wide,app.kubernetes.io/component=work")
        nodes = [pod["spec"]["nodeName"] for pod in pods if pod["spec"].get("nodeName")]
    assert sorted(nodes.count(node) for node in set(nodes)) == [2, 2], nodes
    team("delete", "bj", "wide")
