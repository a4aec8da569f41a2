"""What a person sees while local mode works: a live table on a terminal, lines elsewhere. Fed with snapshots and notes."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from banyan_operator.kube.objects import Key, key_of
from banyan_operator.local.objects import in_namespace
from banyan_operator.local.snapshot import FINISHED, Snapshot, phase, reason
from banyan_operator.plan import Manifest

LINE_EVERY_S = 2.0
LINE_EVERY_PERCENT = 10
"""Without a terminal a progress line comes when either has passed since the last."""
SETTLED_S = 1.0
"""Words that change while the phase stays are printed when they have stood that long: most stand for an instant only."""
LONGEST_LINE = 240
BAR_CELLS, PERCENT_CELLS, GAP = 20, 4, 2
LEAST_NAME, LEAST_BAR, LEAST_DETAIL = 8, 8, 26
"""What has fewer cells tells nothing. The bar leaves so much to the detail, which a server's URL fits into."""
BAD, BUSY, GOOD = "red", "yellow", "green"
_COLOURS = {"Ready": GOOD, "Succeeded": GOOD, "Failed": BAD, "Degraded": BAD, "Expired": BAD, "Cancelled": BAD}


class View(Protocol):
    """Shows what it is given. A context: the terminal is whole again after it."""

    @property
    def gone(self) -> bool:
        """Whether nobody reads it any more: `| head -1` has seen enough."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /) -> None: ...

    def show(self, snapshot: Snapshot) -> None: ...

    def say(self, text: str) -> None: ...


def view_for(stream: TextIO, *, plain: bool, hint: str = "") -> View:
    """The live view where `stream` is a terminal and nobody asked for lines. `hint` stands below it while all goes well."""
    if plain or not stream.isatty():
        return Lines(stream)
    return Screen(Console(file=stream), hint)


def label(resource: Manifest) -> str:
    return label_of(key_of(resource))


def label_of(key: Key) -> str:
    """What one resource is called: two of one name are told apart by their namespaces."""
    return f"{key.kind.lower()}/{key.name}{in_namespace(key.namespace)}"


def percent(resource: Manifest, loading: Mapping[str, Mapping[str, Any]]) -> int | None:
    """How far a resource is, 0 to 100, where that is known."""
    found = _loading(resource, loading)
    if found is not None:
        return int(found.get("percent", 0))
    if resource["kind"] == "BatchJob" and "progressPercent" in resource.get("status", {}):
        return int(resource["status"]["progressPercent"])
    return None


def detail(resource: Manifest, loading: Mapping[str, Mapping[str, Any]]) -> str:
    """What is to be said of a resource beside its phase."""
    status = resource.get("status", {})
    found = _loading(resource, loading)
    if found is not None:
        return f"{found.get('state', '')}: {found['detail']}" if found.get("detail") else str(found.get("state", ""))
    if phase(resource) == "Ready" and status.get("url"):
        return f"{status['url']}/v1"
    if resource["kind"] == "BatchJob" and status.get("requests"):
        parts = [f"{status['requests']} requests"]
        if status.get("requestCounts", {}).get("failed"):
            parts.append(f"{status['requestCounts']['failed']} failed")
        if phase(resource) not in FINISHED:
            if (status.get("shards") or {}).get("total", 0) > 1:
                parts.append(f"{status['shardsText']} shards")
            if status.get("tokensPerSecond"):
                parts.append(f"{status['tokensPerSecond']} tok/s")
            if status.get("etaText"):
                parts.append(f"ETA {status['etaText']}")
        elif phase(resource) == "Succeeded" and status.get("outputURI"):
            return f"{', '.join(parts)} → {status['outputURI']}"
        else:
            parts.append(reason(resource))
        return ", ".join(parts)
    return reason(resource)


def _loading(resource: Manifest, loading: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """What its server says while it is not ready yet."""
    found = loading.get(label(resource))
    return None if found is None or found.get("state") in ("ready", "draining", "dead") else found


@dataclass(frozen=True, slots=True)
class Line:
    """What is to be read of one resource."""

    phase: str
    percent: int | None
    detail: str


def forget(stream: TextIO) -> None:
    """Let what is still written to a stream that nobody reads vanish, also when Python flushes it at its end."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


class Lines:
    """A line for each thing that happens, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self.gone = False
        self._stream = stream
        self._began = time.monotonic()
        self._printed: dict[str, Line] = {}
        self._last: dict[str, float] = {}  # when that was
        self._pending: dict[str, tuple[Line, float]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def say(self, text: str) -> None:
        try:
            print(f"{time.monotonic() - self._began:7.1f}s  {text}", file=self._stream, flush=True)
        except BrokenPipeError:
            self.gone = True
            forget(self._stream)

    def show(self, snapshot: Snapshot) -> None:
        now = time.monotonic()
        for resource in snapshot.resources:
            key = label(resource)
            line = Line(phase(resource), percent(resource, snapshot.loading), detail(resource, snapshot.loading))
            if self._printed.get(key) == line:
                self._pending.pop(key, None)
            elif self._due(key, line, now):
                self._pending.pop(key, None)
                self._printed[key], self._last[key] = line, now
                bar = "" if line.percent is None else f"  {_bar(line.percent)} {line.percent:3d}%"
                self.say(f"{key}  {line.phase}{bar}  {line.detail[:LONGEST_LINE]}".rstrip())

    def _due(self, key: str, line: Line, now: float) -> bool:
        """Whether a line that differs from the last one printed is worth printing now."""
        old = self._printed.get(key)
        if old is None or old.phase != line.phase:
            return True
        if line.percent is not None and line.percent != old.percent:
            return abs(line.percent - (old.percent or 0)) >= LINE_EVERY_PERCENT or now - self._last[key] >= LINE_EVERY_S
        if key not in self._pending or self._pending[key][0] != line:
            self._pending[key] = (line, now)
        return now - self._pending[key][1] >= SETTLED_S


def _bar(done: int) -> str:
    cells = done * BAR_CELLS // 100
    return "#" * cells + "-" * (BAR_CELLS - cells)


class Screen:
    """A table that is drawn again in place; notes scroll by above it."""

    gone = False

    def __init__(self, console: Console, hint: str) -> None:
        self._hint = hint
        self._live = Live(console=console, auto_refresh=False, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        self._live.console.print(Text(text, style="dim"))

    def show(self, snapshot: Snapshot) -> None:
        self._live.update(self._draw(snapshot), refresh=True)

    def _draw(self, snapshot: Snapshot) -> RenderableType:
        rows = [(label(one), phase(one), percent(one, snapshot.loading), detail(one, snapshot.loading)) for one in snapshot.resources]
        table = Table(box=None, padding=(0, GAP, 0, 0), show_header=False)
        widths = _widths(self._live.console.width, rows)
        for width in widths.values():
            table.add_column(no_wrap=True, overflow="ellipsis", width=width)
        for name, word, done, more in rows:
            cells: dict[str, RenderableType] = {
                "name": Text(name, style="bold"),
                "phase": Text(word, style=_COLOURS.get(word, BUSY)),
                # named colours, because a terminal of 16 shows the default ones as black
                "bar": ""
                if done is None
                else ProgressBar(100, done, widths.get("bar"), style="dim", complete_style=BUSY, finished_style=GOOD),
                "percent": "" if done is None else f"{done:3d}%",
                "detail": Text(more),
            }
            table.add_row(*(cells[column] for column in widths))
        hint = {"running": self._hint, "stopping": "stopping …", "stopped": "stopped"}[snapshot.state]
        return Group(Text(""), table, Text(hint, style="dim"))


def _widths(whole: int, rows: Sequence[tuple[str, str, int | None, str]]) -> dict[str, int]:
    """The columns that have room in `whole` cells, and their widths. The bar goes first, the phase last."""
    word = min(max((len(row[1]) for row in rows), default=0), whole - GAP)
    name = min(max((len(row[0]) for row in rows), default=0), whole - word - 2 * GAP)
    widths = {"name": name, "phase": word} if name >= LEAST_NAME else {"phase": word}
    rest = whole - sum(widths.values()) - GAP * len(widths)
    if any(row[2] is not None for row in rows):
        bar = min(BAR_CELLS, rest - PERCENT_CELLS - LEAST_DETAIL - 3 * GAP)
        if bar >= LEAST_BAR:
            widths["bar"] = bar
            rest -= bar + GAP
        if rest >= PERCENT_CELLS + GAP:
            widths["percent"] = PERCENT_CELLS
            rest -= PERCENT_CELLS + GAP
    if rest - GAP >= LEAST_NAME:
        widths["detail"] = rest - GAP
    return widths
