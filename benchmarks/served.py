"""A server for a benchmark to measure from outside: `with served(model, *flags) as (process, url)`."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

READY_WITHIN_S: Final = 180
ENDED_WITHIN_S: Final = 30
POLL_S: Final = 0.02
READY: Final = "fired up and ready to roll"  # what the log says when requests can come


def command(model: Path, *flags: str) -> list[str]:
    """Serve the folder `model` as "m" on a free port."""
    start = [sys.executable, "-m", "banyan_runtime", "serve", "--model-path", str(model), "--served-model-name", "m", "--port", "0"]
    return [*start, *flags]


def url_in(log: str) -> str | None:
    found = re.search(r"Uvicorn running on (http://\S+)", log)
    return found[1] if found else None


@contextlib.contextmanager
def served(model: Path, *flags: str, cpus: str = "", kept: Path | None = None) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Serve the folder `model` as "m" on a free port while the context lasts, on `cpus` ("0,1") if named; its log goes to `kept` if named.
    Raises SystemExit with the log's end if it cannot."""
    pinned = ["taskset", "-c", cpus] if cpus else []
    with kept.open("wb") if kept else tempfile.NamedTemporaryFile() as log:
        # In a group of its own, so that Ctrl-C reaches the benchmark alone, which ends the server.
        process = subprocess.Popen([*pinned, *command(model, *flags)], stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            yield process, _url(process, Path(log.name))
        finally:
            process.terminate()
            try:
                process.wait(ENDED_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    until = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < until and process.poll() is None:
        text = log.read_text()
        if READY in text and (url := url_in(text)):
            return url
        time.sleep(POLL_S)
    raise SystemExit(f"the server did not become ready:\n{log.read_text()[-3000:]}")
