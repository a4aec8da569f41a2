"""A shard at work: what of it is in flight, finished and recorded."""

from __future__ import annotations

import asyncio
import time

from banyan_runtime.batch import ordinals
from banyan_runtime.batch.documents import Part, Shard
from banyan_runtime.batch.protocol import Held
from banyan_runtime.batch.recorder import Finished, Recorder
from banyan_runtime.batch.records import Record


class ShardRun:
    """A shard that a worker owns, as far as it has come."""

    def __init__(self, held: Held, shard: Shard, recorder: Recorder, ours_at: float) -> None:
        self.held = held
        self.shard = shard
        self.recorder = recorder
        self.done = {ordinal for part in held.state.parts for ordinal in ordinals.read(part.lines)}
        self.pending: list[Finished] = []  # finished, and nobody records it yet
        self.unrecorded_bytes = 0  # finished and not durable: pending, or on its way to the storage
        self.tasks: set[asyncio.Task[None]] = set()
        self.recording: asyncio.Task[None] | None = None  # the one that writes parts and states
        self.loaded = False  # no line is left to start
        self.gaps = False  # what became of some lines is not known, or could not be recorded: this owner does not end the shard
        self.lost = False
        self.ours_at = ours_at  # monotonic seconds: it was ours then, and is for a lease more, whoever looks
        self.confirmed = asyncio.Event()  # set when `ours_at` moves
        self.recorded_at = time.monotonic()
        self.completed = held.state.completed  # as shown: recorded or not
        self.failed = held.state.failed
        self.usage = held.state.usage

    @property
    def ended(self) -> bool:
        return self.loaded and not self.tasks and not self.pending and not self.gaps

    def lacking(self, *parts: Part | None) -> int:
        """Lines that are neither in what the shard's state names nor in `parts`."""
        recorded = sum(part.completed + part.failed for part in (*self.held.state.parts, *parts) if part is not None)
        return self.shard.lines - sum(1 for _ in ordinals.read(self.shard.kept)) - recorded

    def finish(self, ordinal: int, record: Record) -> None:
        assert ordinal not in self.done, ordinal
        self.done.add(ordinal)
        self.pending.append((ordinal, record))
        self.unrecorded_bytes += len(record.line)
        if record.kind == "output":
            self.completed += 1
        else:
            self.failed += 1
        if record.usage is not None:
            self.usage.add(record.usage)
