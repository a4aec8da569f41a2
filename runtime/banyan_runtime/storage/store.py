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
    """A store said no. `key` is a URI without credentials or query string; `reason` a few words why, for a progress display."""

    def __init__(self, key: str, message: str, *, reason: str | None = None) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key
        self.message = message
        self.reason = message if reason is None else reason


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


class Full(Unreachable):
    """No room is left, or a quota is used up; worth another try once somebody has made room."""


class Unsupported(StoreError):
    """The store does not know this call, or a condition of it."""


class Damaged(StoreError):
    """An object is there, and whole as far as the store can tell, but it does not hold what was written there."""


class Stopped(StoreError):
    """The wait for a storage was ended from outside, by a signal for example. As with Unreachable, a write may have happened."""


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

    def trust(self) -> None:
        """It has shown that it does what is asked of it here. What it says otherwise from now on, that it denies access, that there is
        no such bucket, or for a while that it cannot do so, is trouble that passes, and waited for."""

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

    def delete(self, key: str, *, if_match: str | None = None) -> None:
        """Remove the object; no error if there is none. With `if_match`, Precondition if it is another version."""

    def sweep(self, prefix: str, older_than_s: float) -> int:
        """Remove what writers below `prefix` that died left behind (unfinished uploads, temporary files) and that began, or was
        last written, more than `older_than_s` ago. Returns how many that were. Objects are never touched.
        """
