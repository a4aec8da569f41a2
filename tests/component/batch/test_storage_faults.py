"""Runs from and to S3 while the network and the server misbehave."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.component.batch.conftest import Bench, s3_bench
from tests.support.s3 import servers
from tests.support.s3.servers import Fault, Proxy
from tests.support.server.scripted import ScriptedServer

SMALL = ["--shard-requests", "10", "--checkpoint-seconds", "0.2"]
WRITES = [b"owner.json", b"plan.json", b"/shards/", b"/parts/", b"output.jsonl", b"errors.jsonl", b"manifest.json"]


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("kind", ["lose", "failed", "unavailable", "conflict"])
def test_answers_that_get_lost_or_say_no_for_a_while_cost_nothing(proxied: tuple[Bench, Proxy], kind: str) -> None:
    bench, proxy = proxied
    bench.give(40)
    bench.server.delay_s = 0.02
    proxy.faults = [Fault(_writes(name), kind, times=2 if name in (b"/shards/", b"/parts/") else 1) for name in WRITES]
    child = bench.run(*SMALL)
    assert [fault.times for fault in proxy.faults] == [0] * len(WRITES)
    assert child.words["code"] == "succeeded"
    bench.check()
    assert bench.repeated == 0


def _writes(name: bytes):  # type: ignore[no-untyped-def]
    return lambda head: head.startswith(b"PUT") and name in head.split(b"\r\n")[0]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["truncate", "lose"])
def test_reads_that_are_cut_are_read_again(proxied: tuple[Bench, Proxy], kind: str) -> None:
    bench, proxy = proxied
    bench.give(40)
    proxy.faults = [Fault(lambda head: head.startswith(b"GET"), kind, times=6)]
    bench.run(*SMALL)
    assert proxy.faults[0].times == 0
    bench.check()
    assert bench.repeated == 0


@pytest.mark.long
def test_a_burst_of_slow_down_in_the_middle_of_a_run_is_waited_out(proxied: tuple[Bench, Proxy]) -> None:
    bench, proxy = proxied
    bench.give(60)
    bench.server.delay_s = 0.05
    child = bench.start(*SMALL)
    bench.eventually(lambda: bench.server.tries.total() > 10)
    proxy.faults = [Fault(lambda head: True, "unavailable", times=12)]
    assert child.wait() == 0
    assert proxy.faults[0].times == 0
    bench.check()
    assert bench.repeated == 0


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("kind", ["denied", "no bucket", "refused", "a page", "conflict", "unsupported"])
def test_what_a_storage_in_order_says_for_a_moment_ends_no_run(proxied: tuple[Bench, Proxy], kind: str) -> None:
    """Keys that are rotated, a gateway that is set up anew: it was right when the run began."""
    bench, proxy = proxied
    bench.give(60)
    bench.server.delay_s = 0.05
    child = bench.start(*SMALL)
    bench.eventually(lambda: bench.server.tries.total() > 10)
    proxy.faults = [Fault(lambda head: True, kind, times=20)]
    assert child.wait() == 0, child.said
    assert proxy.faults[0].times == 0
    bench.check()
    assert bench.repeated == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "kind"),
    [
        (b"GET /", "nothing"),
        (b"list-type=2", "nothing"),
        (b"in.jsonl", "nothing"),
        (b"in.jsonl", "a page"),
        (b".banyan-probe-", "unsupported"),
        (b"plan.json", "nothing"),
    ],
)
def test_one_answer_of_another_server_ends_no_phase(proxied: tuple[Bench, Proxy], what: bytes, kind: str) -> None:
    """Such as of what stands before a storage that is moved: to the first call of such a kind in each phase behind the plan."""
    bench, proxy = proxied
    bench.give(20)
    job = [*SMALL, "--run-id", "job"]
    bench.run(*job, "--phase", "plan")
    for phase in ("work", "merge"):
        proxy.faults = [Fault(lambda head: what in head.split(b"\r\n")[0], kind)]
        bench.run(*job, "--phase", phase, JOB_COMPLETION_INDEX="0")
    bench.check()
    assert bench.repeated == 0


@pytest.mark.long
def test_an_input_that_could_not_be_read_when_a_run_began_leaves_the_output_free(proxied: tuple[Bench, Proxy]) -> None:
    bench, proxy = proxied
    bench.give(20)
    proxy.faults = [Fault(lambda head: b"in.jsonl" in head.split(b"\r\n")[0], "denied", times=100)]
    denied = bench.run(*SMALL, "--run-id", "one", exit_code=77)
    assert denied.words["code"] == "storage_denied"
    proxy.faults = []
    bench.run(*SMALL, "--run-id", "two")
    bench.check()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["denied", "no bucket", "a page"])
@pytest.mark.parametrize("phase", ["work", "merge"])
def test_a_later_phase_that_a_storage_refuses_from_its_first_word_on_is_tried_again(
    proxied: tuple[Bench, Proxy], phase: str, kind: str
) -> None:
    bench, proxy = proxied
    bench.give(20)
    job = [*SMALL, "--run-id", "job", "--storage-timeout", "1"]
    bench.run(*job, "--phase", "plan")
    if phase == "merge":
        bench.run(*job, "--phase", "work", JOB_COMPLETION_INDEX="0")
    proxy.faults = [Fault(lambda head: True, kind, times=1000)]
    child = bench.run(*job, "--phase", phase, JOB_COMPLETION_INDEX="0", exit_code=75)
    assert child.words["code"] == "storage_unavailable"
    proxy.faults = []
    for rest in ("work", "merge"):
        bench.run(*job, "--phase", rest, JOB_COMPLETION_INDEX="0")
    bench.check()


@pytest.mark.long
@pytest.mark.parametrize(("kind", "code"), [("denied", "storage_denied"), ("no bucket", "output_not_found")])
def test_what_a_storage_refuses_from_the_start_ends_a_run_at_once(proxied: tuple[Bench, Proxy], kind: str, code: str) -> None:
    bench, proxy = proxied
    bench.give(20)
    proxy.faults = [Fault(lambda head: True, kind, times=1000)]
    child = bench.start(*SMALL)
    began = time.monotonic()
    assert child.wait() in (64, 77), child.said
    assert child.words["code"] == code
    assert time.monotonic() - began < 10


@pytest.mark.long
def test_a_part_that_is_not_found_for_a_moment_costs_a_finished_run_nothing(proxied: tuple[Bench, Proxy]) -> None:
    bench, proxy = proxied
    bench.give(40)
    proxy.faults = [Fault(lambda head: head.startswith(b"GET") and b"/parts/" in head.split(b"\r\n")[0], "nothing", times=2)]
    bench.run(*SMALL)
    assert proxy.faults[0].times == 0
    bench.check()
    assert bench.repeated == 0


@pytest.mark.long
def test_a_storage_that_hangs_is_named_after_five_seconds_and_the_run_goes_on_when_it_is_back(proxied: tuple[Bench, Proxy]) -> None:
    bench, proxy = proxied
    bench.give(60)
    bench.server.delay_s = 0.05
    child = bench.start(*SMALL)
    bench.eventually(lambda: bench.server.tries.total() > 10)
    proxy.faults = [Fault(lambda head: True, "hang", times=1000)]
    bench.eventually(lambda: proxy.endpoint in child.said)
    assert child.running
    proxy.faults = []
    proxy.released.set()
    assert child.wait() == 0
    assert child.said.count(proxy.endpoint) > 1, "that it is back is told as well"
    bench.check()
    assert bench.repeated == 0


@pytest.mark.long
def test_a_storage_that_stays_away_ends_the_run_with_what_is_recorded_kept(proxied: tuple[Bench, Proxy]) -> None:
    bench, proxy = proxied
    bench.give(120)
    bench.server.delay_s = 0.05
    child = bench.start(*SMALL, "--storage-timeout", "2")
    bench.eventually(lambda: len(bench.recorded) >= 10)
    proxy.faults = [Fault(lambda head: True, "unavailable", times=10_000)]
    assert child.wait() == 75, child.said
    assert child.words["code"] == "storage_unavailable"
    proxy.faults = []
    recorded, before = bench.recorded, Counter(bench.server.tries)
    bench.run(*SMALL)
    bench.check()
    again = {f"id-{line.removeprefix('line ')}" for line, count in before.items() if bench.server.tries[line] > count}
    assert not recorded & again


@pytest.mark.long
@pytest.mark.parametrize("name", [b"/parts/", b"/shards/"], ids=["lines", "states"])
def test_lines_that_could_not_be_recorded_when_all_were_answered_are_run_again(proxied: tuple[Bench, Proxy], name: bytes) -> None:
    """The worker's last words reach the storage again: its shard has not ended all the same."""
    bench, proxy = proxied
    bench.give(40)
    bench.server.delay_s = 0.05
    child = bench.start("--storage-timeout", "2")
    bench.eventually(lambda: bench.server.tries.total() > 20)
    refused: list[float] = []

    def refuses(head: bytes) -> bool:
        if not _writes(name)(head):
            return False
        refused.append(time.monotonic())
        return time.monotonic() - refused[0] < 2.5

    proxy.faults = [Fault(refuses, "unavailable", times=10_000)]
    assert child.wait() == 75, child.said
    assert refused
    proxy.faults = []
    bench.run()
    bench.check()


@pytest.fixture(params=["ignored", "unknown"])
def careless(request: pytest.FixtureRequest, server: ScriptedServer, tmp_path: Path) -> Iterator[Bench]:
    """A storage that ignores the conditions of writes, or does not know them. Its server checks no signatures: the proxy may drop them."""
    with servers.moto() as running:
        bench, proxy = s3_bench(running, server, tmp_path / "runs"), Proxy(running.endpoint)
        conditions = {(b"PUT", b"if-none-match"), (b"PUT", b"if-match")}
        proxy.careless, proxy.unknown = (conditions, proxy.unknown) if request.param == "ignored" else (proxy.careless, conditions)
        bench.environment = bench.environment | {"AWS_ENDPOINT_URL_S3": proxy.endpoint}
        yield bench
        bench.close()
        proxy.close()


@pytest.mark.long
def test_a_storage_without_conditions_is_refused_unless_it_is_accepted_by_name(careless: Bench) -> None:
    bench = careless
    bench.give(30)
    refused = bench.run(*SMALL, exit_code=64)
    assert refused.words["code"] == "conditional_writes_unsupported"
    assert bench.keys() == []
    several = bench.run(*SMALL, "--allow-unfenced", "--workers", "2", exit_code=64)
    assert several.words["field"] == "--workers"
    accepted = bench.run(*SMALL, "--allow-unfenced")
    assert "warning" in accepted.said
    bench.check()


@pytest.fixture
def own_weed(tmp_path: Path, server: ScriptedServer) -> Iterator[Bench]:
    """A server of this test's own, that it may kill."""
    (tmp_path / "weed").mkdir()
    with servers.weed(tmp_path / "weed") as running:
        bench = s3_bench(running, server, tmp_path / "runs")
        yield bench
        bench.close()


@pytest.mark.long
def test_a_storage_server_that_is_killed_and_begun_again_costs_no_line(own_weed: Bench, tmp_path: Path) -> None:
    bench = own_weed
    bench.give(60)
    bench.server.delay_s = 0.1
    child = bench.start(*SMALL, "--storage-timeout", "60")
    bench.eventually(lambda: bench.server.tries.total() > 10)
    old = next(one for one in psutil.Process().children() if f"-dir={tmp_path}/weed" in one.cmdline())
    command, environment = old.cmdline(), old.environ()
    old.send_signal(signal.SIGKILL)
    bench.eventually(lambda: not old.is_running() or old.status() == psutil.STATUS_ZOMBIE)
    time.sleep(0.5)
    again = subprocess.Popen(
        command, env=os.environ | environment, cwd=tmp_path / "weed", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        assert child.wait(90) == 0, child.said
        bench.check()
        assert bench.repeated == 0
    finally:
        again.kill()
        again.wait()
