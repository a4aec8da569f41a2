"""Responses that were asked to be kept: the ones used last in memory, the youngest in the storage of files and batches, for a while.

They are the least that lies there: where files and batches need the rest of a disk, responses are kept in memory only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import msgspec

from banyan_runtime.batch.host.reserve import Reserve
from banyan_runtime.front.errors import ApiError, unavailable
from banyan_runtime.front.openai.responses.events import EndedLogs
from banyan_runtime.front.openai.responses.quota import Quota, Stored
from banyan_runtime.storage.home import HomeStore, make_home
from banyan_runtime.storage.local import LocalStore
from banyan_runtime.storage.open import Location, open_uri
from banyan_runtime.storage.patience import Patience
from banyan_runtime.storage.store import NotFound, Precondition, StoreError

log = logging.getLogger("banyan")

FOLDER: Final = "responses"
KEPT_S: Final = 7 * 86_400.0
KEPT_BYTES: Final = 64 << 20  # in memory
FOLDER_BYTES: Final = 1 << 30  # in a folder, which may lie on the disk of a whole node; a bucket has no end
LEFT_BYTES: Final = 64 << 20  # of a disk for files and batches: less than that is room for hardly anything else
UNWRITTEN_BYTES: Final = 64 << 20  # that wait for the storage; what comes on top is kept in memory only
STORAGE_LIMIT_S: Final = 10.0  # that a storage may be away
SWEEP_EVERY_S: Final = 3600.0
NO_ROOM_S: Final = 5.0  # after a look that found no room, or none at all: until the next one
THREADS: Final = 6  # that talk to the storage
WRITES: Final = 4  # at once, so that a storage which hangs leaves threads for those who read
REMEMBERED: Final = 65_536  # ids, of a few MB: more than are removed while one read is under way, or run in the background
T = TypeVar("T")
_ID: Final = re.compile(r"resp_([0-9a-f]{8})[0-9a-f]{24}")


class Record(msgspec.Struct, frozen=True):
    """One response. JSON stays as it was written."""

    response: msgspec.Raw  # as it was told last
    items: msgspec.Raw  # input items
    messages: msgspec.Raw  # the conversation up to its end, without instructions
    background: bool
    updated: float  # Unix seconds

    @property
    def size(self) -> int:
        return len(bytes(self.response)) + len(bytes(self.items)) + len(bytes(self.messages))


def new_id(now: float) -> str:
    """An id that tells when the response was made, so that an old one is known by its name."""
    return f"resp_{int(now):08x}{uuid.uuid4().hex[:24]}"


class NoRoom(Exception):
    """Why a response is not written, and what would help."""


class ResponseStore:
    """`where`: a folder or s3://BUCKET/PREFIX; None: nowhere but in memory. `most_bytes`: that may lie there; None: any number. `live`:
    the ids of responses that run here in the background. Calls of the storage are made on threads of its own."""

    def __init__(
        self,
        where: str | None = None,
        kept_s: float = KEPT_S,
        clock: Callable[[], float] = time.time,
        *,
        most_bytes: int | None = None,
        live: Container[str] = frozenset(),
    ) -> None:
        self.logs = EndedLogs()
        self._quota = Quota(most_bytes)
        self._live = live
        self._reserve = Reserve(None)
        self._looking = asyncio.Lock()  # at all that is there, to make room
        self._look_again = 0.0
        self._where = None if where is None else where.rstrip("/") + "/"
        self._kept_s = kept_s
        self._clock = clock
        self._records: OrderedDict[str, Record] = OrderedDict()  # the one used last comes last
        self._bytes = 0
        self._place: Location | None = None
        self._opening = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="responses")
        self._swept = 0.0
        self._away = False  # the last write failed
        self._unwritten: dict[str, Record] = {}  # the newest state of each
        self._unwritten_bytes = 0
        self._writes: dict[str, asyncio.Task[None]] = {}
        self._tags: dict[str, str | None] = {}  # of those in the background, as the storage has them; None: not known
        self._removed: dict[str, None] = {}  # what is read or written of them just now does not come back
        self._removing: dict[str, Record | None] = {}  # that the storage is asked to remove; with the state that came meanwhile
        self._stored: dict[str, None] = {}  # those in memory that the storage has had
        self._turns = asyncio.Semaphore(WRITES)
        if self._where is not None:
            self._threads.submit(self._open)  # now: a folder that is not there later has vanished

    @property
    def keeps(self) -> bool:
        """Whether anything is kept at all."""
        return self._kept_s > 0

    def save(self, response_id: str, record: Record) -> None:
        """Keep a response, unless it was removed. It is found at once; the storage has it a moment later, its states in their order."""
        if not self.keeps or response_id in self._removed:
            return
        if response_id in self._removing:
            self._removing[response_id] = record
            return
        self._remember(response_id, record)
        if self._where is None:
            return
        self._forget_unwritten(response_id)
        if self._unwritten_bytes + record.size > UNWRITTEN_BYTES:
            self._note_away("more waits to be written than is held")
            return
        self._unwritten[response_id] = record
        self._unwritten_bytes += record.size
        if response_id not in self._writes:
            self._writes[response_id] = asyncio.get_running_loop().create_task(self._write(response_id))

    async def settle(self) -> None:
        """Wait until everything is written, or cannot be."""
        while self._writes:
            await asyncio.wait(set(self._writes.values()))

    async def load(self, response_id: str) -> Record | None:
        """None: there is none, or it was kept long enough. Raises ApiError when the storage does not answer."""
        made = _ID.fullmatch(response_id)
        if made is None or self._is_old(made) or self._is_hidden(response_id):
            return None
        record = self._records.get(response_id)
        if record is not None:
            self._records.move_to_end(response_id)
            if response_id in self._stored and not self._away and not await self._is_there(response_id):
                self._note_removed(response_id)
                return None
            return record
        if self._where is None:
            return None
        raw = await self._asked(lambda place: _get(place, response_id))
        if raw is None or self._is_hidden(response_id):
            return None
        try:
            record = msgspec.json.decode(raw, type=Record)
        except msgspec.DecodeError:
            log.warning("the stored response %s cannot be read", response_id)
            return None
        if not record.background:  # one in the background may run on another server, and go on there
            self._remember(response_id, record)
            self._note_stored(response_id)
        return record

    async def _is_there(self, response_id: str) -> bool:
        """Whether another server has not removed it meanwhile, as far as one can tell."""
        try:
            return await self._asked(lambda place: _is_there(place, response_id))
        except ApiError:
            return True

    def _note_stored(self, response_id: str) -> None:
        self._stored[response_id] = None
        _bound(self._stored)

    async def remove(self, response_id: str) -> None:
        """Forget a response. Raises ApiError when the storage does not answer; then it is still there, as if nothing had been asked."""
        self._removing.setdefault(response_id, None)
        try:
            if (write := self._writes.get(response_id)) is not None:
                await asyncio.wait({write})
            if self._where is not None:
                await self._asked(lambda place: place.store.delete(_key(place, response_id)))
            self._note_removed(response_id)
        finally:
            newest = self._removing.pop(response_id, None)
            if newest is not None:
                self.save(response_id, newest)

    def was_removed(self, response_id: str) -> bool:
        """Whether a response was removed here, or elsewhere before it was to be written again."""
        return response_id in self._removed

    def _note_removed(self, response_id: str) -> None:
        self._removed[response_id] = None
        _bound(self._removed)
        self.logs.remove(response_id)
        self._tags.pop(response_id, None)
        self._stored.pop(response_id, None)
        self._forget(response_id)
        self._forget_unwritten(response_id)

    def _is_hidden(self, response_id: str) -> bool:
        return response_id in self._removed or response_id in self._removing

    def _is_old(self, made: re.Match[str]) -> bool:
        return int(made.group(1), 16) + self._kept_s < self._clock()

    # --- the storage ---

    async def _write(self, response_id: str) -> None:
        """Write the newest state of a response, until there is no newer one."""
        async with self._turns:
            try:
                while (record := self._unwritten.get(response_id)) is not None:
                    self._forget_unwritten(response_id)
                    try:
                        await self._put(response_id, record)
                    except ApiError:
                        self._note_away("the storage does not take them")
                    except NoRoom as lack:
                        self._note_away(str(lack))
            finally:
                del self._writes[response_id]  # at once: a state that comes now has a task of its own
            if self._clock() - self._swept > SWEEP_EVERY_S:  # also where there is no room, for it makes some
                with contextlib.suppress(ApiError):  # why is in the log
                    await self._look(0)

    async def _put(self, response_id: str, record: Record) -> None:
        """Write one state. One that runs in the background is written again only if it is still there: who deletes it may have asked
        another server. Raises NoRoom, and ApiError when the storage does not answer."""
        raw = msgspec.json.encode(record)
        await self._make_room(len(raw))
        try:
            await self._put_given(response_id, record, raw)
        finally:
            self._quota.settle(len(raw))

    async def _put_given(self, response_id: str, record: Record, raw: bytes) -> None:
        """Write one state for which there is room."""
        begun, tag = response_id in self._tags, self._tags.get(response_id)
        if begun:
            self._tags[response_id] = None  # until it is known what became of this write
        try:
            tag = await self._asked(lambda place: _put_again(place, response_id, raw, tag) if begun else _put(place, response_id, raw))
        except _Gone:
            self._note_removed(response_id)
            return
        self._away = False
        self._note_stored(response_id)
        if record.background and response_id not in self._removed:
            self._tags[response_id] = tag
            _bound(self._tags)

    def _note_away(self, why: str) -> None:
        if not self._away:
            log.warning("responses are kept in memory only, until further notice: %s", why)
        self._away = True

    async def _make_room(self, size: int) -> None:
        """Raises NoRoom, and ApiError when the storage does not answer."""
        if not self._quota.fits(size):  # no look finds room for it, and nothing is to give way in vain
            raise NoRoom(f"{size} bytes are more than --response-store-bytes={self._quota.most}: set it to more")
        if await self._lacking(size) > 0:
            await self._make_room_on_disk(size)
        if self._quota.take(size):
            return
        async with self._looking:
            if self._quota.take(size):
                return
            if (now := self._clock()) >= self._look_again:
                self._look_again = now + NO_ROOM_S
                await self._look(size)
                if self._quota.take(size):
                    self._look_again = 0.0
                    return
        raise NoRoom(f"{size} bytes more than --response-store-bytes={self._quota.most} are not to be had: set it to more")

    async def _make_room_on_disk(self, size: int) -> None:
        """Raises NoRoom, and ApiError when the storage does not answer."""
        async with self._looking:
            lacking = await self._lacking(size)  # another write may have made room meanwhile
            if lacking > 0 and (now := self._clock()) >= self._look_again:
                self._look_again = now + NO_ROOM_S
                await self._look(size, lacking)
                if (lacking := await self._lacking(size)) <= 0:
                    self._look_again = 0.0
        if lacking > 0:
            raise NoRoom(
                f"on the disk of {self._where} {LEFT_BYTES >> 20} MiB are left to files and batches, and {lacking} bytes are lacking for "
                f"{size} more beside them: make room there, or set --response-store-bytes to less"
            )

    async def _lacking(self, size: int) -> int:
        """Bytes that the disk has too few of for so many more."""
        free = await self._asked(lambda place: self._reserve.free)
        return 0 if free is None else LEFT_BYTES + size - free

    async def _look(self, size: int, lacking: int = 0) -> None:
        """Look at all that is there, and remove what was kept long enough, and the oldest so that `size` bytes more have room, on a disk
        that is `lacking` some. Raises ApiError when the storage does not answer."""
        self._swept = self._clock()
        settled, on_the_way = self._quota.settled, self._quota.on_the_way
        self._quota.looked(await self._asked(lambda place: self._sweep(place, size, on_the_way, lacking)), settled, size)

    def _sweep(self, place: Location, size: int, on_the_way: int, lacking: int) -> int:
        """Returns the bytes of those that stay."""
        prefix = place.child(FOLDER + "/").key
        stored = []
        for info in place.store.list(prefix):
            response_id = info.key.removeprefix(prefix).removesuffix(".json")
            if (made := _ID.fullmatch(response_id)) is not None:
                stored.append(Stored(response_id, info.key, int(made.group(1), 16), info.size))
        leaving = self._quota.leaving(stored, self._clock() - self._kept_s, self._live, size, on_the_way, lacking)
        for one in (*leaving.old, *leaving.pushed):
            place.store.delete(one.key)
        if leaving.pushed:
            why = "the disk has little room" if lacking > 0 else f"--response-store-bytes={self._quota.most}"
            log.info("%d responses gave way to later ones (%s)", len(leaving.pushed), why)
        return leaving.left

    async def _asked(self, call: Callable[[Location], T]) -> T:
        """What the storage says. Raises ApiError when it says nothing; why stays in the log, for it may name folders and buckets."""

        def work() -> T:
            return call(self._place or self._open())

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except (StoreError, OSError) as error:
            if not self._away:
                log.warning("the storage of responses cannot be used: %s", error)
            raise unavailable("The storage of responses does not answer just now.") from error

    def _open(self) -> Location:
        """Raises StoreError, OSError."""
        assert self._where is not None
        with self._opening:
            if self._place is None:
                patience = Patience(STORAGE_LIMIT_S)
                place = open_uri(self._where, patience=patience)
                if isinstance(place.store, LocalStore):
                    make_home(place.store.root)
                    self._reserve = Reserve(place.store.root)
                    place = Location(HomeStore(place.store.root, patience), place.key)
                self._place = place
            return self._place

    # --- memory ---

    def _remember(self, response_id: str, record: Record) -> None:
        self._forget(response_id)
        self._records[response_id] = record
        self._bytes += record.size
        while self._bytes > KEPT_BYTES and len(self._records) > 1:
            _, oldest = self._records.popitem(last=False)
            self._bytes -= oldest.size

    def _forget(self, response_id: str) -> None:
        record = self._records.pop(response_id, None)
        if record is not None:
            self._bytes -= record.size

    def _forget_unwritten(self, response_id: str) -> None:
        record = self._unwritten.pop(response_id, None)
        if record is not None:
            self._unwritten_bytes -= record.size


def most_bytes(asked: int | None, where: str) -> int | None:
    """What --response-store-bytes means for a storage; None: responses may take any number of bytes."""
    return FOLDER_BYTES if asked is None and not where.startswith("s3://") else asked


def _key(place: Location, response_id: str) -> str:
    return place.child(f"{FOLDER}/{response_id}.json").key


def _get(place: Location, response_id: str) -> bytes | None:
    try:
        return place.store.get(_key(place, response_id))
    except NotFound:
        return None


def _is_there(place: Location, response_id: str) -> bool:
    try:
        place.store.head(_key(place, response_id))
    except NotFound:
        return False
    return True


class _Gone(Exception):
    """What was to be written over is not there any more."""


def _put(place: Location, response_id: str, raw: bytes) -> str:
    return place.store.put(_key(place, response_id), raw).tag


def _put_again(place: Location, response_id: str, raw: bytes, tag: str | None) -> str:
    """`tag`: of what is written over; None: it is not known. Raises _Gone."""
    key = _key(place, response_id)
    try:
        if tag is not None:
            with contextlib.suppress(Precondition):  # also where an earlier try of the same write was heard, and its answer was not
                return place.store.put(key, raw, if_match=tag).tag
        return place.store.put(key, raw, if_match=place.store.head(key).tag).tag
    except (NotFound, Precondition) as error:
        raise _Gone from error


def _bound(ids: dict[str, Any]) -> None:
    """Forget the oldest of too many."""
    while len(ids) > REMEMBERED:
        del ids[next(iter(ids))]
