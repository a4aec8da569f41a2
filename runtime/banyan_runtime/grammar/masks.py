"""The masks of a step: those that take their time are computed side by side, where there are cores for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from banyan_runtime.grammar.errors import GrammarError
from banyan_runtime.grammar.matcher import Masks, Matcher, SideBySide

log = logging.getLogger("banyan")

FEW: Final = 4  # masks, of 10 to 20 us each: threads are not awake sooner
FEW_THREADS: Final = 4  # two of one core were measured to take a tenth longer than one alone (benchmarks/grammar.py)
MOST_THREADS: Final = 8
SLOW_S: Final = 0.05  # for a step's masks side by side: one of them takes so long, or a machine has other things to do
ALONE: Final = 16  # steps whose masks are computed one after another then, so that it shows whose take that long


class MaskFiller:
    """`open_threads` gives what computes with so many threads; it is called once there is need of it."""

    def __init__(self, open_threads: Callable[[int], SideBySide], cores: int) -> None:
        self._open = open_threads
        self._threads = min(cores, MOST_THREADS)
        self._opened = False
        self._compute: SideBySide | None = None
        self._alone = 0

    def fill(self, matchers: Sequence[Matcher], masks: Masks) -> list[GrammarError | None]:
        """The mask of each matcher into its row, and what went wrong with it. A row with an error means nothing."""
        computed = self._computed(matchers, masks)
        return [_failed(matcher, masks, row, computed=row in computed) for row, matcher in enumerate(matchers)]

    def _computed(self, matchers: Sequence[Matcher], masks: Masks) -> set[int]:
        """The rows that have been computed side by side."""
        if len(matchers) < FEW or self._threads < FEW_THREADS:
            return set()
        slow = [(library, row) for row, matcher in enumerate(matchers) if (library := matcher.library) is not None]
        compute = self._threads_of_its_own() if len(slow) >= FEW else None
        if compute is None:
            return set()
        if self._alone:
            self._alone -= 1
            return set()
        began = time.monotonic()
        try:
            compute(slow, masks)
        except GrammarError as error:  # of one of them: whose it is shows when they are computed one by one
            log.warning("Masks of grammars are computed one after another: %s", error)
            self._compute = None
            return set()
        if time.monotonic() - began > SLOW_S:
            self._alone = ALONE
        return {row for _, row in slow}

    def _threads_of_its_own(self) -> SideBySide | None:
        if not self._opened:
            self._opened = True
            try:
                self._compute = self._open(self._threads)
            except GrammarError as error:
                log.warning("Masks of grammars are computed one after another: %s", error)
        return self._compute


def _failed(matcher: Matcher, masks: Masks, row: int, *, computed: bool) -> GrammarError | None:
    try:
        matcher.fill(masks[row], computed=computed)
    except GrammarError as error:
        return error
    return None
