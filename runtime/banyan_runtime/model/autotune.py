"""Measure at start which kernel each shape class takes (--autotune)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from banyan_runtime.model.attention import Held, Replayed
from banyan_runtime.model.blank import blank
from banyan_runtime.model.capture import Recorder
from banyan_runtime.model.kernel_choices import KernelChoices, class_of
from banyan_runtime.model.mail import Mail
from banyan_runtime.model.table import SlotTable
from banyan_runtime.step import Ragged, RowUpdates, Step, TableShape

log = logging.getLogger("banyan")

CONTEXT: Final = 512  # tokens of each row
GAIN: Final = 0.005  # of a step's time; smaller gains are chance, which is some two thousandths of a captured step


def autotune(choices: KernelChoices, steps: Sequence[Held], seconds: Callable[[Held], float]) -> None:
    """Choose for each shape class the kernel with the fastest decode step. `seconds` times a step with the kernels chosen so far."""
    largest = {rows: held for held in sorted(steps, key=_rows) if (rows := class_of(held.size)) is not None}
    for rows, held in largest.items():
        best = seconds(held)
        for product in choices.products:
            chosen = choices.kernel(product, rows)
            for kernel in choices.offers(product, rows):
                if kernel == chosen:
                    continue
                choices.measured[product, rows] = kernel
                try:
                    now = seconds(held)
                except Exception as error:  # more registers or shared memory than this device has
                    log.warning("--autotune leaves the %s kernel out for %s of %d rows: %s", kernel, product, rows, error)
                    continue
                if now < best * (1 - GAIN):
                    best, chosen = now, kernel
            choices.measured[product, rows] = chosen


class StepTimer:
    """Times captured decode steps whose rows have keys of their own: keys that rows share are read more slowly than keys of texts."""

    def __init__(self, attention: Replayed, shape: TableShape, recorder: Recorder, compute: Callable[[Held], None]) -> None:
        self._attention = attention
        self._recorder = recorder
        self._compute = compute
        self._table = SlotTable(shape)
        self._context = min(CONTEXT, shape.positions)
        self._slots = int(attention.cells.pool.slots(0)[0].shape[1]) - 1  # beside the padding slot

    def __call__(self, held: Held) -> float:
        """Seconds of a step of as many rows."""
        step = self._step(held.size)
        self._table.apply(step)
        held.tell(step, self._attention.fill(step, self._table, held), Mail().bring)
        return self._recorder.seconds(partial(self._compute, held))

    def _step(self, rows: int) -> Step:
        count = self._context
        step = blank(np.ones(rows, np.int32), np.full(rows, count, np.int32), mode="decode")
        slots = (1 + np.arange(rows * count) % self._slots).astype(np.int32)
        updates = RowUpdates(step.rows, np.zeros(rows, np.int32), Ragged(slots, (count * np.arange(rows + 1)).astype(np.int32)))
        return replace(step, out_slots=slots[count - 1 :: count].copy(), updates=updates)


def _rows(held: Held) -> int:
    return held.size
