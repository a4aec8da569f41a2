"""The operator under every order of events: 80 schedules in the gate, 4,000 in test-all, a million with
`make simulate-operator`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from banyan_operator.cluster.store import Store
from tests.simulation.operator.run import Totals, Violation, digest, simulate
from tests.support.paths import ROOT


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "shard" in metafunc.fixturenames:
        gate = metafunc.config.getoption("--gate")
        schedules = int(os.environ.get("BANYAN_SIM_SCHEDULES", "80" if gate else "4000"))
        shards = max(4 if gate else 16, schedules // 2_500)
        metafunc.parametrize(("shard", "count"), [(shard, schedules // shards) for shard in range(shards)])


def test_whatever_happens_the_operator_brings_about_what_is_asked_and_tells_the_truth(shard: int, count: int) -> None:
    totals = simulate(seed=1000 + shard, count=count)
    assert totals.schedules == count
    assert totals.calls > 10 * count


@pytest.mark.long
def test_a_run_goes_every_way() -> None:
    totals = Totals()
    simulate(seed=1, count=900, totals=totals)
    moves = {"edits_a_server", "edits_a_batch", "deletes_and_makes_again", "spoils_a_child", "strips_labels", "puts_a_strange_pod"}
    moves |= {
        "replaces_the_operator",
        "lets_the_operator_die_in_a_call",
        "stalls_a_watch",
        "loses_a_watch",
        "refuses",
        "a Job is swept away",
    }
    answers = {"ok", "0", "403", "404", "409", "422", "429", "500"}
    phases = {
        "Ready",
        "Updating",
        "Paused",
        "Stopped",
        "Planning",
        "Running",
        "Merging",
        "Succeeded",
        "Failed",
        "Cancelling",
        "Cancelled",
        "Suspended",
        "Terminating",
    }
    events = {
        f"Event {reason}" for reason in ("Created", "RolloutStarted", "Scaled", "Ready", "Started", "Completed", "Failed", "Cancelled")
    }
    assert not {*moves, *answers, *phases, *events} - totals.seen.keys()
    assert totals.kills > 50
    assert totals.virtual_s > 3600


def test_a_seed_replays_the_same_run_in_any_process() -> None:
    """The hashes of strings, and with them the order of sets, differ from process to process."""
    code = "from tests.simulation.operator.run import digest; print(*(digest(seed) for seed in range(4)))"
    here = " ".join(digest(seed) for seed in range(4))
    path = os.pathsep.join([str(ROOT), *sys.path])
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
        there = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
        assert there.stdout.strip() == here


def test_a_schedule_that_fails_is_named_with_what_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "children", lambda self, key: ())
    with pytest.raises(Violation, match=r"-m tests\.simulation\.operator\.run --seed \d+ --trace"):
        simulate(seed=5, count=50)
