"""What tests of the batch host share: a storage that is no folder of its own, and how its batches are followed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from banyan_runtime.batch.host.documents import BatchDocument
from banyan_runtime.batch.host.process import Host
from banyan_runtime.storage.local import LocalStore
from banyan_runtime.storage.store import ObjectInfo, StoreError
from tests.component.server.test_batch_faults import Model, model, one_life


class Bucket:
    """A storage that is no folder of the host's: nobody knows its room, and finished lines go into objects."""

    def __init__(self, root: Path) -> None:
        self._store = LocalStore(root)
        self.read: list[str] = []
        self.swept: list[str] = []
        self.fails: Callable[[str], StoreError | None] = lambda key: None  # what a put of a key meets
        self.deleting: Callable[[str], object] = lambda key: None  # called before a delete

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str, **more: Any) -> bytes:
        self.read.append(key)
        return self._store.get(key, **more)

    def put(self, key: str, data: bytes, **more: Any) -> ObjectInfo:
        if (error := self.fails(key)) is not None:
            raise error
        return self._store.put(key, data, **more)

    def delete(self, key: str, **more: Any) -> None:
        self.deleting(key)
        self._store.delete(key, **more)

    def sweep(self, prefix: str, older_than_s: float) -> int:
        self.swept.append(prefix)
        return self._store.sweep(prefix, older_than_s)


def play(act: Callable[[Model], Coroutine[Any, Any, None]], *, holding: bool = False) -> None:
    async def whole() -> None:
        async with asyncio.timeout(60), model(holding=holding) as serving:
            await act(serving)

    asyncio.run(whole())


async def document(host: Host, batch: BatchDocument) -> BatchDocument:
    return (await host.batches.get(batch.id)).document


async def change(host: Host, batch: BatchDocument, **fields: Any) -> None:
    await host.batches.advance(await host.batches.get(batch.id), lambda held: msgspec.structs.replace(held, **fields))


async def to_its_end(host: Host, batch: BatchDocument) -> BatchDocument:
    await one_life(host, batch.id, lambda: False)
    return await document(host, batch)
