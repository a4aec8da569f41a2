"""What a worker that ends in good order, for whatever reason, says last of how far the run is: what is kept, no less and no more."""

from __future__ import annotations

import signal
import time

import pytest

from tests.component.batch.conftest import Bench
from tests.component.batch.driver import Child
from tests.support.s3.servers import Fault, Proxy
from tests.support.server.scripted import line

WORKER = ["--run-id", "job", "--shard-requests", "20", "--checkpoint-seconds", "0.2", "--phase", "work"]


def _counts(child: Child) -> tuple[int, int]:
    """Completed and failed, as it said last."""
    told = child.words["requestCounts"]
    assert child.words["usage"]["completionTokens"] == 3 * told["completed"]
    return told["completed"], told["failed"]


def _kept(bench: Bench) -> tuple[int, int]:
    failed = {f"id-{number}" for number in range(9, len(bench.ids), 10)}
    return len(bench.recorded - failed), len(bench.recorded & failed)


def _give(bench: Bench, count: int) -> None:
    """Lines of which every tenth fails."""
    bench.give([line(f"id-{i}", f"status 400 {i}" if i % 10 == 9 else f"line {i}") for i in range(count)])


@pytest.mark.long
@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_when_it_is_suspended(bench: Bench, number: signal.Signals) -> None:
    _give(bench, 400)
    bench.server.delay_s = 0.05
    child = bench.start(*WORKER, BANYAN_GRACE_SECONDS="12")
    bench.eventually(lambda: bench.server.tries.total() > 60)
    child.send(number)
    assert child.wait() in (130, 143), child.said
    assert _counts(child) == _kept(bench)
    assert child.words["requestCounts"]["total"] == 400
    first = _counts(child)
    child = bench.start(*WORKER, BANYAN_GRACE_SECONDS="12")
    bench.eventually(lambda: bench.server.tries.total() > 200)
    child.send(number)
    child.wait()
    assert _counts(child) == _kept(bench) > first, "what an earlier one has done counts as well"


@pytest.mark.long
def test_when_it_is_suspended_with_others(bench: Bench) -> None:
    """Each knows what the others had done when it looked last."""
    _give(bench, 400)
    bench.server.delay_s = 0.05
    workers = [bench.start(*WORKER, "--workers", "2", BANYAN_GRACE_SECONDS="12", JOB_COMPLETION_INDEX=str(i)) for i in range(2)]
    bench.eventually(lambda: bench.server.tries.total() > 100)
    for child in workers:
        child.send(signal.SIGTERM)
    assert [child.wait() for child in workers] == [143, 143]
    kept = _kept(bench)
    for child in workers:
        completed, failed = _counts(child)
        assert 0 < completed <= kept[0]
        assert failed <= kept[1]


@pytest.mark.long
def test_when_it_is_suspended_before_its_server_is_there(bench: Bench) -> None:
    """It has counted nothing, and says so: a total of 0."""
    _give(bench, 100)
    bench.server.delay_s = 0.05
    child = bench.start(*WORKER, BANYAN_GRACE_SECONDS="12")
    bench.eventually(lambda: bench.server.tries.total() > 30)
    child.send(signal.SIGTERM)
    child.wait()
    bench.server.ready = {"state": "loading", "percent": 1, "detail": ""}
    probes = bench.server.probes
    child = bench.start(*WORKER, BANYAN_GRACE_SECONDS="12")
    bench.eventually(lambda: bench.server.probes > probes)
    time.sleep(0.5)
    child.send(signal.SIGTERM)
    assert child.wait() == 143, child.said
    assert child.words["requestCounts"] == {"total": 0, "completed": 0, "failed": 0}
    assert bench.recorded


@pytest.mark.long
@pytest.mark.parametrize("why", ["cancelled", "expired"])
def test_when_the_run_is_ended(bench: Bench, why: str) -> None:
    _give(bench, 400)
    bench.server.delay_s = 0.05
    child = bench.start(*WORKER)
    bench.eventually(lambda: bench.server.tries.total() > 60)
    merge = bench.run("--run-id", "job", "--shard-requests", "20", "--checkpoint-seconds", "0.2", "--phase", "merge", "--partial", why)
    assert child.wait() in (0, 75), child.said
    assert child.words["code"] in ("unfinished", "worked"), "the latter if it learns of the end by its shards"
    counts = merge.words["requestCounts"]
    assert _counts(child) == (counts["completed"], counts["failed"])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["unavailable", "denied"])
def test_when_the_storage_is_gone(proxied: tuple[Bench, Proxy], kind: str) -> None:
    bench, proxy = proxied
    _give(bench, 400)
    bench.server.delay_s = 0.05
    child = bench.start(*WORKER, "--storage-timeout", "3")
    bench.eventually(lambda: bench.server.tries.total() > 60)
    proxy.faults = [Fault(lambda head: True, kind, times=100_000)]
    assert child.wait(90) not in (0, 143), child.said
    proxy.faults = []
    proxy.released.set()
    completed, failed = _counts(child)
    kept = _kept(bench)
    assert 0 < completed <= kept[0]
    assert failed <= kept[1]


@pytest.mark.long
def test_when_its_grace_is_over(bench: Bench) -> None:
    bench.give([line(f"id-{i}", "slow 60" if i >= 30 else f"hello {i}") for i in range(40)])
    child = bench.start(*WORKER, BANYAN_GRACE_SECONDS="3")
    bench.eventually(lambda: bench.server.tries["slow 60"] > 0)
    child.send(signal.SIGTERM)
    assert child.wait() == 143, child.said
    assert _counts(child) == (30, 0)
    assert len(bench.recorded) == 30


@pytest.mark.long
def test_when_its_input_is_gone(bench: Bench) -> None:
    _give(bench, 400)
    bench.server.delay_s = 0.05
    child = bench.start(*WORKER)
    bench.eventually(lambda: bench.server.tries.total() > 60)
    where = bench.place.child("in.jsonl")
    where.store.delete(where.key)
    assert child.wait() == 65, child.said
    assert _counts(child) == _kept(bench)
