"""Who this process is to other workers of a run, and which of them are known not to run any more."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import Final

_SCHEME: Final = "process:"


def own_name() -> str:
    """A pod's uid, or a name by which another process on this machine can tell whether this one still runs."""
    pod = os.environ.get("BANYAN_POD_UID")
    if pod:
        return f"pod:{pod}"
    started = _started(os.getpid())
    if started is None:
        return f"worker:{secrets.token_hex(8)}"
    return f"{_SCHEME}{socket.gethostname()}/{_boot()}/{os.getpid()}/{started}/{secrets.token_hex(4)}"


def nonce() -> str:
    """What tells one write from all others."""
    return secrets.token_hex(8)


def own_index() -> int | None:
    """The place in an Indexed Job. Of two pods with one index the earlier one has ended."""
    index = os.environ.get("JOB_COMPLETION_INDEX", "")
    return int(index) if index.isdecimal() else None


def is_gone(name: str) -> bool:
    """Whether the process of that name ran on this machine, since its start, and has ended."""
    if not name.startswith(_SCHEME):
        return False
    host, boot, pid, started, *_ = [*name.removeprefix(_SCHEME).split("/"), "", "", ""]
    if host != socket.gethostname() or boot != _boot() or not boot or not pid.isdecimal():
        return False
    return _started(int(pid)) != started


def _boot() -> str:
    """One start of one machine, and one container on it: pids mean nothing elsewhere."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot[:8]}-{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When a process began, in clock ticks since the machine started; None if there is none, or if it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[19] if fields[0] != "Z" else None
