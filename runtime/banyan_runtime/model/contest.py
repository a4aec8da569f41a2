"""Decode steps, measured in each way that there is (`ways.py`), before they are captured for good."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np

from banyan_runtime.model import ways
from banyan_runtime.model.attention import Held, Replayed
from banyan_runtime.model.attention.triton_paged import TritonAttention
from banyan_runtime.model.blank import blank
from banyan_runtime.model.capture import Recorder
from banyan_runtime.model.table import SlotTable
from banyan_runtime.model.ways import Option, Ways
from banyan_runtime.step import TableShape

log = logging.getLogger("banyan")

CONTEST_S: Final = 30.0
"""Behind so many seconds nothing further is tried, and what was not stays as it is without."""
CONTEXT: Final = 512  # tokens of each row, whose keys all lie in the padding slot


class Contest:
    def __init__(
        self,
        ways: Ways,
        attention: Replayed,
        shape: TableShape,
        recorder: Recorder,
        compute: Callable[[Held], None],
        clock: Callable[[], float],
    ) -> None:
        """`compute`: the step that a `Held` tells by then; it can be captured. `clock`: seconds."""
        self._ways = ways
        self._attention = attention
        self._shape = shape
        self._recorder = recorder
        self._compute = compute
        self._clock = clock
        self._until = clock() + CONTEST_S
        self._failed: set[str] = set()

    def settle(self, steps: Sequence[Held]) -> None:
        """Among decode steps that are held; nothing where that was done before. What they were told is gone afterwards."""
        sizes = {size: held for held in sorted(steps, key=_rows) if (size := ways.of(held.size)) is not None}  # the largest of each
        if self._ways.found is not None or not self._ways.options or not sizes:
            return
        if not isinstance(self._attention, TritonAttention):
            return  # FlashInfer's plans belong to the steps that are captured for good
        started = self._clock()
        # Those that matter most first: one row, the most, and those in the middle.
        order = sorted(sizes, key=lambda size: (size not in (1, 16, 64, max(sizes)), size))
        reach = {size: sizes[size].size for size in order}
        self._ways.settle(reach, lambda size: self._seconds(size, sizes[size]), self._possible)
        for held in sizes.values():
            held.told.zero_()
        gc.collect()  # whatever is left of the graphs that were measured
        log.info("Ways of decode steps measured in %.1f s, ms of each number of rows: %s", self._clock() - started, self._ways.line())

    def _seconds(self, size: int, held: Held) -> float | None:
        """Of a step of texts that nobody asked for. None: there is no time left, or a way that need not be gone cannot be."""
        if self._clock() > self._until:
            return None
        count = min(CONTEXT, self._shape.positions)
        step = blank(np.ones(held.size, np.int32), np.full(held.size, count, np.int32), mode="decode")
        table = SlotTable(self._shape)
        table.apply(step)
        held.tell(step, self._attention.fill(step, table, held))
        try:
            return self._recorder.seconds(partial(self._compute, held))
        except Exception as error:
            if not self._ways.trying.get(size):
                raise  # there is no other way
            self._tell_of(error)
            return None

    def _possible(self, option: Option, rows: int) -> bool:
        if self._clock() > self._until:
            return False
        try:
            possible = self._ways.possible(option, rows)
        except Exception as error:
            self._tell_of(error)
            return False
        return possible

    def _tell_of(self, error: Exception) -> None:
        """Whatever is wrong with it, there is another way."""
        words = f"{type(error).__name__}: {error}"
        if words not in self._failed:
            self._failed.add(words)
            log.warning("Of the ways to compute decode steps one is not gone (--disable-autotune tries none): %s", words)


def _rows(held: Held) -> int:
    return held.size
