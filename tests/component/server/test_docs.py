"""The examples of docs/api.md, run as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from banyan_runtime.front.routes import ROUTES
from tests.support.paths import ROOT
from tests.support.server.process import ServerProcess, StartServer

PAGE = (ROOT / "docs" / "api.md").read_text()
COMMAND = re.findall(r"^banyan-runtime serve (.*)$", PAGE, re.MULTILINE)
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
NAME = "smollm2-135m"
CUT = "-- the next example --"


@pytest.mark.long
def test_every_example_runs_one_after_another(start_server: StartServer, tmp_path: Path) -> None:
    """On a server of its own, started as the page says."""
    assert [f"--model-path catalog://{NAME} --enable-embeddings --port 30000"] == COMMAND
    server = start_server("--served-model-name", NAME, "--enable-embeddings").ready()
    (tmp_path / "page.py").write_text(f"print('{CUT}')\n".join(EXAMPLES).replace("http://127.0.0.1:30000", server.url))
    ran = subprocess.run([sys.executable, tmp_path / "page.py"], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    sampled, held, called, other, claude = ran.stdout.split(f"{CUT}\n")
    assert "TopLogprob" in sampled
    assert re.fullmatch(r"(red|green|blue)(, (red|green|blue)){2}\n", held)
    assert re.search(r"name='get_weather'", called)
    assert re.search(r" (completed|incomplete)\n\d+\n$", other)
    assert claude.strip()
    server.stop()


def test_every_path_that_the_page_names_is_there() -> None:
    there = {route.path for route in ROUTES}
    table = PAGE[PAGE.index("| path |") : PAGE.index("## Sampling")]
    named = set(re.findall(r"`(/[^`…]*)`", table))
    assert len(named) > 25
    assert named - {"/v1"} <= there


def test_equal_answers_are_promised_where_a_field_that_is_there_says_so(server: ServerProcess) -> None:
    (promise,) = re.findall(r"^A request with a `seed`.*?whatever else runs, (.*?)\.", PAGE, re.MULTILINE | re.DOTALL)
    (field,) = re.findall(r'where `/model_info` says\n`"(\w+)": true`', promise)
    assert server.get("/model_info").json()[field] is True
