"""Builds the World around one resource: from the store, and for what no watch shows by asking the API server or a pod."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol

from banyan_operator import api as resources
from banyan_operator.cluster import podclient
from banyan_operator.cluster.client import Api, ApiError
from banyan_operator.cluster.store import Store
from banyan_operator.desired.references import references
from banyan_operator.kube import kinds
from banyan_operator.kube.addresses import service_url
from banyan_operator.kube.kinds import Manifest
from banyan_operator.kube.objects import Key, Ref, is_true, uid_of
from banyan_operator.plan import World
from banyan_operator.times import seconds

FOUND_FOR_S: Final = 60.0
MISSING_FIRST_S: Final = 1.0  # a reference that was not there: looked for again after so long at first,
MISSING_CAP_S: Final = 30.0  # and at most so long later
EVENTS_AFTER_S: Final = 20.0  # a pod that waits this long for its volumes: ask for its Events
EVENTS_EVERY_S: Final = 30.0
REMEMBER: Final = 8192


class Asker(Protocol):
    """Asks pods over HTTP."""

    async def readyz(self, pod: Manifest) -> Mapping[str, Any] | None: ...

    async def progress(self, pod: Manifest) -> Mapping[str, Any] | None: ...


class References:
    """Whether referenced objects exist. They are not watched: that would need the right to read every Secret.

    A reference that was found is not looked for again while the resource is healthy, and seldom while it is not.
    """

    def __init__(self, api: Api, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._clock = clock
        self._found: dict[tuple[str, Ref], tuple[str, float]] = {}  # → (who asked: uid and generation, when)
        self._delay: dict[tuple[str, Ref], tuple[float, float]] = {}  # of what is missing: (look again at, delay so far)

    async def missing(self, resource: Manifest) -> frozenset[Ref]:
        try:
            wanted = references(resources.parse(resource, strict=False))
        except resources.SpecError:
            return frozenset()  # reconcile says what is wrong with it
        meta, now = resource["metadata"], self._clock()
        asked_by = f"{meta.get('uid')}/{meta.get('generation')}"
        healthy = is_true(resource, "Accepted") and (is_true(resource, "Ready") or is_true(resource, "Running"))
        missing = []
        for ref in sorted(wanted, key=str):
            place = (meta["namespace"], ref)
            who, when = self._found.get(place, ("", 0.0))
            if who == asked_by and (healthy or now - when < FOUND_FOR_S):
                continue
            if await self._exists(*place):
                self._found.pop(place, None)
                self._found[place] = (asked_by, now)
                while len(self._found) > REMEMBER:
                    del self._found[next(iter(self._found))]
            else:
                missing.append(ref)
        return frozenset(missing)

    def retry_after_s(self, namespace: str, missing: Iterable[Ref]) -> float:
        """When the soonest of these is worth another look, s."""
        now = self._clock()
        return max(0.1, min((self._delay[namespace, ref][0] - now for ref in missing), default=MISSING_CAP_S))

    async def _exists(self, namespace: str, ref: Ref) -> bool:
        place, now = (namespace, ref), self._clock()
        again, delay = self._delay.get(place, (now, 0.0))
        if now < again:
            return False
        try:
            found = await self._api.exists(ref.found_kind(), namespace, ref.name)
        except ApiError as error:
            if error.status != 403:  # not allowed to look (operator.checkSecrets=false): the kubelet will tell
                raise
            found = True
        self._delay.pop(place, None)
        if not found:
            delay = min(MISSING_CAP_S, max(MISSING_FIRST_S, delay * 2))
            self._delay[place] = (now + delay, delay)
            while len(self._delay) > REMEMBER:
                del self._delay[next(iter(self._delay))]
        return found


class Gatherer:
    """One World a call; a snapshot, some seconds old at most."""

    def __init__(self, store: Store, api: Api, pods: Asker, clock: Callable[[], float] = time.time) -> None:
        self._references = References(api)
        self._store, self._api, self._pods, self._clock = store, api, pods, clock
        self._events: dict[str, tuple[float, tuple[Manifest, ...]]] = {}  # pod uid -> (when, its Events)

    async def world(self, key: Key, resource: Manifest) -> World:
        children = self._store.children(key)
        server = self._server(key, resource)
        readyz = progress = None
        if key.kind == kinds.INFERENCE_SERVER.kind:
            pod = podclient.newest(children, "server")
            readyz = await self._pods.readyz(pod) if pod is not None else None
        else:
            pod = podclient.newest(children, "worker")
            progress = await self._pods.progress(pod) if pod is not None else None
        return World(
            now=self._clock(),
            children=children,
            missing=await self._references.missing(resource),
            server=server,
            server_url=service_url(server) if server is not None else None,
            progress=progress,
            readyz=readyz,
            events=await self._warnings(key.namespace, children),
        )

    def look_again_s(self, key: Key, world: World) -> float | None:
        """When what no watch shows is worth another look, s."""
        return self._references.retry_after_s(key.namespace, world.missing) if world.missing else None

    def forget(self, key: Key) -> None:
        """The resource is gone."""

    def _server(self, key: Key, resource: Manifest) -> Manifest | None:
        name = (resource.get("spec", {}).get("serverRef") or {}).get("name")
        if key.kind != kinds.BATCH_JOB.kind or not name:
            return None
        return self._store.get(Key(kinds.INFERENCE_SERVER.kind, key.namespace, name))

    async def _warnings(self, namespace: str, children: Iterable[Manifest]) -> tuple[Manifest, ...]:
        """Warning Events of pods that wait for longer than usual, newest first."""
        now = self._clock()
        found: list[Manifest] = []
        for pod in children:
            if pod["kind"] != "Pod" or not _waits_long(pod, now):
                continue
            uid = uid_of(pod)
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
