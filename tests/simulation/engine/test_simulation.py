"""Scheduler steps under random load, in as many shards as keep several workers busy: a million with `make simulate`, else a tenth."""

from __future__ import annotations

import os

import pytest

from tests.simulation.engine.simulate import WORLD_STEPS, Totals, World, simulate

SHARDS = 16
STEPS = int(os.environ.get("BANYAN_SIM_STEPS", "100_000")) // SHARDS


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_steps_lose_no_slot_no_request_and_no_token(shard: int) -> None:
    totals = simulate(seed=1000 + shard, steps=STEPS)
    assert totals.steps >= STEPS
    assert totals.finished > 100


def test_a_run_takes_every_way_through_the_engine() -> None:
    totals = simulate(seed=1, steps=40_000)
    assert min(vars(totals).values()) > 0


if "BANYAN_SIM_SEED" in os.environ:

    def test_the_world_of_a_failed_run() -> None:
        World(int(os.environ["BANYAN_SIM_SEED"]), Totals()).run(WORLD_STEPS)


def test_a_seed_replays_the_same_run() -> None:
    assert simulate(seed=5, steps=3_000) == simulate(seed=5, steps=3_000)


def test_a_failing_world_is_named_with_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_a_page(self: World, id: int, code: object) -> None:
        self.engine.memory.pages.take(1)

    monkeypatch.setattr(World, "_finished", lose_a_page)
    with pytest.raises(AssertionError, match=r"BANYAN_SIM_SEED=5\b"):
        simulate(seed=5, steps=3_000)
