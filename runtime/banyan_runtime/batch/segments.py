"""The lines of a shard, brought close and put into the order in which they are started.

A shard is taken in segments: so many of its lines as fit into `segment_bytes` of scratch space. Within one, lines whose prompts begin
alike are neighbours, so the server computes what they share once. Memory holds an entry for each line, not its body.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Final

from banyan_runtime.batch import ordinals
from banyan_runtime.batch.documents import Shard
from banyan_runtime.batch.lines import Invalid, LineParser, RawLine
from banyan_runtime.batch.planner import duplicate
from banyan_runtime.storage.store import Full, Unreachable

SEGMENT_BYTES: Final = 64 << 20
IN_MEMORY_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class Ready:
    """A line to be sent. `prefix`: how its prompt begins."""

    ordinal: int  # within the shard
    custom_id: str
    prefix: bytes
    start: int
    size: int


class Segment:
    """Lines of a shard: `ready` in the order in which to start them, and those that cannot be sent."""

    def __init__(self, bodies: IO[bytes], ready: list[Ready], invalid: list[tuple[int, Invalid]]) -> None:
        self._bodies = bodies
        self.ready = ready
        self.invalid = invalid

    def body(self, line: Ready) -> bytes:
        self._bodies.seek(line.start)
        return self._bodies.read(line.size)

    def close(self) -> None:
        self._bodies.close()


def segments(
    shard: Shard, lines: Iterator[RawLine], parser: LineParser, done: Callable[[int], bool], segment_bytes: int = SEGMENT_BYTES
) -> Iterator[Segment]:
    """The lines of `shard` that are not `done`, in segments. Blocks. Close each segment."""
    doubles, kept = set(ordinals.read(shard.duplicates)), set(ordinals.read(shard.kept))
    bodies = _scratch()
    ready: list[Ready] = []
    invalid: list[tuple[int, Invalid]] = []
    size = 0
    for ordinal, raw in enumerate(lines):
        if ordinal in kept or done(ordinal):
            continue
        line = parser.parse(raw)
        if isinstance(line, Invalid):
            invalid.append((ordinal, line))
            size += 200
        elif ordinal in doubles:
            invalid.append((ordinal, duplicate(line)))
            size += 200
        else:
            with _scratch_errors(bodies):
                bodies.write(line.body)
            ready.append(Ready(ordinal, line.custom_id, line.prefix, bodies.tell() - len(line.body), len(line.body)))
            size += len(line.body)
        if size >= segment_bytes:
            yield _segment(bodies, ready, invalid)
            bodies, ready, invalid, size = _scratch(), [], [], 0
    yield _segment(bodies, ready, invalid)


def _segment(bodies: IO[bytes], ready: list[Ready], invalid: list[tuple[int, Invalid]]) -> Segment:
    with _scratch_errors(bodies):
        bodies.flush()
    ready.sort(key=lambda line: line.prefix)  # stable: what shares nothing stays in the file's order where it compares equal
    return Segment(bodies, ready, invalid)


def _scratch() -> IO[bytes]:
    return tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES)


@contextlib.contextmanager
def _scratch_errors(bodies: IO[bytes]) -> Iterator[None]:
    """Raise what the disk says as the stores' errors: with room made, or another folder, the same run goes on."""
    try:
        yield
    except OSError as error:
        with contextlib.suppress(OSError):
            bodies.close()  # it tries once more to write what did not fit
        folder, reason = os.environ.get("TMPDIR") or tempfile.tempdir or "/tmp", (error.strerror or str(error)).lower()
        remedy = f"lines on their way lie there, up to {2 * SEGMENT_BYTES >> 20} MB; make room, or let TMPDIR name another folder"
        kind = Full if error.errno in (errno.ENOSPC, errno.EDQUOT) else Unreachable
        raise kind(folder, f"{reason} (scratch space): {remedy}", reason=reason) from error
