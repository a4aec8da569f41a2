"""The input of a run: one object, or all `*.jsonl` and `*.jsonl.gz` below a folder, read by ranges.

Everything blocks. All reads are tied to the version of the object that was first seen, so two passes over the input, and two workers
of a run, see the same lines. A copy of the same bytes will do: a storage that was moved or restored has other tags.
"""

from __future__ import annotations

import hashlib
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from banyan_runtime.batch.documents import FOLDER, OWNER, InputObject, Shard
from banyan_runtime.batch.errors import InputChanged, InputInvalid, InputNotFound, Interrupted, from_store
from banyan_runtime.batch.lines import LineSplitter, RawLine
from banyan_runtime.batch.records import ERRORS, MANIFEST, OUTPUT
from banyan_runtime.errors import UserError
from banyan_runtime.storage.open import Location, open_together
from banyan_runtime.storage.store import NotFound, ObjectInfo, ObjectStore, Precondition, StoreError, Throttled, Unreachable

BLOCK_BYTES: Final = 8 << 20
PATIENCE_S: Final = 120.0  # how long a storage that was there may be away
CONFIRM_S: Final = (1.0, 5.0)  # pauses before what is not there any more, or not as it was, is looked at again: it may be neither


class Source:
    """Input objects, in key order. Raises the errors of `batch.errors`."""

    def __init__(self, location: Location, objects: Iterable[InputObject]) -> None:
        self._location = location
        self._objects = list(objects)
        self._stopped = threading.Event()
        self._lost: dict[int, UserError] = {}  # objects that are not there any more, or not as they were, and why

    @staticmethod
    def find(location: Location) -> Source:
        """Look the input up. Results of earlier runs that lie below an input folder are not input."""
        try:
            if not location.is_folder:
                return Source(location, [_seen(location.store, location.store.head(location.key))])
            found = list(location.store.list(location.key))
        except StoreError as error:
            raise from_store(error, reading=True) from error
        objects = [info for info in found if info.key.endswith((".jsonl", ".jsonl.gz"))]
        results = _results(info.key for info in found)
        objects = [info for info in objects if info.key not in results and f"{FOLDER}/" not in info.key]
        if not objects:
            raise InputNotFound("no *.jsonl or *.jsonl.gz below this folder", value=location.uri)
        return Source(location, [_seen(location.store, info) for info in sorted(objects, key=lambda info: info.key)])

    @staticmethod
    def of(location: Location, objects: Iterable[InputObject]) -> Source:
        """The input as a plan names it. `location`: where in its store it was found."""
        return Source(location, objects)

    @staticmethod
    def opened(objects: Sequence[InputObject], open_uri: Callable[[str], Location]) -> Source:
        """The input as a plan or a manifest names it, found by its URIs alone."""
        places = open_together([one.uri for one in objects], open_uri)
        named = zip(places, objects, strict=True)
        return Source(places[0], [msgspec.structs.replace(one, key=place.key, uri=place.uri) for place, one in named])

    def check(self) -> None:
        """Look whether all objects are there as they were. Raises InputNotFound and InputChanged."""
        for one in self._objects:
            try:
                same = found_again(self._location.store, one) is not None
                if not same:
                    self._location.store.head(one.key)  # it is perhaps not there at all
            except NotFound as error:
                words = f"{error}; a run is completed with the very input that it had, at the same place; {put_back(one)}"
                raise InputNotFound(words) from error
            except StoreError as error:
                raise from_store(error, reading=True) from error
            if not same:
                raise InputChanged(f"{one.uri}: it is not what it was when the run began that is to be completed; {put_back(one)}")

    def stop(self) -> None:
        """Let a pass that is under way in another thread fail at its next block, as its result is not wanted any more."""
        self._stopped.set()

    @property
    def objects(self) -> list[InputObject]:
        """Each with its digest once its `lines` were read to their end."""
        return list(self._objects)

    @property
    def uri(self) -> str:
        return self._location.uri

    def lines(self, number: int) -> Iterator[RawLine]:
        """All lines of object `number`. Offsets of a compressed one are those of what it unpacks to."""
        return self._lines(number, self._digested(number))

    def shard(self, shard: Shard) -> Iterator[RawLine]:
        """The lines of a shard."""
        one = self._objects[shard.object]
        if is_packed(one.key):
            return self._lines(shard.object, self._blocks(shard.object, 0, one.bytes))
        return _split(LineSplitter(number=shard.number, start=shard.start), self._blocks(shard.object, shard.start, shard.end))

    def _lines(self, number: int, blocks: Iterator[bytes]) -> Iterator[RawLine]:
        one = self._objects[number]
        packed = is_packed(one.key)
        return _split(LineSplitter(), _text(one.uri, _unzip(one.uri, blocks) if packed else blocks, packed))

    def _digested(self, number: int) -> Iterator[bytes]:
        digest = hashlib.sha256()
        for block in self._blocks(number, 0, self._objects[number].bytes):
            digest.update(block)
            yield block
        self._objects[number] = msgspec.structs.replace(self._objects[number], sha256=digest.hexdigest())

    def _blocks(self, number: int, first: int, last: int) -> Iterator[bytes]:
        for start in range(first, last, BLOCK_BYTES):
            yield self._read(number, start, min(start + BLOCK_BYTES, last))

    def _read(self, number: int, start: int, end: int) -> bytes:
        store, deadline = self._location.store, time.monotonic() + PATIENCE_S
        pauses = iter(CONFIRM_S)
        while True:
            if self._stopped.is_set():
                raise Interrupted("reading was stopped")
            if number in self._lost:
                raise self._lost[number]
            one = self._objects[number]
            try:
                try:
                    block = store.get(one.key, start=start, end=end, if_match=one.tag)
                    if len(block) == end - start:
                        return block
                    raise InputChanged(f"{one.uri}: it became shorter while it was read; {put_back(one)}")
                except Precondition as error:
                    copy = found_again(store, one)
                    if copy is None or copy.tag == one.tag:
                        raise InputChanged(f"{error}; a run needs its input to stay as it is; {put_back(one)}") from error
                    self._objects[number] = copy
                except NotFound as error:  # it was there
                    raise InputNotFound(f"{error}; it was removed during the run; {put_back(one)}") from error
            except (InputChanged, InputNotFound) as error:  # whoever stands before a storage may say so, too
                pause_s = next(pauses, None)
                if pause_s is None:
                    self._lost[number] = error
                    raise
                self._stopped.wait(pause_s)
            except (Throttled, Unreachable) as error:
                if time.monotonic() > deadline:
                    raise from_store(error, reading=True) from error
                self._stopped.wait(2.0)
            except StoreError as error:
                raise from_store(error, reading=True) from error


def put_back(one: InputObject) -> str:
    """What helps where `one` is not there any more, or not as it was."""
    known = [f"{one.bytes} bytes"]
    if one.uri.startswith("s3://"):  # what stands in its place for a file is our own
        known.append(f"ETag {one.tag}")
    if one.sha256:
        known.append(f"SHA-256 {one.sha256}")
    return f"put back what was there ({', '.join(known)})"


def found_again(store: ObjectStore, one: InputObject) -> InputObject | None:
    """`one` at the tag that its bytes have now: its own, or a copy's. None: there is something else, or nothing. Raises StoreError."""
    try:
        found = store.head(one.key)
        if found.tag == one.tag:
            return one
        if found.size != one.bytes or not one.sha256:
            return None
        digest = hashlib.sha256()
        for start in range(0, found.size, BLOCK_BYTES):
            digest.update(store.get(one.key, start=start, end=start + BLOCK_BYTES, if_match=found.tag))
    except (NotFound, Precondition):
        return None
    return msgspec.structs.replace(one, tag=found.tag) if digest.hexdigest() == one.sha256 else None


def _seen(store: ObjectStore, info: ObjectInfo) -> InputObject:
    return InputObject(info.key, store.uri(info.key), info.tag, info.size)


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


_GZIP: Final = b"\x1f\x8b"
_OTHERS: Final = {
    _GZIP: "it is gzip; give it a name that ends in .gz, or unpack it",
    b"\x28\xb5\x2f\xfd": "it is packed by zstd; unpack it, or pack it with gzip",
    b"\xfd7zXZ\0": "it is packed by xz; unpack it, or pack it with gzip",
    b"BZh": "it is packed by bzip2; unpack it, or pack it with gzip",
    b"PK\x03\x04": "it is a zip archive; unpack it",
    b"\xff\xfe": "it is UTF-16, and JSONL is UTF-8; iconv -f UTF-16 -t UTF-8 makes it so",
    b"\xfe\xff": "it is UTF-16, and JSONL is UTF-8; iconv -f UTF-16 -t UTF-8 makes it so",
    b"{\0": "it is UTF-16, and JSONL is UTF-8; iconv -f UTF-16LE -t UTF-8 makes it so",
    b"\0{": "it is UTF-16, and JSONL is UTF-8; iconv -f UTF-16BE -t UTF-8 makes it so",
}
"""What is no JSONL as a whole, by how it begins, and what helps: line by line it would be said of each that it is no JSON."""
_TWICE: Final = "it was packed with gzip twice; unpack it once"
_LONGEST: Final = max(map(len, _OTHERS))


def _text(uri: str, blocks: Iterator[bytes], packed: bool) -> Iterator[bytes]:
    """These, if they do not begin as something else does. `packed`: they were unpacked."""
    begin = b""
    for block in blocks:
        begin += block
        if len(begin) >= _LONGEST:
            break
    for magic, words in _OTHERS.items():
        if begin.startswith(magic):
            if packed:
                words = _TWICE if magic == _GZIP else f"unpacked, {words}"
            raise InputInvalid(f"{uri}: {words}")
    yield begin
    yield from blocks


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
