"""A process of ours beside this one: started before there is an event loop, and waited for on one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

from banyan_runtime.process import no_process

ASK_S: Final = 0.2  # between two looks at a process whose end nobody tells


class Child:
    """A Python process that runs one module. Start it on the main thread: the kernel's parent-death signal follows the thread."""

    def __init__(self, module: str, *words: str, stdin: int = subprocess.PIPE, environment: Mapping[str, str] | None = None) -> None:
        """Raises UnavailableError where the system starts no more."""
        # A Ctrl-C reaches the whole group, and who starts a process also ends it: this one never hears of it, not while it imports either.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen([sys.executable, "-m", module, *words], stdin=stdin, env=environment)
        except OSError as error:
            raise no_process(error) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pid = self._process.pid

    def say(self, line: bytes) -> None:
        """Write a line to its standard input, which stays open; it may be dead already."""
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    async def wait(self) -> int:
        """The exit code; negative: the signal that ended it."""
        if self._process.poll() is None:
            try:
                handle = os.pidfd_open(self.pid)
            except OSError:  # an old kernel, a sandbox that knows no such thing, or no file descriptor is left
                while self._process.poll() is None:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(ASK_S)
                return self._process.wait()
            loop, ended = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(handle, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(handle)
                os.close(handle)
        return self._process.wait()

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
