"""Scheduler steps under random load, in shards that several workers share: 100,000 in all, 4,000 in small worlds in the gate."""

from __future__ import annotations

import os

import pytest

from tests.simulation.engine.simulate import WORLD_STEPS, Totals, World, simulate


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "shard" in metafunc.fixturenames:
        shards, steps, world = (2, 4_000, 500) if metafunc.config.getoption("--gate") else (16, 100_000, WORLD_STEPS)
        steps = int(os.environ.get("BANYAN_SIM_STEPS", steps)) // shards
        metafunc.parametrize(("shard", "steps", "world"), [(shard, steps, world) for shard in range(shards)], ids=map(str, range(shards)))


def test_random_steps_lose_no_slot_no_request_and_no_token(shard: int, steps: int, world: int) -> None:
    totals = simulate(seed=1000 + shard, steps=steps, world_steps=world)
    assert totals.steps >= steps
    assert totals.finished > steps // 100


@pytest.mark.long
def test_a_run_takes_every_way_through_the_engine() -> None:
    totals = simulate(seed=4, steps=40_000)
    assert min(vars(totals).values()) > 0


if "BANYAN_SIM_SEED" in os.environ:

    def test_the_world_of_a_failed_run() -> None:
        World(int(os.environ["BANYAN_SIM_SEED"]), Totals()).run(WORLD_STEPS)


def test_a_seed_replays_the_same_run() -> None:
    assert simulate(seed=5, steps=1000, world_steps=500) == simulate(seed=5, steps=1000, world_steps=500)


def test_a_failing_world_is_named_with_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_a_page(self: World, id: int, code: object) -> None:
        self.engine.memory.pages.take(1)

    monkeypatch.setattr(World, "_finished", lose_a_page)
    with pytest.raises(AssertionError, match=r"BANYAN_SIM_SEED=5\b"):
        simulate(seed=5, steps=3_000)
