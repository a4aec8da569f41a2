"""Several workers on one run: they share the lines, and one that was frozen or killed harms nobody."""

from __future__ import annotations

import random
import signal
import time

import pytest

from tests.component.batch.conftest import IN_BOTH, Bench
from tests.support.s3.servers import Fault, Proxy

TOGETHER = ["--run-id", "together", "--shard-requests", "10"]


@pytest.mark.matrix(gate=1)
@IN_BOTH
def test_two_workers_share_a_run_and_each_line_is_sent_once(bench: Bench) -> None:
    bench.give(200)
    bench.server.delay_s = 0.05
    both = [bench.start(*TOGETHER, "--workers", "2", JOB_COMPLETION_INDEX=str(i)) for i in range(2)]
    assert [child.wait() for child in both] == [0, 0]
    assert [child.words["code"] for child in both] == ["succeeded"] * 2
    assert bench.check()["run"] == "together"
    assert bench.repeated == 0
    assert all(child.words["requestCounts"] == {"total": 200, "completed": 200, "failed": 0} for child in both)


@pytest.mark.long  # unstable in a folder: frozen while it holds the folder's lock, it keeps all others out
def test_a_worker_that_was_frozen_longer_than_its_lease_loses_its_shards_and_harms_nothing(bench: Bench) -> None:
    bench.give(60)
    bench.server.delay_s = 0.1
    words = [*TOGETHER, "--lease-seconds", "2", "--checkpoint-seconds", "0.2"]
    frozen = bench.start(*words)
    bench.eventually(lambda: bench.server.tries.total() > 15)
    frozen.send(signal.SIGSTOP)
    other = bench.start(*words)
    assert other.wait() == 0
    before = bench.results
    sent = bench.server.tries.total()
    frozen.send(signal.SIGCONT)
    assert frozen.wait() == 0, frozen.said
    assert bench.results == before
    assert bench.server.tries.total() - sent <= 4, "what was on its way when it was frozen"
    bench.check()
    assert bench.repeated <= 24


@pytest.mark.long
def test_a_worker_that_wakes_up_before_a_slow_storage_starts_nothing_of_what_it_may_have_lost(proxied: tuple[Bench, Proxy]) -> None:
    bench, proxy = proxied
    bench.give(200)
    bench.server.delay_s = 0.1
    words = ["--run-id", "together", "--shard-requests", "100", "--lease-seconds", "2", "--checkpoint-seconds", "0.2"]
    frozen = bench.start(*words)
    bench.eventually(lambda: bench.server.tries.total() > 15)
    frozen.send(signal.SIGSTOP)
    directly = bench.place.store.client.meta.endpoint_url  # type: ignore[attr-defined]
    assert bench.start(*words, AWS_ENDPOINT_URL_S3=directly).wait() == 0
    sent = bench.server.tries.total()
    proxy.faults = [Fault(lambda head: True, "slow", times=1000)]
    frozen.send(signal.SIGCONT)
    assert frozen.wait() == 0, frozen.said
    assert bench.server.tries.total() - sent <= 4, "what was on its way when it was frozen"
    bench.check()


@pytest.mark.long
def test_a_frozen_worker_that_wakes_up_beside_its_successor_takes_no_line_back(bench: Bench) -> None:
    bench.give(60)
    bench.server.delay_s = 0.2
    words = [*TOGETHER, "--lease-seconds", "1", "--checkpoint-seconds", "0.2"]
    frozen = bench.start(*words)
    bench.eventually(lambda: bench.server.tries.total() > 6)
    frozen.send(signal.SIGSTOP)
    other = bench.start(*words)
    bench.eventually(lambda: bench.server.tries.total() > 12)
    frozen.send(signal.SIGCONT)
    assert other.wait() == 0
    assert frozen.wait() == 0
    bench.check()
    assert bench.repeated <= 24


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_four_workers_of_which_one_after_the_other_is_killed_and_begun_anew_finish_the_run(bench: Bench, seed: int) -> None:
    chance = random.Random(seed)
    bench.give(2000)
    bench.server.delay_s = 0.02
    words = ["--run-id", "many", "--workers", "4", "--shard-requests", "50", "--lease-seconds", "2", "--checkpoint-seconds", "0.2"]

    workers = [bench.start(*words, JOB_COMPLETION_INDEX=str(i)) for i in range(4)]
    for _ in range(8):
        time.sleep(chance.uniform(0.1, 0.6))
        index = chance.randrange(4)
        if workers[index].running:
            workers[index].send(signal.SIGKILL)
            workers[index].wait()
        workers[index] = bench.start(*words, JOB_COMPLETION_INDEX=str(index))
    assert [child.wait(120) for child in workers] == [0, 0, 0, 0], [child.said[-1000:] for child in workers]
    bench.check()
    assert bench.repeated <= 8 * 24


def test_phases_as_pods_run_them_plan_work_and_merge(bench: Bench) -> None:
    bench.give(120)
    words = ["--run-id", "job", "--workers", "3", "--shard-requests", "10"]
    plan = bench.run(*words, "--phase", "plan", BANYAN_POD_UID="p")
    assert plan.words["code"] == "planned"
    assert plan.words["requestCounts"] == {"total": 120, "completed": 0, "failed": 0}
    assert (plan.words["shards"], plan.words["fenced"]) == (12, True)
    assert bench.server.tries.total() == 0
    again = bench.run(*words, "--phase", "plan", BANYAN_POD_UID="p2")
    assert again.words == plan.words
    early = bench.run(*words, "--phase", "merge", exit_code=75)
    assert early.words["code"] == "unfinished"
    workers = [bench.start(*words, "--phase", "work", BANYAN_POD_UID=f"w{i}", JOB_COMPLETION_INDEX=str(i)) for i in range(3)]
    assert [child.wait() for child in workers] == [0, 0, 0]
    assert all(child.words["code"] == "worked" for child in workers)
    assert workers[0].words["requestCounts"] == {"total": 120, "completed": 120, "failed": 0}
    assert bench.keys() == []
    merges = [bench.start(*words, "--phase", "merge", BANYAN_POD_UID=f"m{i}") for i in range(2)]
    assert [child.wait() for child in merges] == [0, 0]
    for child in merges:
        assert child.words["code"] == "succeeded"
        assert child.words["manifest"] == bench.output.child("manifest.json").uri
        assert child.words["usage"]["completionTokens"] == 360
    bench.check()
    assert bench.repeated == 0
    late = bench.run(*words, "--phase", "work", BANYAN_POD_UID="late")
    assert late.words["code"] in ("worked", "succeeded")
    assert bench.repeated == 0


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"BANYAN_POD_UID": "a"}, {"BANYAN_POD_UID": "a"}),
        ({"BANYAN_POD_UID": "a", "JOB_COMPLETION_INDEX": "0"}, {"BANYAN_POD_UID": "b", "JOB_COMPLETION_INDEX": "0"}),
    ],
    ids=["a new container of its pod", "a new pod"],
)
def test_who_takes_the_place_of_a_dead_one_takes_up_its_shards_at_once(bench: Bench, before: dict[str, str], after: dict[str, str]) -> None:
    bench.give(30)
    bench.server.delay_s = 0.05
    words = ["--run-id", "job", "--shard-requests", "10", "--phase", "work", "--lease-seconds", "3600"]
    first = bench.start(*words, **before)
    bench.eventually(lambda: bench.server.tries.total() > 12)
    first.send(signal.SIGKILL)
    first.wait()
    bench.run(*words, **after)
    bench.run("--run-id", "job", "--phase", "merge")
    bench.check()


def test_more_workers_than_shards_and_an_input_of_one_line(bench: Bench) -> None:
    bench.give(1)
    workers = [bench.start("--run-id", "one", "--workers", "3", JOB_COMPLETION_INDEX=str(i)) for i in range(3)]
    assert [child.wait() for child in workers] == [0, 0, 0]
    bench.check()
    assert bench.repeated == 0
