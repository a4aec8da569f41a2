"""examples/demo.py watches the operator that it started, with stubs in place of the commands."""

from __future__ import annotations

import runpy
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

DEMO = ROOT / "examples" / "demo.py"


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The demo's names, with `banyan-operator` from the test's folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    names = runpy.run_path(str(DEMO), run_name="imported")
    names["Operator"].__init__.__globals__["BIN"] = tmp_path
    return names


def write(operator: Path, local: str, status: str) -> None:
    operator.write_text(f'#!/bin/bash\necho "$@" >>"$(dirname "$0")/words"\ncase $1 in\nlocal) {local} ;;\nstatus) {status} ;;\nesac\n')
    operator.chmod(0o755)


def test_an_operator_that_ends_is_noticed_at_once_and_its_log_shown(
    demo: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "banyan-operator", "echo the state folder is in use; exit 75", "exec sleep 100")
    began = time.monotonic()
    operator = demo["Operator"]()
    assert operator.wait_for("ready") == 75
    operator.close()
    assert time.monotonic() - began < 30
    assert "The operator has ended (exit code 75). Its last lines:\nthe state folder is in use\n" in capfd.readouterr().err


def test_the_demo_looks_at_its_own_operator_and_no_other(demo: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path / "banyan-operator", "exec sleep 100", """[[ $* == *json* ]] && echo '{"items": []}'; exit 0""")
    operator = demo["Operator"]()
    assert operator.wait_for("ready") == 0
    demo["resources"]()
    operator.close()
    calls = (tmp_path / "words").read_text().splitlines()
    assert len(calls) == 3
    assert all(f"--state-dir {tmp_path / 'state' / 'banyan' / 'demo'}" in call for call in calls)
