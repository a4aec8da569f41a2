"""A process with its children: pinned to CPUs, stopped and continued, its time counted, ended whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final

import psutil
import uvloop
from load.client import Failed, Server
from load.plan import Plan
from load.play import play, takes_ids
from load.sample import Played, Sample

from peers.peer import Setup, Unavailable

READY_WITHIN_S: Final = 900  # a first start of vLLM compiles
ENDED_WITHIN_S: Final = 30


def go_first(pid: int) -> None:
    """Let a session go before all others (root). Linux weighs sessions first (autogroups), then the processes in each.

    Not by a real-time priority: at equal ones, a server's threads that compute let those that speak HTTP wait for 100 ms.
    """
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text("-20")


class Pinned:
    """A running command; what it writes goes to a file, and standard input and output are pipes where `piped`."""

    def __init__(self, command: list[str], env: dict[str, str] | None, log: IO[bytes], *, piped: bool, first: bool) -> None:
        self.popen = subprocess.Popen(
            command,
            env={**os.environ, **(env or {})},
            stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches the benchmark alone, which ends this
        )
        self._first = first
        self._log = Path(log.name)
        if first:
            go_first(self.popen.pid)  # its children in sessions of their own follow when it is resumed

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self, ready: Callable[[], bool]) -> None:
        """Raises Unavailable where the process ends, or takes too long, before `ready`."""
        until = time.monotonic() + READY_WITHIN_S
        while not ready():
            if self.popen.poll() is not None or time.monotonic() > until:
                how = "took too long to start" if self.popen.poll() is None else f"ended with status {self.popen.returncode}"
                raise Unavailable(f"{how}: {' '.join(self.log().split()[-60:])}")
            time.sleep(0.2)

    def tree(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.popen.pid)
            return [root, *root.children(recursive=True)]
        return []

    def signal(self, number: int) -> None:
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def pause(self) -> None:
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self._first:
            for process in self.tree():
                go_first(process.pid)
        self.signal(signal.SIGCONT)

    def cpu_seconds(self) -> float:
        total = 0.0
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def end(self) -> None:
        self.resume()
        children = self.tree()
        self.popen.terminate()
        try:
            self.popen.wait(ENDED_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        for child in children[1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


@contextlib.contextmanager
def pinned(command: list[str], setup: Setup, env: dict[str, str] | None = None, *, piped: bool = False) -> Iterator[Pinned]:
    with tempfile.NamedTemporaryFile(prefix="banyan-bench-", suffix=".log") as log:
        process = Pinned([*setup.place, *command], env, log, piped=piped, first=setup.first)
        try:
            yield process
        finally:
            process.end()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


class Served:
    """A peer that is a server of OpenAI's completions."""

    def __init__(self, process: Pinned, url: str, ready: str, about: str = "") -> None:
        """`ready`: the path that answers 200 when requests can come."""
        self.about = about
        self.pause, self.cpu_seconds = process.pause, process.cpu_seconds
        self._process, self._url, self._ready = process, url, ready
        self._ids: bool | None = None

    def resume(self) -> None:
        """Continue, and wait until it has noticed."""
        self._process.resume()
        self._process.wait(lambda: answers(self._url + self._ready))

    def play(self, plan: Plan) -> Played:
        try:
            return uvloop.run(self._play(plan))
        except Failed as error:
            raise Unavailable(str(error)) from error

    async def _play(self, plan: Plan) -> Played:
        server = Server(self._url, "m", extra={"ignore_eos": True})
        try:
            if self._ids is None:
                self._ids = await takes_ids(server)
            return await play(plan, server, ids=self._ids)
        finally:
            server.close()


class InProcess:
    """A peer that is a library: a child process (`peers/inprocess.py`) plays the plan by itself."""

    def __init__(self, process: Pinned, about: str = "") -> None:
        self.about = about
        self.pause, self.resume, self.cpu_seconds = process.pause, process.resume, process.cpu_seconds
        self._process = process

    def play(self, plan: Plan) -> Played:
        assert self._process.popen.stdin is not None
        sessions = [[session.due_s, [[list(ask.prompt), ask.max_tokens] for ask in session.asks]] for session in plan.sessions]
        job = [plan.name, plan.concurrent, plan.temperature, plan.conversation, sessions]
        self._process.popen.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.popen.stdin.flush()
        answer = self.line()
        return Played([Sample(**sample) for sample in answer["samples"]], answer["wall_s"])

    def line(self) -> dict[str, Any]:
        """The child's next line. Raises Unavailable if it has ended."""
        assert self._process.popen.stdout is not None
        line = self._process.popen.stdout.readline()
        if not line:
            raise Unavailable(f"its process ended: {' '.join(self._process.log().split()[-60:])}")
        answer: dict[str, Any] = json.loads(line)
        return answer
