"""The result files of a run, made of its shards' ended states, in the input's order: the same bytes whoever makes them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from banyan_runtime.batch import entries, ordinals
from banyan_runtime.batch.documents import Outcome, Plan, Shard, State
from banyan_runtime.batch.errors import InputChanged, InputInvalid, InputNotFound
from banyan_runtime.batch.executor import RUN_METADATA
from banyan_runtime.batch.lines import LineParser, LineSplitter, RawLine
from banyan_runtime.batch.protocol import Assembled
from banyan_runtime.batch.records import OUTPUT, Record, not_run, record_id
from banyan_runtime.batch.source import Source, found_again
from banyan_runtime.storage.open import Location
from banyan_runtime.storage.store import NotFound, Precondition

BLOCK_BYTES: Final = 4 << 20
GULP_BYTES: Final = 1 << 20


class ResultFiles:
    """Writes and compares output.jsonl and errors.jsonl. `earlier`: where the output lies that this run completes."""

    def __init__(self, location: Location, plan: Plan, source: Source, parser: LineParser, earlier: Location | None = None) -> None:
        self._location = location
        self._plan = plan
        self._source = source
        self._parser = parser
        self._earlier = earlier

    def write(self, name: str, states: Sequence[State], outcome: Outcome, if_match: str | None) -> Assembled:
        where = self._location.child(name)
        upload = where.store.upload(where.key, metadata={RUN_METADATA: self._plan.run})
        total = _Total()
        try:
            for data in _gulps(self._lines(name, states, outcome), total):
                upload.write(data)
            info = upload.complete(if_match=if_match, if_none_match=if_match is None)
        except Precondition:
            upload.abort()
            return total.assembled(None)
        except BaseException:
            upload.abort()
            raise
        return total.assembled(info.tag)

    def compare(self, name: str, states: Sequence[State], outcome: Outcome) -> Assembled:
        where = self._location.child(name)
        total = _Total()
        for _ in _gulps(self._lines(name, states, outcome), total):
            pass
        try:
            info = where.store.head(where.key)
        except NotFound:
            return total.assembled(None)
        if info.size != total.bytes:
            return total.assembled(None)
        digest, at = hashlib.sha256(), 0
        while at < info.size and (block := where.store.get(where.key, start=at, end=at + BLOCK_BYTES, if_match=info.tag)):
            digest.update(block)
            at += len(block)
        return total.assembled(info.tag if digest.digest() == total.digest.digest() else None)

    def _lines(self, name: str, states: Sequence[State], outcome: Outcome) -> Iterator[bytes]:
        kind = "output" if name == OUTPUT else "error"
        earlier = self._earlier_lines() if kind == "output" and self._plan.completes is not None else iter(())
        for number, (shard, state) in enumerate(zip(self._plan.shards, states, strict=True)):
            kept = list(ordinals.read(shard.kept)) if kind == "output" else []
            lacking = shard.lines - _count(shard.kept) - state.completed - state.failed
            assert lacking == 0 or state.term == "frozen", f"shard {number} has ended without {lacking} of its lines"
            if kind == "output" and state.completed + len(kept):
                yield from _interleaved(kept, earlier, self._finished(state, kind))
            elif kind == "error" and lacking:
                yield from self._with_lines_not_run(shard, state, outcome)
            elif kind == "error" and state.failed:
                for _, line in self._finished(state, kind):
                    yield line

    def _finished(self, state: State, kind: str) -> Iterator[tuple[int, bytes]]:
        located = [(self._location.child(part.key).key, part) for part in state.parts]
        for entry in entries.entries(self._location.store, located):
            if entry.kind == kind:
                yield entry.ordinal, entry.result

    def _with_lines_not_run(self, shard: Shard, state: State, outcome: Outcome) -> Iterator[bytes]:
        done = {ordinal for part in state.parts for ordinal in ordinals.read(part.lines)} | set(ordinals.read(shard.kept))
        failed = self._finished(state, "error")
        following = next(failed, None)
        for ordinal, raw in enumerate(self._raw_lines(shard)):
            if following is not None and following[0] == ordinal:
                yield following[1]
                following = next(failed, None)
            elif ordinal not in done:
                yield self._not_run(shard, ordinal, raw, outcome).line

    def _not_run(self, shard: Shard, ordinal: int, raw: RawLine | None, outcome: Outcome) -> Record:
        record = record_id(self._plan.run, shard.first + ordinal)
        if raw is not None:
            return not_run(record, self._parser.parse(raw).custom_id, outcome, line=raw.number)
        inputs = self._plan.inputs
        which = "the input" if len(inputs) == 1 else inputs[shard.object].uri
        why = f"Its custom_id is not known, since {which} is not what it was when the run began."
        return not_run(record, None, outcome, line=shard.number_of(ordinal), why=why)

    def _raw_lines(self, shard: Shard) -> Iterator[RawLine | None]:
        """None in place of each that cannot be read any more: that an input was replaced must not cost what was finished."""
        read = 0
        try:
            for raw in self._source.shard(shard):
                yield raw
                read += 1
        except (InputChanged, InputNotFound, InputInvalid):
            yield from (None for _ in range(shard.lines - read))

    def _earlier_lines(self) -> Iterator[bytes]:
        """The lines of the output that is completed."""
        completes = self._plan.completes
        assert completes is not None
        assert self._earlier is not None
        output = msgspec.structs.replace(completes.output, key=self._earlier.key)
        output = found_again(self._earlier.store, output) or output
        splitter = LineSplitter(max_line_bytes=1 << 30)
        at = 0
        while at < output.bytes:
            try:
                block = self._earlier.store.get(output.key, start=at, end=at + BLOCK_BYTES, if_match=output.tag)
            except (Precondition, NotFound) as error:
                raise InputChanged(f"{error}; a run needs the output that it completes to stay as it is") from error
            at += len(block)
            for raw in splitter.feed(block):
                assert raw.data is not None
                yield raw.data + b"\n"


def _interleaved(kept: list[int], earlier: Iterator[bytes], finished: Iterator[tuple[int, bytes]]) -> Iterator[bytes]:
    """Lines of an earlier run at the places `kept`, between those of this one."""
    at = 0
    for ordinal, line in finished:
        while at < len(kept) and kept[at] < ordinal:
            yield next(earlier)
            at += 1
        yield line
    for _ in kept[at:]:
        yield next(earlier)


def _count(runs: str) -> int:
    return sum(1 for _ in ordinals.read(runs))


class _Total:
    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.bytes = self.lines = 0

    def assembled(self, tag: str | None) -> Assembled:
        return Assembled(tag, self.bytes, self.digest.hexdigest(), self.lines)


def _gulps(lines: Iterator[bytes], total: _Total) -> Iterator[bytes]:
    """The lines in bigger pieces, counted."""
    gulp = bytearray()
    for line in lines:
        gulp += line
        total.lines += 1
        if len(gulp) >= GULP_BYTES:
            yield _counted(gulp, total)
    if gulp:
        yield _counted(gulp, total)


def _counted(gulp: bytearray, total: _Total) -> bytes:
    data = bytes(gulp)
    gulp.clear()
    total.bytes += len(data)
    total.digest.update(data)
    return data
