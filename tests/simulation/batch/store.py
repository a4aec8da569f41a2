"""A store in memory: conditional writes, results that are made of parts, journals whose last record may be torn.

In a bucket a tag is a function of the bytes, as an ETag is, so what comes back to its old bytes comes back to its old tag. In a folder
every write has a tag of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from banyan_runtime.batch import ordinals
from banyan_runtime.batch.documents import Outcome, Part, Plan, State
from banyan_runtime.batch.records import OUTPUT, Usage

if TYPE_CHECKING:
    from tests.simulation.batch.process import Process

ANY: Final = "*"  # as if_match: no condition, which no true procedure asks for


class Line(NamedTuple):
    """A line that was run. Each running of it has another answer."""

    ordinal: int  # within its shard
    ok: bool
    answer: str


@dataclass(frozen=True, slots=True)
class Object:
    body: bytes
    tag: str
    run: str | None  # that wrote it; None: somebody else
    by: str


class Journal:
    """A file that only grows, by one writer."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.torn = False


Changed = Callable[[str, Object | None, Object | None, "Process | None"], None]


class Store:
    def __init__(self, *, journal: bool, changed: Changed) -> None:
        self.journal = journal
        self.objects: dict[str, Object] = {}
        self.parts: dict[str, tuple[Line, ...]] = {}
        self.journals: dict[str, Journal] = {}
        self.measured: dict[str, int] = {}  # how much of a journal counted when it was first measured
        self._unlinked: set[str] = set()
        self._changed = changed
        self._tags: dict[bytes, str] = {}
        self._count = 0

    # --- objects ---

    def put(self, key: str, body: bytes, if_match: str | None, by: Process | None) -> Object | None:
        """None: the condition did not hold."""
        before = self.objects.get(key)
        if if_match != ANY and (before.tag if before is not None else None) != if_match:
            return None
        after = Object(body, self._tag(body), by.writing if by is not None else None, by.name if by is not None else "somebody")
        self.objects[key] = after
        self._changed(key, before, after, by)
        return after

    def delete(self, key: str, by: Process | None = None) -> None:
        before = self.objects.pop(key, None)
        if before is not None:
            self._changed(key, before, None, by)

    def digest(self, body: bytes) -> str:
        return self._tags.setdefault(body, f"h{len(self._tags)}")

    def _tag(self, body: bytes) -> str:
        # see plants.empty_results_are_alike for what an empty object's ETag does
        if self.journal or not body:
            self._count += 1
            return f"t{self._count}"
        return self.digest(body)

    # --- parts ---

    def append(self, key: str, lines: Iterable[Line], *, torn: bool = False) -> None:
        if key in self._unlinked:  # its writer has it open, and writes to a file without a name
            return
        journal = self.journals.setdefault(key, Journal())
        assert not journal.torn, "only who died leaves a torn record, and nobody else writes there"
        journal.lines.extend(lines)
        journal.torn = torn

    def measure(self, part: Part) -> Part:
        journal = self.journals.get(part.key)
        lines = journal.lines if journal is not None else []
        self.measured.setdefault(part.key, len(lines))
        return part_of(part.key, lines, ordered=False)

    def lines_of(self, state: State) -> list[Line] | None:
        """What the parts hold that a state names, by ordinal. None: one of them is not there."""
        lines: list[Line] = []
        for part in state.parts:
            if part.key in self.parts:
                lines += self.parts[part.key]
            elif part.key in self.journals:
                lines += self.journals[part.key].lines[: part.bytes]
            else:
                return None
        return sorted(lines, key=lambda line: line.ordinal)

    def remove_part(self, key: str) -> None:
        self.parts.pop(key, None)
        if self.journals.pop(key, None) is not None:
            self._unlinked.add(key)


def part_of(key: str, lines: Sequence[Line], *, ordered: bool) -> Part:
    ok = sum(line.ok for line in lines)
    runs = ordinals.written(sorted(line.ordinal for line in lines))
    return Part(key, len(lines), runs, ok, len(lines) - ok, Usage(completion_tokens=len(lines)), ordered)


def rendered(store: Store, plan: Plan, name: str, states: Sequence[State], outcome: Outcome) -> tuple[bytes, int] | None:
    """A result and its number of lines. It omits and doubles whatever the parts do. None: a part is not there."""
    told: list[str] = []
    for shard, state in zip(plan.shards, states, strict=True):
        if shard.lines == 0 and not state.parts:
            continue
        lines = store.lines_of(state)
        if lines is None:
            return None
        there = {line.ordinal for line in lines}
        if state.term == "frozen":
            lines = sorted([*lines, *(Line(one, False, outcome) for one in range(shard.lines) if one not in there)])
        told += [f"{plan.run} {shard.first + line.ordinal} {line.answer}\n" for line in lines if line.ok == (name == OUTPUT)]
    return "".join(told).encode(), len(told)
