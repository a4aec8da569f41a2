"""What a batch run decides about lines and objects, without I/O, clock or chance: the window of lines under way, the order
of what is written, and which objects may be written. `retries.py` holds what it decides about single tries.

A run over one shard and a run over the whole file are the same here: ordinals count from 0 in whatever is being run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from banyan_runtime.batch.records import ERRORS, MANIFEST, OUTPUT, Record
from banyan_runtime.storage.store import ObjectInfo

RUN_METADATA: Final = "banyan-run"


class Window:
    """Lines between the oldest that is not done and the newest that was begun; gives records out in input order.

    Memory is bounded by `max_lines` and `max_bytes`: a slow line holds back new ones once the window behind it is full,
    until it is done or out of time.
    """

    def __init__(self, *, max_lines: int, max_bytes: int) -> None:
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self._next = 0  # ordinal of the next line begun
        self._watermark = 0  # all lines below are written
        self._sizes: dict[int, int] = {}  # bytes that each line under way holds
        self._bytes = 0
        self._done: dict[int, Record] = {}

    @property
    def watermark(self) -> int:
        """Every line below this ordinal was given out by `take`."""
        return self._watermark

    @property
    def begun(self) -> int:
        return self._next

    @property
    def open(self) -> int:
        """Lines begun and not yet given out."""
        return self._next - self._watermark

    @property
    def has_room(self) -> bool:
        return self.open == 0 or (self.open < self._max_lines and self._bytes < self._max_bytes)

    def begin(self, size: int) -> int:
        """Start the next line, which holds `size` bytes while it is under way; returns its ordinal."""
        ordinal = self._next
        self._next += 1
        self._resize(ordinal, size)
        return ordinal

    def finish(self, ordinal: int, record: Record) -> None:
        """Note the outcome of a line. A line has one outcome."""
        assert self._watermark <= ordinal < self._next, ordinal
        assert ordinal not in self._done, ordinal
        self._done[ordinal] = record
        self._resize(ordinal, len(record.line))

    def take(self) -> list[Record]:
        """The records that are next in input order, each exactly once."""
        ready = []
        while (record := self._done.pop(self._watermark, None)) is not None:
            ready.append(record)
            self._resize(self._watermark, 0)
            self._watermark += 1
        return ready

    def _resize(self, ordinal: int, size: int) -> None:
        self._bytes += size - self._sizes.pop(ordinal, 0)
        if size:
            self._sizes[ordinal] = size


@dataclass(frozen=True, slots=True)
class Condition:
    """Under which condition a final object is written."""

    if_match: str | None = None
    if_none_match: bool = False


@dataclass(frozen=True, slots=True)
class Publish:
    """Go on, with these conditions by object name."""

    conditions: Mapping[str, Condition]


@dataclass(frozen=True, slots=True)
class Published:
    """This run's results are there already."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Another run's object is in the way."""

    name: str


def plan_publication(
    found: Mapping[str, ObjectInfo | None], *, run: str, published_run: str | None, overwrite: bool
) -> Publish | Published | Refuse:
    """Decide by what lies at the output: `found` by object name, `published_run` from the manifest there, if any.

    Results without a manifest that carry a run's mark are what a run left that died while publishing; they are replaced.
    """
    if published_run == run:
        return Published()
    for name in (MANIFEST, OUTPUT, ERRORS):
        info = found[name]
        abandoned = info is not None and found[MANIFEST] is None and RUN_METADATA in info.metadata
        if info is not None and not overwrite and not abandoned:
            return Refuse(name)
    return Publish({name: Condition(if_none_match=True) if info is None else Condition(if_match=info.tag) for name, info in found.items()})
