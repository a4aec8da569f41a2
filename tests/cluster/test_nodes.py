"""A node whose power is cut, under a server and under a batch: who reads the status learns which node it is.

BANYAN_TEST_NODE_POWER is a pipe into which the lines `kill NODE` and `start NODE` are written; without it these tests are left out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.batches import Bucket, batch_job, request, secret
from tests.cluster.conftest import TIMES
from tests.cluster.kubectl import Kubectl, condition, is_true, phase
from tests.storage.servers import S3Server

LOST = "node-1"
POWER = os.environ.get("BANYAN_TEST_NODE_POWER", "")

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not POWER, reason="BANYAN_TEST_NODE_POWER is not set: a pipe to whoever cuts the power of a node"),
]


def power(action: str) -> None:
    with Path(POWER).open("w") as pipe:
        pipe.write(f"{action} {LOST}\n")


@pytest.fixture
def lost_node(team: Kubectl) -> Iterator[Callable[[], None]]:
    """Cuts the power of a node when called; it is back afterwards."""
    yield lambda: power("kill")
    power("start")
    team.until(f"node/{LOST}", lambda one: condition(one, "Ready").get("status") == "True", 120)


def test_a_node_that_is_lost_is_named_by_the_server_and_the_batch_on_it(
    team: Kubectl, system: Kubectl, server: Callable[..., str], s3: S3Server, bucket: Bucket, lost_node: Callable[[], None]
) -> None:
    # The operator itself has to live: it goes to the other node first.
    system("cordon", LOST)
    system("delete", "pod", "-l", "app.kubernetes.io/component=operator")
    system.until("deployment/banyan-operator", lambda one: one["status"].get("readyReplicas") == 1, 60)
    system("uncordon", LOST)
    elsewhere = {"nodeSelector": {"kubernetes.io/hostname": "node-0"}}
    there = {"nodeSelector": {"kubernetes.io/hostname": LOST}}
    name, steady = server("spread", scheduling=there), server("steady", scheduling=elsewhere)
    for one in (name, steady):
        team.until(f"isrv/{one}", is_true("Ready"), 120)
    bucket.put("in.jsonl", "\n".join(request(number, max_tokens=400) for number in range(3000)) + "\n")
    team.apply(secret("store"), batch_job("stranded", bucket, s3, serverRef={"name": steady}, scheduling=there, maxConcurrency=2))
    team.until("bj/stranded", phase("Running"), 90)
    lost_node()
    began = time.monotonic()
    found = team.until(f"isrv/{name}", lambda one: LOST in condition(one, "Ready").get("message", ""), 120)
    TIMES["a node's power cut until a server's Ready names it"] = time.monotonic() - began
    assert condition(found, "Ready")["status"] == "False"
    assert condition(found, "Ready")["reason"] == "NodeLost"
    assert found["status"]["readyReplicas"] == 0
    job = team.until("bj/stranded", lambda one: LOST in condition(one, "Running").get("message", ""), 120)
    TIMES["a node's power cut until a batch's Running names it"] = time.monotonic() - began
    assert condition(job, "Running")["status"] != "True"
    assert is_true("Ready")(team.get(f"isrv/{steady}"))
    team("delete", "bj", "stranded", "--wait=false")
