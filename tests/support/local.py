"""Parts that several tests of local mode share: a stand-in for the runtime, and operators as processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

STAND_IN = textwrap.dedent(
    """
    # Stands in for `banyan-runtime serve`: answers as its probes expect, and misbehaves on request.
    import http.server, json, os, signal, subprocess, sys, time

    state = {"ready": True, "live": True}
    port = int(os.environ["BANYAN_PORT"])
    began = time.time()
    load_s = float(os.environ.get("LOAD_S", "0.3"))
    if os.environ.get("CHILD"):  # a process that does not want to die, in a session of its own
        subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"],
                         start_new_session=True)

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args): pass
        def do_GET(self):
            loading = time.time() - began < load_s
            if self.path == "/readyz":
                good = state["ready"] and not loading
                percent = min(100, int(100 * (time.time() - began) / load_s))
                self.answer(200 if good else 503, {"state": "ready" if good else "loading", "percent": percent, "detail": "shard 1 of 1",
                            "model": {"uri": "stand-in", "contextLength": 128}, "version": "0"})
            elif self.path == "/livez":
                self.answer(200 if state["live"] else 503, {})
            elif self.path == "/who":
                self.answer(200, {"pid": os.getpid(), "env": dict(os.environ)})
            elif self.path.startswith("/set/"):
                name, value = self.path.removeprefix("/set/").split("=")
                state[name] = value == "true"
                self.answer(200, state)
            else:
                self.answer(404, {})
        def answer(self, status, body):
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    print("stand-in listens on", port, flush=True)
    http.server.ThreadingHTTPServer((os.environ["BANYAN_HOST"], port), Handler).serve_forever()
    """
)


@pytest.fixture
def stand_in(tmp_path: Path) -> list[str]:
    """The command of a small HTTP server that takes the runtime's place in a pod."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    return [sys.executable, str(script)]


class Operator:
    """A `banyan-operator local` in a process of its own."""

    def __init__(self, manifests: Path, state: Path, *words: str) -> None:
        self.state = state
        self.log = state.with_suffix(".log")
        argv = [sys.executable, "-m", "banyan_operator", "local", "-f", str(manifests), "--state-dir", str(state), *words]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(argv, stdout=output, stderr=output, start_new_session=True)
        self._seen: dict[int, psutil.Process] = {}

    def status(self) -> dict[str, Any]:
        """status.json, or {} before there is one."""
        try:
            found: dict[str, Any] = json.loads((self.state / "status.json").read_text())
        except FileNotFoundError:
            return {}
        return found if found["pid"] == self.process.pid else {}

    def resource(self, name: str) -> dict[str, Any]:
        return next((one for one in self.status().get("resources", []) if one["metadata"]["name"] == name), {"status": {}})

    def phase(self, name: str) -> str:
        return str(self.resource(name).get("status", {}).get("phase", ""))

    def reason(self, name: str, condition: str = "Ready") -> str:
        conditions = self.resource(name).get("status", {}).get("conditions", [])
        return next((str(one["reason"]) for one in conditions if one["type"] == condition), "")

    def url(self, name: str) -> str:
        return str(self.resource(name)["status"]["url"])

    def wait(self, what: Callable[[], bool], timeout: float = 20.0) -> None:
        """Fails with the operator's log if `what` does not come true."""
        deadline = time.monotonic() + timeout
        while not what():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text() + json.dumps(self.status().get("resources"), indent=1)
            time.sleep(0.05)

    def processes(self) -> list[psutil.Process]:
        """Everything that runs below the operator; also remembered, for `survivors`."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        self._seen |= {process.pid: process for process in found}
        return found

    def survivors(self) -> list[psutil.Process]:
        """What still runs of all that was ever seen."""
        return [process for process in self._seen.values() if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

    def stop(self, number: int = signal.SIGTERM, timeout: float = 30.0) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout)


@pytest.fixture
def start_operator(tmp_path: Path) -> Iterator[Callable[..., Operator]]:
    """Starts operators; at the end of the test none of them, and nothing of theirs, is left."""
    started: list[Operator] = []

    def start(manifests: Path, *words: str, state: Path | None = None) -> Operator:
        started.append(Operator(manifests, state or tmp_path / "state", *words))
        return started[-1]

    yield start
    for operator in started:
        if operator.process.poll() is None:
            operator.processes()
            operator.process.kill()
            operator.process.wait()
    deadline = time.monotonic() + 5
    while any(operator.survivors() for operator in started) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [operator.survivors() for operator in started] == [[] for _ in started]
