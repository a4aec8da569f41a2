"""How a process of ours ends when it cannot go on: one line that starts with FATAL:, the same as JSON {code, field, value, message} where
Kubernetes (or local mode) looks for a termination message, and an exit code that says who has to act."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from banyan_runtime import logs
from banyan_runtime.errors import UserError

EXIT_INTERNAL: Final = 70
MAX_BYTES: Final = 4096  # what the kubelet keeps of a container's termination message
MAX_VALUE: Final = 512  # characters
PATIENCE_S: Final = 3.0  # for a log that nobody reads, or a volume that does not answer


def termination_path() -> Path | None:
    """Where the termination message goes: $BANYAN_TERMINATION_LOG, else the kubelet's file if there is one."""
    path = Path(os.environ.get("BANYAN_TERMINATION_LOG", "/dev/termination-log"))
    return path if os.environ.get("BANYAN_TERMINATION_LOG") or path.exists() else None


def write_termination(message: Mapping[str, Any]) -> None:
    """Leave `message` as one JSON line of at most 4096 bytes; a text that is too long is cut, never the JSON. Waits
    PATIENCE_S at most."""
    path = termination_path()
    if path is None:
        return
    record = dict(message)
    while len(line := _line(record)) > MAX_BYTES and record.get("message"):
        record["message"] = record["message"][: len(record["message"]) * 3 // 4]
    trouble = "it takes too long"

    def write() -> None:
        nonlocal trouble
        try:
            _write(path, line)
            trouble = ""
        except OSError as error:
            trouble = str(error)

    _patiently(write, write)
    if trouble:
        say(f"could not write the termination message to {path}: {trouble}")


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode(errors="replace") + b"\n"  # a file's name may be no text


def _write(path: Path, line: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)  # it may be a pipe without a reader
    try:
        while line:
            line = line[os.write(handle, line) :]
    finally:
        os.close(handle)


def say(text: str) -> None:
    """Write last words to standard error, behind what is logged. Never raises, and waits PATIENCE_S at most: a log that is
    full, or that nobody reads, must not keep a process from its end."""
    if sys.stderr is None:
        return  # given up below
    text = logs.as_line(text, logging.CRITICAL)
    said = False

    def write() -> None:
        nonlocal said
        with contextlib.suppress(OSError, ValueError):
            _flush_log()
            print(text, file=sys.stderr, flush=True)
            said = True

    def write_what_fits() -> None:
        nonlocal said
        with contextlib.suppress(OSError, ValueError):
            _flush_log()
            log = sys.stderr.fileno()
            room = select.poll()
            room.register(log, select.POLLOUT)
            if room.poll(PATIENCE_S * 1000):
                os.write(log, text.encode(errors="backslashreplace")[: select.PIPE_BUF - 1] + b"\n")  # so much never waits then
                said = True

    _patiently(write, write_what_fits)
    if not said:
        sys.stderr = None  # at its end Python would write to it again, and wait or change the exit code


def _flush_log() -> None:
    for handler in logging.getLogger().handlers:
        handler.flush()


def _patiently(work: Callable[[], None], otherwise: Callable[[], None]) -> None:
    """Do `work` on a thread, and wait for it PATIENCE_S at most. Where no thread can be started, do `otherwise`, which does not wait
    long."""
    thread = threading.Thread(target=work, name="last words", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        otherwise()
    else:
        thread.join(PATIENCE_S)


def fatal(error: BaseException) -> int:
    """Leave word why the process ends, where supervisors look for it first; returns the exit code. Waits as those two do."""
    write_termination(words(error))
    say(f"FATAL: {error}" if isinstance(error, UserError) else f"FATAL: {type(error).__name__}: {error}")
    return error.exit_code if isinstance(error, UserError) else EXIT_INTERNAL


def words(error: BaseException) -> dict[str, Any]:
    """The termination message of an error."""
    if not isinstance(error, UserError):
        return {"code": "internal_error", "field": "", "value": "", "message": f"{type(error).__name__}: {error}"}
    return {"code": error.code, "field": error.field, "value": error.value[:MAX_VALUE], "message": error.message}
