"""Whether a store keeps the conditions of conditional writes. Some S3-compatible servers ignore them in silence."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from banyan_runtime.storage.store import NotFound, ObjectStore, Precondition, StoreError, Unsupported

NAME: Final = ".banyan-probe-"


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a store refuses when its condition does not hold: `writes` (put and upload), `deletes`."""

    writes: bool
    deletes: bool


def probe(store: ObjectStore, prefix: str) -> Conditions:
    """Try it out with an object of a random name below `prefix` ("" or ending in '/'). Also tells whether we may write there:
    the store's errors come through, Denied among them; StoreError for what keeps nothing, such as a web page that says OK to all.
    """
    key = f"{prefix}{NAME}{secrets.token_hex(8)}"
    try:
        tag = store.put(key, b"1", if_none_match=True).tag
    except Unsupported:
        store.put(key, b"1")  # if it takes this, it is the condition that it does not know
        with contextlib.suppress(StoreError):
            store.delete(key)
        return Conditions(writes=False, deletes=False)
    try:
        if not _holds(store, key, b"1"):
            raise StoreError(store.uri(key), "what was written there is not what is read; check the endpoint (AWS_ENDPOINT_URL_S3)")
        created_once = _refused(lambda: store.put(key, b"2", if_none_match=True))
        current = store.put(key, b"3", if_match=tag).tag if created_once else tag
        replaced_once = created_once and current != tag and _refused(lambda: store.put(key, b"4", if_match=tag))
        deletes = False
        # a role that may write but not delete is no reason to stop
        with contextlib.suppress(StoreError):
            deletes = _refused(lambda: store.delete(key, if_match=tag))
        return Conditions(writes=replaced_once, deletes=deletes and replaced_once)
    except Unsupported:
        return Conditions(writes=False, deletes=False)
    finally:
        with contextlib.suppress(StoreError):
            store.delete(key)


def _holds(store: ObjectStore, key: str, data: bytes) -> bool:
    try:
        return store.get(key) == data
    except NotFound:
        return False


def _refused(write: Callable[[], object]) -> bool:
    try:
        write()
    except (Precondition, NotFound):
        return True
    return False
