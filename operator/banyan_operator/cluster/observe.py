"""Builds the World around one resource: from the store, and for what no watch shows by asking the API server or a pod."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from banyan_operator import api as resources
from banyan_operator.cluster import kinds, pods
from banyan_operator.cluster.client import Api, ApiError
from banyan_operator.cluster.kinds import Key
from banyan_operator.cluster.pods import Pods
from banyan_operator.cluster.store import Store
from banyan_operator.desired.references import references
from banyan_operator.plan import Manifest, Ref, World
from banyan_operator.times import seconds

FOUND_FOR_S: Final = 60.0  # a reference that was there is looked for again after so long
MISSING_FIRST_S: Final = 1.0  # one that was not there: after so long at first,
MISSING_CAP_S: Final = 30.0  # and at most so long later
EVENTS_AFTER_S: Final = 20.0  # a pod that waits this long for its volumes: ask for its Events
EVENTS_EVERY_S: Final = 30.0
REMEMBER: Final = 8192


class References:
    """Whether referenced objects exist. They are not watched: that would need the right to read every Secret."""

    def __init__(self, api: Api, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._clock = clock
        self._looked: dict[tuple[str, Ref], tuple[bool, float, float]] = {}  # -> (found, look again at, delay so far)

    async def missing(self, resource: Manifest) -> frozenset[Ref]:
        try:
            wanted = references(resources.parse(resource))
        except resources.SpecError:
            return frozenset()  # reconcile says what is wrong with it
        namespace = resource["metadata"]["namespace"]
        return frozenset([ref for ref in sorted(wanted, key=str) if not await self._exists(namespace, ref)])

    def retry_after_s(self, namespace: str, missing: Iterable[Ref]) -> float:
        """When the soonest of these is worth another look, s."""
        now = self._clock()
        return max(0.1, min((self._looked[namespace, ref][1] - now for ref in missing), default=MISSING_CAP_S))

    async def _exists(self, namespace: str, ref: Ref) -> bool:
        now = self._clock()
        found, again, delay = self._looked.get((namespace, ref), (False, now, 0.0))
        if now < again:
            return found
        try:
            found = await self._api.exists(kinds.find(ref.api_version, ref.kind), namespace, ref.name)
        except ApiError as error:
            if error.status != 403:  # not allowed to look (operator.checkSecrets=false): the kubelet will tell
                raise
            found = True
        delay = FOUND_FOR_S if found else min(MISSING_CAP_S, max(MISSING_FIRST_S, delay * 2 if delay != FOUND_FOR_S else 0))
        self._looked.pop((namespace, ref), None)
        self._looked[namespace, ref] = (found, now + delay, delay)
        while len(self._looked) > REMEMBER:
            del self._looked[next(iter(self._looked))]
        return found


class Observer:
    """One World a call; a snapshot, some seconds old at most."""

    def __init__(self, store: Store, api: Api, asked: Pods, clock: Callable[[], float] = time.time) -> None:
        self.references = References(api)
        self._store, self._api, self._pods, self._clock = store, api, asked, clock
        self._events: dict[str, tuple[float, tuple[Manifest, ...]]] = {}  # pod uid -> (when, its Events)

    async def world(self, key: Key, resource: Manifest) -> World:
        children = self._store.children(key)
        server, server_url = self._server(key, resource)
        readyz = progress = None
        if key.kind == kinds.INFERENCE_SERVER.kind:
            pod = pods.newest(children, "server")
            readyz = await self._pods.readyz(pod) if pod is not None else None
        else:
            pod = pods.newest(children, "worker")
            progress = await self._pods.progress(pod) if pod is not None else None
        return World(
            now=self._clock(),
            children=children,
            missing=await self.references.missing(resource),
            server=server,
            server_url=server_url,
            progress=progress,
            readyz=readyz,
            events=await self._warnings(key.namespace, children),
        )

    def _server(self, key: Key, resource: Manifest) -> tuple[Manifest | None, str | None]:
        name = (resource.get("spec", {}).get("serverRef") or {}).get("name")
        if key.kind != kinds.BATCH_JOB.kind or not name:
            return None, None
        server = self._store.get(kinds.INFERENCE_SERVER.kind, key.namespace, name)
        port = ((server or {}).get("spec", {}).get("service") or {}).get("port", 80)
        return server, f"http://{name}.{key.namespace}.svc:{port}"

    async def _warnings(self, namespace: str, children: Iterable[Manifest]) -> tuple[Manifest, ...]:
        """Warning Events of pods that wait for longer than usual, newest first."""
        now = self._clock()
        found: list[Manifest] = []
        for pod in children:
            if pod["kind"] != "Pod" or not _waits_long(pod, now):
                continue
            uid = pod["metadata"]["uid"]
            when, events = self._events.get(uid, (0.0, ()))
            if now - when >= EVENTS_EVERY_S:
                try:
                    listed, _ = await self._api.list(kinds.EVENT, namespace, fields=f"involvedObject.uid={uid},type=Warning")
                except ApiError as error:
                    if error.status != 403:
                        raise
                    listed = []
                events = tuple(listed)
                self._events.pop(uid, None)
                self._events[uid] = (now, events)
                while len(self._events) > REMEMBER:
                    del self._events[next(iter(self._events))]
            found.extend(events)
        return tuple(sorted(found, key=lambda event: event.get("lastTimestamp") or "", reverse=True))


def _waits_long(pod: Manifest, now: float) -> bool:
    status: dict[str, Any] = pod.get("status") or {}
    if status.get("phase") != "Pending" or not pod.get("spec", {}).get("nodeName"):
        return False
    began = status.get("startTime") or pod["metadata"].get("creationTimestamp")
    return bool(began) and now - seconds(str(began)) > EVENTS_AFTER_S
