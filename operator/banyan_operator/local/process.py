"""One container as a process: the launcher around it, its log file, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from banyan_operator.local import launcher

LOG_KEPT: Final = ".previous"


class Process:
    """A running container. Everything it starts ends with it, and with this process, however that ends."""

    def __init__(self, process: asyncio.subprocess.Process, lifeline: int) -> None:
        self._process = process
        self._lifeline: int | None = lifeline

    @property
    def pid(self) -> int:
        """Of the launcher; the container's own process is its only child."""
        return self._process.pid

    @staticmethod
    async def start(argv: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path) -> Process:
        """Start `argv` with exactly the environment `env`; stdout and stderr go to `log`, an older log is kept beside it.

        Raises OSError when the log or the folder cannot be used. A command that cannot be run ends with code 127.
        """
        _keep_older(log)
        theirs, ours = os.pipe()
        try:
            with log.open("wb") as output:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", launcher.__file__, str(theirs), *argv),
                    env=dict(env),
                    cwd=cwd,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(theirs,),
                    start_new_session=True,
                )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return Process(process, ours)

    async def wait(self) -> int:
        """The exit code: the process's own, or 128 plus the signal that ended it."""
        code = await self._process.wait()
        self.kill()
        # the launcher itself may have been killed from outside; what it leaves is in its process group
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        return code if code >= 0 else 128 - code

    def terminate(self) -> None:
        """SIGTERM to the container's process (not to its children: how to stop them is its business)."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """SIGKILL to the container's process and everything below it: the launcher sees that the lifeline is closed."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None


def _keep_older(log: Path) -> None:
    """Make room for a new log file, as `kubectl logs --previous` knows it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists():
        log.replace(log.with_name(log.name + LOG_KEPT))
