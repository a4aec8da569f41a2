"""Batches in local mode with the real runtime and a real S3 server: several workers, ended and added, suspended and cancelled."""

from __future__ import annotations

import json
import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from banyan_runtime.storage.s3 import S3Store
from tests.support.s3.servers import ACCESS_KEY, SECRET_KEY, S3Server, weed

pytestmark = pytest.mark.long  # the real runtime, minutes; the protocol itself is tested in tests/component/batch

LINES = 96
SERVER = {
    "apiVersion": "serving.banyan.dev/v1alpha1",
    "kind": "InferenceServer",
    "metadata": {"name": "chat"},
    "spec": {
        "model": {"uri": "pvc://models/tiny-chat"},
        # So slow that something is left to be done when it is ended, suspended or cancelled.
        "runtime": {"contextLength": 512, "args": ["--runner=torch"], "env": [{"name": "OMP_NUM_THREADS", "value": "1"}]},
    },
}


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with weed(tmp_path_factory.mktemp("weed")) as server:
        yield server


def line(number: int) -> dict[str, Any]:
    body = {"model": "chat", "messages": [{"role": "user", "content": f"Hello {number}"}], "max_tokens": 48, "ignore_eos": True}
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


class Batch:
    """Manifests of a server and a batch whose input and output lie in a bucket of its own."""

    def __init__(self, folder: Path, server: S3Server, bucket: str) -> None:
        self._folder = folder / "manifests"
        self._folder.mkdir()
        bucket += f"-{secrets.token_hex(4)}"  # a test may be run a second time
        self._store = S3Store(bucket, server.settings())
        self._store.client.create_bucket(Bucket=bucket)
        lines = "".join(json.dumps(line(number)) + "\n" for number in range(LINES))
        self._store.client.put_object(Bucket=bucket, Key="in.jsonl", Body=lines.encode())
        self._spec: dict[str, Any] = {
            "serverRef": {"name": "chat"},
            "input": {"uri": f"s3://{bucket}/in.jsonl"},
            "output": {"uri": f"s3://{bucket}/out/"},
            "s3": {"endpoint": server.endpoint, "region": "us-east-1", "forcePathStyle": True, "credentialsSecretRef": {"name": "keys"}},
            "sharding": {"targetRequests": LINES // 8},
            "maxConcurrency": 2,
        }
        keys = folder / "keys"
        keys.mkdir()
        for name, value in (("AWS_ACCESS_KEY_ID", ACCESS_KEY), ("AWS_SECRET_ACCESS_KEY", SECRET_KEY)):
            (keys / name).write_text(value)
        self.words = ("--secret", f"keys={keys}")

    def write(self, **spec: Any) -> Path:
        self._spec |= spec
        return self._write(
            SERVER, {"apiVersion": SERVER["apiVersion"], "kind": "BatchJob", "metadata": {"name": "nightly"}, "spec": self._spec}
        )

    def remove(self) -> None:
        self._write(SERVER)

    def _write(self, *manifests: dict[str, Any]) -> Path:
        new = self._folder / "new"
        new.write_text(yaml.safe_dump_all(manifests))
        new.replace(self._folder / "all.yaml")
        return self._folder

    @property
    def output(self) -> dict[str, Any]:
        return dict(self._spec["output"])

    def published(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The lines of output.jsonl and of errors.jsonl; each line of the input is in one of them, once."""

        def lines(name: str) -> list[dict[str, Any]]:
            body = self._store.client.get_object(Bucket=self._store.bucket, Key=f"out/{name}")["Body"].read()
            return [json.loads(text) for text in body.splitlines()]

        output, errors = lines("output.jsonl"), lines("errors.jsonl")
        for found in (output, errors):
            numbers = [int(one["custom_id"].removeprefix("line-")) for one in found]
            assert numbers == sorted(numbers)
        assert sorted(one["custom_id"] for one in (*output, *errors)) == sorted(f"line-{number}" for number in range(LINES))
        return output, errors


@pytest.fixture
def start(tmp_path: Path, tiny_chat: Path, s3: S3Server, start_operator: Any) -> Callable[[str], tuple[Batch, Any]]:
    def begin(bucket: str, **spec: Any) -> tuple[Batch, Any]:
        batch = Batch(tmp_path, s3, bucket)
        operator = start_operator(batch.write(**spec), "--volume", f"models={tiny_chat.parent}", *batch.words)
        operator.wait(lambda: done(operator) >= 10, 180)
        return batch, operator

    return begin


@pytest.fixture
def again(tiny_chat: Path, start_operator: Any) -> Callable[[Batch], Any]:
    """Local mode once more, on the same state."""
    return lambda batch: start_operator(batch.write(), "--volume", f"models={tiny_chat.parent}", *batch.words)


def status(operator: Any) -> dict[str, Any]:
    found: dict[str, Any] = operator.resource("nightly").get("status", {})
    return found


def done(operator: Any) -> int:
    return int((status(operator).get("requestCounts") or {}).get("completed", 0))


def workers(operator: Any) -> list[psutil.Process]:
    found = []
    for process in operator.processes():
        try:
            words = process.cmdline()
        except psutil.NoSuchProcess:
            continue
        if "--phase=work" in words and "batch" in words:
            found.append(process)
    return found


def test_workers_that_end_and_workers_that_are_added_do_each_line_once(start: Any) -> None:
    batch, operator = start("elastic", workers=2)
    assert status(operator)["shards"]["total"] == 8
    workers(operator)[-1].send_signal(signal.SIGTERM)
    batch.write(workers=3)
    operator.wait(lambda: status(operator)["workers"]["desired"] == 3, 30)
    operator.wait(lambda: operator.phase("nightly") == "Succeeded", 240)
    assert status(operator)["requestCounts"] == {"total": LINES, "completed": LINES, "failed": 0}
    assert status(operator)["shardsText"] == "8/8"
    output, errors = batch.published()
    assert (len(output), errors) == (LINES, [])


def test_what_was_done_is_kept_over_a_suspension_and_a_restart_and_published_by_a_cancel(start: Any, again: Any) -> None:
    batch, operator = start("ended", workers=2)
    batch.write(suspend=True)
    operator.wait(lambda: operator.phase("nightly") == "Suspended", 60)
    before, run = done(operator), status(operator)["runID"]
    assert workers(operator) == []
    batch.write(suspend=False)
    operator.wait(lambda: done(operator) > before, 120)
    before = done(operator)
    assert operator.stop(signal.SIGINT, timeout=60) == 0
    operator = again(batch)
    operator.wait(lambda: done(operator) > before, 180)
    assert status(operator)["runID"] == run
    batch.write(cancel=True)
    operator.wait(lambda: operator.phase("nightly") == "Cancelled", 120)
    output, errors = batch.published()
    counts = status(operator)["requestCounts"]
    assert counts["completed"] == len(output) > before >= 10
    assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
    assert len(output) + len(errors) == LINES


def test_what_a_deleted_batch_has_finished_another_goes_on_with(start: Any) -> None:
    batch, operator = start("resumed")
    run, before = status(operator)["runID"], done(operator)
    batch.remove()
    operator.wait(lambda: not workers(operator) and "metadata" not in operator.resource("nightly"), 60)
    batch.write()
    operator.wait(lambda: operator.phase("nightly") == "Failed", 120)
    told = str(status(operator)["conditions"])
    assert "OutputExists" in told
    assert run in told
    assert "spec.output.resume" in told
    batch.remove()
    operator.wait(lambda: "metadata" not in operator.resource("nightly"), 60)
    batch.write(output={**batch.output, "resume": run})
    operator.wait(lambda: done(operator) > 0, 120)
    assert status(operator)["runID"] == run
    assert done(operator) >= before
    operator.wait(lambda: operator.phase("nightly") == "Succeeded", 240)
    output, errors = batch.published()
    assert (len(output), errors) == (LINES, [])
