"""BatchJobs whose pods read from and write to a real S3 server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from tests.cluster.batches import MODEL, Bucket, batch_job, request, secret
from tests.cluster.conftest import inference_server
from tests.cluster.kubectl import Kubectl, condition, is_true, phase
from tests.storage.servers import S3Server

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
