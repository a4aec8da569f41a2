"""Bytes of files: read to the end even when somebody deletes the file meanwhile, and the ranges that clients ask for."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Protocol

from banyan_runtime.storage.local import LocalStore
from banyan_runtime.storage.store import ObjectStore


class Reader(Protocol):
    """One object, at the version at which it was opened. Calls block; raises StoreError."""

    size: int

    def read(self, start: int, end: int) -> bytes: ...

    def close(self) -> None: ...


class _Ranges:
    """Each block is a request of its own, tied to the version."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        info = store.head(key)
        self._store, self._key, self._tag = store, key, info.tag
        self.size = info.size

    def read(self, start: int, end: int) -> bytes:
        return self._store.get(self._key, start=start, end=end, if_match=self._tag)

    def close(self) -> None:
        pass


class _Descriptor:
    """A file that is held open can still be read when its name is gone."""

    def __init__(self, store: LocalStore, key: str) -> None:
        info = store.head(key)  # raises the store's own errors
        self._descriptor = os.open(store.path(key), os.O_RDONLY | os.O_CLOEXEC)
        self.size = info.size

    def read(self, start: int, end: int) -> bytes:
        return os.pread(self._descriptor, end - start, start)

    def close(self) -> None:
        os.close(self._descriptor)


def open_content(store: ObjectStore, key: str) -> Reader:
    """Raises StoreError."""
    return _Descriptor(store, key) if isinstance(store, LocalStore) else _Ranges(store, key)


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [start, end) of a file; `whole`: nobody asked for less."""

    start: int
    end: int
    whole: bool = False


def span(header: str | None, size: int) -> Span | None:
    """What a Range header asks for; None: nothing that there is. Several ranges, and what is no range, get the whole."""
    matched = re.fullmatch(r"bytes=([0-9]{0,19})-([0-9]{0,19})", header.strip()) if header else None
    if matched is None or matched[0].strip() == "bytes=-":
        return Span(0, size, whole=True)
    first, last = matched[1], matched[2]
    if not first:
        count = int(last)
        return Span(max(0, size - count), size) if count and size else None
    start, end = int(first), int(last) + 1 if last else size
    if last and int(last) < start:
        return Span(0, size, whole=True)
    return Span(start, min(end, size)) if start < size else None
