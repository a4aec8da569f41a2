"""The server that a batch talks to: waiting until it is ready, or starting one of its own and taking it down again."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final, NoReturn

import aiohttp
import msgspec

from banyan_runtime.batch.client import base_url
from banyan_runtime.batch.display import Display
from banyan_runtime.batch.errors import ServerFailed, ServerNotReady
from banyan_runtime.errors import UserError

POLL_S: Final = 0.3
PROBE_TIMEOUT_S: Final = 5.0
STOP_S: Final = 15.0  # after SIGTERM; the batch has no request open then
LOG_TAIL_LINES: Final = 20
_FOLDER: Final = "banyan-batch-"
_HELD: Final = "held"  # a file in it, locked while the run lives
_LEFT_S: Final = 60.0
_THERE: Final = frozenset({200, 401, 403, 404, 405})
_PR_SET_PDEATHSIG: Final = 1


class _Readiness(msgspec.Struct):
    state: str = "starting"
    percent: int = 0
    detail: str = ""


async def wait_ready(server: str, display: Display, *, patience_s: float, api_key: str | None = None) -> None:
    """Return once GET /readyz says 200, or that there is no such path or that it is not for us: there is a server, and the lines
    will show. Raises ServerNotReady after `patience_s` without any change in what it answers.
    """
    url = base_url(server) + "/readyz"
    seen: _Readiness | None = None
    changed = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        while True:
            readiness, why = _Readiness(detail="no answer yet"), ""
            try:
                async with session.get(url) as response:
                    if response.status in _THERE:
                        return
                    with contextlib.suppress(msgspec.MsgspecError):
                        readiness = msgspec.json.decode(await response.read(), type=_Readiness)
            except TimeoutError:
                why = f" within {PROBE_TIMEOUT_S:g} s"
            except aiohttp.ClientError as error:
                why = f": {error}"
            now = time.monotonic()
            if readiness != seen:
                seen, changed = readiness, now
            elif now - changed > patience_s:
                raise ServerNotReady(
                    f"{base_url(server)} is not ready and has shown no progress for {patience_s:.0f} s "
                    f"(state {readiness.state}, {readiness.percent} %, {readiness.detail}{why})",
                    hint="see --server-timeout",
                )
            display.waiting(readiness.state, readiness.percent, readiness.detail + why)
            await asyncio.sleep(POLL_S)


class OwnServer:
    """`banyan-runtime serve` as a child in a process group of its own, on a free port of the loopback."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, folder: Path) -> None:
        self._process = process
        self._folder = folder
        self.url = url

    async def watch(self) -> NoReturn:
        """Raise ServerFailed when the child ends."""
        raise self._failure(await self._process.wait())

    async def model_name(self) -> str:
        """The name under which the child serves its model."""
        async with aiohttp.ClientSession() as session, session.get(self.url + "/v1/models") as response:
            answer = await response.json()
        return str(answer["data"][0]["id"])

    def _failure(self, status: int) -> ServerFailed:
        try:
            said = json.loads((self._folder / "last-words").read_text())
            message = str(UserError(said["message"], field=said["field"], value=said["value"]))
        except (OSError, ValueError, KeyError):
            tail = (self._folder / "log").read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            message = "\n".join(["its log ends with:", *tail])
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
        return ServerFailed(f"the server {how}: {message}", status)

    async def stop(self) -> None:
        """End the child and everything it started."""
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            self._process.terminate()
            await asyncio.wait_for(self._process.wait(), STOP_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()


@contextlib.asynccontextmanager
async def own_server(model_path: str, arguments: Sequence[str]) -> AsyncIterator[OwnServer]:
    """Start a server for `model_path` with more `arguments`; it is gone when the context ends, however it ends."""
    port = _free_port()
    _sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_FOLDER) as name, (Path(name) / _HELD).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        folder = Path(name)
        command = [sys.executable, "-m", "banyan_runtime", "serve", "--model-path", model_path, *arguments]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        environment = os.environ | {"BANYAN_TERMINATION_LOG": str(folder / "last-words")}
        with (folder / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        server = OwnServer(process, f"http://127.0.0.1:{port}", folder)
        try:
            yield server
        finally:
            await server.stop()


def _sweep(temporary: Path) -> None:
    """Remove the folders of our runs that were killed outright: old, and held by nobody. Anybody may have put anything there."""
    for held in temporary.glob(f"{_FOLDER}*/{_HELD}"):
        with contextlib.suppress(OSError), os.fdopen(os.open(held, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)) as file:
            found = os.fstat(file.fileno())
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and time.time() - found.st_mtime > _LEFT_S:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(held.parent)


_libc = ctypes.CDLL(None)  # loaded before any fork: between fork and exec nothing may take a lock


def _die_with_parent() -> None:
    """If the batch is killed outright, its server gets SIGTERM."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
