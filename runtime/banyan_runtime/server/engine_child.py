"""The engine process as the front sees it: started, watched, ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError
from banyan_runtime.process import no_process
from banyan_runtime.server.engine_process import Boot

log = logging.getLogger("banyan")

SOCKET_PATH_BYTES: Final = 107  # what a Unix socket's address can hold


def private_folder() -> Path:
    """A folder that only this user can enter, with a name that a socket's address can hold. Raises ConfigError."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="banyan-"))
        if len(os.fsencode(folder / "engine")) > SOCKET_PATH_BYTES or not is_text(folder):
            folder.rmdir()
            folder = Path(tempfile.mkdtemp(prefix="banyan-", dir="/tmp"))
    except OSError as error:
        raise ConfigError(f"no temporary folder can be made ({error}); set TMPDIR to a folder that can be written") from error
    return folder


def is_text(path: Path) -> bool:
    """Whether a path is valid UTF-8, as what is written into JSON must be."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


class EngineChild:
    """One engine process. Create it with `start`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    @staticmethod
    async def start(config: ServerConfig, model_dir: Path, address: str, pulse: Path) -> EngineChild:
        """Start the engine of `config` on the model in `model_dir`; it connects to `address` and counts in the file `pulse`.

        Must run on the main thread: the kernel's parent-death signal follows the thread that starts the process. Raises
        UnavailableError, and ConfigError for a folder whose name cannot be passed on.
        """
        if not is_text(model_dir):
            raise ConfigError(f"the model's folder {str(model_dir)!a} is not valid UTF-8; rename it")
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "banyan_runtime.server.engine_process", stdin=asyncio.subprocess.PIPE
            )
        except OSError as error:
            raise no_process(error) from error
        assert process.stdin is not None
        boot = Boot(config.engine_json(), str(model_dir), address, str(pulse), os.getpid())
        process.stdin.write(msgspec.json.encode(boot) + b"\n")
        with contextlib.suppress(ConnectionError):  # it may be dead already; `wait` tells
            await process.stdin.drain()
        return EngineChild(process)

    async def wait(self) -> int:
        """The exit code; negative: the signal that ended it."""
        return await self._process.wait()

    def show_stacks(self) -> None:
        """Have the engine write what its threads do to the log."""
        self._signal(signal.SIGUSR2)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    async def end(self, patience_s: float) -> None:
        """Wait for the engine to go, then make it."""
        try:
            await asyncio.wait_for(self._process.wait(), patience_s)
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
