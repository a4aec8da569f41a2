"""SIGTERM and Ctrl-C in every phase: the first ends in good order within the grace period, the second at once."""

from __future__ import annotations

import signal

import pytest

from tests.component.batch.conftest import IN_FLIGHT, Bench, places
from tests.support.s3.servers import Fault, Proxy
from tests.support.server.scripted import line

CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}
BOTH = pytest.mark.parametrize("number", list(CODES))
CASES = places(list(CODES), [signal.SIGTERM], gate=[signal.SIGTERM])
PLACES_AND_SIGNALS = pytest.mark.parametrize(("bench", "number"), CASES, indirect=["bench"])


@PLACES_AND_SIGNALS
def test_while_it_waits_for_the_server(bench: Bench, number: signal.Signals) -> None:
    bench.give(10)
    bench.server.ready = {"state": "loading", "percent": 1, "detail": ""}
    child = bench.start(BANYAN_GRACE_SECONDS="60")
    bench.eventually(lambda: bench.server.probes > 0)
    _ends(child, number, 30)
    bench.server.ready = None
    bench.run()
    bench.check()


@pytest.mark.matrix(gate=1)
@BOTH
def test_while_it_reads_a_big_input(folder_bench: Bench, number: signal.Signals) -> None:
    bench = folder_bench
    bench.place.store.put("in.jsonl", (line("id", "x" * 300) + "\n").encode() * 400_000)
    child = bench.start(BANYAN_GRACE_SECONDS="12")
    bench.eventually(lambda: "phase=planning" in child.said or "planning" in child.said)
    assert bench.server.tries.total() == 0
    _ends(child, number, 6)


@PLACES_AND_SIGNALS
def test_while_lines_are_in_flight_they_may_end_and_are_kept(bench: Bench, number: signal.Signals) -> None:
    bench.give(60)
    bench.server.delay_s = 0.3
    child = bench.start("--shard-requests", "10", BANYAN_GRACE_SECONDS="60")  # of which lines in flight have 50 s
    bench.eventually(lambda: bench.server.tries.total() > 10)
    _ends(child, number, 30)
    sent = bench.server.tries.total()
    assert child.words["requestCounts"]["completed"] == sent
    bench.server.delay_s = 0.0
    bench.run("--shard-requests", "10")
    bench.check()
    assert bench.repeated == 0


def test_lines_that_take_longer_than_the_grace_are_left(bench: Bench) -> None:
    bench.give([line(f"id-{i}", "slow 60" if i >= 10 else f"hello {i}") for i in range(20)])
    child = bench.start(BANYAN_GRACE_SECONDS="12")
    bench.eventually(lambda: bench.server.tries["slow 60"] == IN_FLIGHT)  # all others have their answers
    _ends(child, signal.SIGTERM, 10)
    assert child.words["requestCounts"] == {"total": 20, "completed": 10, "failed": 0}


@pytest.mark.long
def test_lines_that_wait_for_a_server_that_is_away_are_not_waited_for(bench: Bench) -> None:
    bench.give([line(f"id-{i}", "status 500") for i in range(8)])
    child = bench.start(BANYAN_GRACE_SECONDS="120")
    bench.eventually(lambda: bench.server.tries.total() > 0)
    bench.server.ready = {"state": "loading", "percent": 1, "detail": ""}
    bench.eventually(lambda: "to serve again" in child.said)
    _ends(child, signal.SIGTERM, 15)
    assert child.words["requestCounts"]["failed"] == 0


def test_the_second_signal_ends_at_once(bench: Bench) -> None:
    bench.give([line(f"id-{i}", "slow 600") for i in range(8)])
    child = bench.start(BANYAN_GRACE_SECONDS="120")
    bench.eventually(lambda: bench.server.tries.total() > 0)
    child.send(signal.SIGTERM)
    bench.eventually(lambda: "stopping" in child.said)
    _ends(child, signal.SIGTERM, 60)
    assert child.words["code"] == "interrupted"


@pytest.mark.long
@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize(("method", "number"), [(b"PUT", signal.SIGTERM), (b"HEAD", signal.SIGINT), (b"GET", signal.SIGTERM)])
def test_while_the_storage_hangs_in_the_beginning(proxied: tuple[Bench, Proxy], number: signal.Signals, method: bytes) -> None:
    bench, proxy = proxied
    bench.give(10)
    proxy.faults = [Fault(lambda head: head.startswith(method), "hang", times=1000)]
    child = bench.start(BANYAN_GRACE_SECONDS="12")
    bench.eventually(lambda: proxy.faults[0].times < 1000)
    bench.eventually(lambda: proxy.endpoint in child.said)
    _ends(child, number, 5)


@pytest.mark.long
def test_while_the_storage_hangs_in_the_middle(proxied: tuple[Bench, Proxy]) -> None:
    bench, proxy = proxied
    bench.give(60)
    bench.server.delay_s = 0.05
    child = bench.start("--checkpoint-seconds", "0.2", "--shard-requests", "10", BANYAN_GRACE_SECONDS="12")
    bench.eventually(lambda: bench.server.tries.total() > 10)
    proxy.faults = [Fault(lambda head: True, "hang", times=1000)]
    bench.eventually(lambda: proxy.faults[0].times < 1000)
    _ends(child, signal.SIGTERM, 14)
    proxy.faults = []
    proxy.released.set()
    bench.run("--shard-requests", "10")
    bench.check()


@pytest.mark.long
def test_while_the_storage_hangs_as_it_publishes(proxied: tuple[Bench, Proxy]) -> None:
    bench, proxy = proxied
    bench.give(10)
    proxy.faults = [Fault(lambda head: head.startswith(b"PUT") and b"output.jsonl" in head, "hang", times=1000)]
    child = bench.start(BANYAN_GRACE_SECONDS="12")
    bench.eventually(lambda: proxy.faults[0].times < 1000)
    _ends(child, signal.SIGINT, 14)
    proxy.faults = []
    proxy.released.set()
    bench.run()
    bench.check()
    assert bench.repeated == 0


def _ends(child, number: signal.Signals, limit_s: float) -> None:  # type: ignore[no-untyped-def]
    child.send(number)
    assert child.wait(limit_s) in CODES.values(), child.said
    assert child.process.exitcode == CODES[number]
    assert child.words["code"] == "interrupted"
    assert "Traceback" not in child.said, child.said
