"""From a URI to the store that holds it: `s3://BUCKET/KEY`, `file:///PATH` and plain paths."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote_to_bytes, urlsplit

from banyan_runtime.storage.local import LocalStore
from banyan_runtime.storage.patience import Patience
from banyan_runtime.storage.store import ObjectStore, StoreError

_ONE_SLASH: Final = re.compile(r"([a-z][a-z0-9+.-]*):/")


class BadUri(StoreError):
    """The URI itself is wrong, whatever the store would say. Its text never holds credentials."""


@dataclass(frozen=True, slots=True)
class Location:
    """An object, or a folder of objects (`key` empty or ending in '/'), in a store."""

    store: ObjectStore
    key: str

    @property
    def uri(self) -> str:
        return self.store.uri(self.key)

    @property
    def is_folder(self) -> bool:
        return not self.key or self.key.endswith("/")

    def child(self, name: str) -> Location:
        """The object `name` in this folder."""
        folder = self.key if self.is_folder else self.key + "/"
        return Location(self.store, folder + name)


def open_uri(uri: str, environment: Mapping[str, str] = os.environ, patience: Patience | None = None) -> Location:
    """Where `uri` points. Nothing is looked up yet but whether a path is a folder, so this works without a network.
    `patience`: how its calls wait.

    Raises BadUri for a scheme that has no store here, credentials or a query in the URI, or a missing bucket;
    Denied if the credentials folder lacks its files or a path may not be looked at, StoreError for a bad endpoint or AWS_CA_BUNDLE.
    """
    scheme, separator, _ = uri.partition("://")
    if not separator:
        if typo := _ONE_SLASH.match(uri):  # else the results would go to a folder 's3:', where nobody looks for them
            raise BadUri(uri, f"write {typo[1]}:// (two slashes), or ./{uri} for a folder of that name")
        return _local(uri, patience)
    parts = urlsplit(uri)
    if "@" in parts.netloc or (scheme != "file" and (parts.query or parts.fragment)):
        where = f"{scheme}://{parts.netloc.rpartition('@')[2]}"
        raise BadUri(where, "a URI must not hold credentials, '?' or '#'; use AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    if scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise BadUri(uri, "write file:///ABSOLUTE/PATH (three slashes)")
        return _local(_unquoted(uri.removeprefix("file://").removeprefix(parts.netloc)), patience)
    if scheme == "s3":
        if not parts.netloc:
            raise BadUri(uri, "the bucket is missing; write s3://BUCKET/KEY")
        from banyan_runtime.storage.s3 import S3Store  # a tenth of a second, which who has no S3 does not wait for
        from banyan_runtime.storage.s3_settings import S3Settings

        store = S3Store(parts.netloc, S3Settings.of(environment), patience=patience)
        return Location(store, uri.removeprefix(f"s3://{parts.netloc}").lstrip("/"))
    if scheme == "pvc":
        raise BadUri(uri, "pvc:// is turned into a mounted folder by banyan-operator; here give the folder's path")
    raise BadUri(uri, f"the scheme {scheme}:// is not supported; use s3://, file:// or a path")


def open_together(uris: Sequence[str], open_one: Callable[[str], Location]) -> list[Location]:
    """Where `uris` point that one store has given its objects: in one store again. Raises what `open_one` does, which opens a URI."""
    first, last = min(uris), max(uris)
    same = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    folder = first[:same].rpartition("/")[0] + "/"
    place = open_one(folder)
    names = (uri.removeprefix(folder) for uri in uris)
    return [place.child(_unquoted(name) if folder.startswith("file:") else name) for name in names]


def _unquoted(path: str) -> str:
    return os.fsdecode(unquote_to_bytes(os.fsencode(path)))


def _local(path: str, patience: Patience | None) -> Location:
    """A path that ends in '/' or is a folder is a folder; else the object in its parent."""
    if not path:
        raise BadUri("", "the path is empty")
    where = Path(path)
    if path.endswith("/"):
        return Location(LocalStore(where, patience), "")
    beside = LocalStore(where.parent, patience)
    with beside.errors(where.name):
        if where.is_dir():
            return Location(LocalStore(where, patience), "")
    return Location(beside, where.name)
