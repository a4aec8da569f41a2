"""A store whose traffic and failures are counted in a run's progress."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from banyan_runtime.batch.progress import Progress
from banyan_runtime.storage.store import NotFound, ObjectInfo, ObjectStore, Precondition, StoreError, Upload


class InstrumentedStore:
    """Passes every call on to `store`."""

    def __init__(self, store: ObjectStore, progress: Progress) -> None:
        self._store = store
        self._progress = progress

    def uri(self, key: str) -> str:
        return self._store.uri(key)

    def head(self, key: str) -> ObjectInfo:
        with _counted(self._progress, "head"):
            return self._store.head(key)

    def get(self, key: str, *, start: int = 0, end: int | None = None, if_match: str | None = None) -> bytes:
        with _counted(self._progress, "get"):
            data = self._store.get(key, start=start, end=end, if_match=if_match)
        self._progress.storage_bytes["read"] += len(data)
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
        with _counted(self._progress, "put"):
            info = self._store.put(key, data, if_match=if_match, if_none_match=if_none_match, metadata=metadata)
        self._progress.storage_bytes["write"] += len(data)
        return info

    def upload(self, key: str, *, metadata: Mapping[str, str] | None = None) -> Upload:
        with _counted(self._progress, "multipart"):
            return InstrumentedUpload(self._store.upload(key, metadata=metadata), self._progress)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with _counted(self._progress, "list"):
            yield from self._store.list(prefix)

    def delete(self, key: str) -> None:
        with _counted(self._progress, "put"):
            self._store.delete(key)


class InstrumentedUpload:
    """Passes every call on to `upload`."""

    def __init__(self, upload: Upload, progress: Progress) -> None:
        self._upload = upload
        self._progress = progress

    def write(self, data: bytes) -> None:
        with _counted(self._progress, "multipart"):
            self._upload.write(data)
        self._progress.storage_bytes["write"] += len(data)

    def complete(self, *, if_match: str | None = None, if_none_match: bool = False) -> ObjectInfo:
        with _counted(self._progress, "multipart"):
            return self._upload.complete(if_match=if_match, if_none_match=if_none_match)

    def abort(self) -> None:
        with _counted(self._progress, "multipart"):
            self._upload.abort()


@contextlib.contextmanager
def _counted(progress: Progress, operation: str) -> Iterator[None]:
    try:
        yield
    except (NotFound, Precondition):
        raise  # answers, not failures
    except StoreError:
        progress.storage_errors[operation] += 1
        raise
