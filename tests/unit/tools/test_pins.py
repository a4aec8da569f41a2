"""What constraints.txt pins goes together with what cannot be installed here: PyTorch for CUDA."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT

LINUX = {"platform_system": "Linux", "sys_platform": "linux", "platform_machine": "x86_64", "python_version": "3.13", "extra": ""}


@pytest.mark.long  # asks the package index
def test_the_pinned_torch_built_for_cuda_asks_for_nothing_that_is_pinned_otherwise(tmp_path: Path) -> None:
    """What the package index says of it, without its gigabytes. Of a Python of which no CPU build lies beside the index."""
    report = tmp_path / "report.json"
    platforms = [f"--platform=manylinux_2_{glibc}_x86_64" for glibc in (17, 27, 28, 31, 34, 35)]
    asked = ["install", "--dry-run", "--no-deps", "--ignore-installed", "--only-binary=:all:", "--python-version=3.13", *platforms]
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line and not line.startswith("#")]
    (torch,) = (pin for pin in pins if pin.startswith("torch=="))
    subprocess.run(
        [sys.executable, "-m", "pip", *asked, f"--target={tmp_path / 'there'}", f"--report={report}", torch],
        check=True, capture_output=True, timeout=110,
    )  # fmt: skip
    (found,) = json.loads(report.read_text())["install"]
    needs = [Requirement(line) for line in found["metadata"]["requires_dist"]]
    needs = [need for need in needs if need.marker is None or need.marker.evaluate(LINUX)]
    assert any(need.name == "triton" for need in needs), f"{found['metadata']['version']} is not built for CUDA"
    pinned = {canonicalize_name(name): version for name, _, version in (pin.partition("==") for pin in pins)}
    for need in needs:
        version = pinned.get(canonicalize_name(need.name))
        assert version is None or need.specifier.contains(version), f"{torch} asks for {need}"
