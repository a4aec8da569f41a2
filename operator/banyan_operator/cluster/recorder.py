"""Kubernetes Events: what `kubectl describe` shows at its end. A repeat within ten minutes raises a count instead of adding a line."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from banyan_operator.cluster.client import Api, ApiError, TokenBucket
from banyan_operator.kube import kinds
from banyan_operator.kube.lru import Lru
from banyan_operator.plan import Event, Manifest
from banyan_operator.times import stamp

log = logging.getLogger(__name__)

AGGREGATE_S: Final = 600.0
MESSAGE_BYTES: Final = 1024
BURST: Final = 10
RATE_PER_S: Final = 0.1
REMEMBER: Final = 4096  # Events and resources that are kept in mind


@dataclass
class _Posted:
    count: int
    at: float


def event_name(regarding: Manifest, event: Event) -> str:
    """The same object, reason and message give the same name, so that two operators, or one after a restart, write one Event."""
    digest = hashlib.sha256(f"{regarding['metadata'].get('uid')}\n{event.reason}\n{event.message[:256]}".encode()).hexdigest()
    return f"{regarding['metadata']['name']}.{digest[:16]}"


def cut(message: str) -> str:
    raw = message.encode()
    return message if len(raw) <= MESSAGE_BYTES else raw[: MESSAGE_BYTES - 3].decode(errors="ignore") + "..."


class Recorder:
    """Posts Events. Never raises: an Event that cannot be written is logged, and the work goes on."""

    def __init__(self, api: Api, clock: Callable[[], float] = time.time) -> None:
        self._api = api
        self._clock = clock
        self._posted = Lru[tuple[str, str], _Posted](REMEMBER)
        self._buckets = Lru[str, TokenBucket](REMEMBER)

    async def post(self, regarding: Manifest, event: Event) -> None:
        now = self._clock()
        meta = regarding["metadata"]
        name, namespace = event_name(regarding, event), meta["namespace"]
        posted = self._posted.get((namespace, name))
        try:
            if posted is not None and now - posted.at < AGGREGATE_S:
                posted.count, posted.at = posted.count + 1, now
                await self._repeat(namespace, name, posted.count, now)
                return
            if self._bucket(meta.get("uid") or name).reserve() > 0:
                log.info("too many events for %s %s/%s; left out: %s", regarding["kind"], namespace, meta["name"], event.reason)
                return
            self._posted[namespace, name] = _Posted(1, now)
            await self._create(regarding, event, name, now)
        except ApiError as error:
            log.warning("event %s for %s/%s could not be written: %s", event.reason, namespace, meta["name"], error)

    async def _create(self, regarding: Manifest, event: Event, name: str, now: float) -> None:
        meta, at = regarding["metadata"], stamp(now)
        body: Manifest = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": meta["namespace"]},
            "involvedObject": {
                "apiVersion": regarding["apiVersion"],
                "kind": regarding["kind"],
                "namespace": meta["namespace"],
                "name": meta["name"],
                "uid": meta.get("uid"),
            },
            "type": event.type,
            "reason": event.reason,
            "message": cut(event.message),
            "source": {"component": kinds.FIELD_MANAGER},
            "reportingComponent": kinds.FIELD_MANAGER,
            "reportingInstance": "",
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }
        try:
            await self._api.create(kinds.EVENT, meta["namespace"], body)
        except ApiError as error:
            if error.status != 409:
                raise
            # An operator before this one wrote it.
            found = await self._api.get(kinds.EVENT, meta["namespace"], name)
            count = (found or {}).get("count", 0) + 1
            self._posted[meta["namespace"], name].count = count
            await self._repeat(meta["namespace"], name, count, now)

    async def _repeat(self, namespace: str, name: str, count: int, now: float) -> None:
        try:
            await self._api.merge(kinds.EVENT, namespace, name, {"count": count, "lastTimestamp": stamp(now)})
        except ApiError as error:
            if error.status != 404:
                raise
            self._posted.pop((namespace, name), None)  # it has expired; the next one is a new one

    def _bucket(self, uid: str) -> TokenBucket:
        self._buckets[uid] = bucket = self._buckets.get(uid) or TokenBucket(RATE_PER_S, BURST, self._clock)
        return bucket
