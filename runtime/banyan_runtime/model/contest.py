"""Decode steps, measured in each way that there is (`ways.py`), before they are captured for good."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
import torch

from banyan_runtime.model import device as devices
from banyan_runtime.model import ways
from banyan_runtime.model.attention import Held, Replayed
from banyan_runtime.model.attention.triton_paged import TritonAttention
from banyan_runtime.model.blank import blank
from banyan_runtime.model.capture import Recorder
from banyan_runtime.model.mail import Mail
from banyan_runtime.model.pool import KvPool, cell_bytes
from banyan_runtime.model.table import SlotTable
from banyan_runtime.model.ways import Option, Ways
from banyan_runtime.step import Ragged, RowUpdates, Step, TableShape

log = logging.getLogger("banyan")

CONTEST_S: Final = 30.0
"""Behind so many seconds nothing further is tried, and what was not stays as it is without."""
CONTEXT: Final = 512  # tokens of each row
LAYERS: Final = 4
"""That there are keys of: with a layer's weights between them they do not stay in a GPU's cache, and so are read as those of texts are."""
SHARE: Final = 4  # of the memory that is free one part, at most, are keys


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
        self._slots = 0  # that keys lie in
        self._table = SlotTable(shape)
        self._bring = Mail().bring

    def settle(self, steps: Sequence[Held]) -> None:
        """Among decode steps that are held; nothing where that was done before. What they were told is gone afterwards."""
        sizes = {size: held for held in sorted(steps, key=_rows) if (size := ways.of(held.size)) is not None}  # the largest of each
        if self._ways.found is not None or not self._ways.options or not sizes:
            return
        if not isinstance(self._attention, TritonAttention):
            return  # FlashInfer's plans belong to the steps that are captured for good
        started = self._clock()
        # Those that matter most first: the fewest, the most, and those in the middle.
        order = sorted(sizes, key=lambda size: (size not in (1, 4, 8, 16, 64, max(sizes)), size))
        reach = {size: sizes[size].size for size in order}
        try:
            largest = sizes[max(sizes)]
            with self._attention.lent(self._pool(largest.size)):
                self._table.apply(step := self._laid_out(largest.size))
                self._attention.fill(step, self._table, largest)  # which tells the device of the table
                self._ways.settle(reach, lambda size: self._seconds(size, sizes[size]), self._possible)
        except (RuntimeError, MemoryError) as error:  # a start must not fail for want of what it can do without
            if (said := devices.shortage(error)) is None:
                raise
            log.warning("There is no memory to measure how decode steps are computed fastest (%s); nothing is chosen.", said)
            self._ways.leave()
        for held in sizes.values():
            held.told.zero_()
        _forget()
        log.info("Ways of decode steps measured in %.1f s, ms of each number of rows: %s", self._clock() - started, self._ways.line())

    def _pool(self, rows: int) -> KvPool:
        """With a slot for each token of so many rows, if there is memory for it."""
        assert isinstance(self._attention, TritonAttention)
        spec, pool = self._attention.spec, self._attention.pool
        each = cell_bytes(spec, pool.kept) * min(LAYERS, spec.layers) // spec.layers
        room = devices.available_bytes(pool.device) // SHARE // each
        self._slots = max(1, min(rows * min(CONTEXT, self._shape.positions), room))
        return KvPool(spec, self._slots, 1, pool.dtype, pool.device, pool.kept, LAYERS)

    def _seconds(self, size: int, held: Held) -> float | None:
        """Of a step of texts that nobody asked for. None: there is no time left, or a way that need not be gone cannot be."""
        if self._clock() > self._until:
            return None
        step = replace(self._laid_out(held.size), updates=None)  # the table was told of more rows than these
        held.tell(step, self._attention.fill(step, self._table, held), self._bring)
        trying = self._ways.current.get(size)
        try:
            seconds = self._recorder.seconds(partial(self._compute, held))
        except Exception as error:
            if not trying:
                raise  # there is no other way
            self._tell_of(error)
            return None
        log.debug("A decode step of %d rows: %.3f ms with %s", held.size, 1e3 * seconds, ", ".join(map(str, trying or ())) or "none")
        return seconds

    def _laid_out(self, rows: int) -> Step:
        """A step that tells in which slots each row's keys lie: its own, as far as there are so many."""
        count = min(CONTEXT, self._shape.positions)
        blank_step = blank(np.ones(rows, np.int32), np.full(rows, count, np.int32), mode="decode")
        slots = (1 + np.arange(rows * count) % self._slots).astype(np.int32)
        told = RowUpdates(blank_step.rows, np.zeros(rows, np.int32), Ragged(slots, (count * np.arange(rows + 1)).astype(np.int32)))
        return replace(blank_step, out_slots=slots[count - 1 :: count].copy(), updates=told)

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


def _forget() -> None:
    """What was taken here: it is not taken again."""
    gc.collect()  # whatever is left of the graphs that were measured
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _rows(held: Held) -> int:
    return held.size
