"""One real server for all clients, and what each client's script had to tell of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.clients import environment
from tests.support.server.dictated import DictatedServer
from tests.support.server.process import ServerProcess

SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT_LIMIT_S = 240.0
FLAGS = ("--reasoning-parser", "qwen3", "--enable-embeddings", "--enable-tokenizer-info-endpoint")
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks GitHub for the prices of models
    "ANONYMIZED_TELEMETRY": "False",
    "LANGCHAIN_TRACING_V2": "false",
}

Answers = Callable[[str], Any]
Told = Callable[..., Answers]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_chat: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(tiny_chat, tmp_path_factory.mktemp("clients") / "server.log", *FLAGS)
    yield process.ready()
    process.stop()


@pytest.fixture(scope="session")
def dictated(tmp_path_factory: pytest.TempPathFactory, tiny_chat: Path) -> Iterator[DictatedServer]:
    """A server of its own, whose model is told what to say to agents."""
    server = DictatedServer(tiny_chat, tmp_path_factory.mktemp("dictated"), "--accept-any-model", "--reasoning-parser", "qwen3")
    server.process.ready()
    yield server
    server.process.stop()


@pytest.fixture(scope="session")
def told(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """`told(script, environment)`: the answers of a script that ran once, in an environment of clients or in ours."""
    ran: dict[tuple[str, str | None], dict[str, Any]] = {}

    def of(script: str, packages: str | None = None) -> Answers:
        if (script, packages) not in ran:
            ran[script, packages] = _run(script, packages, server.url, tmp_path_factory.mktemp(script))
        answers = ran[script, packages]

        def answer(question: str) -> Any:
            assert "error" not in answers[question], answers[question]["error"]
            return answers[question]["value"]

        return answer

    return of


def _run(script: str, packages: str | None, url: str, scratch: Path) -> dict[str, Any]:
    try:
        interpreter = environment.python(packages) if packages else sys.executable
    except environment.UnavailableError as error:
        pytest.skip(f"the clients of {packages}.txt cannot be installed: {error}")
    answers = scratch / "answers.json"
    unwanted = ("OPENAI_", "ANTHROPIC_", "HTTP_PROXY", "HTTPS_PROXY", "PYTHON")
    variables = {name: value for name, value in os.environ.items() if not name.upper().startswith(unwanted)}
    variables |= {**OFFLINE, "HOME": str(scratch), "HF_HOME": str(scratch), "OMP_NUM_THREADS": "1"}
    command = [str(interpreter), str(SCRIPTS / f"{script}.py"), url, str(answers)]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=variables, timeout=SCRIPT_LIMIT_S)
    assert ended.returncode == 0, f"{script} ended with {ended.returncode}:\n{ended.stdout[-2000:]}\n{ended.stderr[-6000:]}"
    told: dict[str, Any] = json.loads(answers.read_text())
    return told
