"""The input of a run: one object, or all `*.jsonl` and `*.jsonl.gz` below a folder, read by ranges.

Everything blocks. All reads are tied to the version of the object that was first seen, so two passes over the input, and two workers
of a run, see the same lines.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from banyan_runtime.batch.documents import FOLDER, OWNER, InputObject, Shard
from banyan_runtime.batch.errors import InputChanged, InputInvalid, InputNotFound, Interrupted, from_store
from banyan_runtime.batch.lines import LineSplitter, RawLine
from banyan_runtime.batch.records import ERRORS, MANIFEST, OUTPUT
from banyan_runtime.storage.open import Location, open_together
from banyan_runtime.storage.store import NotFound, ObjectInfo, Precondition, StoreError, Throttled, Unreachable

BLOCK_BYTES: Final = 8 << 20
PATIENCE_S: Final = 120.0  # how long a storage that was there may be away


class Source:
    """Input objects, in key order. Raises the errors of `batch.errors`."""

    def __init__(self, location: Location, objects: Sequence[ObjectInfo]) -> None:
        self._location = location
        self._objects = objects
        self._stopped = threading.Event()

    @staticmethod
    def find(location: Location) -> Source:
        """Look the input up. Results of earlier runs that lie below an input folder are not input."""
        try:
            if not location.is_folder:
                return Source(location, [location.store.head(location.key)])
            found = list(location.store.list(location.key))
        except StoreError as error:
            raise from_store(error, reading=True) from error
        objects = [info for info in found if info.key.endswith((".jsonl", ".jsonl.gz"))]
        results = _results(info.key for info in found)
        objects = [info for info in objects if info.key not in results and f"{FOLDER}/" not in info.key]
        if not objects:
            raise InputNotFound(f"{location.uri}: no *.jsonl or *.jsonl.gz below this folder")
        return Source(location, sorted(objects, key=lambda info: info.key))

    @staticmethod
    def of(location: Location, objects: Iterable[InputObject]) -> Source:
        """The input as a plan names it. `location`: where in its store it was found."""
        return Source(location, [ObjectInfo(one.key, one.bytes, one.tag) for one in objects])

    @staticmethod
    def opened(objects: Sequence[InputObject], open_uri: Callable[[str], Location]) -> Source:
        """The input as a plan or a manifest names it, found by its URIs alone."""
        places = open_together([one.uri for one in objects], open_uri)
        return Source(places[0], [ObjectInfo(place.key, one.bytes, one.tag) for place, one in zip(places, objects, strict=True)])

    def check(self) -> None:
        """Look whether all objects are there as they were. Raises InputNotFound and InputChanged."""
        for info in self._objects:
            uri = self._location.store.uri(info.key)
            try:
                tag = self._location.store.head(info.key).tag
            except NotFound as error:
                raise InputNotFound(f"{error}; a run is completed with the very input that it had, at the same place") from error
            except StoreError as error:
                raise from_store(error, reading=True) from error
            if tag != info.tag:
                raise InputChanged(f"{uri}: it is not what it was when the run began that is to be completed")

    def stop(self) -> None:
        """Let a pass that is under way in another thread fail at its next block, as its result is not wanted any more."""
        self._stopped.set()

    @property
    def objects(self) -> list[InputObject]:
        return [InputObject(info.key, self._location.store.uri(info.key), info.tag, info.size) for info in self._objects]

    @property
    def uri(self) -> str:
        return self._location.uri

    def lines(self, number: int) -> Iterator[RawLine]:
        """All lines of object `number`. Offsets of a compressed one are those of what it unpacks to."""
        info = self._objects[number]
        blocks = self._blocks(info, 0, info.size)
        return _split(LineSplitter(), _unzip(self._location.store.uri(info.key), blocks) if is_packed(info.key) else blocks)

    def shard(self, shard: Shard) -> Iterator[RawLine]:
        """The lines of a shard."""
        info = self._objects[shard.object]
        if is_packed(info.key):
            return self.lines(shard.object)
        return _split(LineSplitter(number=shard.number, start=shard.start), self._blocks(info, shard.start, shard.end))

    def _blocks(self, info: ObjectInfo, first: int, last: int) -> Iterator[bytes]:
        for start in range(first, last, BLOCK_BYTES):
            end = min(start + BLOCK_BYTES, last)
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


def is_packed(key: str) -> bool:
    return key.endswith(".gz")


def _results(keys: Iterable[str]) -> set[str]:
    """Which of `keys` are results of a run: output.jsonl and errors.jsonl beside a manifest or an owner."""
    known = set(keys)
    folders = {key.removesuffix(MANIFEST) for key in known if key.rpartition("/")[2] == MANIFEST}
    folders |= {key.removesuffix(OWNER) for key in known if key.endswith(OWNER)}
    return {folder + name for folder in folders for name in (OUTPUT, ERRORS)}


def _split(splitter: LineSplitter, blocks: Iterable[bytes]) -> Iterator[RawLine]:
    for block in blocks:
        yield from splitter.feed(block)
    yield from splitter.finish()


def _unzip(uri: str, blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Gzip, of one member or several, in bounded memory whatever it unpacks to."""
    unzip = zlib.decompressobj(wbits=31)
    try:
        for block in blocks:
            data = block
            while data:
                if unzip.eof:
                    data = data.lstrip(b"\0")  # some pad what they write
                    if not data:
                        break
                    unzip = zlib.decompressobj(wbits=31)
                yield unzip.decompress(data, BLOCK_BYTES)
                data = unzip.unused_data if unzip.eof else unzip.unconsumed_tail
    except zlib.error as error:
        raise InputInvalid(f"{uri}: not valid gzip ({error}); pack it anew, or unpack it and give it a name without .gz") from error
    if not unzip.eof:
        raise InputInvalid(f"{uri}: the gzip data end too early; the file is cut")
