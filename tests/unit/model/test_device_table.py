"""What goes to the device: columns, and the slot table by what changes in it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from banyan_runtime.model import device as devices
from banyan_runtime.model import table as slot_tables
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


def step(start: int, count: int) -> Step:
    """Of all rows, `count` tokens each."""
    each, ones = np.arange(ROWS, dtype=np.int32), np.ones(ROWS, np.int32)
    positions = np.tile(np.arange(start, start + count, dtype=np.int32), ROWS)
    slots = (1 + np.repeat(each, count) * POSITIONS + positions).astype(np.int32)
    return Step("prefill", positions * 0 + 1, positions, slots, each, ones * count, ones * (start + count), ones, columns([]))


@pytest.mark.parametrize("together", [1 << 20, 5])
def test_the_devices_table_is_as_the_hosts(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last cell."""
    monkeypatch.setattr(slot_tables, "_TOGETHER", together)
    shape = TableShape(ROWS, POSITIONS)
    table, own = SlotTable(shape), DeviceTable(shape, torch.device("cpu"))
    for start in (0, 4):
        table.apply(now := step(start, 4))
        own.follow(now, table)
    assert table.slots.all()
    assert np.array_equal(own.slots.numpy(), table.slots)
