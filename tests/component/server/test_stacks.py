"""SIGUSR2 shows what a process does, whatever its log is, and whatever becomes of that holds the process up."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PROGRAM = """
import ctypes, sys
from banyan_runtime import stacks
stacks.show_on_signal()
def work_on():
    print("up", flush=True)
    for line in sys.stdin:
        print(line, end="", flush=True)
        if line == "hold the lock\\n":
            ctypes.PyDLL(None).sleep(60)
work_on()
"""


class Log:
    """Somewhere that a process writes to, and where it can be read."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        if kind == "file":
            path = folder / "log"
            self.ends = (os.open(path, os.O_WRONLY | os.O_CREAT), os.open(path, os.O_RDONLY))
        elif kind == "socket":
            self.ends = tuple(end.detach() for end in socket.socketpair())  # type: ignore[assignment]
        else:
            self.ends = os.pipe()[::-1]  # type: ignore[assignment]
        self.write, self.read = self.ends
        os.set_blocking(self.read, False)

    def until(self, word: bytes) -> bytes:
        text, deadline = b"", time.monotonic() + 30
        while word not in text:
            assert time.monotonic() < deadline, text.decode()
            with contextlib.suppress(BlockingIOError):
                text += os.read(self.read, 65536)
            time.sleep(0.01)
        return text

    def clog(self) -> None:
        """Fill it; nobody reads it."""
        os.set_blocking(self.write, False)
        with contextlib.suppress(BlockingIOError):
            while os.write(self.write, b"x" * 64):
                pass
        os.set_blocking(self.write, True)


Start = Callable[[Log], "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def started(log: Log) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.write, bufsize=0
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert line_of(process) == b"up\n"
            return process

        yield started


def line_of(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def say(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(line)


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("kind", ["pipe", "socket", "file"])
def test_the_stacks_of_a_process_go_to_its_log(start: Start, kind: str, tmp_path: Path) -> None:
    log = Log(kind, tmp_path)
    process = start(log)
    for _ in range(2):
        process.send_signal(signal.SIGUSR2)
        assert b"most recent call first" in log.until(b"in work_on")


def test_a_thread_that_never_gives_up_the_lock_is_shown_too(start: Start, tmp_path: Path) -> None:
    log = Log("pipe", tmp_path)
    process = start(log)
    say(process, b"hold the lock\n")
    assert line_of(process) == b"hold the lock\n"
    process.send_signal(signal.SIGUSR2)
    log.until(b"in work_on")


@pytest.mark.matrix(gate=1)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_stacks_that_nobody_reads_do_not_hold_the_process_up(start: Start, kind: str, tmp_path: Path) -> None:
    log = Log(kind, tmp_path)
    process = start(log)
    log.clog()
    for line in (b"one\n", b"two\n"):
        process.send_signal(signal.SIGUSR2)
        say(process, line)
        assert line_of(process) == line
