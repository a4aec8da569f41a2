"""What a person sees while local mode works: a live table on a terminal, lines elsewhere. Fed with snapshots and notes."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from banyan_operator.kube.kinds import Manifest
from banyan_operator.local.state import Snapshot
from banyan_operator.local.status import has_ended, label, phase, reason

LINE_EVERY_S: Final = 2.0
LINE_EVERY_PERCENT: Final = 10
"""Without a terminal a progress line comes when either has passed since the last."""
SETTLED_S: Final = 1.0
"""Words that change while the phase stays are printed when they have stood that long: most stand for an instant only."""
LONGEST_LINE: Final = 240
BAR_CELLS: Final = 20
LEAST_WIDTH: Final = 110  # of a terminal on which the bar leaves a server's URL whole
BAD, BUSY, GOOD = "red", "yellow", "green"
_COLOURS: Final = {"Ready": GOOD, "Succeeded": GOOD, "Failed": BAD, "Degraded": BAD, "Expired": BAD, "Cancelled": BAD}


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


class Line(NamedTuple):
    """What is to be read of one resource."""

    phase: str
    percent: int | None
    detail: str

    @staticmethod
    def of(resource: Manifest, loading: Mapping[str, Mapping[str, Any]]) -> Line:
        """`loading`: by label what servers say of themselves."""
        said = loading.get(label(resource))
        if said is not None and said.get("state") not in ("ready", "draining", "dead"):  # it is not ready yet
            words = [str(said[name]) for name in ("state", "detail") if said.get(name)]
            return Line(phase(resource), int(said.get("percent", 0)), ": ".join(words))
        status = resource.get("status", {})
        if resource["kind"] == "BatchJob":
            return Line(phase(resource), status.get("progressPercent"), _of_batch(resource, status))
        ready = phase(resource) == "Ready" and status.get("url")
        return Line(phase(resource), None, f"{status['url']}/v1" if ready else reason(resource))


def _of_batch(job: Manifest, status: Manifest) -> str:
    if not status.get("requests"):
        return reason(job)
    parts = [f"{status['requests']} requests"]
    if failed := status.get("requestCounts", {}).get("failed"):
        parts.append(f"{failed} failed")
    if phase(job) == "Succeeded":
        return f"{', '.join(parts)} → {status['outputURI']}"
    if has_ended(job):
        return ", ".join((*parts, reason(job)))
    if (status.get("shards") or {}).get("total", 0) > 1:
        parts.append(f"{status['shardsText']} shards")
    rates = (("tokensPerSecond", "{} tok/s"), ("etaText", "ETA {}"))
    return ", ".join((*parts, *(text.format(status[name]) for name, text in rates if status.get(name))))


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
        self._printed: dict[str, tuple[Line, float]] = {}  # and when that was
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
            key, line = label(resource), Line.of(resource, snapshot.loading)
            if key in self._printed and self._printed[key][0] == line:
                self._pending.pop(key, None)
            elif self._due(key, line, now):
                self._pending.pop(key, None)
                self._printed[key] = line, now
                bar = "" if line.percent is None else f"  {_bar(line.percent)} {line.percent:3d}%"
                self.say(f"{key}  {line.phase}{bar}  {line.detail[:LONGEST_LINE]}".rstrip())

    def _due(self, key: str, line: Line, now: float) -> bool:
        """Whether a line that differs from the last one printed is worth printing now."""
        if key not in self._printed or self._printed[key][0].phase != line.phase:
            return True
        old, at = self._printed[key]
        if line.percent is not None and line.percent != old.percent:
            return abs(line.percent - (old.percent or 0)) >= LINE_EVERY_PERCENT or now - at >= LINE_EVERY_S
        if key not in self._pending or self._pending[key][0] != line:
            self._pending[key] = line, now
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
        lines = {label(one): Line.of(one, snapshot.loading) for one in snapshot.resources}
        bars = self._live.console.width >= LEAST_WIDTH and any(line.percent is not None for line in lines.values())
        table = Table.grid("", "", *([""] if bars else []), "", "", padding=(0, 2, 0, 0))
        for column in table.columns[:-1]:  # the detail gives way
            column.no_wrap = True
        for name, line in lines.items():
            cells: list[RenderableType] = [Text(name, style="bold"), Text(line.phase, style=_COLOURS.get(line.phase, BUSY))]
            if bars:  # named colours, because a terminal of 16 shows the default ones as black
                bar = ProgressBar(100, line.percent or 0, BAR_CELLS, style="dim", complete_style=BUSY, finished_style=GOOD)
                cells.append("" if line.percent is None else bar)
            table.add_row(
                *cells, "" if line.percent is None else f"{line.percent:3d}%", Text(line.detail, no_wrap=True, overflow="ellipsis")
            )
        hint = {"running": self._hint, "stopping": "stopping …", "stopped": "stopped"}[snapshot.state]
        return Group(Text(""), table, Text(hint, style="dim"))
