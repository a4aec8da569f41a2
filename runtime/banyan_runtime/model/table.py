"""The slot table: in which KV slot each position of each row lies, built from the steps alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from banyan_runtime.model import device as devices
from banyan_runtime.model import host
from banyan_runtime.step import I32, PADDING_SLOT, Step, TableShape

I64 = npt.NDArray[np.int64]
_TOGETHER: Final = (
    1 << 20
)  # cells that are told at once, 12 bytes each: of many rows that begin with a long text that is cached there are more


class SlotTable:
    """int32 [rows, positions] on the host, where attention is planned. Only positions that the steps named mean anything."""

    def __init__(self, shape: TableShape) -> None:
        # 2,048 rows of 131,072 positions would take a gigabyte.
        self.slots = host.zeros((shape.rows, shape.positions))
        self.address: int = self.slots.ctypes.data  # of its memory, which stays

    def apply(self, step: Step) -> None:
        """Note what a step changes before it runs, and what it writes."""
        for row, start, slots in _updates(step):
            self.slots[row, start : start + len(slots)] = slots
        self.slots[_token_rows(step), step.positions] = step.out_slots

    def pages(self, rows: I64, first: int, count: int, page_size: int) -> I64:
        """The pages [len(rows), count] of positions first · page_size and up; the padding page beyond the table."""
        pages = np.full((len(rows), count), PADDING_SLOT, dtype=np.int64)
        known = self.slots[rows, first * page_size : (first + count) * page_size : page_size]
        pages[:, : known.shape[1]] = known // page_size
        return pages


class DeviceTable:
    """The slot table on a device: what a step changes goes there, and nothing else."""

    def __init__(self, shape: TableShape, device: torch.device) -> None:
        self.slots: Tensor = torch.zeros((shape.rows, shape.positions), dtype=torch.int32, device=device)

    @staticmethod
    def bytes(shape: TableShape) -> int:
        return torch.int32.itemsize * shape.rows * shape.positions

    def follow(self, step: Step, table: SlotTable) -> None:
        """Note what `step` changed in the host's table, which has taken it in. No step may be left out."""
        width = table.slots.shape[1]
        assert self.slots.shape[1] == width
        self._copy([_token_rows(step).astype(np.int64) * width + step.positions, *self._updated(step)], table)

    def follow_updates(self, step: Step, table: SlotTable) -> None:
        """As `follow`, but for what the step itself writes."""
        if updated := self._updated(step):
            self._copy(updated, table)

    def take(self, table: SlotTable) -> None:
        """All of the host's table, where it is not certain which steps were followed. Needs no memory, and waits for the device."""
        assert self.slots.shape == table.slots.shape
        self.slots.copy_(torch.from_numpy(table.slots))

    def _updated(self, step: Step) -> list[I64]:
        return [np.arange(len(slots)) + row * self.slots.shape[1] + start for row, start, slots in _updates(step)]

    def _copy(self, changed: list[I64], table: SlotTable) -> None:
        device, every = self.slots.device, np.concatenate(changed)
        for first in range(0, len(every), _TOGETHER):
            cells = every[first : first + _TOGETHER]
            # From the host's table, so that a cell that is named twice gets what it holds in the end.
            values = devices.tensor(table.slots.reshape(-1)[cells], device, torch.int32)
            self.slots.view(-1).index_copy_(0, devices.tensor(cells, device), values)


def _updates(step: Step) -> Iterator[tuple[int, int, I32]]:
    """What changes before the step runs: row, first position, slots from there on."""
    if (updates := step.updates) is not None:
        for index, (row, start) in enumerate(zip(updates.rows.tolist(), updates.starts.tolist(), strict=True)):
            yield row, start, updates.slots[index]


def _token_rows(step: Step) -> I32:
    """[T] of which row each token is."""
    return step.rows if len(step.rows) == len(step.positions) else np.repeat(step.rows, step.query_lens)
