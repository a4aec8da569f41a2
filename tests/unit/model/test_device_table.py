"""What goes to the device: columns, and the slot table by what changes in it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from banyan_runtime.model import device as devices
from banyan_runtime.model import table as slot_tables
from banyan_runtime.model.forward import Picked
from banyan_runtime.model.rounds import one_by_one
from banyan_runtime.model.table import DeviceTable, SlotTable
from banyan_runtime.step import Step, TableShape
from tests.support.models.driver import columns

ROWS, POSITIONS = 3, 8


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_columns_go_there_from_pinned_memory(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of arrays that may not be written, as a step's are: a copy, for torch pins no memory of numpy's by itself."""
    pinned: list[Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda own: pinned.append(own) or own)
    monkeypatch.setattr(torch.Tensor, "to", lambda own, device, non_blocking: own)
    column = np.arange(5, dtype=np.int32)
    column.setflags(write=False)
    found = devices.tensor(column, torch.device("cuda"), dtype)
    assert (found.tolist(), found.dtype, len(pinned)) == ([0, 1, 2, 3, 4], dtype, 1)


def step(start: int, rounds: int) -> Step:
    """A decode step of all rows, in rounds."""
    each, ones = np.arange(ROWS, dtype=np.int32), np.ones(ROWS, np.int32)
    slots = (1 + each[:, None] * POSITIONS + start + np.arange(rounds)).astype(np.int32)
    return Step(
        "decode", ones, each * 0 + start, slots[:, 0].copy(), each, ones, each * 0 + start + 1, ones, columns([]), rounds=rounds,
        later_slots=slots[:, 1:],
    )  # fmt: skip


class Planned:
    """A forward that takes note of the table, as attention does when a step is planned."""

    def __init__(self) -> None:
        self.own = DeviceTable(TableShape(ROWS, POSITIONS), torch.device("cpu"))
        self.seen: list[list[int]] = []

    def hidden(self, now: Step, token_ids: Tensor, table: SlotTable) -> Tensor:
        self.own.follow(now, table)
        self.seen.append(now.positions.tolist())
        return token_ids

    def pick(self, hidden: Tensor, *_: object) -> Picked:
        return Picked(hidden + 1, torch.zeros(ROWS, dtype=torch.bool))


@pytest.mark.parametrize("together", [1 << 20, 5])
def test_rounds_leave_the_devices_table_as_the_hosts(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last cell: what a later round writes was told by the first."""
    monkeypatch.setattr(slot_tables, "_TOGETHER", together)
    table, forward = SlotTable(TableShape(ROWS, POSITIONS)), Planned()
    for start in (0, 4):
        now = step(start, 4)
        table.apply(now)
        drawn = one_by_one(forward, now, torch.zeros(ROWS, dtype=torch.int64), table, None)  # type: ignore[arg-type]
        assert drawn.tolist() == [[1, 2, 3, 4]] * ROWS
    assert forward.seen == [[position] * ROWS for position in range(POSITIONS)]
    assert np.array_equal(forward.own.slots.numpy(), table.slots)
