"""What a GPU did, from a trace that torch.profiler exported: how much of the time it was busy, where it waited, and with what it was busy.

    python benchmarks/gpu_trace.py TRACE.json[.gz] [--step NAME] [--rows 20]

Kernels, copies and fills of all streams of one GPU count as one: it is idle where none of them runs. A kernel that is brought up while the
one before it ends (`model/kernels/dependent.py`) runs from then on, so its time holds its waiting, and how many run side by side says how
much of that there is; the last table therefore says by how much later a kernel ended than whatever ended before it, for each size of its
grid. `--step`: what steps were marked with (`torch.profiler.record_function`); of a mark in the host's time and one in the GPU's, only the
host's counts. `gpu.py --profile` prints the same.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

STEP: Final = "step"
WORK: Final = ("kernel", "gpu_memcpy", "gpu_memset")
EDGES: Final = (2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1000.0)
"""Microseconds: gaps are counted from one to the next. Shorter ones than the first lie between any two kernels."""
_NAME: Final = 72  # characters that are printed of one


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    start: float  # microseconds, as all that follow
    end: float
    grid: str = ""  # programs along its axes; "": no kernel


@dataclass(frozen=True, slots=True)
class Trace:
    events: list[Event]  # of the GPU, in the order in which they began
    steps: int  # that were marked


@dataclass(frozen=True, slots=True)
class Gap:
    """Nothing ran."""

    start: float
    end: float
    before: str  # what ended last
    after: str

    @property
    def length(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Kind:
    """All events of one name."""

    name: str
    times: list[float]

    @property
    def total(self) -> float:
        return sum(self.times)


def parsed(trace: Mapping[str, Any], step: str = STEP) -> Trace:
    """Of what a trace's file holds."""
    found, steps = [], 0
    for entry in trace["traceEvents"]:
        if entry.get("ph") != "X":
            continue
        if entry.get("cat") in WORK:
            start = float(entry["ts"])
            grid = " x ".join(map(str, entry.get("args", {}).get("grid", ())))
            found.append(Event(entry["name"], start, start + float(entry["dur"]), grid))
        elif entry.get("cat") == "user_annotation" and entry["name"] == step:
            steps += 1
    return Trace(sorted(found, key=lambda event: (event.start, event.end)), steps)


def read(file: Path, step: str = STEP) -> Trace:
    """Raises OSError and ValueError for what is no trace."""
    text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    found = json.loads(text)
    if not isinstance(found, dict) or "traceEvents" not in found:
        raise ValueError(f"{file} holds no traceEvents")
    return parsed(found, step)


def gaps(events: Sequence[Event]) -> list[Gap]:
    """In their order, whatever their length."""
    found: list[Gap] = []
    last: Event | None = None  # that ends last
    for event in events:
        if last is not None and event.start > last.end:
            found.append(Gap(last.end, event.start, last.name, event.name))
        if last is None or event.end > last.end:
            last = event
    return found


def histogram(lengths: Iterable[float]) -> list[tuple[float, int, float]]:
    """For each of EDGES how many are as long, but shorter than the next, and how long they are together."""
    counts, totals = [0] * len(EDGES), [0.0] * len(EDGES)
    for length in lengths:
        if (at := bisect_right(EDGES, length) - 1) >= 0:
            counts[at] += 1
            totals[at] += length
    return list(zip(EDGES, counts, totals, strict=True))


def kinds(events: Iterable[Event]) -> list[Kind]:
    """Those that took longest first."""
    times: dict[str, list[float]] = {}
    for event in events:
        times.setdefault(event.name, []).append(event.end - event.start)
    return sorted((Kind(name, each) for name, each in times.items()), key=lambda kind: -kind.total)


def later(events: Iterable[Event]) -> list[Kind]:
    """By name and grid: how much later events ended than the one that ended before them. Those that took longest together first."""
    times: dict[str, list[float]] = {}
    before: float | None = None
    for event in sorted(events, key=lambda event: event.end):
        if before is not None:
            times.setdefault(f"[{event.grid}] {event.name}" if event.grid else event.name, []).append(event.end - before)
        before = event.end
    return sorted((Kind(name, each) for name, each in times.items()), key=lambda kind: -kind.total)


def table(trace: Trace, rows: int = 20) -> str:
    """All of it to be read: so many of the largest gaps, and of the kinds that took longest."""
    events = trace.events
    if not events:
        return "the GPU did nothing"
    idle = gaps(events)
    whole = max(event.end for event in events) - events[0].start
    waited = sum(gap.length for gap in idle)
    busy, summed = whole - waited, sum(event.end - event.start for event in events)
    lines = [
        f"{whole / 1e3:.3f} ms from the first event to the end of the last, busy {busy / whole if whole else 1:.1%}",
        f"{len(events)} launches of {summed / len(events):.2f} us on average, side by side {summed / busy if busy else 1:.2f}",
    ]
    if trace.steps:
        lines.append(f"{trace.steps} steps of {len(events) / trace.steps:.1f} launches and {whole / trace.steps:.1f} us")
    if idle:
        median = statistics.median(gap.length for gap in idle)
        lines.append(f"{len(idle)} gaps, {waited / 1e3:.3f} ms together, median {median:.2f} us")
        lines += ["", f"{'gaps of':>16} {'count':>7} {'ms':>9}"]
        lines += [
            f"{f'{edge:g} us and more':>16} {count:7} {total / 1e3:9.3f}" for edge, count, total in histogram(gap.length for gap in idle)
        ]
        lines += ["", f"{'us idle':>9} {'at ms':>9}  behind what, before what"]
        largest = sorted(idle, key=lambda gap: -gap.length)[:rows]
        start = events[0].start
        lines += [
            f"{gap.length:9.1f} {(gap.start - start) / 1e3:9.3f}  {_short(gap.before)}\n{'':21}{_short(gap.after)}" for gap in largest
        ]
    lines += ["", f"{'count':>7} {'ms':>9} {'mean us':>9} {'share':>6}  of the time that all of them took"]
    lines += [
        f"{len(kind.times):7} {kind.total / 1e3:9.3f} {kind.total / len(kind.times):9.2f} "
        f"{kind.total / summed if summed else 0:6.1%}  {_short(kind.name)}"
        for kind in kinds(events)[:rows]
    ]
    ends = later(events)
    lines += ["", f"{'count':>7} {'median us':>9} {'share':>6}  behind the end of what ended before"] if ends else []
    lines += [
        f"{len(kind.times):7} {statistics.median(kind.times):9.2f} {kind.total / whole if whole else 0:6.1%}  {_short(kind.name)}"
        for kind in ends[:rows]
    ]
    return "\n".join(lines)


def _short(name: str) -> str:
    return name if len(name) <= _NAME else f"{name[: _NAME - 3]}..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--step", default=STEP)
    parser.add_argument("--rows", type=int, default=20)
    options = parser.parse_args()
    try:
        print(table(read(options.trace, options.step), options.rows))
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
