"""A store whose traffic and failures are counted."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final, Protocol

from banyan_runtime.storage.store import NotFound, ObjectInfo, ObjectStore, Precondition, StoreError, Upload

OPERATIONS: Final = ("get", "put", "list", "head", "multipart")
DIRECTIONS: Final = ("read", "write")


class Traffic(Protocol):
    """Where it is counted."""

    storage_errors: Counter[str]  # by operation
    storage_bytes: Counter[str]  # by direction


class InstrumentedStore:
    """Passes every call on to `store`."""

    def __init__(self, store: ObjectStore, traffic: Traffic) -> None:
        self._store = store
        self._traffic = traffic

    def uri(self, key: str) -> str:
        return self._store.uri(key)

    def trust(self) -> None:
        self._store.trust()

    def head(self, key: str) -> ObjectInfo:
        with _counted(self._traffic, "head"):
            return self._store.head(key)

    def get(self, key: str, *, start: int = 0, end: int | None = None, if_match: str | None = None) -> bytes:
        with _counted(self._traffic, "get"):
            data = self._store.get(key, start=start, end=end, if_match=if_match)
        self._traffic.storage_bytes["read"] += len(data)
        return data

    def put(
        self,
        key: str,
        data: bytes,
        *,
        if_match: str | None = None,
        if_none_match: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        with _counted(self._traffic, "put"):
            info = self._store.put(key, data, if_match=if_match, if_none_match=if_none_match, metadata=metadata)
        self._traffic.storage_bytes["write"] += len(data)
        return info

    def upload(self, key: str, *, metadata: Mapping[str, str] | None = None) -> Upload:
        with _counted(self._traffic, "multipart"):
            return InstrumentedUpload(self._store.upload(key, metadata=metadata), self._traffic)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with _counted(self._traffic, "list"):
            yield from self._store.list(prefix)

    def delete(self, key: str, *, if_match: str | None = None) -> None:
        with _counted(self._traffic, "put"):
            self._store.delete(key, if_match=if_match)

    def sweep(self, prefix: str, older_than_s: float) -> int:
        with _counted(self._traffic, "multipart"):
            return self._store.sweep(prefix, older_than_s)


class InstrumentedUpload:
    """Passes every call on to `upload`."""

    def __init__(self, upload: Upload, traffic: Traffic) -> None:
        self._upload = upload
        self._traffic = traffic

    def write(self, data: bytes) -> None:
        with _counted(self._traffic, "multipart"):
            self._upload.write(data)
        self._traffic.storage_bytes["write"] += len(data)

    def complete(self, *, if_match: str | None = None, if_none_match: bool = False) -> ObjectInfo:
        with _counted(self._traffic, "multipart"):
            return self._upload.complete(if_match=if_match, if_none_match=if_none_match)

    def abort(self) -> None:
        with _counted(self._traffic, "multipart"):
            self._upload.abort()


@contextlib.contextmanager
def _counted(traffic: Traffic, operation: str) -> Iterator[None]:
    try:
        yield
    except (NotFound, Precondition):
        raise  # answers, not failures
    except StoreError:
        traffic.storage_errors[operation] += 1
        raise
