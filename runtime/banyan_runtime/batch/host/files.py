"""The files of the API in storage: bytes first, then the document that makes them a file; deleted the other way round.

A file's bytes stay while a batch that has not ended reads them, whoever deletes the file. Bytes without a document, which a process
that was killed leaves behind, are swept.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from banyan_runtime.batch.host.content import Reader, open_content
from banyan_runtime.batch.host.documents import FileDocument, new_id
from banyan_runtime.batch.host.refusals import no_such_file, storage_full, too_large
from banyan_runtime.batch.host.requests import Page
from banyan_runtime.batch.host.shelf import SUFFIX, Shelf, Storage
from banyan_runtime.storage.store import NotFound, Precondition, StoreError

log = logging.getLogger("banyan")

FOLDER: Final = "files/"
BLOCK_BYTES: Final = 1 << 20
ORPHAN_S: Final = 3600.0  # an upload whose document is still to come looks the same
InUse = Callable[[], Awaitable[frozenset[str] | None]]
"""The keys of all bytes that batches still read; None: nobody knows."""


class Incoming:
    """Bytes on their way into storage. `finish` or `abort` it."""

    def __init__(self, storage: Storage, identity: str) -> None:
        self.id = identity
        self.key = f"{storage.below}{FOLDER}{identity}"
        self.size = 0
        self._storage = storage
        self._upload = storage.store.upload(self.key)
        self._held = bytearray()

    async def write(self, data: bytes, limit: int) -> None:
        """Raises Refusal beyond `limit` bytes or where there is no room, and StoreError."""
        self.size += len(data)
        if self.size > limit:
            raise too_large(limit)
        self._held += data
        if len(self._held) >= BLOCK_BYTES:
            await self._flush()

    async def finish(self) -> None:
        await self._flush()
        await self._storage.call(lambda: self._upload.complete(if_none_match=True))

    async def abort(self) -> None:
        with contextlib.suppress(StoreError):
            await self._storage.call(self._upload.abort)

    async def _flush(self) -> None:
        free = self._storage.reserve.free
        if free is not None and free < len(self._held):
            raise storage_full()
        data, self._held = bytes(self._held), bytearray()
        if data:
            await self._storage.call(self._upload.write, data)


class Files:
    """All files. Raises StoreError throughout."""

    def __init__(self, storage: Storage, in_use: InUse) -> None:
        self._storage = storage
        self._shelf = Shelf(storage, FOLDER, FileDocument.decode)
        self._in_use = in_use
        self._orphans: dict[str, float] = {}  # bytes without a document, and since when (monotonic seconds)

    async def receive(self) -> Incoming:
        """Begin to take in a file."""
        return await self._storage.call(Incoming, self._storage, new_id("file-"))

    async def keep(self, incoming: Incoming, filename: str, purpose: str, expires_after: int | None) -> FileDocument:
        """Make a file of what was taken in. `expires_after`: seconds; None: never."""
        now = int(time.time())
        document = FileDocument(
            id=incoming.id,
            size=incoming.size,
            created_at=now,
            filename=filename,
            purpose=purpose,
            content=incoming.key,
            expires_at=None if expires_after is None else now + expires_after,
        )
        await incoming.finish()
        await self._shelf.create(document)
        return document

    async def add(self, document: FileDocument) -> None:
        """Make a file of bytes that lie in storage already; one that was made before stays."""
        with contextlib.suppress(Precondition):
            await self._shelf.create(document)

    async def get(self, identity: str) -> FileDocument:
        """Raises Refusal where there is none."""
        held = await self._shelf.get(identity)
        if held is None or _expired(held.document):
            raise no_such_file(identity)
        return held.document

    async def open(self, identity: str) -> tuple[FileDocument, Reader]:
        """The bytes of a file, for reading. Raises Refusal where there is none."""
        document = await self.get(identity)
        try:
            return document, await self._storage.call(open_content, self._storage.store, document.content)
        except NotFound:
            raise no_such_file(identity) from None

    async def delete(self, identity: str) -> None:
        """Raises Refusal where there is none."""
        await self._remove(await self.get(identity))

    async def listed(self, page: Page, purpose: str | None) -> tuple[list[FileDocument], bool]:
        """One page, and whether there are more."""
        found: list[FileDocument] = []
        documents: AsyncIterator[FileDocument] = self._shelf.pages(page)
        async for document in documents:
            if _expired(document) or (purpose is not None and document.purpose != purpose):
                continue
            if len(found) == page.limit:
                return found, True
            found.append(document)
        return found, False

    async def sweep(self) -> None:
        """Remove what has expired, and bytes that belong to nothing any more."""
        tags = await self._shelf.tags()
        for identity, tag in tags.items():
            held = await self._shelf.known(identity, tag)
            if held is not None and _expired(held.document):
                log.info("file %s has expired", identity)
                await self._remove(held.document)
        in_use = await self._in_use()
        if in_use is None:
            return
        folder = self._storage.below + FOLDER
        keys = await self._storage.call(lambda: [info.key for info in self._storage.store.list(folder)])
        now = time.monotonic()
        orphans = [key for key in keys if not key.endswith(SUFFIX) and key not in in_use and key.removeprefix(folder) not in tags]
        self._orphans = {key: self._orphans.get(key, now) for key in orphans}
        for key, since in self._orphans.items():
            if now - since > ORPHAN_S:
                await self._storage.call(self._storage.store.delete, key)

    async def _remove(self, document: FileDocument) -> None:
        await self._shelf.remove(document.id)
        in_use = await self._in_use()
        if in_use is not None and document.content not in in_use:  # else it is swept when the batch has ended
            await self._storage.call(self._storage.store.delete, document.content)


def _expired(document: FileDocument) -> bool:
    return document.expires_at is not None and document.expires_at <= time.time()
