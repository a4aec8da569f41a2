"""The batch protocol under every order of calls, faults and deaths: ten thousand schedules, in the gate 1,500, a million with
`make simulate-batch`; conftest.py says how many.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.simulation.batch import programs
from tests.simulation.batch.run import Totals, Violation, digest, simulate
from tests.support.paths import ROOT


def test_whatever_happens_every_line_is_published_once_and_nothing_waits_for_ever(shard: int, count: int) -> None:
    totals = simulate(seed=1000 + shard, count=count)
    assert totals.schedules == count
    assert totals.steps > 30 * count


def test_a_run_goes_every_way() -> None:
    totals = simulate(seed=1, count=600)
    faults = {"crash before", "crash after", "crash, late", "unclear", "unclear after", "unclear, late"}
    faults |= {"raises", "raises after", "raises, late", "answered LOST", "conflict"}
    faults |= {"a late write landed", "a late write failed", "a process stood still"}
    ways = {"a run was refused", "a run was displaced", "a run was published", "a shard was lost"}
    ends = {f"ended: {how}" for how in ("published", "published before", "refused", "taken", "left", "crashed", "could not plan")}
    outcomes = {f"outcome {how}" for how in ("completed", "cancelled", "expired", "failed", "too-many-errors")}
    people = {"ended: took the results away", "ended: left a file"}
    assert {*faults, *ways, *ends, *outcomes, *people} - totals.seen.keys() == set()


def test_a_seed_replays_the_same_run_in_any_process() -> None:
    """The hashes of strings, and with them the order of sets, differ from process to process."""
    code = "from tests.simulation.batch.run import digest; print(*(digest(seed) for seed in range(50)))"
    here = " ".join(digest(seed) for seed in range(50))
    path = os.pathsep.join([str(ROOT), *sys.path])
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
        there = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
        assert there.stdout.strip() == here


def test_a_schedule_that_fails_is_named_with_what_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs.HABITS, "manifest_before_removal", False)
    with pytest.raises(Violation, match=r"-m tests\.simulation\.batch\.run --seed \d+ --trace"):
        simulate(seed=5, count=50)


def test_totals_add_up_over_schedules() -> None:
    totals = Totals()
    simulate(seed=1, count=3, totals=totals)
    assert totals.schedules == 3
    assert sum(count for what, count in totals.seen.items() if what.startswith("ended: ")) >= 3
