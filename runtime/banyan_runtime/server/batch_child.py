"""The batch host as the front sees it: a process that keeps files and batches, started when it is needed, and again when it ends.

It says every two seconds at least that it is there; one that stands still is ended, and replaced as one that died.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from banyan_runtime.batch.host.boot import Boot
from banyan_runtime.batch.host.tally import STATUSES, News
from banyan_runtime.batch.instrumented import DIRECTIONS, OPERATIONS
from banyan_runtime.batch.lines import ENDPOINTS
from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError
from banyan_runtime.exposition import Cell, Page
from banyan_runtime.front.errors import ApiError, unavailable
from banyan_runtime.front.routes import takes_posts
from banyan_runtime.hub.resolve import cache_dir
from banyan_runtime.process import cpu_seconds
from banyan_runtime.server.engine_child import private_folder
from banyan_runtime.server.signs import LOOK_EVERY_S, Signs

log = logging.getLogger("banyan")

SOCKET: Final = "batches"
START_S: Final = 20.0  # for a request that came before the host was up
FIRST_BACKOFF_S: Final = 0.5
LAST_BACKOFF_S: Final = 30.0
STEADY_S: Final = 60.0  # a host that ran for so long begins its back-off anew
END_S: Final = 2.0
_NEVER: Final = (errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS)


class BatchCounts:
    """What the hosts of this server have counted, one after the other, as series of its own metrics."""

    def __init__(self, model_name: str) -> None:
        self.page = page = Page({"model_name": model_name})
        self._lines = page.cells("banyan_batch_lines_total", "counter", "Lines of the server's batches with an outcome.", status=STATUSES)
        self._retries = page.cell("banyan_batch_line_retries_total", "counter", "Tries beyond a line's first.")
        self._errors = page.cells("banyan_batch_s3_errors_total", "counter", "Failed calls of the batches' storage.", operation=OPERATIONS)
        self._bytes = page.cells("banyan_batch_s3_bytes_total", "counter", "Bytes of the batches' storage.", direction=DIRECTIONS)

    def add(self, news: News) -> None:
        self._retries.value += news.retries
        for cells, more in ((self._lines, news.lines), (self._errors, news.storage_errors), (self._bytes, news.storage_bytes)):
            _add(cells, more)


def _add(cells: Mapping[tuple[str, ...], Cell], more: Mapping[str, int]) -> None:
    for label, count in more.items():
        if (cell := cells.get((label,))) is not None:  # labels are those that were declared
            cell.value += count


class BatchChild:
    """Supervises the host: it may die at any moment, and the server stays."""

    def __init__(self, config: ServerConfig, url: str, key: str) -> None:
        self._config = config
        self._url = url
        self._key = key
        self._folder: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._signs: Signs | None = None  # of that process
        self._supervising: asyncio.Task[None] | None = None
        self._up: asyncio.Future[bool] | None = None  # of the last life: whether it listens, once that is known
        self._listened = False  # in any of its lives
        self.counts = BatchCounts(config.names[0])
        self._leaving = False
        self.max_running: Callable[[], int | None] = lambda: None  # requests that the engine computes at once, once that is known

    @property
    def storage(self) -> str:
        """Where files and batches are kept."""
        return self._config.file_storage_path or str(default_storage(self._config))

    def start_if_wanted(self) -> None:
        """Start now where batches may wait to go on: the storage was named, or holds some. Else the first request starts it."""
        if self._config.file_storage_path is not None or any_left(Path(self.storage)):
            self._start()

    async def address(self) -> str:
        """The path of the host's socket, once it listens. Raises ApiError."""
        if self._leaving and self._process is None:
            raise unavailable("The server is shutting down; try another one.")
        self._start()
        if self._signs is not None and self._signs.silent:
            raise _away()
        assert self._up is not None
        try:
            listens = await asyncio.wait_for(asyncio.shield(self._up), START_S)
        except TimeoutError:
            raise _away() from None
        if not listens:
            raise _away()
        return str(self._path)

    def drain(self) -> None:
        """Let the host give back what it works on; it still answers, until `close`."""
        self._leaving = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    async def close(self) -> None:
        """End the host and forget its socket."""
        self._leaving = True
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.wait({self._supervising})
        process = self._process
        if process is not None and process.returncode is None:
            assert process.stdin is not None
            process.stdin.close()  # which it takes for our end
            try:
                await asyncio.wait_for(process.wait(), END_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _path(self) -> Path:
        assert self._folder is not None
        return self._folder / SOCKET

    def _start(self) -> None:
        if self._supervising is None and not self._leaving:
            self._folder = private_folder()
            self._up = asyncio.get_running_loop().create_future()
            self._supervising = asyncio.create_task(self._supervise())

    async def _supervise(self) -> None:
        backoff = FIRST_BACKOFF_S
        while not self._leaving:
            began = time.monotonic()
            try:
                await self._live()
            except OSError as error:
                log.error("the batch host cannot be started: %s", error)
            finally:
                if self._up is None or self._up.done():  # it has listened
                    self._up = asyncio.get_running_loop().create_future()
                self._up.set_result(False)
            if self._leaving:
                return
            if time.monotonic() - began > STEADY_S:
                backoff = FIRST_BACKOFF_S
            await asyncio.sleep(backoff)
            self._up = asyncio.get_running_loop().create_future()
            backoff = min(2 * backoff, LAST_BACKOFF_S)

    async def _live(self) -> None:
        """One life of the host."""
        self._path.unlink(missing_ok=True)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "banyan_runtime.batch.host.process", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(self._boot()) + b"\n")
        with contextlib.suppress(ConnectionError):
            await process.stdin.drain()
        self._signs = signs = Signs(time.monotonic())
        watching = [asyncio.create_task(self._watch(process.stdout, signs)), asyncio.create_task(_mind(process, signs))]
        try:
            code = await process.wait()
        finally:
            for task in watching:
                task.cancel()
            self._signs = None
        if not self._leaving:
            how = ", and goes on where it was" if self._listened else ""
            log.error("the batch host ended with exit code %d; it is started again%s", code, how)

    async def _watch(self, output: asyncio.StreamReader, signs: Signs) -> None:
        """The first line that a host writes to its standard output says that it listens, the others how much more it has counted, be it
        nothing."""
        if await output.readline():
            signs.heard()
            assert self._up is not None
            self._up.set_result(True)
            self._listened = True
        while True:
            try:
                if not (line := await output.readline()):
                    return
                signs.heard()
                self.counts.add(msgspec.json.decode(line, type=News))
            except ValueError as error:  # what goes to standard output by mistake; unread it would fill the pipe
                log.warning("the batch host said what is no count: %s", error)

    def _boot(self) -> Boot:
        config = self._config
        return Boot(
            storage=self.storage,
            socket=str(self._path),
            server=self._url,
            key=self._key,
            models=config.names,
            endpoints=tuple(path for path in ENDPOINTS if takes_posts(path, config)),
            max_running=self.max_running(),
            follows=self._listened,
            log_level=config.log_level,
            log_format=config.log_format,
        )


async def _mind(process: asyncio.subprocess.Process, signs: Signs) -> None:
    """Look now and then whether the host gets on, and end it if not: whoever waits for an answer of it then hears so."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        ends = signs.look(time.monotonic(), cpu_seconds(process.pid))
        with contextlib.suppress(ProcessLookupError):
            if ends:
                log.error("the batch host does not get on and is ended (pid %d)", process.pid)
                process.kill()
                return
            elif signs.newly_silent:
                process.send_signal(signal.SIGUSR2)  # the stacks of its threads


def check_storage(config: ServerConfig) -> None:
    """Raises ConfigError for a folder that was asked for and can never be had. One that is away, such as another machine's, costs files
    and batches alone."""
    asked = config.file_storage_path
    if asked is None or "://" in asked:
        return
    folder = Path(asked).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno not in _NEVER:
            return
        raise ConfigError(f"{error.strerror}; name a folder that can be written to", field="--file-storage-path", value=asked) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError("this user may not write there; name a folder that can be written to", field="--file-storage-path", value=asked)


def default_storage(config: ServerConfig) -> Path:
    """A folder of the model's own, so that a server that is started again finds its batches, and no other model's runs them."""
    path = config.model_path if "://" in config.model_path else str(Path(config.model_path).expanduser().resolve())
    name = path if config.names[0] == config.model_path else config.names[0]
    digest = hashlib.sha256(f"{name}\0{path}".encode()).hexdigest()[:8]
    return cache_dir(config.download_dir) / "storage" / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name).strip('-.')[-64:]}-{digest}"


def any_left(storage: Path) -> bool:
    """Whether a local storage holds batches that have not ended."""
    try:
        return any((storage / "open").iterdir())
    except OSError:
        return False


def _away() -> ApiError:
    return unavailable("Files and batches are not available just now.")
