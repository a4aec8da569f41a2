"""Where finished lines of a shard are recorded: a journal that grows in a folder, or a new object at each checkpoint in S3."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Protocol

from banyan_runtime.batch import entries
from banyan_runtime.batch.documents import Part
from banyan_runtime.batch.entries import Tally
from banyan_runtime.batch.records import Record
from banyan_runtime.storage.local import LocalStore, sync_folder
from banyan_runtime.storage.open import Location
from banyan_runtime.storage.patience import Patience
from banyan_runtime.storage.store import StoreError

Finished = tuple[int, Record]  # ordinal within the shard


class Recorder(Protocol):
    """Calls block. What `record` returned for is durable; in S3 it counts once the shard's state names the part."""

    journal: bool  # whether every call makes lines durable, or only one that writes a part

    def record(self, lines: Sequence[Finished], key: str) -> Part | None:
        """Make `lines` durable. Returns the new part, at `key`, where there is one."""

    def opened(self) -> Part | None:
        """The journal as it is."""

    def close(self) -> Part | None:
        """Close the journal; returns it as it ended."""


def works_on(location: Location) -> bool:
    """Whether finished lines go into journals there."""
    return isinstance(location.store, LocalStore)


class Journal:
    """Appends to one file. What a write that failed has left behind, on a full disk, is written over by the same bytes when it is tried
    again, and never cut off: somebody else may have counted its whole records by then, and taken the shard over."""

    journal = True

    def __init__(self, location: Location, part: Part, patience: Patience) -> None:
        where = location.child(part.key)
        assert isinstance(where.store, LocalStore)
        self._store = where.store
        self._patience = patience
        self._object = where.key
        self._key = part.key
        self._path = where.store.path(where.key)
        self._tally = Tally()
        self._owed: list[Finished] = []  # what was to be written and could not: it comes first, where it may lie already
        self._file: int | None = None

    def record(self, lines: Sequence[Finished], key: str) -> Part | None:
        self._owed += lines
        data, sizes = bytearray(), []
        for ordinal, record in self._owed:
            encoded = entries.encode(ordinal, record)
            sizes.append(len(encoded))
            data += encoded
        self._patience.retry(self._store.where, lambda _: self._append(data))
        for (ordinal, record), size in zip(self._owed, sizes, strict=True):
            self._tally.add(ordinal, record.kind, record.usage, size)
        self._owed = []
        return None

    def opened(self) -> Part | None:
        return self._tally.growing(self._key)

    def close(self) -> Part | None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
        return self._tally.part(self._key, ordered=False)

    def _append(self, data: bytearray) -> None:
        try:
            with self._store.errors(self._object):
                file = self._open()
                _write_all(file, data, self._tally.bytes)
                os.fdatasync(file)
        except StoreError:
            # after a failed sync the file's pages may be lost silently: what follows goes through a descriptor that is new
            if self._file is not None:
                with contextlib.suppress(OSError):
                    os.close(self._file)
                self._file = None
            raise

    def _open(self) -> int:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            sync_folder(self._path.parent)
        return self._file


class Parts:
    """Writes what came since the last checkpoint as one object."""

    journal = False

    def __init__(self, location: Location) -> None:
        self._location = location

    def record(self, lines: Sequence[Finished], key: str) -> Part | None:
        tally, data = Tally(), bytearray()
        for ordinal, record in sorted(lines, key=lambda line: line[0]):
            encoded = entries.encode(ordinal, record)
            tally.add(ordinal, record.kind, record.usage, len(encoded))
            data += encoded
        where = self._location.child(key)
        where.store.put(where.key, bytes(data), if_none_match=True)
        return tally.part(key, ordered=True)

    def opened(self) -> Part | None:
        return None

    def close(self) -> Part | None:
        return None


def _write_all(file: int, data: bytearray, at: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(file, rest, at)
        rest, at = rest[written:], at + written
