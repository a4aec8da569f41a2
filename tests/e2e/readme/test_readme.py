"""The README's first hour in a cluster, its very lines, as a newcomer copies them.

What the lines leave to the environment is done by the environment, and no line is changed for it: blocks below `<!-- environment -->`
(the cluster, the images in it) are what the tests' setup has done already, and REGISTRY and TAG name those images. Where pods have no way
to the package index, the model comes from a mirror (`mirror.py`). Where storage makes folders of root's, they are opened.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.cluster.kubectl import Kubectl
from tests.e2e.cluster.mirror import mirror
from tests.e2e.cluster.volumes import Volumes
from tests.e2e.conftest import OPERATOR_IMAGE, ROOT, RUNTIME_IMAGE, TIMES

NAMESPACE = "banyan"
ENVIRONMENT = "<!-- environment -->"
BLOCK_LIMIT_S = 200

pytestmark = pytest.mark.timeout(1200)


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    environment: bool


def blocks(section: str) -> list[Block]:
    """The fenced blocks of one section of the README, in their order."""
    text = (ROOT / "README.md").read_text()
    found = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert found, f"README.md has no section '{section}'"
    fenced = re.finditer(rf"^({ENVIRONMENT}\n)?```(\w*)\n(.*?)^```$", found[1], re.M | re.S)
    return [Block(one[2], one[3], bool(one[1])) for one in fenced]


class Terminal:
    """One bash, as a newcomer has it open: what a block exports or starts is there for the next one."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._log = (folder / "terminal.log").open("w+")
        self._process = subprocess.Popen(
            ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail"],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=folder / "checkout",
            env=environment,
            text=True,
            start_new_session=True,
        )
        self._count = 0

    def run(self, text: str) -> str:
        """Type it, and return what appeared when it is over. Ends with the first line that fails."""
        self._count += 1
        before, over = len(self._seen()), f"--- block {self._count} is over ---"
        assert self._process.stdin is not None
        self._process.stdin.write(f"{text}\necho '{over}'\n")
        self._process.stdin.flush()
        deadline = time.monotonic() + BLOCK_LIMIT_S
        while not (seen := self._seen()[before:]).endswith(over + "\n"):
            if self._process.poll() is not None and not self._seen()[before:].endswith(over + "\n"):
                raise AssertionError(f"a line of this block failed:\n{text}\n{self._seen()[before:]}")
            assert time.monotonic() < deadline, f"this block does not end:\n{text}\n{seen}\n{self._kubectl('get', 'pods,isrv,bj,events')}"
            time.sleep(0.2)
        return seen.removesuffix(over + "\n")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        os.killpg(self._process.pid, signal.SIGTERM)  # the port-forward in the background, too
        self._process.wait(10)
        self._log.close()

    def _kubectl(self, *args: str) -> str:
        return subprocess.run(["kubectl", "--namespace", NAMESPACE, *args], capture_output=True, text=True, timeout=30).stdout

    def _seen(self) -> str:
        return Path(self._log.name).read_text()


@pytest.fixture(scope="module")
def newcomer(bare_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Terminal, Path]]:
    """A terminal in a copy of what the lines read of the checkout, with a kubeconfig of its own; and the copy."""
    folder = tmp_path_factory.mktemp("newcomer")
    checkout = folder / "checkout"
    for name in ("charts", "examples"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("out"))
    shutil.copy(os.environ["KUBECONFIG"], folder / "kubeconfig")
    registry, _, tag = RUNTIME_IMAGE.partition("/banyan-runtime:")
    assert f"{registry}/banyan-operator:{tag}" == OPERATOR_IMAGE, "the README's lines take both images from one registry with one tag"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"REGISTRY": registry, "TAG": tag, "KUBECONFIG": str(folder / "kubeconfig"), "PATH": path}
    terminal = Terminal(folder, environment)
    try:
        yield terminal, checkout
    finally:
        terminal.close()


@pytest.fixture(scope="module")
def package_index() -> Iterator[None]:
    """pip in pods finds the model: by itself, or, where there is no way out, at a mirror."""
    wheels, address = os.environ.get("BANYAN_TEST_WHEELS"), os.environ.get("BANYAN_TEST_S3_ADDRESS")
    if not wheels or not address:
        yield
        return
    with mirror(Path(wheels), address, Kubectl(NAMESPACE)):
        yield


def test_the_first_hour_works_by_copying_the_lines_of_the_readme(
    newcomer: tuple[Terminal, Path], package_index: None, volumes: Volumes
) -> None:
    terminal, checkout = newcomer
    team = Kubectl(NAMESPACE)
    to_run = [block for block in blocks("In a cluster") if not block.environment and block.language in ("sh", "python")]
    assert len(to_run) > 6
    began = time.monotonic()
    output = ""
    for block in to_run:
        if block.language == "python":
            (checkout / "block.py").write_text(block.text)
            output += terminal.run("python3 block.py")
        else:
            output += terminal.run(block.text)
        if "claim.yaml" in block.text:
            volumes.open_to_all(team, "batches")
        if "isrv/smollm2 --for=condition=Ready" in block.text:
            TIMES["README: first line to a server that is Ready"] = time.monotonic() - began
        if "max_tokens" in block.text and "curl" in block.text:
            TIMES["README: first line to the first answer"] = time.monotonic() - began
    TIMES["README: all of it, to the end"] = time.monotonic() - began
    assert '"finish_reason"' in output  # curl's answer
    assert re.search(r"capitals +\w+ .* 20/20|20 of 20 requests completed, 0 failed", output)
    assert "manifest.json" in output
    answers = [json.loads(line) for line in (checkout / "answers.jsonl").read_text().splitlines()]
    asked = [json.loads(line) for line in (ROOT / "examples" / "01-minimal" / "batches" / "requests.jsonl").read_text().splitlines()]
    assert sorted(one["custom_id"] for one in answers) == sorted(one["custom_id"] for one in asked)
    assert Kubectl("default").find(f"namespace/{NAMESPACE}") is None
    assert "banyan" not in Kubectl("default")("get", "crd,clusterrole,clusterrolebinding", "-o", "name")
