"""Finished lines as they lie in parts: one record a line, `CRC32 LENGTH [ordinal, kind, usage, result line]`.

A part can be read as far as its records are whole: what a process that died had half written, or a disk has damaged, is told by
length and checksum.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from banyan_runtime.batch import ordinals
from banyan_runtime.batch.documents import Part
from banyan_runtime.batch.records import Kind, Record, Usage
from banyan_runtime.storage.store import Damaged, NotFound, ObjectStore, StoreError

BLOCK_BYTES: Final = 4 << 20  # read at a time, and put into order in memory
LEAST_BLOCK_BYTES: Final = 64 << 10
MERGE_BYTES: Final = 64 << 20  # all parts that are merged share it: each of them has a block in memory
_CRC_DIGITS: Final = 8


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A finished line of a shard: `line` is the result line without its newline."""

    ordinal: int
    kind: Kind
    usage: Usage | None
    line: msgspec.Raw

    @property
    def result(self) -> bytes:
        return bytes(self.line) + b"\n"


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Entry)


class DamagedPart(Damaged):
    """A part does not hold what the shard's state says."""


class PartGone(StoreError):
    """A part that a shard's state names is not there."""


def encode(ordinal: int, record: Record) -> bytes:
    """The record of line `ordinal` of a shard."""
    payload = _encoder.encode(Entry(ordinal, record.kind, record.usage, msgspec.Raw(record.line[:-1])))
    return b"%08x %d " % (zlib.crc32(payload), len(payload)) + payload + b"\n"


def decode(record: bytes) -> Entry | None:
    """The entry of one record with its newline; None if it is not whole."""
    crc, _, rest = record.partition(b" ")
    length, _, payload = rest.partition(b" ")
    try:
        sound = (
            len(crc) == _CRC_DIGITS
            and int(length) == len(payload) - 1
            and payload.endswith(b"\n")
            and int(crc, 16) == zlib.crc32(payload[:-1])
        )
        return _decoder.decode(payload) if sound else None
    except (ValueError, msgspec.MsgspecError):
        return None


class Tally:
    """Counts what goes into a part."""

    def __init__(self) -> None:
        self._ordinals: set[int] = set()
        self.completed = self.failed = self.bytes = 0
        self.usage = Usage()

    def add(self, ordinal: int, kind: Kind, usage: Usage | None, size: int) -> None:
        assert ordinal not in self._ordinals, f"line {ordinal} has two outcomes"
        self._ordinals.add(ordinal)
        self.bytes += size
        if kind == "output":
            self.completed += 1
        else:
            self.failed += 1
        if usage is not None:
            self.usage.add(usage)

    def __contains__(self, ordinal: int) -> bool:
        return ordinal in self._ordinals

    def part(self, key: str, *, ordered: bool) -> Part:
        """The part that was counted, closed."""
        return Part(key, self.bytes, ordinals.written(sorted(self._ordinals)), self.completed, self.failed, self._usage(), ordered)

    def growing(self, key: str) -> Part:
        """A journal so far, open."""
        return Part(key, 0, "", self.completed, self.failed, self._usage(), ordered=False)

    def _usage(self) -> Usage:
        usage = Usage()
        usage.add(self.usage)
        return usage


def measure(store: ObjectStore, key: str, part: Part) -> Part:
    """The part as far as its journal at `key` can be read. Of two records for one line the first counts."""
    tally = Tally()
    try:
        for entry, size in _records(store, key, None):
            if entry.ordinal in tally:
                break
            tally.add(entry.ordinal, entry.kind, entry.usage, size)
    except NotFound:
        pass  # its owner died before it wrote anything
    return tally.part(part.key, ordered=False)


def entries(store: ObjectStore, keys: Iterable[tuple[str, Part]]) -> Iterator[Entry]:
    """All entries of a shard's parts, by ordinal. Raises DamagedPart if one does not hold what its shard's state says."""
    located = list(keys)
    block_bytes = min(BLOCK_BYTES, max(LEAST_BLOCK_BYTES, MERGE_BYTES // max(1, len(located))))
    streams = [_part(store, key, part, block_bytes) for key, part in located]
    return heapq.merge(*streams, key=lambda entry: entry.ordinal)


def _part(store: ObjectStore, key: str, part: Part, block_bytes: int) -> Iterator[Entry]:
    expected = ordinals.read(part.lines)
    try:
        for entry in _ordered(store, key, part, block_bytes):
            if entry.ordinal != next(expected, None):
                raise DamagedPart(store.uri(key), f"line {entry.ordinal} stands where the shard's state names another")
            yield entry
    except NotFound as error:
        raise PartGone(error.key, "a part that the shard's state names is not there") from error
    if next(expected, None) is not None:
        raise DamagedPart(store.uri(key), "it ends too early")


def _ordered(store: ObjectStore, key: str, part: Part, block_bytes: int) -> Iterator[Entry]:
    if part.ordered:
        for entry, _ in _records(store, key, part.bytes, block_bytes):
            yield entry
    elif part.bytes <= block_bytes:
        yield from sorted((entry for entry, _ in _records(store, key, part.bytes)), key=lambda entry: entry.ordinal)
    else:
        places: list[tuple[int, int, int]] = []
        at = 0
        for entry, size in _records(store, key, part.bytes, block_bytes):
            places.append((entry.ordinal, at, size))
            at += size
        for _, start, size in sorted(places):
            entry_again = decode(store.get(key, start=start, end=start + size))
            if entry_again is None:
                raise DamagedPart(store.uri(key), f"the record at byte {start} is damaged")
            yield entry_again


def _records(store: ObjectStore, key: str, size: int | None, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[Entry, int]]:
    """The whole records in the first `size` bytes, with their sizes. Without `size`, up to the first one that is not whole."""
    at, rest = 0, b""
    while size is None or at < size:
        block = store.get(key, start=at, end=at + block_bytes if size is None else min(at + block_bytes, size))
        at += len(block)
        lines = (rest + block).split(b"\n")
        rest = lines.pop()
        for line in lines:
            entry = decode(line + b"\n")
            if entry is None:
                if size is None:
                    return
                raise DamagedPart(store.uri(key), "a record is damaged")
            yield entry, len(line) + 1
        if len(block) < block_bytes and (size is None or at < size):
            break
    if size is not None and (rest or at < size):
        raise DamagedPart(store.uri(key), f"it holds {at} bytes, the shard's state names {size}")
