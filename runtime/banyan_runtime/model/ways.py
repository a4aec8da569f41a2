"""Which way each part of a step is computed where there are several: settled once, by what decode steps took on the device that serves.

A kernel that is faster by itself may make a step slower, whose kernels begin while others end; so steps are what is measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Rows of the steps that are measured: what is found holds down to the one before. From 16 on each takes some
kernels more to be compiled."""
GAIN: Final = 0.005  # of a step's time: what gains less is not told from chance, which is some two thousandths of a captured step
CLEAR: Final = 4 * GAIN  # what gains more is chosen even where no time is left to measure it again


class Product(NamedTuple):
    """A product of rows with a matrix, by its shape."""

    outputs: int
    width: int
    gated: bool  # as `Kernels.gated`

    @property
    def bytes(self) -> int:
        """Of its weight, in 16 bits."""
        return 2 * self.outputs * self.width * (2 if self.gated else 1)

    def __str__(self) -> str:
        return f"{self.outputs}x{self.width}{' gated' if self.gated else ''}"


class Staged(NamedTuple):
    """A product whose weights wait for what they are multiplied with (`kernels/staged.py`)."""

    product: Product

    def __str__(self) -> str:
        return f"{self.product} staged"


Option = Product | Staged
"""Of a product by itself: that it is computed in tiles (`kernels/tiles.py`)."""
Possible = Callable[[int], bool]
Timed = Callable[[int, frozenset[Option]], float | None]
"""Seconds of a decode step of so many rows, computed so; None: it cannot be."""


@dataclass(frozen=True, slots=True)
class Found:
    """Of steps of some rows."""

    chosen: frozenset[Option]
    before: float  # seconds without any of them
    after: float


@dataclass(slots=True, eq=False)
class Ways:
    """What there is to choose from, and what was chosen. Nothing is before `settle`."""

    seen: dict[Option, list[Possible]] = field(default_factory=dict)
    found: dict[int, Found] | None = None
    current: Mapping[int, frozenset[Option]] = field(default_factory=dict)  # of each size: what is tried, and once settled what was chosen
    reach: Mapping[int, int] = field(default_factory=dict)  # of each size the rows that were measured; nothing is chosen for more

    def add(self, option: Option, possible: Possible = lambda rows: True) -> None:
        """`possible`: whether it is one for steps of so many rows."""
        self.seen.setdefault(option, []).append(possible)

    @property
    def options(self) -> list[Option]:
        """Those of every block. What occurs once in a step is not worth a choice."""
        return [option for option, each in self.seen.items() if len(each) > 1]

    def possible(self, option: Option, rows: int) -> bool:
        return self.seen[option][0](rows)

    def taken(self, option: Option, rows: int) -> int | None:
        """The number of rows of SIZES that it was chosen for, of which so many are a part; None: it was not."""
        size = of(rows)
        return size if size is not None and option in self.current.get(size, ()) and rows <= self.reach.get(size, size) else None

    def leave(self) -> None:
        """Settled, with none chosen."""
        self.found = {}
        self.current = {}

    def settle(self, reach: Mapping[int, int], seconds: Callable[[int], float | None], possible: Callable[[Option, int], bool]) -> None:
        """`seconds`: what a step of a size takes as things are, None where it cannot be computed so or there is no time to try.
        `possible`: as the method."""
        self.reach = reach

        def timed(rows: int, chosen: frozenset[Option]) -> float | None:
            self.current = {rows: chosen}
            return seconds(rows)

        found = {rows: fastest(rows, [option for option in self.options if possible(option, rows)], timed) for rows in reach}
        self.found = {rows: one for rows, one in found.items() if one is not None}
        self.current = {rows: one.chosen for rows, one in self.found.items()}

    def line(self) -> str:
        """What was found, in words, and for which numbers of rows nothing was measured: for want of time, or of a choice."""
        parts = [
            f"{rows}: {1e3 * one.before:.3f} -> {1e3 * one.after:.3f} with {', '.join(sorted(map(str, one.chosen)))}"
            if one.chosen
            else f"{rows}: {1e3 * one.before:.3f}"
            for rows, one in sorted((self.found or {}).items())
        ]
        left = ", ".join(str(rows) for rows in sorted(self.reach) if rows not in (self.found or {}))
        return "; ".join([*parts, *([f"not measured: {left}"] if left else [])])


def of(rows: int) -> int | None:
    """The number of rows of SIZES that so many are measured with; None: they are more."""
    at = bisect_left(SIZES, rows)
    return SIZES[at] if at < len(SIZES) else None


def fastest(rows: int, options: Sequence[Option], timed: Timed) -> Found | None:
    """From all on, each option in turn the other way, which stays if it is faster so: of several small gains each may be too small to be
    seen, and some gain beside others only. Of a product that has both, tiles and weights that wait are options of one choice. From none
    on where all cannot be measured. What comes of it is measured against none, and twice more, in turn with it."""
    none: frozenset[Option] = frozenset()
    if not options or (before := timed(rows, none)) is None:
        return None
    threefold = frozenset(option.product for option in options if isinstance(option, Staged) and option.product in options)
    chosen = frozenset(options) - threefold
    best = timed(rows, chosen)
    if best is None:
        chosen, best = none, before
    for option in sorted(options, key=_turn):
        if option in threefold:
            continue  # among which its weights' waiting was chosen, or not
        change = frozenset([option])
        others = [chosen ^ change]
        if isinstance(option, Staged) and option.product in threefold:
            others.append((chosen - change) | {option.product})
        for other in others:
            if other and (now := timed(rows, other)) is not None and now < best * (1 - GAIN):
                chosen, best = other, now
    if best >= before * (1 - GAIN):
        chosen = none
    if chosen:
        pairs = [(timed(rows, none), timed(rows, chosen)) for _ in range(2)]
        known = [(again, after) for again, after in pairs if again is not None and after is not None]
        if known:
            again, after = map(min, zip(*known, strict=True))
            if after < again * (1 - GAIN):
                return Found(chosen, again, after)
        elif best < before * (1 - CLEAR):
            return Found(chosen, before, best)
    return Found(none, before, before)


def _turn(option: Option) -> int:
    """Most is gained where weights wait."""
    return (Staged, Product).index(type(option))
