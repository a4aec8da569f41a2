"""What a person sees: a bar on a terminal, else a line every ten seconds. Everything goes to stderr."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Final, Never, Protocol

from tqdm import tqdm

from banyan_runtime.batch.progress import Progress

LINE_EVERY_S: Final = 10.0


class Display(Protocol):
    """Called a few times a second; decides itself what to show."""

    refresh_s: float

    def waiting(self, state: str, percent: int, detail: str) -> None:
        """The server is not ready yet; `state` and `percent` are its own words."""

    def working(self, progress: Progress) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


def display() -> Display:
    return Bar() if sys.stderr.isatty() else Lines()


class Bar:
    """One bar for the server's start, then one for the lines."""

    refresh_s = 0.25

    def __init__(self) -> None:
        self._bar: tqdm[Never] | None = None
        self._title = ""

    def waiting(self, state: str, percent: int, detail: str) -> None:
        bar = self._show(f"server: {state}", 100, "{desc} {percentage:3.0f}%|{bar}| {postfix}")
        bar.n = percent
        bar.set_postfix_str(detail, refresh=False)
        bar.refresh()

    def working(self, progress: Progress) -> None:
        if progress.phase == "starting" or progress.total is None:
            self._show("reading the input", None, "{desc} {elapsed}").refresh()
            return
        report = progress.report(time.monotonic())
        bar = self._show("batch", progress.total, "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} lines {postfix}")
        bar.n = report.completed + report.failed
        eta = "-" if report.eta_seconds is None else duration(report.eta_seconds)
        phase = "" if report.phase == "running" else f", {report.phase}"
        state = f", waiting for {report.waiting_for}" if report.waiting_for else phase
        bar.set_postfix_str(f"{report.failed} failed, {report.tokens_per_second:.0f} tok/s, ETA {eta}{state}", refresh=False)
        bar.refresh()

    def say(self, text: str) -> None:
        with _audience():
            tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _show(self, title: str, total: int | None, form: str) -> tqdm[Never]:
        if self._bar is None or self._title != title:
            self.close()
            self._title = title
            # a terminal may say that it is 0 columns wide (docker run -t); tqdm would then show nothing
            sized = os.get_terminal_size(sys.stderr.fileno()).columns > 0
            ncols, nrows = (None, None) if sized else (100, 20)
            self._bar = tqdm(total=total, desc=title, bar_format=form, file=sys.stderr, dynamic_ncols=sized, ncols=ncols, nrows=nrows)
        assert self._bar is not None
        return self._bar


class Lines:
    """Log lines."""

    refresh_s = 0.5

    def __init__(self) -> None:
        self._last = -LINE_EVERY_S
        self._state = ""

    def waiting(self, state: str, percent: int, detail: str) -> None:
        if self._due(state):
            self.say(f"server state={state} percent={percent} {detail}".rstrip())

    def working(self, progress: Progress) -> None:
        if self._due(progress.phase):
            self.say(summary(progress))

    def say(self, text: str) -> None:
        with _audience():
            print(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        pass

    def _due(self, state: str) -> bool:
        now = time.monotonic()
        if state == self._state and now - self._last < LINE_EVERY_S:
            return False
        self._state, self._last = state, now
        return True


@contextlib.contextmanager
def _audience() -> Iterator[None]:
    """A closed pipe or a full log disk must not end a run: nobody hears it any more, that is all."""
    try:
        yield
    except (OSError, ValueError):
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def summary(progress: Progress) -> str:
    """One line that says where a run is."""
    report = progress.report(time.monotonic())
    eta = "-" if report.eta_seconds is None else f"{report.eta_seconds}s"
    return (
        f"batch phase={report.phase} done={report.completed + report.failed}/{'?' if report.total is None else report.total} "
        f"ok={report.completed} err={report.failed} inflight={progress.in_flight} limit={progress.limit} "
        f"tok/s={report.tokens_per_second:.0f} eta={eta}{f' waiting for {report.waiting_for}' if report.waiting_for else ''}"
    )


def duration(seconds: int) -> str:
    """'42s', '3m12s', '5h07m'."""
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
