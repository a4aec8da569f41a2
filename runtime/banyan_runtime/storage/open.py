"""From a URI to the store that holds it: `s3://BUCKET/KEY`, `file:///PATH` and plain paths."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from banyan_runtime.storage.local import LocalStore
from banyan_runtime.storage.s3 import S3Settings, S3Store
from banyan_runtime.storage.store import ObjectStore, StoreError


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


def open_uri(uri: str, environment: Mapping[str, str] = os.environ) -> Location:
    """Where `uri` points. Nothing is looked up yet, so this works without a network.

    Raises BadUri for a scheme that has no store here, credentials or a query in the URI, or a missing bucket;
    Denied if the credentials folder lacks its files.
    """
    scheme, separator, _ = uri.partition("://")
    if not separator:
        return _local(uri)
    parts = urlsplit(uri)
    if "@" in parts.netloc or (scheme != "file" and (parts.query or parts.fragment)):
        where = f"{scheme}://{parts.netloc.rpartition('@')[2]}"
        raise BadUri(where, "a URI must not hold credentials, '?' or '#'; use AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    if scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise BadUri(uri, "write file:///ABSOLUTE/PATH (three slashes)")
        return _local(unquote(uri.removeprefix("file://").removeprefix(parts.netloc)))
    if scheme == "s3":
        if not parts.netloc:
            raise BadUri(uri, "the bucket is missing; write s3://BUCKET/KEY")
        return Location(S3Store(parts.netloc, S3Settings.of(environment)), uri.removeprefix(f"s3://{parts.netloc}").lstrip("/"))
    if scheme == "pvc":
        raise BadUri(uri, "pvc:// is turned into a mounted folder by banyan-operator; here give the folder's path")
    raise BadUri(uri, f"the scheme {scheme}:// is not supported; use s3://, file:// or a path")


def _local(path: str) -> Location:
    """A path that ends in '/' or is a folder is a folder; else the object in its parent."""
    if not path:
        raise BadUri("", "the path is empty")
    where = Path(path)
    if path.endswith("/") or where.is_dir():
        return Location(LocalStore(where), "")
    return Location(LocalStore(where.parent), where.name)
