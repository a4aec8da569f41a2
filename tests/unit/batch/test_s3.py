"""Whole runs from and to a real S3 server over HTTP, and through a network that breaks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from banyan_runtime.batch import run as run_module
from banyan_runtime.batch.cli import main
from banyan_runtime.storage import s3
from banyan_runtime.storage.s3 import S3Store
from tests.support.s3.servers import Fault, Proxy, S3Server
from tests.support.server.scripted import ScriptedServer, line

Batch = Callable[..., int]


@pytest.fixture
def bucket(weed: S3Server) -> S3Store:
    store = S3Store(f"batch-{uuid.uuid4().hex[:12]}", weed.settings())
    store.client.create_bucket(Bucket=store.bucket)
    return store


@pytest.fixture
def words(tmp_path: Path, weed: S3Server, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, Any]]:
    """The last words of the last run; the environment points at SeaweedFS as a pod's would."""
    for name, value in (weed.environment() | {"BANYAN_TERMINATION_LOG": str(tmp_path / "words")}).items():
        monkeypatch.setenv(name, value)
    return lambda: dict(json.loads((tmp_path / "words").read_text()))


@pytest.fixture
def proxy(weed: S3Server, words: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    proxy = Proxy(weed.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
    yield proxy
    proxy.close()


def batch(bucket: S3Store, server: ScriptedServer, *arguments: str) -> int:
    return main(
        ["--input", bucket.uri("in.jsonl"), "--output", bucket.uri("out/"), "--server", server.url, "--max-backoff", "0.01", *arguments]
    )


def keys(bucket: S3Store) -> list[str]:
    return sorted(info.key for info in bucket.list() if "/.banyan/" not in info.key)


def test_a_batch_goes_from_bucket_to_bucket(bucket: S3Store, server: ScriptedServer, words: Callable[[], dict[str, Any]]) -> None:
    bucket.put("in.jsonl", "\n".join([*(line(str(i), "hello") for i in range(50)), "{broken"]).encode())
    assert batch(bucket, server) == 0
    assert keys(bucket) == ["in.jsonl", "out/errors.jsonl", "out/manifest.json", "out/output.jsonl"]
    output = [json.loads(text) for text in bucket.get("out/output.jsonl").splitlines()]
    assert [entry["custom_id"] for entry in output] == [str(i) for i in range(50)]
    assert len(bucket.get("out/errors.jsonl").splitlines()) == 1
    assert words()["requestCounts"] == {"total": 51, "completed": 50, "failed": 1}
    assert words()["output"] == bucket.uri("out/output.jsonl")
    manifest = json.loads(bucket.get("out/manifest.json"))
    assert manifest["output"]["etag"] == bucket.head("out/output.jsonl").tag
    assert batch(bucket, server) == 65
    assert words()["code"] == "output_exists"
    assert batch(bucket, server, "--overwrite") == 0


@pytest.mark.long
def test_with_a_whole_bucket_as_output_only_the_runs_own_uploads_are_swept(
    bucket: S3Store, server: ScriptedServer, words: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "LEFTOVERS_S", -60.0)
    bucket.put("in.jsonl", line("a", "hello").encode())
    for key in ("other-team/backup.tar", "output.jsonl", ".banyan/r/parts/x"):
        bucket.client.create_multipart_upload(Bucket=bucket.bucket, Key=key)
    assert main(["--input", bucket.uri("in.jsonl"), "--output", bucket.uri(""), "--server", server.url]) == 0
    left = bucket.client.list_multipart_uploads(Bucket=bucket.bucket).get("Uploads", [])
    assert [upload["Key"] for upload in left] == ["other-team/backup.tar"]


@pytest.mark.long
def test_large_results_are_uploaded_in_parts(
    bucket: S3Store, server: ScriptedServer, words: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3.S3Store.__init__, "__kwdefaults__", {"part_bytes": 5 << 20})
    bucket.put("in.jsonl", "\n".join(line(str(i), "x" * 60_000) for i in range(200)).encode())
    assert batch(bucket, server) == 0
    info = bucket.head("out/output.jsonl")
    assert info.size > 10 << 20
    assert info.tag.strip('"').endswith("-3")
    assert len(bucket.get("out/output.jsonl").splitlines()) == 200


def test_a_broken_network_costs_no_line(bucket: S3Store, server: ScriptedServer, proxy: Proxy, words: Callable[[], dict[str, Any]]) -> None:
    bucket.put("in.jsonl", "\n".join(line(str(i), "hello " + "x" * 1000) for i in range(500)).encode())
    proxy.faults = [
        Fault(lambda head: head.startswith(b"GET"), "truncate", times=3),
        Fault(lambda head: head.startswith(b"PUT") and b"output.jsonl" in head, "lose"),
        Fault(lambda head: head.startswith(b"PUT") and b"manifest.json" in head, "lose"),
        Fault(lambda head: True, "unavailable", times=3),
    ]
    assert batch(bucket, server) == 0
    assert [fault.times for fault in proxy.faults] == [0, 0, 0, 0]
    ids = [json.loads(text)["custom_id"] for text in bucket.get("out/output.jsonl").splitlines()]
    assert ids == [str(i) for i in range(500)]
    assert words()["code"] == "succeeded"


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize(
    ("change", "exit_code", "code", "said"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "WRONG-SECRET"}, 77, "storage_denied", ["403"]),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_SHARED_CREDENTIALS_FILE": "/nowhere"}, 77, "storage_denied", []),
        ({"BANYAN_S3_CREDENTIALS_DIR": "/nowhere"}, 77, "storage_denied", []),
        ({}, 65, "input_not_found", ["/in.jsonl"]),
        (
            {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"},
            75,
            "storage_unavailable",
            ["http://127.0.0.1:9", "out/"],
        ),
        ({"AWS_ENDPOINT_URL_S3": "http://nowhere.invalid"}, 75, "storage_unavailable", ["http://nowhere.invalid"]),
        ({"AWS_ENDPOINT_URL_S3": "not a url"}, 64, "invalid_flag", []),
    ],
    ids=["wrong secret", "no keys", "empty secret folder", "no such object", "nobody there", "no such host", "bad endpoint"],
)
def test_a_storage_that_cannot_be_used_is_explained(
    bucket: S3Store,
    server: ScriptedServer,
    words: Callable[[], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, str],
    exit_code: int,
    code: str,
    said: list[str],
) -> None:
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    assert batch(bucket, server) == exit_code
    assert words()["code"] == code
    for part in said:
        assert part in f"{words()['value']}: {words()['message']}"
    assert "SECRET" not in words()["message"].replace("AWS_SECRET_ACCESS_KEY", "")


@pytest.mark.long
def test_a_run_that_is_stopped_while_it_publishes_ends_its_publication(
    bucket: S3Store, server: ScriptedServer, proxy: Proxy, words: Callable[[], dict[str, Any]]
) -> None:
    bucket.put("in.jsonl", line("a", "hello").encode())
    slow = Fault(lambda head: head.startswith(b"PUT") and b"out/errors.jsonl" in head, "slow")
    proxy.faults = [slow]
    command = [sys.executable, "-m", "banyan_runtime", "batch", "--input", bucket.uri("in.jsonl"), "--output", bucket.uri("out/")]
    process = subprocess.Popen([*command, "--server", server.url], env=os.environ)
    try:
        while slow.times:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
    assert words()["code"] == "succeeded"
    assert keys(bucket) == ["in.jsonl", "out/errors.jsonl", "out/manifest.json", "out/output.jsonl"]
