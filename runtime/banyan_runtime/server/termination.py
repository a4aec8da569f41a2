"""How a process of ours ends when it cannot go on: one line that starts with FATAL:, the same as JSON where Kubernetes (or
local mode) looks for a termination message, and an exit code that says who has to act."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from banyan_runtime.errors import UserError

EXIT_INTERNAL: Final = 70
MAX_BYTES: Final = 4096  # what the kubelet keeps of a container's termination message


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
        print(f"could not write the termination message to {path}: {error}", file=sys.stderr)


def fatal(error: BaseException) -> int:
    """Say why the process ends and return its exit code."""
    known = isinstance(error, UserError)
    code = error.exit_code if isinstance(error, UserError) else EXIT_INTERNAL
    message = str(error) if known else f"{type(error).__name__}: {error}"
    print(f"FATAL: {message}", file=sys.stderr, flush=True)
    write_termination({"code": type(error).__name__, "message": message})
    return code
