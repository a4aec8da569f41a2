"""A server in a system that lacks something ends with a reason that its user can act on."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import ServerProcess, StartServer

THREADLESS = ("-m", "tests.server.threadless")


def told(server: ServerProcess, limit_s: float = 30.0) -> tuple[int, str, str]:
    """The exit code, and the code and message that were left behind, which the log's last line repeats."""
    code = server.wait(limit_s)
    words = json.loads(server.termination_log.read_text())
    assert f"FATAL: {words['message']}" in server.log.splitlines()
    return code, words["code"], words["message"]


def test_without_a_thread_for_its_last_words_a_server_still_says_them(start_server: StartServer, tmp_path: Path) -> None:
    flag = tmp_path / "none"
    server = start_server(program=THREADLESS, environment={"NO_THREADS": str(flag)}).ready()
    flag.touch()
    server.engine.kill()
    code, kind, message = told(server)
    assert (code, kind) == (70, "EngineDied")
    assert message.startswith("the engine process ended with exit code -9")
    assert "Traceback" not in server.log


def test_a_server_that_gets_no_thread_to_start_with_says_so(start_server: StartServer, tmp_path: Path) -> None:
    flag = tmp_path / "none"
    flag.touch()
    code, kind, message = told(start_server(program=THREADLESS, environment={"NO_THREADS": str(flag)}))
    assert (code, kind) == (75, "UnavailableError")
    assert "pids limit" in message


def test_a_thread_that_is_lacking_while_it_loads_is_named(start_server: StartServer, tmp_path: Path) -> None:
    flag = tmp_path / "none"
    server = start_server(program=THREADLESS, environment={"NO_THREADS": str(flag)})
    assert server.url
    flag.touch()
    code, kind, message = told(server)
    assert (code, kind) == (75, "UnavailableError")
    assert "pids limit" in message
