"""Makes the plan of a run: one pass over the input that counts, checks and cuts it, and a second one where custom_ids may be double."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from banyan_runtime.batch import ordinals
from banyan_runtime.batch.documents import Completes, Plan, Shard
from banyan_runtime.batch.duplicates import IdCensus
from banyan_runtime.batch.errors import InputInvalid
from banyan_runtime.batch.lines import Invalid, LineParser, LineSplitter, RawLine, Request
from banyan_runtime.batch.source import Source, is_packed

MAX_SHARDS: Final = 100_000
MAX_MODELS: Final = 64
MAX_PROBLEMS: Final = 100
SHARDS_PER_WORKER: Final = 4  # so that nobody waits long for the last one
UNITS: Final = 16  # a shard is put together of at least so many pieces, to even shards out once the lines are counted


@dataclass(frozen=True, slots=True)
class Cut:
    """How big shards may be."""

    lines: int = 1000
    bytes: int = 64 << 20
    workers: int = 1


@dataclass(slots=True)
class Scan:
    """What the passes over the input found. `problems`: the first lines that cannot be sent; `invalid` counts all of them."""

    shards: list[Shard] = field(default_factory=list)
    total: int = 0
    invalid: int = 0
    problems: list[Invalid] = field(default_factory=list)
    models: set[str] | None = field(default_factory=set)
    all_ids_checked: bool = True


class Kept:
    """The lines that succeeded in an earlier run, as its output names them: in the input's order."""

    def __init__(self, custom_ids: Iterator[str]) -> None:
        self._ids = custom_ids
        self._next = next(custom_ids, None)
        self.lines = 0

    def takes(self, line: Request) -> bool:
        if self._next is None or line.custom_id != self._next:
            return False
        self._next = next(self._ids, None)
        self.lines += 1
        return True

    @property
    def exhausted(self) -> bool:
        return self._next is None


def scan(source: Source, parser: LineParser, cut: Cut, *, kept: Kept | None = None) -> Scan:
    """Read the whole input. Raises InputInvalid if it holds no request."""
    found = Scan()
    census = IdCensus()
    units: list[Shard] = []
    for number, one in enumerate(source.objects):
        units += _units(found, census, source.lines(number), number, one.bytes, parser, cut, is_packed(one.key))
    if not found.total:
        raise InputInvalid(f"{source.uri}: the input holds no request line")
    found.shards = _shards(units, found.total, cut)
    found.all_ids_checked = census.complete
    suspects = census.suspects()
    if len(suspects) or kept is not None:
        found.shards = [_marked(found, shard, source.shard(shard), parser, suspects.seen_before, kept) for shard in found.shards]
    if kept is not None and not kept.exhausted:
        raise InputInvalid(
            f"{source.uri}: this is not the input of the run that is to be completed: its output has lines that are not here"
        )
    return found


def plan_of(
    scan: Scan, source: Source, *, run: str, nonce: str, digest: str, endpoint: str, completes: Completes | None, max_error_percent: int
) -> Plan:
    return Plan(
        run=run,
        nonce=nonce,
        digest=digest,
        endpoint=endpoint,
        inputs=source.objects,
        shards=scan.shards,
        models=sorted(scan.models) if scan.models is not None else None,
        all_ids_checked=scan.all_ids_checked,
        completes=completes,
        max_error_percent=max_error_percent,
    )


def _units(
    found: Scan,
    census: IdCensus,
    lines: Iterator[RawLine],
    number: int,
    size: int,
    parser: LineParser,
    cut: Cut,
    packed: bool,
) -> Iterator[Shard]:
    """One pass over an object: small shards of it. A compressed one is a single shard, since it can only be read from its start."""
    most_lines, most_bytes = max(1, cut.lines // UNITS), max(1, cut.bytes // UNITS)
    start, first_number, last_number, first = 0, 1, 0, found.total
    for raw in lines:
        if not packed and found.total > first and (found.total - first >= most_lines or raw.start - start >= most_bytes):
            yield Shard(number, start, raw.start, first_number, first, found.total - first, last_number)
            start, first_number, first = raw.start, raw.number, found.total
        found.total += 1
        last_number = raw.number
        line = parser.parse(raw)
        if isinstance(line, Invalid):
            _note(found, line)
            continue
        census.add(line.custom_id)
        if found.models is not None:
            found.models.add(line.model or "")
            if len(found.models) > MAX_MODELS:
                found.models = None
    if found.total > first:
        yield Shard(number, start, size, first_number, first, found.total - first, last_number)


def _shards(units: list[Shard], total: int, cut: Cut) -> list[Shard]:
    """Put neighbouring units together, so that there are several shards for each worker and none is too big."""
    most_lines = cut.lines if cut.workers == 1 else max(1, min(cut.lines, -(-total // (SHARDS_PER_WORKER * cut.workers))))
    most_bytes = cut.bytes
    fewest = len({unit.object for unit in units})
    while True:
        shards: list[Shard] = []
        for unit in units:
            last = shards[-1] if shards else None
            if (
                last is not None
                and last.object == unit.object
                and last.lines + unit.lines <= most_lines
                and unit.end - last.start <= most_bytes
            ):
                shards[-1] = msgspec.structs.replace(last, end=unit.end, lines=last.lines + unit.lines, last=unit.last)
            else:
                shards.append(unit)
        if len(shards) <= MAX_SHARDS or len(shards) == fewest:
            return shards
        most_lines, most_bytes = most_lines * 2, most_bytes * 2


def _marked(
    found: Scan,
    shard: Shard,
    lines: Iterator[RawLine],
    parser: LineParser,
    seen_before: Callable[[str], bool],
    kept: Kept | None,
) -> Shard:
    """The shard with its doubles and with the lines that need not be run again."""
    doubles, keeps = [], []
    for ordinal, raw in enumerate(lines):
        line = parser.parse(raw)
        if isinstance(line, Invalid):
            continue  # a line that can be sent may follow under the same custom_id
        if seen_before(line.custom_id):
            doubles.append(ordinal)
            _note(found, duplicate(line))
        elif kept is not None and kept.takes(line):
            keeps.append(ordinal)
    return msgspec.structs.replace(shard, duplicates=ordinals.written(doubles), kept=ordinals.written(keeps))


def duplicate(line: Request) -> Invalid:
    """Of lines with one custom_id the first that can be sent is sent; this is what becomes of the others."""
    message = f"The custom_id '{line.custom_id}' occurs in an earlier line; it must be unique in the file."
    return Invalid(line.number, line.custom_id, "duplicate_custom_id", message, "custom_id")


def _note(found: Scan, line: Invalid) -> None:
    found.invalid += 1
    if len(found.problems) < MAX_PROBLEMS:
        found.problems.append(line)


def custom_ids(blocks: Iterator[bytes]) -> Iterator[str]:
    """The custom_ids of a result file."""
    splitter = LineSplitter(max_line_bytes=1 << 30)
    for block in blocks:
        for raw in splitter.feed(block):
            yield _custom_id(raw)
    for raw in splitter.finish():
        yield _custom_id(raw)


class _Line(msgspec.Struct):
    custom_id: str


_line = msgspec.json.Decoder(_Line)


def _custom_id(raw: RawLine) -> str:
    assert raw.data is not None
    return _line.decode(raw.data).custom_id
