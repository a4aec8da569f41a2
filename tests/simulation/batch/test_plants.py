"""The simulation finds what it is there for: each defect within so many schedules. Plants come from conftest.py."""

from __future__ import annotations

import re

import pytest

from tests.simulation.batch.plants import Plant
from tests.simulation.batch.run import found_after


def test_a_defect_that_is_put_in_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch, record_property) -> None:
    plant.patch(monkeypatch)
    found = found_after(seed=plant.seed, most=plant.within, crowded=plant.crowded)
    assert found is not None, f"{plant.within} schedules, and nobody noticed"
    number, said = found
    record_property("schedules", number)
    assert re.search(plant.says, said), said
    assert not re.search("TypeError|AttributeError|NameError|KeyError|IndexError", said), f"the plant itself is broken: {said}"
