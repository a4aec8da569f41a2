"""Agents that write code, as npm installs them, run once in a project of their own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.clients import environment

AGENT_LIMIT_S: Final = 400.0
TASK: Final = "Mend the greeting in greet.py, and run it."
WRONG, RIGHT = "print('helo')\n", "print('hello')\n"
_UNWANTED: Final = ("OPENAI_", "CODEX_", "ANTHROPIC_", "CLAUDE", "HTTP_PROXY", "HTTPS_PROXY", "PYTHON")


def project_in(scratch: Path) -> Path:
    project = scratch / "project"
    project.mkdir()
    (project / "greet.py").write_text(WRONG)
    return project


def run(name: str, arguments: list[str], project: Path, **variables: str) -> str:
    """What the agent says while it works. `variables`: of its environment, beside ours."""
    try:
        program = environment.agent(name)
    except environment.UnavailableError as error:
        pytest.skip(f"{name} cannot be installed: {error}")
    kept = {variable: value for variable, value in os.environ.items() if not variable.upper().startswith(_UNWANTED)}
    ended = subprocess.run(
        [str(program), *arguments],
        cwd=project,
        env={**kept, "HOME": str(project.parent), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=AGENT_LIMIT_S,
    )
    assert ended.returncode == 0, f"{name} ended with {ended.returncode}:\n{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}"
    return ended.stdout
