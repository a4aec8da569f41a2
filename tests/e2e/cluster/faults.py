"""What the tests do to a cluster: memory that runs out, a node without power, an API server that is away."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster.kubectl import Kubectl, KubectlError, Manifest, condition

PARTS = os.environ.get("BANYAN_TEST_PARTS", "")
"""A pipe to whoever runs the cluster: it takes the lines `kill PART` and `start PART`,
where a part is a node, `kube-apiserver` or `kube-proxy`."""

needs_parts = pytest.mark.skipif(
    not PARTS, reason="BANYAN_TEST_PARTS is not set: a pipe to whoever ends and starts nodes and the cluster's own parts"
)

LOST = "node-1"
_TAKE_ALL = """
import os, time
open("/proc/1/oom_score_adj", "w").write("1000")
for _ in range(40):
    if os.fork() == 0:
        kept = b"x" * (20 << 20)
        break
time.sleep(60)
"""
"""Many small processes, since the kernel ends a big one."""


def tell(action: str, part: str) -> None:
    with Path(PARTS).open("w") as pipe:
        pipe.write(f"{action} {part}\n")


def cut_power() -> None:
    """Of the node LOST: its containers end, and nobody says so."""
    tell("kill", LOST)


def return_power(kubectl: Kubectl) -> None:
    tell("start", LOST)
    kubectl.until(f"node/{LOST}", lambda one: condition(one, "Ready").get("status") == "True", 120)


@contextlib.contextmanager
def without_api_server(kubectl: Kubectl) -> Iterator[None]:
    """Afterwards it is back and answers."""
    tell("kill", "kube-apiserver")
    try:
        yield
    finally:
        tell("start", "kube-apiserver")
        deadline = time.monotonic() + 60
        while True:
            try:
                kubectl("get", "--raw", "/readyz", timeout=20)
                break
            except (KubectlError, subprocess.TimeoutExpired):
                assert time.monotonic() < deadline, "the API server did not come back"
                time.sleep(0.5)


def run_out_of_memory(kubectl: Kubectl, pod: str, container: str) -> None:
    """Fill the container's memory, so that the kernel kills its first process. Returns when that is seen."""
    before = _ends(kubectl.get(f"pod/{pod}"), container)
    with contextlib.suppress(KubectlError):  # it dies under our hands
        kubectl("exec", pod, "-c", container, "--", "python3", "-c", _TAKE_ALL, timeout=90)
    kubectl.until(f"pod/{pod}", lambda one: _ends(one, container) - before, 60)


def _ends(pod: Manifest, container: str) -> set[str]:
    """Which of the container's lives were ended for memory."""
    status: Manifest = next((one for one in pod["status"].get("containerStatuses", []) if one["name"] == container), {})
    ends = [status.get(when, {}).get("terminated") for when in ("state", "lastState")]
    return {end["containerID"] for end in ends if end and end["reason"] == "OOMKilled"}
