"""The input of a run: one object, or all `*.jsonl` and `*.jsonl.gz` below a folder, read by ranges and checked line by line.

Everything blocks; `LineReader` brings it to the event loop, a chunk at a time. All reads are tied to the version of the
object that was first seen, so two passes over the input see the same lines.
"""

from __future__ import annotations

import asyncio
import threading
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

from banyan_runtime.batch.duplicates import IdCensus, Suspects
from banyan_runtime.batch.errors import InputChanged, InputInvalid, InputNotFound, Interrupted, from_store
from banyan_runtime.batch.lines import Invalid, LineParser, LineSplitter, RawLine, Request
from banyan_runtime.batch.records import InputFile
from banyan_runtime.storage.open import Location
from banyan_runtime.storage.store import ObjectInfo, Precondition, StoreError, Throttled, Unreachable

BLOCK_BYTES: Final = 8 << 20
CHUNK_BYTES: Final = 1 << 20  # of requests, handed to the event loop at once
CHUNK_LINES: Final = 256
PATIENCE_S: Final = 120.0  # how long a storage that was there may be away
MAX_PROBLEMS: Final = 100


@dataclass(frozen=True, slots=True)
class Scan:
    """What one pass over the input found."""

    total: int  # lines that are not blank
    suspects: Suspects  # custom_ids that may occur twice
    problems: list[Invalid]  # the first MAX_PROBLEMS lines that cannot be sent
    all_ids_checked: bool


class Source:
    """Input objects, in key order. Raises the errors of `batch.errors`."""

    def __init__(self, location: Location, objects: list[ObjectInfo]) -> None:
        self._location = location
        self._objects = objects
        self._stopped = threading.Event()

    @staticmethod
    def find(location: Location) -> Source:
        """Look the input up."""
        try:
            if not location.is_folder:
                return Source(location, [location.store.head(location.key)])
            objects = [info for info in location.store.list(location.key) if info.key.endswith((".jsonl", ".jsonl.gz"))]
        except StoreError as error:
            raise from_store(error, reading=True) from error
        if not objects:
            raise InputNotFound(f"{location.uri}: no *.jsonl or *.jsonl.gz below this folder")
        return Source(location, sorted(objects, key=lambda info: info.key))

    def stop(self) -> None:
        """Let a pass that is under way in another thread fail at its next block, as its result is not wanted any more."""
        self._stopped.set()

    @property
    def files(self) -> list[InputFile]:
        return [InputFile(self._location.store.uri(info.key), info.tag, info.size) for info in self._objects]

    def scan(self, parser: LineParser) -> Scan:
        """Count and check all lines."""
        total = 0
        census = IdCensus()
        problems: list[Invalid] = []
        for raw in self._lines():
            total += 1
            line = parser.parse(raw)
            if isinstance(line, Request):
                census.add(line.custom_id)
            elif len(problems) < MAX_PROBLEMS:
                problems.append(line)
        if not total:
            raise InputInvalid(f"{self._location.uri}: the input holds no request line")
        return Scan(total, census.suspects(), problems, census.complete)

    def items(self, parser: LineParser, suspects: Suspects) -> Iterator[Request | Invalid]:
        """Every line once, in order. Of lines with one custom_id the first that can be sent is sent, the others are invalid."""
        for raw in self._lines():
            line = parser.parse(raw)
            if isinstance(line, Request) and suspects.seen_before(line.custom_id):
                message = f"The custom_id '{line.custom_id}' occurs in an earlier line; it must be unique in the file."
                yield Invalid(line.number, line.custom_id, "duplicate_custom_id", message, "custom_id")
            else:
                yield line

    def _lines(self) -> Iterator[RawLine]:
        for info in self._objects:
            splitter = LineSplitter()
            blocks = self._blocks(info)
            for block in _unzip(info.key, blocks) if info.key.endswith(".gz") else blocks:
                yield from splitter.feed(block)
            yield from splitter.finish()

    def _blocks(self, info: ObjectInfo) -> Iterator[bytes]:
        for start in range(0, info.size, BLOCK_BYTES):
            end = min(start + BLOCK_BYTES, info.size)
            block = self._read(info, start, end)
            if len(block) != end - start:
                raise InputChanged(f"{self._location.store.uri(info.key)}: it became shorter while it was read")
            yield block

    def _read(self, info: ObjectInfo, start: int, end: int) -> bytes:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            if self._stopped.is_set():
                raise Interrupted("reading was stopped")
            try:
                return self._location.store.get(info.key, start=start, end=end, if_match=info.tag)
            except Precondition as error:
                raise InputChanged(f"{error}; a run needs its input to stay as it is") from error
            except (Throttled, Unreachable) as error:
                if time.monotonic() > deadline:
                    raise from_store(error, reading=True) from error
                self._stopped.wait(2.0)
            except StoreError as error:
                raise from_store(error, reading=True) from error


def _unzip(key: str, blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Gzip, of one member or several, in bounded memory whatever it unpacks to."""
    unzip = zlib.decompressobj(wbits=31)
    try:
        for block in blocks:
            data = block
            while data:
                if unzip.eof:
                    unzip = zlib.decompressobj(wbits=31)
                yield unzip.decompress(data, BLOCK_BYTES)
                data = unzip.unused_data if unzip.eof else unzip.unconsumed_tail
    except zlib.error as error:
        raise InputInvalid(f"{key}: not valid gzip ({error})") from error
    if not unzip.eof:
        raise InputInvalid(f"{key}: the gzip data end too early; the file is cut")


class LineReader:
    """The lines of a source on the event loop: one chunk is handed out while the next is read in `threads`."""

    def __init__(self, items: Iterator[Request | Invalid], threads: Executor) -> None:
        self._items = items
        self._threads = threads

    async def __aiter__(self) -> AsyncIterator[Request | Invalid]:
        loop = asyncio.get_running_loop()
        pending = loop.run_in_executor(self._threads, self._take)
        try:
            while chunk := await pending:
                pending = loop.run_in_executor(self._threads, self._take)
                for item in chunk:
                    yield item
        finally:
            pending.cancel()  # nobody will ask for what it reads, nor for why it failed

    def _take(self) -> list[Request | Invalid]:
        chunk: list[Request | Invalid] = []
        size = 0
        for item in self._items:
            chunk.append(item)
            size += len(item.body) if isinstance(item, Request) else 0
            if len(chunk) >= CHUNK_LINES or size >= CHUNK_BYTES:
                break
        return chunk
