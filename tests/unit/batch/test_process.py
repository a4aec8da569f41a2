"""The batch as a process: signals, progress while it runs, what a terminal shows, and memory."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.s3.servers import free_port
from tests.support.server.scripted import ScriptedServer, line

COMMAND = [sys.executable, "-m", "banyan_runtime", "batch"]
SLOW_DISK = """
import os, sys, time
from banyan_runtime.cli import main
sync = os.fdatasync
os.fdatasync = lambda file: (time.sleep(0.5), sync(file))
sys.exit(main())
"""
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(server: ScriptedServer, tmp_path: Path) -> Iterator[Start]:
    """Start a batch over `count` lines that each take `seconds`."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(
        *arguments: str, count: int, prompt: str = "slow 0.05", command: Sequence[str] = COMMAND, **more: Any
    ) -> subprocess.Popen[bytes]:
        source = tmp_path / "in.jsonl"
        source.write_text("".join(line(str(i), prompt) + "\n" for i in range(count)))
        words = [*command, "--input", str(source), "--output", str(tmp_path / "out"), "--server", server.url, *arguments]
        environment = os.environ | {"BANYAN_TERMINATION_LOG": str(tmp_path / "words")}
        process = subprocess.Popen(words, env=environment, **more)
        running.append(process)
        return process

    yield begin
    for process in running:
        process.kill()
        process.wait()


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_run_publishes_nothing_and_says_so(
    start: Start, server: ScriptedServer, tmp_path: Path, number: signal.Signals, exit_code: int
) -> None:
    process = start(count=2000)
    _eventually(lambda: server.tries.total() > 50)
    process.send_signal(number)
    assert process.wait(10) == exit_code
    words = json.loads((tmp_path / "words").read_text())
    assert words["code"] == "interrupted"
    assert words["requestCounts"]["total"] == 2000
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".banyan"]
    again = start("--max-concurrency", "256", count=20)
    assert again.wait(20) == 0, "an interrupted run leaves nothing in the way of the next one"


def test_progress_and_metrics_are_served_while_it_runs(start: Start, server: ScriptedServer) -> None:
    port = free_port()
    process = start("--progress-port", str(port), "--max-concurrency", "4", count=300, prompt="slow 0.02")
    _eventually(lambda: server.tries.total() > 100)
    report = json.loads(_get(f"http://127.0.0.1:{port}/progress"))
    assert (report["phase"], report["total"], report["failed"]) == ("running", 300, 0)
    assert 60 < report["completed"] < 300
    assert 20 <= report["percent"] < 100
    assert report["usage"]["completionTokens"] == 3 * report["completed"]
    assert report["etaSeconds"] is None or 0 < report["etaSeconds"] < 60
    metrics = _get(f"http://127.0.0.1:{port}/metrics")
    samples = dict(text.rsplit(" ", 1) for text in metrics.splitlines() if not text.startswith("#"))
    assert float(samples['banyan_batch_lines_total{status="completed"}']) >= report["completed"]
    assert 1 <= float(samples["banyan_batch_requests_in_flight"]) <= 4
    assert process.wait(30) == 0


def test_without_a_terminal_progress_is_plain_lines(start: Start) -> None:
    process = start(count=20, stderr=subprocess.PIPE)
    _, stderr = process.communicate(timeout=20)
    text = stderr.decode()
    assert "phase=done done=20/20 ok=20 err=0" in text
    assert "\r" not in text


@pytest.mark.long
def test_on_a_terminal_progress_is_a_bar_with_counts_speed_and_time_left(start: Start) -> None:
    ours, theirs = pty.openpty()
    process = start("--max-concurrency", "8", count=150, stderr=theirs)
    os.close(theirs)
    text = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:
            break
        text += piece
    os.close(ours)
    assert process.wait(10) == 0
    assert b"150/150 lines" in text
    assert b"0 failed" in text
    assert b"tok/s" in text
    assert b"ETA" in text
    assert text.count(b"\r") > 3


@pytest.mark.long
def test_a_server_that_starts_slowly_is_waited_for_and_shown(start: Start, server: ScriptedServer) -> None:
    server.ready = {"state": "loading", "percent": 40, "detail": "shard 2 of 5"}
    process = start(count=3, stderr=subprocess.PIPE)
    _eventually(lambda: server.probes >= 3)
    assert process.poll() is None
    server.ready = None
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 0
    assert b"server state=loading percent=40 shard 2 of 5" in stderr


@pytest.mark.long
def test_memory_does_not_grow_with_the_file_even_on_a_slow_disk(start: Start) -> None:
    """A 22 MB and a 60 MB input of equal lines, each longer than the window; their results are as long again.

    16 MB of results may wait for the disk, twice: as they came and as they are written. The short input does not always fill that.
    """
    command, words = [sys.executable, "-c", SLOW_DISK, "batch"], ["--max-concurrency", "32", "--overwrite"]
    peaks = [_peak_rss(start(*words, command=command, count=count, prompt=f"say {'x' * 20_000}")) for count in (1_100, 3_000)]
    assert peaks[1] - peaks[0] < 40 << 20, [peak >> 20 for peak in peaks]


def _peak_rss(process: subprocess.Popen[bytes]) -> int:
    watched = psutil.Process(process.pid)
    peak = 0
    while process.poll() is None:
        try:
            peak = max(peak, watched.memory_info().rss)
        except psutil.NoSuchProcess:
            break
        time.sleep(0.02)
    assert process.wait() == 0
    return peak


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


def _eventually(seen: Callable[[], bool], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.01)
