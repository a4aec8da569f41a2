"""Claude Code as npm installs it, on a real server whose model says what an able one would: it reads a file, edits it and runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.clients import agents
from tests.support.server.dictated import DictatedServer, called

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]  # with the installation, once
DONE = "It says hello now."


def test_claude_code_completes_a_turn_of_work(dictated: DictatedServer, tmp_path: Path) -> None:
    project = agents.project_in(tmp_path)
    file = str(project / "greet.py")
    edit = {"file_path": file, "old_string": "helo", "new_string": "hello"}
    run = {"command": "python3 greet.py > said", "description": "Run it"}
    dictated.dictate([called("Read", {"file_path": file}), called("Edit", edit), called("Bash", run), DONE])
    asked = ["-p", agents.TASK, "--model", "banyan", "--allowedTools", "Read,Edit,Bash", "--output-format", "json"]
    variables = {"ANTHROPIC_BASE_URL": dictated.process.url, "ANTHROPIC_API_KEY": "none", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    told = json.loads(agents.run("claude", asked, project, **variables))
    assert (told["is_error"], told["result"], told["num_turns"]) == (False, DONE, 4)
    assert (project / "greet.py").read_text() == agents.RIGHT
    assert (project / "said").read_text() == "hello\n"
    assert dictated.unsaid == 0
