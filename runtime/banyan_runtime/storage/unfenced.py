"""A store without conditional writes, for one writer at a time: a look at the object stands in for the condition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from banyan_runtime.storage.store import NotFound, ObjectInfo, ObjectStore, Precondition, Upload


class UnfencedStore:
    """Passes every call on to `store`, without the conditions of writes. Of two writers that meet, the later one wins."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def uri(self, key: str) -> str:
        return self._store.uri(key)

    def trust(self) -> None:
        self._store.trust()

    def head(self, key: str) -> ObjectInfo:
        return self._store.head(key)

    def get(self, key: str, *, start: int = 0, end: int | None = None, if_match: str | None = None) -> bytes:
        return self._store.get(key, start=start, end=end, if_match=if_match)

    def put(
        self,
        key: str,
        data: bytes,
        *,
        if_match: str | None = None,
        if_none_match: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        self.check(key, if_match, if_none_match)
        return self._store.put(key, data, metadata=metadata)

    def upload(self, key: str, *, metadata: Mapping[str, str] | None = None) -> Upload:
        return UnfencedUpload(self, key, self._store.upload(key, metadata=metadata))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._store.list(prefix)

    def delete(self, key: str, *, if_match: str | None = None) -> None:
        if if_match is not None:
            there = self._there(key)
            if there is None:
                return
            if there != if_match:
                raise Precondition(self.uri(key), "the object changed")
        self._store.delete(key)

    def sweep(self, prefix: str, older_than_s: float) -> int:
        return self._store.sweep(prefix, older_than_s)

    def check(self, key: str, if_match: str | None, if_none_match: bool) -> None:
        """Raise Precondition if the object is not as a write wants it."""
        if if_match is None and not if_none_match:
            return
        there = self._there(key)
        if if_none_match and there is not None:
            raise Precondition(self.uri(key), "the object exists")
        if if_match is not None and there != if_match:
            raise Precondition(self.uri(key), "the object changed or is gone")

    def _there(self, key: str) -> str | None:
        try:
            return self._store.head(key).tag
        except NotFound:
            return None


class UnfencedUpload:
    def __init__(self, store: UnfencedStore, key: str, upload: Upload) -> None:
        self._store = store
        self._key = key
        self._upload = upload

    def write(self, data: bytes) -> None:
        self._upload.write(data)

    def complete(self, *, if_match: str | None = None, if_none_match: bool = False) -> ObjectInfo:
        self._store.check(self._key, if_match, if_none_match)
        return self._upload.complete()

    def abort(self) -> None:
        self._upload.abort()
