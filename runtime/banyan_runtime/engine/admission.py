"""The budget of one prefill step, what the pool, the step and the chunk still have room for, and what was chosen for it.

The one predicate of admission. `EngineLimits.check` and `max_new` bound every request so that in an empty pool it passes.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from banyan_runtime.engine.in_batch_prefix import InBatchPrefixes
from banyan_runtime.engine.limits import EngineLimits
from banyan_runtime.engine.memory.kv import KvMemory
from banyan_runtime.engine.request import Request


class Verdict(enum.Enum):
    ROOM = "room"
    NO_TOKEN = "no_token"  # the pool is spoken for: looking again makes no sense before somebody leaves
    STEP_FULL = "step_full"  # this step is: the next one may take more


class Budget:
    """Tokens. `expected` is what running requests are still expected to generate."""

    def __init__(self, limits: EngineLimits, memory: KvMemory, expected: float, chunk: int | None) -> None:
        self._memory = memory
        self._promised = expected  # to running and admitted requests, output included
        self._taken = 0  # by the admitted ones in this step
        self._input = limits.max_prefill_tokens
        self.chunk = chunk

    @property
    def total(self) -> float:
        """Room for prompt and expected output; live, because locking a cached prefix shrinks it."""
        return self._memory.available - self._promised

    @property
    def current(self) -> int:
        """Room in the pool for this step's tokens."""
        return self._memory.available - self._taken

    def input_fits(self, size: int) -> bool:
        return size <= self._input

    def part_of(self, rest: int) -> int:
        """How many of `rest` tokens fit into this step's chunk: all of them, or whole pages."""
        page = self._memory.page_size
        if self.chunk is None or self._memory.whole_pages(rest) <= self.chunk:
            return rest
        return self.chunk - self.chunk % page

    def charge(self, tokens: int, expected_output: int) -> None:
        """`tokens` go into this step, in whole pages."""
        size = self._memory.whole_pages(tokens)
        self._promised += size + expected_output
        self._taken += size
        self._input -= size
        if self.chunk is not None:
            self.chunk -= size

    def withdraw(self, expected_output: float) -> None:
        """Running requests that were promised so much have left."""
        self._promised -= expected_output

    def verdict(self) -> Verdict:
        if self.total <= 0 or self.current <= 0:
            return Verdict.NO_TOKEN
        if self._input <= 0 or (self.chunk is not None and self.chunk <= 0):
            return Verdict.STEP_FULL
        return Verdict.ROOM


@dataclass(slots=True)
class PrefillChunk:
    """A request's part in a prefill step: `count` tokens from position `start` on."""

    request: Request
    start: int
    count: int


@dataclass(slots=True)
class Selection:
    """What a prefill step is made of so far."""

    budget: Budget
    chunks: list[PrefillChunk] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)  # those of them that come from the queue
    computing: InBatchPrefixes = field(default_factory=InBatchPrefixes)  # keys that are not in the tree yet
    cached: int = 0  # prompt tokens found in the tree
    held_back: int = 0  # requests that wait for a prefix in `computing`
    pushed: float = -math.inf  # the highest level of those who were pushed aside for it
