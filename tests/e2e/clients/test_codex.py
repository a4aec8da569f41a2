"""Codex CLI as npm installs it, on a real server whose model says what an able one would: it reads a file, edits it and runs it.

What it asks for depends on what it believes the model to be: plain functions of one that it does not know, tools of free text and a search
for tools of some of OpenAI's, and of others one tool for scripts, brought by an item of the input.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e.clients import environment
from tests.support.server.dictated import DictatedServer, called

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]  # with the installation, once
CODEX_LIMIT_S: Final = 300.0
CONFIG: Final = """
model_provider = "banyan"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.banyan]
name = "banyan"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "BANYAN_KEY"
"""
READ, EDIT, RUN = "cat greet.py", "sed -i s/helo/hello/ greet.py", "python3 greet.py"
PATCH: Final = "*** Begin Patch\n*** Update File: greet.py\n@@\n-print('helo')\n+print('hello')\n*** End Patch\n"
TASK: Final = "Mend the greeting in greet.py, and run it."
DONE: Final = "It says hello now."


def command(words: str) -> str:
    return called("exec_command", {"cmd": words})


def script(text: str) -> str:
    return called("exec", {"input": text})


def nested(words: str) -> str:
    return script(f"text(await tools.exec_command({json.dumps({'cmd': words})}))")


ANSWERS: Final = {
    "banyan": [command(READ), command(EDIT), command(RUN), DONE],
    "gpt-5.5": [command(READ), called("apply_patch", {"input": PATCH}), command(RUN), DONE],
    "gpt-6.2-sol": [nested(READ), script(f"text(await tools.apply_patch({json.dumps(PATCH)}))"), nested(RUN), DONE],
}


@pytest.fixture(scope="module")
def dictated(tmp_path_factory: pytest.TempPathFactory, tiny_chat: Path) -> Iterator[DictatedServer]:
    """A server of its own, whose model is told what to say."""
    server = DictatedServer(tiny_chat, tmp_path_factory.mktemp("dictated"), "--accept-any-model", "--reasoning-parser", "qwen3")
    server.process.ready()
    yield server
    server.process.stop()


@pytest.mark.parametrize("model", ANSWERS)
def test_codex_completes_a_turn_of_work(dictated: DictatedServer, tmp_path: Path, model: str) -> None:
    dictated.dictate([f"<think>\nWhat comes next?\n</think>\n\n{answer}" for answer in ANSWERS[model]])
    project = tmp_path / "project"
    project.mkdir()
    (project / "greet.py").write_text("print('helo')\n")
    events, last = codex(dictated.process.url, model, project, tmp_path)
    assert (project / "greet.py").read_text() == "print('hello')\n"
    assert last == DONE
    assert dictated.unsaid == 0
    assert [event["type"] for event in events if event["type"].startswith(("error", "turn."))] == ["turn.started", "turn.completed"]
    done = [event["item"] for event in events if event["type"] == "item.completed"]
    ran = [item["aggregated_output"] for item in done if "aggregated_output" in item]
    assert [ran[0], ran[-1]] == ["print('helo')\n", "hello\n"]


def codex(url: str, model: str, project: Path, scratch: Path) -> tuple[list[dict[str, Any]], str]:
    """What it reports while it works, and its last words."""
    try:
        program = environment.agent("codex")
    except environment.UnavailableError as error:
        pytest.skip(f"Codex cannot be installed: {error}")
    home, last = scratch / "codex", scratch / "last"
    home.mkdir()
    (home / "config.toml").write_text(CONFIG.format(url=url))
    unwanted = ("OPENAI_", "CODEX_", "HTTP_PROXY", "HTTPS_PROXY", "PYTHON")
    variables = {name: value for name, value in os.environ.items() if not name.upper().startswith(unwanted)}
    variables |= {"CODEX_HOME": str(home), "HOME": str(scratch), "BANYAN_KEY": "none"}
    asked = [str(program), "exec", "--json", "--skip-git-repo-check", "-m", model, "-o", str(last), TASK]
    options: dict[str, Any] = {"cwd": project, "env": variables, "stdin": subprocess.DEVNULL, "timeout": CODEX_LIMIT_S}
    ended = subprocess.run(asked, capture_output=True, text=True, **options)
    assert ended.returncode == 0, f"{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}"
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")], last.read_text()
