"""What every thread of this process does, written to standard error at a signal: SIGUSR2 (`kill -USR2`), or the watchdog's."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import stat
import sys
from typing import Final

from banyan_runtime.process import start_thread

PIECE_BYTES: Final = 65_536


def show_on_signal(number: signal.Signals = signal.SIGUSR2, *, chain: bool = False) -> None:
    """From now on; `chain`: what the signal did before, it then does too. A log that nobody reads holds nothing up; what does not
    fit into it is lost."""
    faulthandler.register(number, file=_impatient(sys.stderr.fileno()), all_threads=True, chain=chain)


def _impatient(log: int) -> int:
    """A descriptor for what `log` goes to, on which no write waits. `log` itself goes on to wait: other processes share it.

    faulthandler writes from the signal handler, on whatever the main thread is doing, so that it also shows a thread that never
    gives up Python's lock.
    """
    if stat.S_ISREG(os.fstat(log).st_mode):
        return log  # a file makes nobody wait, and opened anew it would have a position of its own
    with contextlib.suppress(OSError):  # a socket cannot be opened, nor a pipe that belongs to another user
        return os.open(f"/proc/self/fd/{log}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    start_thread(lambda: _copy(ours, log), "stacks")
    return theirs


def _copy(source: int, log: int) -> None:
    while piece := os.read(source, PIECE_BYTES):
        with contextlib.suppress(OSError):
            os.write(log, piece)
