"""The protocol every store speaks, and its errors.

Kept to what the batch protocol needs (ranged conditional reads, conditional whole writes, conditional multipart, list),
so that each store can be tested against the same law. A tag is an ETag or its like: opaque, equal for equal content at
one moment, passed back exactly as received.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol


class StoreError(Exception):
    """A store said no. `key` is a URI without credentials or query string."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key


class NotFound(StoreError):
    """No such object or bucket."""


class Precondition(StoreError):
    """The object changed, or exists already: an if_match or if_none_match did not hold."""


class Throttled(StoreError):
    """The store asks for fewer requests; worth another try later."""


class Denied(StoreError):
    """Credentials are missing or wrong, or permission is lacking; another try gives the same answer."""


class Unreachable(StoreError):
    """The store did not answer or answered with a failure of its own; worth another try later."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    key: str  # path below the store's root, '/'-separated
    size: int  # bytes
    tag: str
    metadata: Mapping[str, str] = field(default_factory=dict)


class Upload(Protocol):
    """A multipart upload: nothing is visible before `complete`, nothing remains after `abort`."""

    def write(self, data: bytes) -> None: ...

    def complete(self, *, if_match: str | None = None, if_none_match: bool = False) -> ObjectInfo: ...

    def abort(self) -> None: ...


class ObjectStore(Protocol):
    """A flat set of objects below one root (a folder, or a bucket and prefix).

    All calls block and are safe from several threads. A failed call is one of the errors above and changed nothing that
    can be seen, except that an `Unreachable` write may have happened: read back and compare.
    """

    def uri(self, key: str) -> str: ...

    def head(self, key: str) -> ObjectInfo: ...

    def get(self, key: str, *, start: int = 0, end: int | None = None, if_match: str | None = None) -> bytes:
        """Bytes [start, end) of the object; fewer at its end, none beyond it."""

    def put(
        self,
        key: str,
        data: bytes,
        *,
        if_match: str | None = None,
        if_none_match: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        """Write the whole object at once; readers see the old or the new one, never a mixture."""

    def upload(self, key: str, *, metadata: Mapping[str, str] | None = None) -> Upload:
        """Begin to write an object of any size piece by piece, in constant memory."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """The objects whose key begins with `prefix`, each once. Sort them yourself: SeaweedFS does not list in key order."""

    def delete(self, key: str) -> None:
        """Remove the object; no error if there is none."""
