"""The simulation finds what it is there for: each defect, put back, within so many schedules. The gate tries some of them."""

from __future__ import annotations

import re

import pytest

from tests.simulation.drawn import drawn
from tests.simulation.operator.plants import PLANTS, Plant
from tests.simulation.operator.run import found_after

IN_THE_GATE = 4


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    plants = drawn(PLANTS, IN_THE_GATE) if metafunc.config.getoption("--gate") else PLANTS
    metafunc.parametrize("plant", plants, ids=lambda plant: plant.defect)


def test_a_defect_that_is_put_back_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch, record_property) -> None:
    plant.patch(monkeypatch)
    found = found_after(seed=plant.seed, most=plant.within)
    assert found is not None, f"{plant.within} schedules, and nobody noticed"
    number, said = found
    record_property("schedules", number)
    assert re.search(plant.says, said), said
