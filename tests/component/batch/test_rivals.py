"""Two runs that want the same output: one has it, the other is told whose it is."""

from __future__ import annotations

import signal
import time

import pytest

from tests.component.batch.conftest import Bench
from tests.support.s3.servers import Fault, Proxy
from tests.support.server.scripted import line

SMALL = ["--shard-requests", "10", "--checkpoint-seconds", "0.2"]


def test_a_second_run_is_refused_by_the_first_ones_name_and_changes_nothing(bench: Bench) -> None:
    bench.give(60)
    bench.server.delay_s = 1.0
    first = bench.start(*SMALL, "--run-id", "first")
    bench.eventually(lambda: bench.server.tries.total() > 0)
    for words in ([], ["--run-id", "second"]):
        second = bench.run(*SMALL, *words, exit_code=65)
        assert second.words["code"] == "output_exists"
        assert "run first" in second.words["message"]
    bench.server.delay_s = 0.0
    assert first.wait() == 0
    assert bench.check()["run"] == "first"
    assert bench.repeated == 0


def test_a_run_that_overwrites_takes_over_and_the_first_publishes_nothing(bench: Bench) -> None:
    bench.give(60)
    bench.server.delay_s = 0.1
    first = bench.start(*SMALL, "--run-id", "first")
    bench.eventually(lambda: bench.server.tries.total() > 10)
    bench.server.delay_s = 2.0  # the first cannot end before the second is there
    second = bench.start(*SMALL, "--run-id", "second", "--overwrite")
    bench.eventually(lambda: b"second" in (bench.read(".banyan/owner.json") or b""))
    bench.server.delay_s = 0.02
    assert second.wait() == 0
    assert first.wait() == 65, first.said
    assert first.words["code"] == "output_exists"
    assert "second" in first.words["message"]
    assert bench.check()["run"] == "second"
    again = bench.run(*SMALL, "--run-id", "first", "--overwrite", exit_code=65)
    assert again.words["code"] == "output_exists"
    assert bench.check()["run"] == "second"


def test_a_run_that_was_displaced_notices_long_before_its_last_line(bench: Bench) -> None:
    bench.give(800)
    bench.server.delay_s = 0.1
    first = bench.start(*SMALL, "--run-id", "first")
    bench.eventually(lambda: bench.server.tries.total() > 10)
    bench.run(*SMALL, "--run-id", "second", "--overwrite", "--phase", "plan")
    assert first.wait() == 65, first.said
    assert bench.server.tries.total() < 800
    assert first.words["code"] == "output_exists"
    assert "second" in first.words["message"]


def test_parts_of_a_run_that_was_displaced_are_removed_with_those_of_its_successor(bench: Bench) -> None:
    bench.give(60)
    bench.server.delay_s = 0.1
    first = bench.start(*SMALL, "--run-id", "first")
    bench.eventually(lambda: any("/first/parts/" in info.key for info in bench.output.store.list(bench.output.key)))
    first.send(signal.SIGKILL)
    first.wait()
    bench.server.delay_s = 0.0
    bench.run(*SMALL, "--run-id", "second", "--overwrite")
    bench.check()
    assert not [info.key for info in bench.output.store.list(bench.output.key) if "/parts/" in info.key]


@pytest.mark.long
@pytest.mark.parametrize("held", [b"output.jsonl", b"errors.jsonl", b"manifest.json"])
@pytest.mark.parametrize("overwrite", [True, False])
def test_no_manifest_ever_vouches_for_another_runs_data(proxied: tuple[Bench, Proxy], held: bytes, overwrite: bool) -> None:
    """The first one's write of a result hangs in the network for 2 s, and is carried out then."""
    bench, proxy = proxied
    bench.give([line(f"id-{i}", "from the first") for i in range(20)])
    slow = Fault(lambda head: head.startswith(b"PUT") and held in head, "slow")
    proxy.faults = [slow]
    first = bench.start("--run-id", "first")
    bench.eventually(lambda: slow.times == 0)
    second = bench.start("--run-id", "second", *(["--overwrite"] if overwrite else []))
    codes = first.wait(), second.wait()
    run = bench.check()["run"]
    winner = first if run == "first" else second
    assert winner.words["code"] == "succeeded"
    assert codes in ((0, 65), (65, 0), (0, 0)), (first.said, second.said)
    if not overwrite:
        assert codes == (0, 65)
        assert run == "first"
    time.sleep(2.5)  # the write that was late has come
    assert bench.check()["run"] == run


def test_of_two_runs_that_overwrite_each_other_one_wins(bench: Bench) -> None:
    bench.give(40)
    bench.server.delay_s = 0.05
    both = [bench.start(*SMALL, "--run-id", name, "--overwrite") for name in ("a", "b")]
    codes = [child.wait() for child in both]
    assert sorted(codes) in ([0, 65], [0, 0]), [child.said for child in both]
    run = bench.check()["run"]
    assert codes["ab".index(run)] == 0
