"""Real processes: what a container's process gets, how it ends, and that nothing of it stays."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from banyan_operator.local.process import Process

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
WITH_DAEMON = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600 if sys.argv[1:] == ["stay"] else 0)
"""


def eventually(what: Callable[[], bool], timeout: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if what():
            return True
        time.sleep(0.02)
    return False


def run(
    code: str, log: Path, *words: str, then: Callable[[Process], None] = lambda process: None, env: dict[str, str] | None = None
) -> int:
    async def life() -> int:
        process = await Process.start([sys.executable, "-c", code, *words], env or dict(os.environ), log.parent, log)
        await asyncio.to_thread(then, process)
        return await process.wait()

    return asyncio.run(life())


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("code", "exit_code"), [("raise SystemExit(0)", 0), ("raise SystemExit(65)", 65), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_the_exit_code_is_the_commands_own(tmp_path: Path, code: str, exit_code: int) -> None:
    assert run(code, tmp_path / "log") == exit_code


def test_a_command_that_does_not_exist_ends_with_127_and_says_so_in_its_log(tmp_path: Path) -> None:
    async def life() -> int:
        return await (await Process.start(["/no/such/program"], {}, tmp_path, tmp_path / "log")).wait()

    assert asyncio.run(life()) == 127
    assert "cannot run /no/such/program" in (tmp_path / "log").read_text()


def test_output_goes_to_the_log_and_the_log_before_it_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "pod" / "server.log"
    run("print('first')", log)
    run("import sys; print('second'); print('third', file=sys.stderr)", log)
    assert log.read_text().split() == ["third", "second"] or log.read_text().split() == ["second", "third"]
    assert log.with_name("server.log.previous").read_text() == "first\n"


def test_the_environment_is_exactly_the_one_given(tmp_path: Path) -> None:
    log = tmp_path / "log"
    run("import os; print(sorted(set(os.environ) - {'LC_CTYPE'}))", log, env={"ONLY": "this"})
    assert log.read_text() == "['ONLY']\n"


def test_terminate_reaches_the_command_alone_and_kill_takes_everything(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def stop(process: Process) -> None:
        assert eventually(lambda: "up" in log.read_text())
        process.terminate()
        time.sleep(0.3)
        assert psutil.pid_exists(process.pid), "it ignores SIGTERM"
        process.kill()

    assert run(STUBBORN, log, then=stop) == 137


@pytest.mark.parametrize("stays", [True, False])
def test_what_a_command_leaves_behind_dies_with_it_even_in_a_session_of_its_own(tmp_path: Path, stays: bool) -> None:
    log = tmp_path / "log"

    def stop(process: Process) -> None:
        assert eventually(lambda: log.read_text().endswith("\n"))
        if stays:
            process.kill()

    run(WITH_DAEMON, log, *(["stay"] if stays else []), then=stop)
    assert is_gone(int(log.read_text()))


def test_a_killed_launcher_leaves_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    children: list[psutil.Process] = []

    def kill(process: Process) -> None:
        assert eventually(lambda: "up" in log.read_text())
        children.extend(psutil.Process(process.pid).children(recursive=True))
        os.kill(process.pid, signal.SIGKILL)

    assert run(STUBBORN, log, then=kill) == 137
    assert children
    assert eventually(lambda: all(is_gone(child.pid) for child in children))


def test_when_the_starting_process_is_killed_everything_it_started_dies(tmp_path: Path) -> None:
    log = tmp_path / "log"
    parent_code = textwrap.dedent(
        f"""
        import asyncio, os, sys
        from pathlib import Path
        from banyan_operator.local.process import Process
        async def main():
            argv = [sys.executable, "-c", {WITH_DAEMON!r}, "stay"]
            process = await Process.start(argv, dict(os.environ), Path({str(tmp_path)!r}), Path({str(log)!r}))
            print(process.pid, flush=True)
            await process.wait()
        asyncio.run(main())
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    launcher = int(parent.stdout.readline())
    assert eventually(lambda: log.exists() and log.read_text().endswith("\n"))
    daemon = int(log.read_text())
    assert psutil.pid_exists(daemon)
    parent.kill()
    parent.wait()
    assert eventually(lambda: is_gone(launcher) and is_gone(daemon))
