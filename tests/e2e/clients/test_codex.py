"""Codex CLI as npm installs it, on a real server whose model says what an able one would: it reads a file, edits it, takes a note with a
tool of another server's, and runs the file.

What it offers depends on what it believes the model to be: to one that it does not know plain functions and namespaces, to some of OpenAI's
a tool of free text and a search for tools, and to others one tool for scripts, in a namespace that an item of the input brings.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e.clients import agents
from tests.e2e.clients.conftest import SCRIPTS
from tests.support.server.dictated import DictatedServer, called

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]  # with the installation, once
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

[mcp_servers.notes]
command = "{python}"
args = ["{script}", "{notes}"]
"""
READ, EDIT, RUN = "cat greet.py", "sed -i s/helo/hello/ greet.py", "python3 greet.py"
PATCH: Final = "*** Begin Patch\n*** Update File: greet.py\n@@\n-print('helo')\n+print('hello')\n*** End Patch\n"
DONE: Final = "It says hello now."


def command(words: str) -> str:
    return called("exec_command", {"cmd": words})


def script(text: str) -> str:
    return called("exec", {"input": text})


def nested(words: str) -> str:
    return script(f"text(await tools.exec_command({json.dumps({'cmd': words})}))")


NOTE: Final = called("mcp__notes__add", {"text": "mended"})
ANSWERS: Final = {
    "banyan": [command(READ), command(EDIT), NOTE, command(RUN), DONE],
    "gpt-5.5": [
        command(READ), called("apply_patch", {"input": PATCH}), called("tool_search", {"query": "note"}), NOTE, command(RUN), DONE,
    ],
    "gpt-6.2-sol": [
        nested(READ), script(f"text(await tools.apply_patch({json.dumps(PATCH)}))"),
        script("text(await tools.mcp__notes__add({text: 'mended'}))"), nested(RUN), DONE,
    ],
}  # fmt: skip


@pytest.mark.parametrize("model", ANSWERS)
def test_codex_completes_a_turn_of_work(dictated: DictatedServer, tmp_path: Path, model: str) -> None:
    dictated.dictate([f"<think>\nWhat comes next?\n</think>\n\n{answer}" for answer in ANSWERS[model]])
    project = agents.project_in(tmp_path)
    events, last = codex(dictated.process.url, model, project, tmp_path)
    assert (project / "greet.py").read_text() == agents.RIGHT
    assert (tmp_path / "notes").read_text() == "mended"
    assert last == DONE
    assert dictated.unsaid == 0
    assert [event["type"] for event in events if event["type"].startswith(("error", "turn."))] == ["turn.started", "turn.completed"]
    done = [event["item"] for event in events if event["type"] == "item.completed"]
    ran = [item["aggregated_output"] for item in done if "aggregated_output" in item]
    assert [ran[0], ran[-1]] == [agents.WRONG, "hello\n"]


def codex(url: str, model: str, project: Path, scratch: Path) -> tuple[list[dict[str, Any]], str]:
    """What it reports while it works, and its last words."""
    home, last = scratch / "codex", scratch / "last"
    home.mkdir()
    told = {"url": url, "python": sys.executable, "script": SCRIPTS / "keep_notes.py", "notes": scratch / "notes"}
    (home / "config.toml").write_text(CONFIG.format(**told))
    asked = ["exec", "--json", "--skip-git-repo-check", "-m", model, "-o", str(last), agents.TASK]
    said = agents.run("codex", asked, project, CODEX_HOME=str(home), BANYAN_KEY="none")
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")], last.read_text()
