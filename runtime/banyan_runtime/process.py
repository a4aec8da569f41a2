"""What the operating system knows of this process, and does for it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from banyan_runtime.errors import UnavailableError

PR_SET_PDEATHSIG: Final = 1
PAGE_BYTES: Final = resource.getpagesize()
CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")  # a second
YOUNG_OBJECTS: Final = 20_000  # that a collection looks through, in about a millisecond; Python's own number is 700


def resident_bytes() -> int:
    """Memory that is in use now; where there is no /proc, the most that ever was."""
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def cpu_seconds(pid: int) -> float:
    """What a process has computed so far, in user and kernel mode; where there is no /proc, the time that has passed."""
    if sys.platform != "linux":
        return time.monotonic()
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:  # it has ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def open_streams() -> None:
    """Lead the standard streams that whoever started us has closed to nowhere. Else the next file or socket would get such a
    stream's number, and what is printed."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            handle = os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            os.set_inheritable(handle, True)  # as such streams are: ours go to the processes that we start
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Imports, a quarter faster: a large library makes a million objects of which none is garbage, and the collector looks through
    them again and again. It does not look at them afterwards either."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def collect_rarely() -> None:
    """The start is over. What is there stays: looking through it again would hold everything up for a tenth of a second. And what comes
    leaves hardly any garbage that needs looking for, which took an eighth of the front's time at 64 requests at once."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def start_thread(work: Callable[[], object], name: str) -> None:
    """Run `work` on a daemon thread. Raises UnavailableError where the system has no thread for us."""
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError as error:
        raise _no_more("threads", str(error)) from error


def no_process(error: OSError) -> UnavailableError:
    """What it means to the user that a process could not be started."""
    return _no_more("processes", error.strerror or str(error))


def _no_more(what: str, why: str) -> UnavailableError:
    return UnavailableError(
        f"the system starts no more {what} ({why}); raise the limit (the container's pids limit, ulimit -u) or free memory"
    )


def limit_memory(more_bytes: int) -> None:
    """Let this process have so much memory beyond what it has; beyond that, allocations fail. Of all processes here the
    kernel ends this one first when memory runs out."""
    if sys.platform != "linux":
        return
    size = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = size + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def die_with(parent: int) -> None:
    """Have the kernel end this process when `parent`, or its thread that started us, ends. Only Linux does so."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the signal was asked for
        os._exit(0)


def end_with_input(leave: Callable[[], None]) -> None:
    """End this process when its parent, which holds the other end of our standard input, has ended; `leave` is called before.

    `die_with` does the same without a chance to clean up. Each has a gap: the kernel's signal exists on Linux alone, the end
    of the pipe can't be seen by a process that is stopped.
    """

    def watch() -> None:
        while os.read(0, 4096):
            pass
        leave()
        os._exit(0)

    start_thread(watch, "parent")


def leave(code: int) -> int:
    """The exit code; but with threads that still call, for example into a network that does not answer, the process ends here: the
    interpreter would wait for some of them, and take itself down under the others."""
    if threading.active_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
