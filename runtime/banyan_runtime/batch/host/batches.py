"""The batches of the API in storage. A batch that has not ended is also listed by name below `open/`, so that whoever looks for work,
or for who reads a file, need not look through all that ever ran.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable
from typing import Final

from banyan_runtime.batch.host import lifecycle
from banyan_runtime.batch.host.documents import ID, BatchDocument, made_at, new_id
from banyan_runtime.batch.host.files import FOLDER as FILES
from banyan_runtime.batch.host.lifecycle import Step
from banyan_runtime.batch.host.refusals import Unreadable, invalid, no_such_batch
from banyan_runtime.batch.host.requests import NewBatch, Page
from banyan_runtime.batch.host.shelf import SUFFIX, Held, Shelf, Storage
from banyan_runtime.batch.records import ERRORS, OUTPUT
from banyan_runtime.storage.store import NotFound, Precondition

DOCUMENTS: Final = "documents/"
OPEN: Final = "open/"
KEYS: Final = "idempotency/"
IDEMPOTENCY_KEY: Final = "Idempotency-Key"
RESULTS: Final = "batches/"
TWIN_S: Final = 60.0  # a request that a client sends again comes within this time
UNBORN_S: Final = 3600.0  # then a name below open/ without a batch is given up
KEY_S: Final = 86_400.0  # for which an Idempotency-Key stands for its batch
SETTLED_S: Final = 3600.0  # after its end nobody works on a batch any more, however long a process was stopped


class Batches:
    """All batches. Raises StoreError throughout. `clock`: Unix seconds."""

    def __init__(self, storage: Storage, clock: Callable[[], float] = time.time) -> None:
        self._storage = storage
        self._shelf = Shelf(storage, DOCUMENTS, BatchDocument.decode)
        self._clock = clock
        self._keys: dict[str, tuple[str, float]] = {}  # of each Idempotency-Key, by name: its tag, and when its batch was made

    async def repeated(self, new: NewBatch, *, key: str | None, again: bool) -> BatchDocument | None:
        """The batch that the same request made when it was sent before: told by an Idempotency-Key (`key`), or by `again`, a retry
        of a client that sends none. Raises Refusal where the key belongs to another request.
        """
        if key is None:
            return await self._twin(new) if again else None
        identity = await self._storage.call(self._settled, key)
        held = await self._shelf.get(identity) if identity is not None else None
        return _the_same(held.document, new) if held is not None else None

    async def create(self, new: NewBatch, source: str, *, key: str | None) -> BatchDocument:
        """A new batch over the bytes at `source`, or the one that `key` has made in the meantime. Raises Refusal where it belongs to
        another request.
        """
        identity = new_id("batch_")
        if key is not None:
            identity = await self._storage.call(self._settle, key, identity)
            if (before := await self._shelf.get(identity)) is not None:
                return _the_same(before.document, new)
        now = int(self._clock())
        batch = BatchDocument(
            id=identity,
            endpoint=new.endpoint,
            input_file_id=new.input_file_id,
            completion_window=new.completion_window,
            created_at=now,
            expires_at=now + new.window_s,
            input=source,
            metadata=new.metadata,
            output_expires_after=new.output_expires_after,
        )
        await self._list(identity)
        try:
            made = (await self._shelf.create(batch)).document
        except Precondition:
            return _the_same((await self.get(identity)).document, new)
        if self._clock() - made_at(identity) > UNBORN_S / 2:  # somebody may have given the name up in between
            await self._list(identity)
        return made

    async def get(self, identity: str) -> Held[BatchDocument]:
        """Raises Refusal where there is none."""
        held = await self._shelf.get(identity)
        if held is None:
            raise no_such_batch(identity)
        return held

    async def listed(self, page: Page) -> tuple[list[BatchDocument], bool]:
        """One page, and whether there are more."""
        found: list[BatchDocument] = []
        async for batch in self._shelf.pages(page):
            if len(found) == page.limit:
                return found, True
            found.append(batch)
        return found, False

    async def cancel(self, identity: str) -> BatchDocument:
        """Raises Refusal where there is none, or where it is too late."""
        return (await self.advance(await self.get(identity), lifecycle.cancelled(int(self._clock())))).document

    async def advance(self, held: Held[BatchDocument], step: Step) -> Held[BatchDocument]:
        """Take a step from the batch as it is, which may differ from `held`. Returns it as it is then, also where no step was left
        to take. Raises Refusal where there is no such batch."""
        while True:
            changed = step(held.document)
            if changed is None:
                return held
            try:
                held = await self._shelf.replace(held, changed)
            except Precondition:
                held = await self.get(held.document.id)
                continue
            if changed.ended:
                await self._close(changed.id)
            return held

    async def open(self) -> list[Held[BatchDocument]]:
        """The batches that have not ended and can be read, the oldest first."""
        return (await self._look())[0]

    async def inputs(self) -> frozenset[str] | None:
        """The keys of all bytes that batches still read. None: nobody knows, for there is a batch that cannot be read."""
        found, all_read = await self._look()
        return frozenset(held.document.input for held in found) if all_read else None

    async def sweep(self) -> None:
        """Remove what batches that have ended left beside their results, and Idempotency-Keys that are old."""
        now = self._clock()
        tags = await self._shelf.tags()
        for identity, keys in (await self._storage.call(self._leftovers)).items():
            held = await self._shelf.known(identity, tags[identity]) if identity in tags else None
            ended_at = held.document.ended_at if held is not None else None
            if held is not None and ended_at is not None and now - ended_at > SETTLED_S:
                for key in keys:
                    if not await self._storage.call(self._is_file, held.document, key.removeprefix(self.results(identity))):
                        await self._storage.call(self._storage.store.delete, key)
        for key in await self._storage.call(self._old_keys, now - KEY_S):
            await self._storage.call(self._storage.store.delete, key)

    def results(self, identity: str) -> str:
        """Prefix of what a batch's run keeps and writes."""
        return f"{self._storage.below}{RESULTS}{identity}/"

    async def _twin(self, new: NewBatch) -> BatchDocument | None:
        async for batch in self._shelf.pages(Page(limit=0, after=None)):
            if self._clock() - batch.created_at > TWIN_S:
                return None
            same = (batch.input_file_id, batch.endpoint, batch.metadata) == (new.input_file_id, new.endpoint, new.metadata)
            if same and batch.cancelling_at is None:  # who cancelled it knew of it
                return batch
        return None

    async def _look(self) -> tuple[list[Held[BatchDocument]], bool]:
        """The batches that have not ended, and whether all could be read."""
        found, all_read = [], True
        for identity in await self._storage.call(self._names):
            try:
                held = await self._shelf.get(identity)
            except Unreadable:
                all_read = False
                continue
            if held is None:
                if self._clock() - made_at(identity) > UNBORN_S:
                    await self._give_up(identity)
            elif held.document.ended:
                await self._close(identity)
            else:
                found.append(held)
        return found, all_read

    def _leftovers(self) -> dict[str, list[str]]:
        """The keys below each batch's results, of batches that have left more there than results; these come first."""
        folder = self._storage.below + RESULTS
        results: dict[str, list[str]] = {}
        others: dict[str, list[str]] = {}
        for info in self._storage.store.list(folder):
            identity, _, name = info.key.removeprefix(folder).partition("/")
            kind = results if name in (OUTPUT, ERRORS) and info.size else others
            kind.setdefault(identity, []).append(info.key)
        return {identity: [*results.get(identity, ()), *keys] for identity, keys in others.items()}

    def _is_file(self, batch: BatchDocument, name: str) -> bool:
        """Whether there is a file of that part of the results."""
        output, errors = batch.reserved or (None, None)
        chosen = {OUTPUT: batch.output_file_id or output, ERRORS: batch.error_file_id or errors}.get(name)
        if chosen is None:
            return False
        with contextlib.suppress(NotFound):
            self._storage.store.head(f"{self._storage.below}{FILES}{chosen}{SUFFIX}")
            return True
        return False

    def _old_keys(self, before: float) -> list[str]:
        store, seen = self._storage.store, self._keys
        self._keys = {}
        for info in store.list(self._storage.below + KEYS):
            known = seen.get(info.key)
            if known is None or known[0] != info.tag:
                with contextlib.suppress(NotFound):
                    known = info.tag, made_at(store.get(info.key).decode(errors="replace"))
            if known is not None:
                self._keys[info.key] = known
        return [key for key, (_, made) in self._keys.items() if made < before]

    def _settle(self, key: str, identity: str) -> str:
        """The id of the batch that `key` makes, from the first time it was seen."""
        while True:
            try:
                self._storage.store.put(self._key(key), identity.encode(), if_none_match=True)
                return identity
            except Precondition:
                if (before := self._settled(key)) is not None:
                    return before

    def _settled(self, key: str) -> str | None:
        with contextlib.suppress(NotFound):
            return self._storage.store.get(self._key(key)).decode()
        return None

    def _key(self, key: str) -> str:
        return f"{self._storage.below}{KEYS}{hashlib.sha256(key.encode(errors='surrogatepass')).hexdigest()}"

    async def _list(self, identity: str) -> None:
        await self._storage.call(self._storage.store.put, self._open(identity), b"")

    async def _give_up(self, identity: str) -> None:
        """Close a name that is of no batch, unless one is made under it at this moment: whoever makes it looks, too."""
        await self._close(identity)
        with contextlib.suppress(NotFound):
            await self._storage.call(self._storage.store.head, self._shelf.key(identity))
            await self._list(identity)

    async def _close(self, identity: str) -> None:
        await self._storage.call(self._storage.store.delete, self._open(identity))

    def _open(self, identity: str) -> str:
        return f"{self._storage.below}{OPEN}{identity}"

    def _names(self) -> list[str]:
        folder = self._storage.below + OPEN
        names = (info.key.removeprefix(folder) for info in self._storage.store.list(folder))
        return sorted(name for name in names if ID.fullmatch(name))


def _the_same(batch: BatchDocument, new: NewBatch) -> BatchDocument:
    """The batch that an Idempotency-Key has made, if this request is what made it. Raises Refusal."""
    made = (batch.input_file_id, batch.endpoint, batch.completion_window, batch.metadata, batch.output_expires_after)
    if made != (new.input_file_id, new.endpoint, new.completion_window, new.metadata, new.output_expires_after):
        raise invalid(IDEMPOTENCY_KEY, f"The {IDEMPOTENCY_KEY} was sent before with another request: send a new one with each new request.")
    return batch
