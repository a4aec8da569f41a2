"""Benchmarks are run rarely; that each still fits the code it measures is tried here."""

from __future__ import annotations

import random
import runpy
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.long  # some import torch and build a model
FOLDER = ROOT / "benchmarks"
SCRIPTS = sorted(file.name for file in FOLDER.glob("*.py"))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Imports a benchmark: its names."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return lambda name: runpy.run_path(str(FOLDER / name), run_name="imported")


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_benchmark_can_be_imported(script: Callable[[str], dict[str, Any]], name: str) -> None:
    assert script(name)


def test_the_metrics_that_are_timed_are_filled_as_a_servers_are(script: Callable[[str], dict[str, Any]]) -> None:
    names = script("metrics.py")
    page = names["filled"](random.Random(1)).page
    assert len(page.text()) > 10_000
    assert names["prepared"](page)().splitlines()[0] == page.text().splitlines()[0]


def test_every_benchmark_is_in_the_list() -> None:
    listed = (FOLDER / "README.md").read_text()
    assert [script for script in SCRIPTS if f"`{script}`" not in listed and script != "served.py"] == []
