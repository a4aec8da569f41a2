"""Virtual environments of clients: packages that no test process could hold beside ours, since they ask for other versions. And programs
of npm, agents that write code.

One for each list of requirements in this folder and for each agent, made once, kept in the cache, and made anew when its versions change.
`python -m tests.e2e.clients.environment` makes them all.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.conftest import CACHE, locked

HERE: Final = Path(__file__).parent
FOLDER: Final = CACHE / "clients"
NAMES: Final = ("frameworks", "lm-eval")
AGENTS: Final = {"codex": "@openai/codex@0.171.0", "claude": "@anthropic-ai/claude-code@2.1.332"}  # of npm, by their programs
INSTALL_LIMIT_S: Final = 1200.0
"""Some 700 MB each; two to four minutes from a near index. An agent is 400 MB."""


class UnavailableError(Exception):
    """An environment that cannot be made here; the message says why."""


def python(name: str) -> Path:
    """The interpreter of the environment whose packages `NAME.txt` lists: every one with its version, so that nothing is resolved."""
    requirements = HERE / f"{name}.txt"

    def make(folder: Path) -> None:
        _run(getattr(sys, "_base_executable", sys.executable), "-m", "venv", str(folder))
        quiet = ("--quiet", "--disable-pip-version-check", "--no-input", "--no-compile")
        _run(str(folder / "bin" / "python"), "-m", "pip", "install", *quiet, "--no-deps", "-r", str(requirements))

    return _made(name, requirements.read_bytes() + sys.version.encode(), make) / "bin" / "python"


def agent(name: str) -> Path:
    """The program of one of `AGENTS`, from npm."""

    def make(folder: Path) -> None:
        _run("npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), AGENTS[name])

    return _made(name, AGENTS[name].encode(), make) / "node_modules" / ".bin" / name


def _made(name: str, told: bytes, make: Callable[[Path], None]) -> Path:
    """A folder that is made once for what it is made of."""
    folder = FOLDER / f"{name}-{hashlib.sha256(told).hexdigest()[:16]}"
    made = folder / "made"
    with locked(f"clients-{name}"):
        if not made.exists():
            for old in FOLDER.glob(f"{name}-*"):
                shutil.rmtree(old)
            folder.mkdir(parents=True)
            make(folder)
            made.touch()
    return folder


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
    except FileNotFoundError as error:
        raise UnavailableError(f"there is no {command[0]}") from error
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{command[2]} took longer than {INSTALL_LIMIT_S:g} s") from error
    except subprocess.CalledProcessError as error:
        words = [line for line in error.stderr.splitlines() if line.startswith("ERROR")] or error.stderr.splitlines()
        raise UnavailableError(words[-1][:300] if words else f"exit code {error.returncode}") from error


if __name__ == "__main__":
    for name in NAMES:
        print(python(name))
    for name in AGENTS:
        print(agent(name))
