"""Documents in storage: each an object of its own, read and written by name, listed by their sorted ids.

Everything here is awaited; the storage's calls block and run on threads of their own.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from banyan_runtime.batch.host.documents import ID
from banyan_runtime.batch.host.refusals import Unreadable
from banyan_runtime.batch.host.requests import Page
from banyan_runtime.batch.host.reserve import Reserve
from banyan_runtime.storage.store import NotFound, ObjectStore, Precondition

log = logging.getLogger("banyan")

SUFFIX: Final = ".json"
CACHED: Final = 20_000  # documents of a few hundred bytes
THREADS: Final = 8
T = TypeVar("T")
_R = TypeVar("_R")


class Document(Protocol):
    @property
    def id(self) -> str: ...

    def encode(self) -> bytes: ...


D = TypeVar("D", bound=Document)


@dataclass(frozen=True, slots=True)
class Held(Generic[T]):
    """A document as it was read or written last; `tag` is the condition of the next write."""

    document: T
    tag: str


class Storage:
    """The store, from the event loop. `below` is the prefix of everything, "" or ending in '/'."""

    def __init__(self, store: ObjectStore, below: str, reserve: Reserve) -> None:
        self.store = store
        self.below = below
        self.reserve = reserve
        self._threads = ThreadPoolExecutor(THREADS, "storage")

    async def call(self, function: Callable[..., _R], *arguments: Any) -> _R:
        """Run something that blocks. Cancelled, it returns only once the call has ended."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            future.exception()  # nobody waits for it any more
            raise


class Shelf(Generic[D]):
    """All documents of one kind, below one folder."""

    def __init__(self, storage: Storage, folder: str, decode: Callable[[bytes], D]) -> None:
        self._storage = storage
        self._folder = storage.below + folder
        self._decode = decode
        self._cache: dict[str, Held[D]] = {}  # the newest
        self._unreadable: dict[str, str] = {}  # tags of documents that were found to be so

    def key(self, identity: str) -> str:
        return f"{self._folder}{identity}{SUFFIX}"

    async def get(self, identity: str) -> Held[D] | None:
        """None: there is none. Raises Unreadable, and StoreError."""
        if not ID.fullmatch(identity):
            return None
        found = await self._storage.call(self._get, identity)
        if found is None:
            self._forget(identity)
            return None
        data, tag = found
        try:
            document = self._decode(data)
        except msgspec.MsgspecError as error:
            if self._unreadable.get(identity) != tag:
                log.error("%s is left alone, for it cannot be read: %s", self._storage.store.uri(self.key(identity)), error)
            self._unreadable[identity] = tag
            raise Unreadable(identity) from None
        return self._remember(Held(document, tag))

    async def create(self, document: D) -> Held[D]:
        """Raises Precondition where there is one of this id, and StoreError."""
        return self._remember(await self._storage.call(self._put, document, None))

    async def replace(self, held: Held[D], document: D) -> Held[D]:
        """Raises Precondition where it is not as `held` any more, and StoreError."""
        return self._remember(await self._storage.call(self._put, document, held.tag))

    async def remove(self, identity: str) -> None:
        self._forget(identity)
        await self._storage.call(self._storage.store.delete, self.key(identity))

    async def tags(self) -> dict[str, str]:
        """The tag of every document, by id in rising order."""
        tags = await self._storage.call(self._tags)
        for identity in self._cache.keys() - tags.keys():  # removed by another host
            self._forget(identity)
        return tags

    async def known(self, identity: str, tag: str) -> Held[D] | None:
        """The document at a tag that `tags` told: as it is remembered, or else as it is now. None: there is none that can be read."""
        cached = self._cache.get(identity)
        if cached is not None and cached.tag == tag:
            return cached
        if self._unreadable.get(identity) == tag:
            return None
        try:
            return await self.get(identity)
        except Unreadable:
            return None

    async def pages(self, page: Page) -> AsyncIterator[D]:
        """Documents in the order of a list, behind `page.after`."""
        tags = await self.tags()
        ids = list(tags)
        if page.order == "asc":
            wanted = ids if page.after is None else ids[bisect_right(ids, page.after) :]
        else:
            wanted = (ids if page.after is None else ids[: bisect_left(ids, page.after)])[::-1]
        for identity in wanted:
            if (held := await self.known(identity, tags[identity])) is not None:
                yield held.document

    def _get(self, identity: str) -> tuple[bytes, str] | None:
        store, key = self._storage.store, self.key(identity)
        while True:
            try:
                tag = store.head(key).tag
                return store.get(key, if_match=tag), tag
            except NotFound:
                return None
            except Precondition:  # it was replaced in between
                continue

    def _put(self, document: D, tag: str | None) -> Held[D]:
        data = document.encode()
        info = self._storage.reserve.spend(
            lambda: self._storage.store.put(self.key(document.id), data, if_match=tag, if_none_match=tag is None)
        )
        return Held(document, info.tag)

    def _remember(self, held: Held[D]) -> Held[D]:
        identity = held.document.id
        self._unreadable.pop(identity, None)
        self._cache[identity] = held
        if len(self._cache) > CACHED:
            # the oldest: lists begin at the newest, and who reads all from the first on finds the rest still here
            del self._cache[min(self._cache)]
        return held

    def _forget(self, identity: str) -> None:
        self._cache.pop(identity, None)
        self._unreadable.pop(identity, None)

    def _tags(self) -> dict[str, str]:
        found = {}
        for info in self._storage.store.list(self._folder):
            name = info.key.removeprefix(self._folder)
            identity = name.removesuffix(SUFFIX)
            if name != identity and ID.fullmatch(identity):
                found[identity] = info.tag
        return dict(sorted(found.items()))
