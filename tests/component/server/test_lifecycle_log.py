"""A log that nobody reads, or that cannot be written, changes neither whether a process ends nor what it leaves as its reason."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import httpx2 as httpx
import psutil
import pytest

PIPE_BYTES = 4096


class Server:
    """A server process with whatever for a log."""

    def __init__(self, model: Path, scratch: Path, *flags: str, stderr: int | IO[bytes], closed: bool = False) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.termination_log = scratch / "termination"
        command = [sys.executable, "-m", "banyan_runtime", "serve", "--model-path", str(model), "--port", str(port), *flags]
        if closed:
            command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command]
        variables = {"OMP_NUM_THREADS": "1", "BANYAN_TERMINATION_LOG": str(self.termination_log), "BANYAN_TEST_HANG_SECONDS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr, env=os.environ | variables, start_new_session=True
        )

    def status(self, path: str) -> int | None:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(self.url + path, timeout=5).status_code
        return None

    def ready(self) -> None:
        deadline = time.monotonic() + 90
        while self.status("/readyz") != 200:
            assert self.process.poll() is None, f"exit code {self.process.returncode}"
            assert time.monotonic() < deadline
            time.sleep(0.05)

    @property
    def engine(self) -> psutil.Process:
        (engine,) = (
            each for each in psutil.Process(self.process.pid).children() if "banyan_runtime.server.engine_process" in each.cmdline()
        )
        return engine

    def last_words(self) -> dict[str, str]:
        words: dict[str, str] = json.loads(self.termination_log.read_text())
        return words


Launch = Callable[..., Server]


@pytest.fixture
def launch(tiny_chat: Path, tmp_path: Path) -> Iterator[Launch]:
    servers: list[Server] = []

    def start(*flags: str, stderr: int | IO[bytes], closed: bool = False) -> Server:
        servers.append(Server(tiny_chat, tmp_path, *flags, stderr=stderr, closed=closed))
        return servers[-1]

    yield start
    for server in servers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()


class Pipe:
    """A small pipe whose reader can stop to read."""

    def __init__(self) -> None:
        self._read, self.write = os.pipe()
        fcntl.fcntl(self.write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._reading = True
        self._thread = threading.Thread(target=self._drain)
        self._thread.start()

    def _drain(self) -> None:
        os.set_blocking(self._read, False)
        while self._reading:
            with contextlib.suppress(BlockingIOError):
                os.read(self._read, PIPE_BYTES)
            time.sleep(0.005)

    def clog(self) -> None:
        """Stop reading, and fill it."""
        self._reading = False
        self._thread.join()
        own = os.open(f"/proc/self/fd/{self.write}", os.O_WRONLY | os.O_NONBLOCK)  # the server's end goes on to wait
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(own, b"x" * 64)
        os.close(own)

    def close(self) -> None:
        self._reading = False
        self._thread.join()
        os.close(self._read)


def end_killed(server: Server) -> str:
    server.engine.kill()
    deadline = time.monotonic() + 5
    while server.status("/livez") != 503:  # it is still served meanwhile
        assert time.monotonic() < deadline
    return "exit code -9"


def end_hung(server: Server) -> str:
    server.engine.suspend()
    return "--watchdog-timeout"


@pytest.mark.long
@pytest.mark.parametrize("end", [end_killed, end_hung])
def test_a_log_that_nobody_reads_does_not_keep_a_server_from_its_end(launch: Launch, end: Callable[[Server], str]) -> None:
    pipe = Pipe()
    server = launch("--watchdog-timeout", "2", stderr=pipe.write)
    server.ready()
    pipe.clog()
    reason = end(server)
    assert server.process.wait(30) == 70
    words = server.last_words()
    assert words["code"] == "engine_died"
    assert reason in words["message"]
    pipe.close()
    os.close(pipe.write)


@pytest.mark.long
def test_stacks_that_nobody_reads_hold_up_neither_probes_nor_answers(launch: Launch) -> None:
    pipe = Pipe()
    server = launch(stderr=pipe.write)
    server.ready()
    pipe.clog()
    server.process.send_signal(signal.SIGUSR2)
    server.engine.send_signal(signal.SIGUSR2)
    assert server.status("/livez") == 200
    answer = httpx.post(f"{server.url}/generate", json={"input_ids": [5], "sampling_params": {"max_new_tokens": 4}}, timeout=30)
    assert answer.status_code == 200
    pipe.close()
    os.close(pipe.write)


def full(launch: Launch, *flags: str) -> Server:
    with open("/dev/full", "wb") as log:
        return launch(*flags, stderr=log)


def unread(launch: Launch, *flags: str) -> Server:
    read, write = os.pipe()
    os.close(read)
    server = launch(*flags, stderr=write)
    os.close(write)
    return server


def closed(launch: Launch, *flags: str) -> Server:
    return launch(*flags, stderr=subprocess.DEVNULL, closed=True)


@pytest.mark.long
@pytest.mark.parametrize("broken", [full, unread, closed])
def test_a_log_that_cannot_be_written_costs_neither_exit_code_nor_reason(launch: Launch, broken: Callable[..., Server]) -> None:
    refused = broken(launch, "--page-size", "3")
    assert refused.process.wait(30) == 64
    assert refused.last_words()["code"] == "invalid_flag"
    server = broken(launch)
    server.ready()
    server.engine.kill()
    assert server.process.wait(30) == 70
    assert server.last_words()["code"] == "engine_died"


def test_a_batch_run_whose_log_cannot_be_written_keeps_its_exit_code_and_reason(tmp_path: Path) -> None:
    words = tmp_path / "termination"
    command = [sys.executable, "-m", "banyan_runtime", "batch", "--input", str(tmp_path / "none.jsonl"), "--output", str(tmp_path / "out")]
    command += ["--server", "http://127.0.0.1:1"]
    with open("/dev/full", "wb") as log:
        code = subprocess.run(command, stderr=log, env=os.environ | {"BANYAN_TERMINATION_LOG": str(words)}, timeout=60).returncode
    plain = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert code == plain.returncode
    assert json.loads(words.read_text())["message"] in plain.stderr.partition("FATAL: ")[2]
