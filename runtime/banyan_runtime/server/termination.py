"""How a process of ours ends when it cannot go on: one line that starts with FATAL:, the same as JSON where Kubernetes (or
local mode) looks for a termination message, and an exit code that says who has to act."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from banyan_runtime.errors import UserError

EXIT_INTERNAL: Final = 70
MAX_BYTES: Final = 4096  # what the kubelet keeps of a container's termination message
LOG_PATIENCE_S: Final = 3.0  # for a log that nobody reads


def termination_path() -> Path | None:
    """Where the termination message goes: $BANYAN_TERMINATION_LOG, else the kubelet's file if there is one."""
    path = Path(os.environ.get("BANYAN_TERMINATION_LOG", "/dev/termination-log"))
    return path if os.environ.get("BANYAN_TERMINATION_LOG") or path.exists() else None


def write_termination(words: Mapping[str, Any]) -> None:
    """Leave `words` as one JSON line of at most 4096 bytes; a message that is too long is cut, never the JSON."""
    path = termination_path()
    if path is None:
        return
    record = dict(words)
    text = json.dumps(record, ensure_ascii=False)
    while len(text.encode()) > MAX_BYTES and record.get("message"):
        record["message"] = record["message"][: len(record["message"]) * 3 // 4]
        text = json.dumps(record, ensure_ascii=False)
    try:
        path.write_text(text + "\n")
    except OSError as error:
        say(f"could not write the termination message to {path}: {error}")


def say(text: str) -> None:
    """Write last words to standard error, behind what is logged. Never raises, and waits LOG_PATIENCE_S at most: a log that is
    full, or that nobody reads, must not keep a process from its end."""
    written = threading.Event()

    def write() -> None:
        with contextlib.suppress(OSError, ValueError):
            for handler in logging.getLogger().handlers:
                handler.flush()
            print(text, file=sys.stderr, flush=True)
            written.set()

    thread = threading.Thread(target=write, name="last words", daemon=True)
    thread.start()
    thread.join(LOG_PATIENCE_S)
    if not written.is_set():
        sys.stderr = None  # at its end Python would write to it again, and wait or change the exit code


def fatal(error: BaseException) -> int:
    """Leave word why the process ends, where supervisors look for it first; returns the exit code. Waits as `say` does."""
    known = isinstance(error, UserError)
    code = error.exit_code if isinstance(error, UserError) else EXIT_INTERNAL
    message = str(error) if known else f"{type(error).__name__}: {error}"
    write_termination({"code": type(error).__name__, "message": message})
    say(f"FATAL: {message}")
    return code
