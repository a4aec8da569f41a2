"""How much of the simulation the gate runs: some schedules in few shards, and a few planted defects, chosen by the commit's hash."""

from __future__ import annotations

import os

import pytest

from tests.simulation.batch.plants import PLANTS
from tests.simulation.drawn import drawn

GATE_SCHEDULES, GATE_SHARDS, GATE_PLANTS = 1_500, 4, 4
ALL_SCHEDULES = 10_000


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parameters of `shard` and `count`, and of `plant`."""
    gate = metafunc.config.getoption("--gate")
    if "shard" in metafunc.fixturenames:
        schedules = int(os.environ.get("BANYAN_SIM_BATCHES", GATE_SCHEDULES if gate else ALL_SCHEDULES))
        shards = max(GATE_SHARDS if gate else 8, schedules // 25_000)
        metafunc.parametrize(("shard", "count"), [(shard, schedules // shards) for shard in range(shards)], ids=map(str, range(shards)))
    if "plant" in metafunc.fixturenames:
        metafunc.parametrize("plant", drawn(PLANTS, GATE_PLANTS) if gate else PLANTS, ids=lambda plant: plant.defect)
