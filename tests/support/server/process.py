"""A real server process on a free port, and what tests want to ask it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import httpx2 as httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from banyan_runtime.front.metrics import REWRITE_EVERY_S

T = TypeVar("T")
START_LIMIT_S = 90.0
ADDRESS = re.compile(r"Listening on (http://[\d.]+:\d+)")
MODEL = "tiny"  # the name under which every test server serves
SECOND_NAME = "second-name"  # of the shared server
PROGRAM = ("-m", "banyan_runtime")
SLOW = Path(__file__).with_name("slow")  # what lets engines be `slowed`
READY = "The server is fired up and ready to roll!"
DEADLINE_S = 4.0  # a `slowed` engine gives the first token of a long answer long before it, and the last long after


class ServerProcess:
    """`banyan-runtime serve` as a process of its own, its log in a file."""

    def __init__(
        self, model: Path, log: Path, *flags: str, environment: dict[str, str] | None = None, program: Sequence[str] = PROGRAM
    ) -> None:
        self.log_file = log
        self.termination_log = log.with_suffix(".termination")
        self.http = httpx.Client(timeout=30, verify=False)  # no TLS: loading certificates would take longer than most tests
        command = [sys.executable, *program, "serve", "--model-path", str(model), "--served-model-name", MODEL]
        command += ["--port", "0", *flags]
        self._slow = log.with_suffix(".slow")
        own = {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(SLOW), os.environ.get("PYTHONPATH")))),
            "BANYAN_TEST_SLOW": str(self._slow),
            "OMP_NUM_THREADS": "1",
            "BANYAN_TERMINATION_LOG": str(self.termination_log),
            "BANYAN_CACHE": str(log.with_suffix(".cache")),  # where files are kept, unless a flag says otherwise
        }
        variables = {**os.environ, **own, **(environment or {})}
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=variables, start_new_session=True
            )

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def lines(self) -> list[str]:
        """The log without its time stamps."""
        return [re.sub(r"^\[[-\d]+ [:\d]+\] ", "", line) for line in self.log.splitlines()]

    @property
    def url(self) -> str:
        """Where it listens, from the moment it does."""
        found: list[str] = self.eventually(lambda: ADDRESS.findall(self.log), "the address in the log")
        return found[0]

    def ready(self) -> ServerProcess:
        self.eventually(lambda: READY in self.log, "readiness", START_LIMIT_S)
        return self

    def eventually(self, seen: Callable[[], T], what: str, limit_s: float = 30.0) -> T:
        """Wait until `seen` is true; fails with the log when the server ends or the time does."""
        deadline = time.monotonic() + limit_s
        while True:
            ended = self.process.poll() is not None
            if value := seen():
                return value
            assert not ended, f"exit code {self.process.returncode} before {what}; the log:\n{self.log}"
            assert time.monotonic() < deadline, f"no {what} within {limit_s:g} s; the log:\n{self.log}"
            time.sleep(0.02)

    def get(self, path: str) -> httpx.Response:
        return self.http.get(self.url + path)

    def post(self, path: str, body: dict[str, object]) -> httpx.Response:
        return self.http.post(self.url + path, json=body)

    def status(self, path: str) -> int | None:
        """The status of a GET; None when nobody answers."""
        try:
            return self.get(path).status_code
        except httpx.TransportError:
            return None

    def metric(self, series: str) -> float:
        """One sample of /metrics, by its name and, if any, labels without model_name: 'name' or 'name{a="b"}'."""
        (wanted,) = (sample for family in text_string_to_metric_families(f"{series} 0\n") for sample in family.samples)
        families = text_string_to_metric_families(self.get("/metrics").text)
        found = [
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == wanted.name and {**sample.labels, "model_name": ""} == {**wanted.labels, "model_name": ""}
        ]
        assert len(found) == 1, f"{series}: {found}"
        return found[0]

    def settled(self, series: str) -> float:
        """The same, of a page that tells of all that was before: it is written anew a few times a second."""
        time.sleep(REWRITE_EVERY_S + 0.1)
        return self.metric(series)

    def until_idle(self) -> None:
        """Wait until no request runs."""
        self.eventually(lambda: self.metric("banyan_requests_running") == 0, "an empty batch")

    @property
    def engine(self) -> psutil.Process:
        """Its engine process, from the moment there is one."""
        return self.eventually(lambda: self._child("banyan_runtime.server.engine_process"), "the engine process")

    @property
    def zygote(self) -> psutil.Process:
        """The process that forks those that tokenize, from the moment there is one."""
        return self.eventually(lambda: self._child("banyan_runtime.front.prepare.fork_server"), "the process that forks")

    @contextlib.contextmanager
    def slowed(self) -> Iterator[None]:
        """Makes each step of the engine long: on no machine is a long answer over before somebody has looked at it.

        It is idle before: the load gauges may show a request a little longer than its answer took.
        """
        self.until_idle()
        self._slow.touch()
        try:
            yield
        finally:
            self._slow.unlink(missing_ok=True)

    def _child(self, module: str) -> psutil.Process | None:
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if module in child.cmdline():
                    return child
        return None

    def wait(self, limit_s: float = 20.0) -> int:
        """The exit code."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {limit_s:g} s; the log:\n{self.log}")

    def stop(self) -> None:
        """End it and all it started, whatever state it is in. A process that coverage measures has time to write what it has seen."""
        if "COVERAGE_PROCESS_START" in os.environ:
            self.http.close()
            for _ in range(2):  # the second one cuts a drain short
                self.process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(3)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.http.close()


StartServer = Callable[..., ServerProcess]


@pytest.fixture(scope="module")
def start_server(tmp_path_factory: pytest.TempPathFactory, tiny_chat: Path) -> Iterator[StartServer]:
    """Start servers of the tiny model (or `model=`) with more flags; all are stopped with the module."""
    started: list[ServerProcess] = []

    def start(
        *flags: str, model: Path = tiny_chat, environment: dict[str, str] | None = None, program: Sequence[str] = PROGRAM
    ) -> ServerProcess:
        log = tmp_path_factory.mktemp("server") / "server.log"
        server = ServerProcess(model, log, *flags, environment=environment, program=program)
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the shared server keeps files, batches and responses."""
    return tmp_path_factory.mktemp("storage") / "kept"


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory, tiny_chat: Path, storage: Path) -> Iterator[ServerProcess]:
    """The one server of the tiny model that all tests of the API in this process share.

    Whatever they need is switched on. It has answered other requests before: a test compares counts before and after, and uses texts
    and ids of its own where a cache or a list would show those of others. No test ends it, its engine, or leaves it slow.
    """
    flags = (
        "--served-model-name", MODEL, SECOND_NAME, "--dtype", "float32", "--reasoning-parser", "qwen3", "--enable-embeddings",
        "--json-model-override-args", '{"is_matryoshka": true}', "--chunked-prefill-size", "64", "--file-storage-path", str(storage),
    )  # fmt: skip
    server = ServerProcess(tiny_chat, tmp_path_factory.mktemp("server") / "server.log", *flags)
    try:
        yield server.ready()
    finally:
        server.stop()


@pytest.fixture(scope="session")
def server(shared_server: ServerProcess) -> ServerProcess:
    """The shared server, where a module has none of its own."""
    return shared_server


@pytest.fixture
def slowed(server: ServerProcess) -> Iterator[None]:
    """The server is slow during this test."""
    with server.slowed():
        yield
