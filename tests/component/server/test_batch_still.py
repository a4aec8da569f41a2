"""A batch host that stands still for a moment loses nothing; one that goes on doing so is replaced, and nobody waits for it."""

from __future__ import annotations

import contextlib
import http.client
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import psutil
import pytest

from banyan_runtime.server.signs import LOOK_EVERY_S, STALLED_LOOKS
from tests.component.server.test_batch_faults import check, done, some_done
from tests.component.server.test_batches_api import begin, end, lines, until
from tests.component.server.test_files_api import form, host_of
from tests.support.server.process import ServerProcess, StartServer

pytestmark = pytest.mark.long  # a host is looked at every 2 s, and several looks are waited for
FLAGS = ("--max-running-requests", "8", "--drain-linger-seconds", "0")
BRIEF_S = LOOK_EVERY_S * (STALLED_LOOKS - 2)  # within what a host may stand still
REPLACED_S = LOOK_EVERY_S * (STALLED_LOOKS + 2)
LARGE = 48 << 20  # more than lies in buffers between a host and who reads slowly


@contextlib.contextmanager
def stopped(host: psutil.Process) -> Iterator[None]:
    host.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            host.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def server(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    return start_server("--file-storage-path", str(tmp_path_factory.mktemp("kept")), *FLAGS).ready()


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=10)


class Upload(threading.Thread):
    """Sends a file, of which the last part waits until `go_on`."""

    def __init__(self, server: ServerProcess, size: int) -> None:
        super().__init__(daemon=True)
        self._host, self._port = server.url.removeprefix("http://").split(":")
        self._body, self._headers = form(("purpose", None, b"user_data"), ("file", "f", b"x" * size))
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.status: int | None = None
        self.said = b""
        self.start()
        assert self.begun.wait(30)

    def run(self) -> None:
        with contextlib.closing(http.client.HTTPConnection(self._host, int(self._port), timeout=60)) as connection:
            connection.putrequest("POST", "/v1/files")
            for name, value in (self._headers | {"Content-Length": str(len(self._body))}).items():
                connection.putheader(name, value)
            connection.endheaders()
            half = len(self._body) // 2
            connection.send(self._body[:half])
            self.begun.set()
            self.go_on.wait(60)
            with contextlib.suppress(OSError):  # who has answered takes no more
                connection.send(self._body[half:])
            answer = connection.getresponse()
            self.status, self.said = answer.status, answer.read()


class Download:
    """Reads a file, of which it has read a little."""

    def __init__(self, server: ServerProcess, file: str) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._socket.sendall(f"GET /v1/files/{file}/content HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        self._answer = http.client.HTTPResponse(self._socket)
        self._answer.begin()
        self.read = len(self._answer.read(1 << 16))

    def rest(self) -> int:
        """Bytes in all."""
        with contextlib.closing(self._socket):
            try:
                self.read += len(self._answer.read())
            except http.client.IncompleteRead as cut:
                self.read += len(cut.partial)
        return self.read


def test_a_host_that_stands_still_is_replaced_and_who_waits_for_it_hears_so(server: ServerProcess, client: openai.OpenAI) -> None:
    large = client.files.create(file=("large", b"y" * LARGE), purpose="user_data")
    batch = until(client, begin(client, lines(200, max_tokens=16)), some_done)
    uploading, downloading = Upload(server, 8 << 20), Download(server, large.id)
    host = host_of(server)
    with stopped(host):
        begun = time.monotonic()
        refused = server.http.get(f"{server.url}/v1/batches", timeout=REPLACED_S + 10)
        assert time.monotonic() - begun < REPLACED_S
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "server_error")
        assert "retry-after" in refused.headers
        assert server.get("/readyz").status_code == 200
        uploading.go_on.set()
        assert downloading.rest() < LARGE
        uploading.join(30)
        assert uploading.status == 503, uploading.said
        host.wait(10)
    assert f"(pid {host.pid})" in server.log
    batch = end(client, batch)
    assert batch.status == "completed"
    check(client, batch, 200)
    assert host_of(server).pid != host.pid
    assert Download(server, large.id).rest() == LARGE
    assert [file.filename for file in client.files.list(purpose="user_data").data] == ["large"], "of what was cut off there is nothing"


def test_a_host_that_stands_still_for_a_moment_loses_nothing(server: ServerProcess, client: openai.OpenAI) -> None:
    large = client.files.create(file=("large", b"y" * LARGE), purpose="user_data")
    batch = until(client, begin(client, lines(200, max_tokens=16)), some_done)
    uploading, downloading = Upload(server, 8 << 20), Download(server, large.id)
    host = host_of(server)
    for _ in range(2):
        asked: list[httpx.Response] = []
        asking = threading.Thread(target=lambda asked=asked: asked.append(server.http.get(f"{server.url}/v1/batches")))
        with stopped(host):
            asking.start()
            uploading.go_on.set()
            time.sleep(BRIEF_S)
        asking.join(30)
        assert [answer.status_code for answer in asked] == [200]
    uploading.join(30)
    assert (uploading.status, downloading.rest()) == (200, LARGE)
    batch = end(client, batch)
    assert batch.status == "completed"
    check(client, batch, 200)
    assert host_of(server).pid == host.pid


def test_a_host_that_nobody_asks_anything_is_replaced_as_well(server: ServerProcess, client: openai.OpenAI) -> None:
    client.files.list()
    host = host_of(server)
    with stopped(host):
        server.eventually(lambda: not psutil.pid_exists(host.pid), "the end of a host that stands still", REPLACED_S + 10)
    client.files.list()


def test_a_server_that_stood_still_with_its_host_ends_nobody(server: ServerProcess, client: openai.OpenAI) -> None:
    """As when the machine is suspended."""
    client.files.list()
    host, front = host_of(server), psutil.Process(server.process.pid)
    with stopped(host):
        with stopped(front):
            time.sleep(REPLACED_S + LOOK_EVERY_S)
        time.sleep(BRIEF_S - LOOK_EVERY_S)
    client.files.list()
    assert host_of(server).pid == host.pid


def test_of_two_servers_over_one_folder_the_other_is_not_disturbed_by_a_host_that_stands_still(
    start_server: StartServer, tmp_path: Path
) -> None:
    servers = [start_server("--file-storage-path", str(tmp_path), *FLAGS).ready() for _ in range(2)]
    clients = [openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=10) for server in servers]
    batches = [until(client, begin(client, lines(150, max_tokens=16)), some_done) for client in clients]
    hosts = [host_of(server) for server in servers]
    with stopped(hosts[0]):
        before = [done(batch) for batch in batches]
        servers[0].eventually(lambda: not psutil.pid_exists(hosts[0].pid), "the end of a host that stands still", REPLACED_S + 10)
    ended: list[Any] = [end(clients[1], batch) for batch in batches]
    for batch, least in zip(ended, before, strict=True):
        assert batch.status == "completed"
        assert done(batch) >= least
        check(clients[0], batch, 150)
    assert host_of(servers[1]).pid == hosts[1].pid
