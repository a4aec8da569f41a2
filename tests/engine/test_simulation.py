"""A million scheduler steps under random load, in as many shards as keep several workers busy."""

from __future__ import annotations

import os

import pytest

from tests.engine.simulate import WORLD_STEPS, Totals, World, simulate

SHARDS = 16
STEPS = 62_500
assert SHARDS * STEPS == 1_000_000


@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_million_random_steps_lose_no_slot_no_request_and_no_token(shard: int) -> None:
    totals = simulate(seed=1000 + shard, steps=STEPS)
    assert totals.steps >= STEPS
    # the run meant something: every way out of the engine was taken, memory was shared and was short
    assert totals.finished > 1000
    assert min(totals.aborted, totals.failed, totals.retractions, totals.cached, totals.evicted) > 0


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
