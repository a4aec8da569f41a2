"""Runs the command in a process of its own that dies at one of its writes.

The product knows nothing of this: the stores' methods are wrapped. Processes are forked from one that has imported everything, so
that each costs little.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from banyan_runtime.batch import recorder
from banyan_runtime.batch.cli import main
from banyan_runtime.process import leave
from banyan_runtime.storage.local import LocalStore, LocalUpload
from banyan_runtime.storage.s3 import S3Store, S3Upload

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])


@dataclass(frozen=True)
class Fault:
    """Die at the `nth` write (1-based) that `label` names, `before` or `after` it, or when `half` of a journal's records are written."""

    label: str = ""
    nth: int = 1
    when: str = "before"


@dataclass(frozen=True)
class Child:
    """A running command."""

    process: ForkServerProcess
    folder: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = 60.0) -> int:
        """The exit code; minus the number of the signal that ended it."""
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            self.process.kill()
            raise TimeoutError(f"it still runs after {timeout_s:.0f} s:\n{self.said}")
        return self.process.exitcode

    @property
    def running(self) -> bool:
        return self.process.is_alive()

    @property
    def said(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / "stderr").read_text()
        return ""

    @property
    def words(self) -> dict[str, Any]:
        """The termination message."""
        return dict(json.loads((self.folder / "words").read_text()))

    @property
    def writes(self) -> list[str]:
        """What was written so far, in words."""
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / "writes").read_text().splitlines()
        return []


def start(arguments: Sequence[str], folder: Path, environment: dict[str, str], fault: Fault | None = None) -> Child:
    """Begin `banyan-runtime batch ARGUMENTS`; what it says and writes is noted in `folder`."""
    folder.mkdir(parents=True)
    process = _context.Process(target=_run, args=(list(arguments), os.fspath(folder), environment, fault))
    process.start()
    return Child(process, folder)


def _run(arguments: list[str], folder: str, environment: dict[str, str], fault: Fault | None) -> None:
    os.environ.update(environment | {"BANYAN_TERMINATION_LOG": f"{folder}/words"})
    said = os.open(f"{folder}/stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    _Killer(fault or Fault(), Path(folder) / "writes").install()
    sys.exit(leave(main(arguments)))


class _Killer:
    def __init__(self, fault: Fault, log: Path) -> None:
        self._fault = fault
        self._log = log
        self._count = 0  # writes of the label
        self._lock = threading.Lock()

    def install(self) -> None:
        for store in (LocalStore, S3Store):
            self._wrap(store, "delete", lambda self, key, **_: f"remove {_place(key)}")
        self._wrap(S3Store, "put", lambda self, key, data, **_: _object(key, data))
        for upload in (LocalUpload, S3Upload):
            self._wrap(upload, "complete", lambda self, **_: _object(self._key, _data(self)))
        self._wrap(recorder.Journal, "_append", lambda self, data: "journal")
        whole = recorder._write_all

        def write_all(file: int, data: bytes, at: int) -> None:
            if self._fault.when == "half" and self._count == self._fault.nth:
                os.pwrite(file, data[: len(data) // 2], at)
                _die()
            whole(file, data, at)

        recorder._write_all = write_all

    def _wrap(self, kind: type, name: str, label: Callable[..., str]) -> None:
        inner = getattr(kind, name)

        @functools.wraps(inner)
        def wrapped(*args: Any, **more: Any) -> Any:
            with self._around(label(*args, **more)):
                return inner(*args, **more)

        setattr(kind, name, wrapped)

    @contextlib.contextmanager
    def _around(self, label: str) -> Iterator[None]:
        with self._lock:
            here = label == self._fault.label
            self._count += here
            here = here and self._count == self._fault.nth
            with self._log.open("a") as log:
                log.write(label + "\n")
        if here and self._fault.when == "before":
            _die()
        try:
            yield
        finally:
            if here and self._fault.when == "after":
                _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _data(upload: Any) -> bytes:
    return bytes(upload._buffer) if isinstance(upload, S3Upload) else upload._temporary.read_bytes()


def _object(key: str, data: bytes) -> str:
    place = _place(key)
    if place == "shard":
        state = json.loads(data)
        if state.get("term"):
            return f"shard: {state['term']}"
        if state.get("owner") is None:
            return "shard: given back"
        return "shard: claim" if state["seq"] == 1 else "shard: checkpoint"
    if place == "manifest.json" and json.loads(data)["state"] == "publishing":
        return "placeholder of the manifest"
    return place


def _place(key: str) -> str:
    name = key.rpartition("/")[2]
    if "probe" in name:
        return "probe"
    if "/shards/" in key:
        return "shard"
    return "part" if "/parts/" in key else name
