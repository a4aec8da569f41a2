"""What a batch has left in its bucket: how far it is, and whether its results are whole."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.e2e.cluster.batches import Bucket
from tests.e2e.cluster.kubectl import Manifest


@dataclass(frozen=True)
class Results:
    """The two files, read."""

    output: list[dict[str, Any]]
    errors: list[dict[str, Any]]

    def codes(self) -> set[str]:
        """Why lines were not answered."""
        return {one["error"]["code"] for one in self.errors if one["error"]}


def recorded(bucket: Bucket, name: str) -> int:
    """How many lines of the batch below `name`/ are finished for good, whatever happens to who works on them."""
    shards = [key for key in bucket.names() if key.startswith(f"{name}/.banyan/") and "/shards/" in key]
    states = [json.loads(bucket.body(key)) for key in shards]
    return sum(part["completed"] + part["failed"] for state in states for part in state.get("parts", []))


def wait_for_some(bucket: Bucket, name: str, count: int = 1, *, of: int, timeout_s: float = 300) -> int:
    """Wait until so many lines are recorded; then it is in the middle of its work, or this fails."""
    deadline = time.monotonic() + timeout_s
    while (done := recorded(bucket, name)) < count:
        assert time.monotonic() < deadline, f"{name}: {done} lines are recorded after {timeout_s:.0f} s"
        time.sleep(0.3)
    assert done < of, f"{name} was over before anything could happen to it"
    return done


def check_results(bucket: Bucket, name: str, ids: Sequence[str], job: Manifest, outcome: str = "completed") -> Results:
    """The results of the batch below `name`/ are whole, in order and vouched for, and `job` tells of them what is true."""
    bodies = {which: bucket.body(f"{name}/{which}.jsonl") for which in ("output", "errors")}
    read = {which: _lines(body) for which, body in bodies.items()}
    place = {custom_id: at for at, custom_id in enumerate(ids)}
    for which, lines in read.items():
        order = [place[line["custom_id"]] for line in lines]
        assert order == sorted(set(order)), f"{name}/{which}.jsonl: a line twice, or out of order"
    assert len(read["output"]) + len(read["errors"]) == len(ids)
    assert {line["custom_id"] for lines in read.values() for line in lines} == set(ids)
    assert all(line["response"]["status_code"] == 200 and line["error"] is None for line in read["output"])

    manifest = json.loads(bucket.body(f"{name}/manifest.json"))
    status = job["status"]
    assert (manifest["state"], manifest["outcome"], manifest["run"]) == ("complete", outcome, status["runID"])
    for which, body in bodies.items():
        told = manifest[which]
        assert told["uri"] == status[f"{which}URI"] == f"s3://{bucket.name}/{name}/{which}.jsonl"
        assert (told["sha256"], told["bytes"]) == (hashlib.sha256(body).hexdigest(), len(body))
        assert told["lines"] == len(read[which])
    assert manifest["requestCounts"] == status["requestCounts"]
    not_run = sum(1 for line in read["errors"] if line["error"] and line["error"]["code"] == f"batch_{outcome}")
    assert status["requestCounts"] == {"total": len(ids), "completed": len(read["output"]), "failed": len(read["errors"]) - not_run}
    assert status["usage"]["completionTokens"] == sum(line["response"]["body"]["usage"]["completion_tokens"] for line in read["output"])
    assert not [key for key in bucket.names() if key.startswith(f"{name}/.banyan/") and "/parts/" in key], "parts were left"
    return Results(read["output"], read["errors"])


def _lines(body: bytes) -> list[dict[str, Any]]:
    assert not body or body.endswith(b"\n")
    return [json.loads(line) for line in body.split(b"\n")[:-1]]
