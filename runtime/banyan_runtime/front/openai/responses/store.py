"""The responses that this server keeps: in memory, or in a folder of its own."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from banyan_runtime.errors import ConfigError
from banyan_runtime.front.openai.responses.events import EndedLogs

log = logging.getLogger("banyan")

KEPT_S: Final = 7 * 86_400.0
MEMORY_BYTES: Final = 64 << 20
FOLDER_BYTES: Final = 1 << 30
_ID: Final = re.compile(r"resp_([0-9a-f]{8})([0-9a-f]{8})[0-9a-f]{16}")
_SERVER_ID: Final = re.compile(r"[0-9a-f]{8}")


class Record(msgspec.Struct, frozen=True):
    """One response. JSON stays as it was written."""

    response: msgspec.Raw  # its newest state
    items: msgspec.Raw  # input items
    messages: msgspec.Raw  # the conversation up to its end, without instructions
    background: bool

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(len(memoryview(part)) for part in (self.response, self.items, self.messages))


class ResponseStore:
    """Keeps each response for `kept_s` seconds. When all take more than `max_bytes`, the oldest are removed.

    `folder`: where responses survive a restart of the server; None keeps them in memory. One thread reads and writes the folder, so its
    calls run in their order. Raises ConfigError where the folder cannot be used."""

    def __init__(
        self,
        folder: Path | None = None,
        kept_s: float = KEPT_S,
        max_bytes: int | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.logs = EndedLogs()
        self.server_id = secrets.token_hex(4)
        self._folder = folder
        self._kept_s = kept_s
        self._max_bytes = max_bytes or (MEMORY_BYTES if folder is None else FOLDER_BYTES)
        self._clock = clock
        self._sizes: dict[str, int] = {}  # bytes of each response, the oldest first
        self._bytes = 0  # of all
        self._memory: dict[str, Record] = {}  # those that the folder does not have
        self._lock: int | None = None  # the file that marks the folder as in use
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")
        self._last: Future[Record | None] | None = None  # the newest task of the thread
        if folder is not None:
            try:
                self._open(folder)
            except OSError as error:
                message = f"{error.strerror}; name a folder that can be written"
                raise ConfigError(message, field="--response-store-path", value=folder) from None

    def new_id(self) -> str:
        """The id of a response that this server keeps: it has the time, the server's id, and a random part."""
        return f"resp_{int(self._clock()):08x}{self.server_id}{secrets.token_hex(8)}"

    @property
    def keeps(self) -> bool:
        """Whether the server keeps responses at all."""
        return self._kept_s > 0

    def is_elsewhere(self, response_id: str) -> bool:
        """Whether another server made the response."""
        made = _ID.fullmatch(response_id)
        return self.keeps and made is not None and made.group(2) != self.server_id

    def save(self, response_id: str, record: Record) -> None:
        """Keep the newest state of a response."""
        if not self.keeps:
            return
        size = record.size
        if size > self._max_bytes:
            log.warning("a response has %d bytes, more than --response-store-bytes=%d: it is not kept", size, self._max_bytes)
            self._forget(response_id)
            return
        self._bytes += size - self._sizes.get(response_id, 0)
        self._sizes[response_id] = size
        self._memory[response_id] = record
        self._remove_oldest()
        if self._folder is None:
            return
        while len(self._memory) > 1 and sum(self._sizes[one] for one in self._memory) > MEMORY_BYTES:
            self._forget(next(iter(self._memory)))  # the folder is slow, or takes none

        def written(done: asyncio.Future[Record | None]) -> None:
            if (error := done.exception()) is not None:
                log.warning("--response-store-path does not take a response, which stays in memory: %s", error)
            elif (newest := done.result()) is not None and self._memory.get(response_id) is newest:
                del self._memory[response_id]

        asyncio.wrap_future(self._settle_later(response_id)).add_done_callback(written)

    async def load(self, response_id: str) -> Record | None:
        """None: this server does not have it."""
        self._remove_oldest()
        if response_id not in self._sizes:
            return None
        record = self._memory.get(response_id)
        if record is None:
            try:
                record = await asyncio.get_running_loop().run_in_executor(self._thread, _read, self._path(response_id))
            except (OSError, msgspec.DecodeError) as error:
                log.warning("the response %s cannot be read: %s", response_id, error)
                return None
        return record if response_id in self._sizes else None  # it may have been removed meanwhile

    def remove(self, response_id: str) -> None:
        self.logs.remove(response_id)
        self._forget(response_id)

    async def close(self) -> None:
        """Wait until the folder has what it was given, and free it for another server."""
        if self._last is not None:
            await asyncio.wait([asyncio.wrap_future(self._last)])
        self._thread.shutdown()
        if self._lock is not None:
            os.close(self._lock)

    def _remove_oldest(self) -> None:
        too_old = self._clock() - self._kept_s
        while self._sizes and (self._bytes > self._max_bytes or _made(next(iter(self._sizes))) < too_old):
            self._forget(next(iter(self._sizes)))

    def _forget(self, response_id: str) -> None:
        size = self._sizes.pop(response_id, None)
        if size is None:
            return
        self._bytes -= size
        self._memory.pop(response_id, None)
        if self._folder is not None:
            self._settle_later(response_id)

    def _settle_later(self, response_id: str) -> Future[Record | None]:
        self._last = self._thread.submit(self._settle, response_id)
        return self._last

    def _settle(self, response_id: str) -> Record | None:
        """On the thread: write the newest state of a response, or remove its file. Returns what was written."""
        record, path = self._memory.get(response_id), self._path(response_id)
        if record is not None:
            _write(path, record)
        elif response_id not in self._sizes:
            _unlink(path)
        return record

    def _path(self, response_id: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{response_id}.json"

    def _open(self, folder: Path) -> None:
        """Take the folder for this server, and note what an earlier life of it left there. Raises ConfigError, OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(folder / "server-id", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--response-store-path={folder} is in use by another server. Give each server a folder of its own."
            ) from None
        known = os.read(self._lock, 8).decode(errors="replace")
        if _SERVER_ID.fullmatch(known):
            self.server_id = known
        else:
            os.pwrite(self._lock, self.server_id.encode(), 0)
        for unfinished in folder.glob("resp_*.tmp"):
            unfinished.unlink()
        for path in sorted(folder.glob("resp_*.json")):  # by the time that each name begins with
            if _ID.fullmatch(path.stem):
                self._sizes[path.stem] = path.stat().st_size
        self._bytes = sum(self._sizes.values())


def _made(response_id: str) -> int:
    """When a response was made, in Unix seconds."""
    return int(response_id[5:13], 16)


def _write(path: Path, record: Record) -> None:
    part = path.with_suffix(".tmp")
    try:
        part.touch(mode=0o600)
        part.write_bytes(msgspec.json.encode(record))
        part.replace(path)
    except OSError:
        _unlink(part)
        raise


def _read(path: Path) -> Record:
    return msgspec.json.decode(path.read_bytes(), type=Record)


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("the response %s cannot be removed: %s", path.stem, error)
