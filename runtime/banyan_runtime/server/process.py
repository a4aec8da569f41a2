"""What the operating system knows of this process, and does for it."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Final

PR_SET_PDEATHSIG: Final = 1
PAGE_BYTES: Final = resource.getpagesize()


def resident_bytes() -> int:
    """Memory that is in use now; where there is no /proc, the most that ever was."""
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def die_with_parent(parent: int) -> None:
    """Make sure that this process does not outlive `parent`, which holds the other end of our standard input.

    Two ways, because each has a gap: the kernel's signal exists on Linux alone, the end of the pipe can't be seen by a
    process that is stopped.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the signal was asked for
        os._exit(0)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="parent", daemon=True).start()
