"""BatchJobs whose pods read from and write to a real S3 server."""

from __future__ import annotations

import json
import uuid
from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cluster.conftest import MODEL
from tests.cluster.kubectl import Kubectl, Manifest, condition, is_true, phase
from tests.storage.servers import ACCESS_KEY, SECRET_KEY, S3Server

BAD_LINE = '{"custom_id": "broken", "method": "POST"'


class Bucket:
    """A bucket of its own."""

    def __init__(self, s3: S3Server) -> None:
        self.client: Any = s3.settings().client()
        self.name = f"batch-{uuid.uuid4().hex[:8]}"
        self.client.create_bucket(Bucket=self.name)

    def put(self, key: str, text: str) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=text.encode())

    def lines(self, key: str) -> list[dict[str, Any]]:
        body = self.client.get_object(Bucket=self.name, Key=key)["Body"].read().decode()
        return [json.loads(line) for line in body.splitlines()]

    def keys(self) -> set[str]:
        return {entry["Key"] for entry in self.client.list_objects_v2(Bucket=self.name).get("Contents", [])}


@pytest.fixture
def bucket(s3: S3Server) -> Bucket:
    return Bucket(s3)


@pytest.fixture(scope="module")
def ready_server(team: Kubectl) -> Iterator[str]:
    from tests.cluster.conftest import inference_server

    team.apply(inference_server("shared"))
    team.until("isrv/shared", is_true("Ready"), 120)
    yield "shared"
    team("delete", "isrv", "shared", "--wait=false")


def request(number: int, max_tokens: int = 8) -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": f"Say {number}."}], "max_tokens": max_tokens, "temperature": 0}
    return json.dumps({"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body})


def secret(name: str, key: str = ACCESS_KEY, value: str = SECRET_KEY) -> Manifest:
    data = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": value}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name},
        "data": {name: b64encode(text.encode()).decode() for name, text in data.items()},
    }


def batch_job(name: str, bucket: Bucket, s3: S3Server, credentials: str = "store", **spec: Any) -> Manifest:
    return {
        "apiVersion": "serving.banyan.dev/v1alpha1",
        "kind": "BatchJob",
        "metadata": {"name": name},
        "spec": {
            "input": {"uri": f"s3://{bucket.name}/in.jsonl"},
            "output": {"uri": f"s3://{bucket.name}/out/"},
            "s3": {"endpoint": s3.endpoint, "region": "us-east-1", "forcePathStyle": True, "credentialsSecretRef": {"name": credentials}},
            **spec,
        },
    }


def test_every_line_ends_in_exactly_one_of_output_and_errors_on_s3(team: Kubectl, ready_server: str, s3: S3Server, bucket: Bucket) -> None:
    bucket.put("in.jsonl", "\n".join([*(request(number) for number in range(30)), BAD_LINE]) + "\n")
    team.apply(secret("store"), batch_job("lines", bucket, s3, serverRef={"name": ready_server}))
    job = team.until("bj/lines", phase("Succeeded", "Failed"), 90)
    assert job["status"]["phase"] == "Succeeded", job["status"]
    assert job["status"]["requestCounts"] == {"total": 31, "completed": 30, "failed": 1}
    assert bucket.keys() == {"in.jsonl", "out/output.jsonl", "out/errors.jsonl", "out/manifest.json"}
    assert [line["custom_id"] for line in bucket.lines("out/output.jsonl")] == [f"line-{number}" for number in range(30)]
    assert len(bucket.lines("out/errors.jsonl")) == 1
    assert job["status"]["outputURI"] == f"s3://{bucket.name}/out/output.jsonl"
    assert job["status"]["usage"]["completionTokens"] > 30


def test_a_batch_with_a_server_of_its_own_ends_with_its_pod(team: Kubectl, s3: S3Server, bucket: Bucket) -> None:
    bucket.put("in.jsonl", "\n".join(request(number) for number in range(5)) + "\n")
    own = {"model": {"uri": f"pvc://models/{MODEL}", "servedNames": [MODEL]}, "resources": {"limits": {"memory": "2Gi"}}}
    team.apply(secret("store"), batch_job("own", bucket, s3, server=own))
    job = team.until("bj/own", phase("Succeeded", "Failed"), 150)
    assert job["status"]["phase"] == "Succeeded", job["status"]
    assert len(bucket.lines("out/output.jsonl")) == 5
    pods = team.items("pods", "serving.banyan.dev/batchjob=own")
    assert [pod["status"]["phase"] for pod in pods] == ["Succeeded"]


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


def test_a_cancelled_batch_stops_its_pod_and_publishes_nothing(team: Kubectl, ready_server: str, s3: S3Server, bucket: Bucket) -> None:
    bucket.put("in.jsonl", "\n".join(request(number, max_tokens=400) for number in range(3000)) + "\n")
    team.apply(secret("store"), batch_job("endless", bucket, s3, serverRef={"name": ready_server}, maxConcurrency=4))
    team.until("bj/endless", phase("Running"), 60)
    team.patch("bj/endless", {"spec": {"cancel": True}})
    job = team.until("bj/endless", phase("Cancelled", "Failed", "Succeeded"), 60)
    assert job["status"]["phase"] == "Cancelled"
    team.pods_left("serving.banyan.dev/batchjob=endless", 0)
    assert bucket.keys() == {"in.jsonl"}


def test_a_batch_waits_for_its_server_and_says_so(team: Kubectl, s3: S3Server, bucket: Bucket, server: Callable[..., str]) -> None:
    bucket.put("in.jsonl", request(1) + "\n")
    team.apply(secret("store"), batch_job("early", bucket, s3, serverRef={"name": "late"}))
    job = team.until("bj/early", lambda one: condition(one, "Running").get("reason") == "WaitingForServer", 20)
    assert "late does not exist" in condition(job, "Running")["message"]
    assert team.items("pods", "serving.banyan.dev/batchjob=early") == []
    server("late")
    job = team.until("bj/early", phase("Succeeded", "Failed"), 120)
    assert job["status"]["phase"] == "Succeeded", job["status"]
