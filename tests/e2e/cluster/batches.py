"""BatchJobs over S3: buckets, requests, manifests."""

from __future__ import annotations

import json
import time
import uuid
from base64 import b64encode
from collections.abc import Callable
from typing import Any, TypeVar

from botocore.exceptions import ClientError

from tests.e2e.cluster.kubectl import Manifest
from tests.support.s3.servers import ACCESS_KEY, SECRET_KEY, S3Server

T = TypeVar("T")

MODEL = "tiny-chat"  # the folder on the claim `models`


class Bucket:
    """A bucket of its own."""

    def __init__(self, s3: S3Server) -> None:
        self.client: Any = s3.settings().client()
        self.name = f"batch-{uuid.uuid4().hex[:8]}"
        self.client.create_bucket(Bucket=self.name)

    def put(self, key: str, text: str) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=text.encode())

    def body(self, key: str) -> bytes:
        return _patiently(lambda: bytes(self.client.get_object(Bucket=self.name, Key=key)["Body"].read()))

    def lines(self, key: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.body(key).splitlines()]

    def names(self) -> set[str]:
        pages = self.client.get_paginator("list_objects_v2")
        return _patiently(lambda: {entry["Key"] for page in pages.paginate(Bucket=self.name) for entry in page.get("Contents", [])})

    def results(self) -> set[str]:
        """Names of what is there beside the input and what a run notes for itself."""
        return {key.removeprefix("out/") for key in self.names() if key != "in.jsonl" and "/.banyan/" not in key}


def _patiently(read: Callable[[], T]) -> T:
    """A storage that was started a moment ago, as some tests do to it, answers with errors of its own for a while."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return read()
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] < 500 or time.monotonic() > deadline:
                raise
        time.sleep(0.5)


def lines(count: int, max_tokens: int = 8, *, exactly: bool = False) -> str:
    """So many requests, as a file."""
    return "".join(f"{request(number, max_tokens, exactly=exactly)}\n" for number in range(count))


def request(number: int, max_tokens: int = 8, *, exactly: bool = False) -> str:
    """`exactly`: its answer does not end before `max_tokens`."""
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": f"Say {number}."}]}
    body |= {"max_tokens": max_tokens, "temperature": 0} | ({"ignore_eos": True} if exactly else {})
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
