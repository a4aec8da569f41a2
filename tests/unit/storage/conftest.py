"""Stores to test: a folder, SeaweedFS and moto."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from banyan_runtime.storage.local import LocalStore
from banyan_runtime.storage.s3 import S3Store
from banyan_runtime.storage.s3_settings import S3Settings
from banyan_runtime.storage.store import ObjectStore
from tests.support.s3 import servers

PART_BYTES = 5 << 20  # the smallest that S3 allows


@pytest.fixture
def new_bucket() -> Callable[[S3Settings], S3Store]:
    def make(settings: S3Settings) -> S3Store:
        store = S3Store(f"bucket-{uuid.uuid4().hex[:12]}", settings, part_bytes=PART_BYTES)
        store.client.create_bucket(Bucket=store.bucket)
        return store

    return make


@pytest.fixture(params=["folder", "weed", pytest.param("moto", marks=pytest.mark.long)])
def store(request: pytest.FixtureRequest, tmp_path: Path, new_bucket: Callable[[S3Settings], S3Store]) -> ObjectStore:
    if request.param == "folder":
        return LocalStore(tmp_path)
    server: servers.S3Server = request.getfixturevalue(request.param)
    return new_bucket(server.settings())


@pytest.fixture
def proxy(weed: servers.S3Server) -> Iterator[servers.Proxy]:
    proxy = servers.Proxy(weed.endpoint)
    yield proxy
    proxy.close()


@pytest.fixture
def faulty(weed: servers.S3Server, proxy: servers.Proxy, new_bucket: Callable[[S3Settings], S3Store]) -> S3Store:
    """A bucket behind the proxy; add to `proxy.faults` to break it."""
    return new_bucket(weed.settings(proxy.endpoint))
