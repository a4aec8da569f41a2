"""The engine process as the front sees it: started, watched, ended."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from banyan_runtime.child import Child
from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError
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
    """One engine process."""

    def __init__(self) -> None:
        """Start the process, which waits for `boot` with what takes long at hand. On the main thread. Raises UnavailableError."""
        self._process = Child("banyan_runtime.server.engine_process")
        self.pid = self._process.pid

    def boot(self, config: ServerConfig, model_dir: Path, tokenizer_dir: Path | None, address: str, pulse: Path) -> None:
        """Let it be the engine of `config` on the model in `model_dir`; it connects to `address` and counts in the file `pulse`.
        `tokenizer_dir`: where its tokenizer is, if not with the model. Raises ConfigError for a folder whose name cannot be
        passed on."""
        if not is_text(model_dir):
            raise ConfigError(f"the model's folder {str(model_dir)!a} is not valid UTF-8; rename it")
        boot = Boot(config.engine_json(), str(model_dir), str(tokenizer_dir or model_dir), address, str(pulse), os.getpid())
        self._process.say(msgspec.json.encode(boot))

    async def wait(self) -> int:
        """The exit code; negative: the signal that ended it."""
        return await self._process.wait()

    def show_stacks(self) -> None:
        """Have the engine write what its threads do to the log."""
        self._process.signal(signal.SIGUSR2)

    def kill(self) -> None:
        self._process.kill()

    async def end(self, patience_s: float) -> None:
        """Wait for the engine to go, then make it."""
        try:
            await asyncio.wait_for(self._process.wait(), patience_s)
        except TimeoutError:
            self.kill()
            await self._process.wait()
