"""A server that nobody asks anything, or only how it is."""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import signal
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.support.server.process import ServerProcess, StartServer

pytestmark = pytest.mark.long  # seconds are waited for and counted: what a busy machine adds to them shows


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> ServerProcess:
    """A server of its own: the shared one has a batch host, which asks it now and then."""
    return start_server().ready()


@contextlib.contextmanager
def closing_connection(server: ServerProcess) -> Iterator[http.client.HTTPResponse]:
    """What a probe on a connection of its own is answered."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=10)
    try:
        connection.request("GET", "/health")
        yield connection.getresponse()
    finally:
        connection.close()


def test_an_idle_server_uses_no_cpu(server: ServerProcess) -> None:
    processes = [psutil.Process(server.process.pid), server.engine]
    time.sleep(1)

    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    def woken() -> int:
        return sum(process.num_ctx_switches().voluntary for process in processes)

    before, woken_before = used(), woken()
    time.sleep(5)
    assert (used() - before) / 5 < 0.05
    assert (woken() - woken_before) / 5 < 16, "uvicorn's ten looks a second and a few of ours are what is left"


def test_time_goes_on_for_an_idle_server(server: ServerProcess) -> None:
    """Its clocks stand still while nobody is connected; the first answer then still tells the hour."""
    with closing_connection(server) as first:
        said = first.getheader("date")
    time.sleep(3)
    with closing_connection(server) as second:
        then = second.getheader("date")
    assert said is not None
    assert then is not None
    passed = email.utils.parsedate_to_datetime(then) - email.utils.parsedate_to_datetime(said)
    assert 2 <= passed.total_seconds() <= 10


@pytest.mark.parametrize(("path", "waits"), [("/readyz", False), ("/v1/models", True)])
def test_a_connection_that_only_probes_came_on_is_not_waited_for(start_server: StartServer, path: str, waits: bool) -> None:
    server = start_server("--drain-linger-seconds", "6").ready()
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=10)
    connection.request("GET", path)
    assert connection.getresponse().read()
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
    assert (time.monotonic() - began > 5) == waits
    connection.close()
