"""Builds the World around one resource: from the store, and for what no watch shows by asking the API server or a pod."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from banyan_operator import api as resources
from banyan_operator.api import BatchJob, Resource
from banyan_operator.api.status import MADE
from banyan_operator.cluster import podclient
from banyan_operator.cluster.client import Api, ApiError
from banyan_operator.cluster.store import Store
from banyan_operator.desired.batchpod import PHASES
from banyan_operator.desired.monitors import wanted_optional
from banyan_operator.desired.names import derived
from banyan_operator.desired.references import references
from banyan_operator.kube import kinds
from banyan_operator.kube.kinds import Manifest
from banyan_operator.kube.lru import Lru
from banyan_operator.kube.objects import Key, Ref, controller, controller_uid, is_true, uid_of
from banyan_operator.kube.ownership import Owner
from banyan_operator.observed.batch import is_terminal
from banyan_operator.observed.server import serves_as_wanted
from banyan_operator.plan import World
from banyan_operator.times import seconds

FOUND_FOR_S: Final = 60.0
MISSING_FIRST_S: Final = 1.0  # a reference that was not there: looked for again after so long at first,
MISSING_CAP_S: Final = 30.0  # and at most so long later
EVENTS_AFTER_S: Final = 20.0  # a pod that waits this long for its volumes, a Job for its pod: ask for its Events
EVENTS_EVERY_S: Final = 30.0
IN_THE_WAY_S: Final = 30.0  # so is whether what has the name of an optional object has gone
ABSENT_FOR_S: Final = 60.0  # an API that was not served is looked for again after so long
REMEMBER: Final = 50_000


class Asker(Protocol):
    """Asks pods over HTTP."""

    async def readyz(self, pod: Manifest) -> Mapping[str, Any] | None: ...

    async def progress(self, pods: Sequence[Manifest]) -> Mapping[str, Mapping[str, Any]]: ...


class References:
    """Whether referenced objects exist. They are not watched: that would need the right to read every Secret.

    A reference that was found is not looked for again while the resource is healthy, and seldom while it is not.
    """

    def __init__(self, api: Api, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._clock = clock
        self._found = Lru[tuple[str, Ref], float](REMEMBER)  # → when
        self._told = Lru[tuple[str, Ref], None](REMEMBER)  # (uid and generation of a resource, what was found for it)
        self._delay = Lru[tuple[str, Ref], tuple[float, float]](REMEMBER)  # of what is missing: (look again at, delay so far)

    async def missing(self, resource: Manifest, parsed: Resource) -> frozenset[Ref]:
        wanted = references(parsed)
        meta, now = resource["metadata"], self._clock()
        asked_by = _asked_by(resource)
        healthy = is_true(resource, "Accepted") and (serves_as_wanted(resource) or is_true(resource, "Running"))
        missing = []
        for ref in sorted(wanted, key=str):
            place = (meta["namespace"], ref)
            if now - self._found.get(place, float("-inf")) < FOUND_FOR_S or (healthy and (asked_by, ref) in self._told):
                self._told[asked_by, ref] = None
            elif await self._exists(*place):
                self._found[place] = now
                self._told[asked_by, ref] = None
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
        return found


class OptionalKinds:
    """Objects of kinds whose API a cluster may not have, or have later.

    Kopf watches only what is served when it starts, so they are asked for: once for each generation of a resource that wants one,
    unless another object is in the way. What goes later the hourly audit finds.
    """

    def __init__(self, api: Api, store: Store, clock: Callable[[], float]) -> None:
        self._api, self._store, self._clock = api, store, clock
        self._absent: dict[str, float] = {}  # kind → when its API was found missing
        self._asked = Lru[tuple[Key, Ref], str](REMEMBER)  # → who asked: uid and generation

    async def absent(self, key: Key, resource: Manifest, parsed: Resource) -> frozenset[str]:
        """Names of the kinds that it wants and the cluster has not; of the others the store knows the live objects afterwards."""
        found = set()
        asked_by = _asked_by(resource)
        for ref in wanted_optional(parsed):
            if self._clock() - self._absent.get(ref.kind, float("-inf")) < ABSENT_FOR_S:
                found.add(ref.kind)
            elif self._asked.get((key, ref)) != asked_by:
                try:
                    live = await self._api.get(ref.found_kind(), key.namespace, ref.name)
                except ApiError as error:
                    if error.unserved:
                        self._absent[ref.kind] = self._clock()
                        self._store.forget(ref.key(key.namespace))
                        found.add(ref.kind)
                    elif not error.forbidden:  # that shows again where it is to be applied, and is told there
                        raise
                    continue
                self._absent.pop(ref.kind, None)
                if live is None:
                    self._store.forget(ref.key(key.namespace))
                else:
                    self._store.note(live)
                if live is None or _settled(resource, live):
                    self._asked[key, ref] = asked_by
        return frozenset(found)

    def look_again_s(self, resource: Manifest, world: World) -> float | None:
        """When what is in the way may have gone, s: no watch tells."""
        waits = any(child["kind"] in kinds.OPTIONAL and not _settled(resource, child) for child in world.children)
        return IN_THE_WAY_S if waits else None


class Gatherer:
    """One World a call; a snapshot, some seconds old at most.

    `clock` gives unix seconds, `monotonic` seconds that only grow.
    """

    def __init__(
        self,
        store: Store,
        api: Api,
        pods: Asker,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._references, self._optional = References(api, monotonic), OptionalKinds(api, store, monotonic)
        self._store, self._api, self._pods, self._clock = store, api, pods, clock
        self._events = Lru[str, tuple[float, tuple[Manifest, ...]]](REMEMBER)  # pod uid -> (when, its Events)

    async def world(self, key: Key, resource: Manifest) -> World:
        server = self._server(key, resource)
        missing, absent = frozenset[Ref](), frozenset[str]()
        if (parsed := _parsed(resource)) is not None:
            missing = await self._references.missing(resource, parsed)
            absent = await self._optional.absent(key, resource, parsed)
        children = self._store.children(key)
        if key.kind == kinds.BATCH_JOB.kind:
            children = (*children, *await self._unshown_jobs(resource, children, _to_find(resource, parsed, children)))
        readyz, progress = None, dict[str, Mapping[str, Any]]()
        if key.kind == kinds.INFERENCE_SERVER.kind:
            pod = podclient.newest(resource, children, "server")
            readyz = await self._pods.readyz(pod) if pod is not None else None
        else:
            progress = dict(await self._pods.progress(podclient.reachable(resource, children, "worker")))
        return World(
            now=self._clock(),
            children=children,
            remains=self._store.remains(key),  # last: how one of the children ended may have been heard since it was asked for
            missing=missing,
            absent=absent,
            server=server,
            progress=progress,
            readyz=readyz,
            events=await self._warnings(key.namespace, children),
        )

    def look_again_s(self, key: Key, world: World) -> float | None:
        """When what no watch shows is worth another look, s."""
        times = [self._references.retry_after_s(key.namespace, world.missing)] if world.missing else []
        resource = self._store.get(key)
        blocked = None if resource is None else self._optional.look_again_s(resource, world)
        times += [] if blocked is None else [blocked]
        return min([*times, *([ABSENT_FOR_S] if world.absent else [])], default=None)

    def _server(self, key: Key, resource: Manifest) -> Manifest | None:
        name = (resource.get("spec", {}).get("serverRef") or {}).get("name")
        if key.kind != kinds.BATCH_JOB.kind or not name:
            return None
        return self._store.get(Key(kinds.INFERENCE_SERVER.kind, key.namespace, name))

    async def _unshown_jobs(self, resource: Manifest, children: Iterable[Manifest], to_find: Iterable[str]) -> list[Manifest]:
        """Jobs that no watch shows, for they have lost our label, and that nobody would find: those that pods name as theirs,
        and `to_find`, those that must be known to be gone or to stand still.

        A child that lost its label is found again where it is to be written; a Job that is not to be made is not.
        """
        known = tuple(children)
        uids = {uid_of(child) for child in known}
        owners = [controller(child) for child in known if child["kind"] == kinds.POD.kind]
        names = {one["name"] for one in owners if one and one["kind"] == kinds.JOB.kind and one["uid"] not in uids}
        names |= set(to_find)
        mine, namespace = Owner.of(resource), resource["metadata"]["namespace"]
        live = [await self._api.get(kinds.JOB, namespace, name) for name in sorted(names)]
        return [one for one in live if one is not None and uid_of(one) not in uids and mine.may_change(one)]

    async def _warnings(self, namespace: str, children: Iterable[Manifest]) -> tuple[Manifest, ...]:
        """Warning Events of pods and claims that wait for longer than usual, and of Jobs that wait for a pod, newest first."""
        now, known = self._clock(), tuple(children)
        staffed = {controller_uid(child) for child in known if child["kind"] == kinds.POD.kind}
        found: list[Manifest] = []
        for child in known:
            if not _waits_long(child, staffed, now):
                continue
            uid = uid_of(child)
            when, events = self._events.get(uid, (0.0, ()))
            if now - when >= EVENTS_EVERY_S:
                try:
                    listed, _ = await self._api.list(kinds.EVENT, namespace, fields=f"involvedObject.uid={uid},type=Warning")
                except ApiError as error:
                    if error.status != 403:
                        raise
                    listed = []
                events = tuple(listed)
                self._events[uid] = (now, events)
            found.extend(events)
        return tuple(sorted(found, key=lambda event: event.get("lastTimestamp") or "", reverse=True))


def _parsed(resource: Manifest) -> Resource | None:
    try:
        return resources.parse(resource, strict=False)
    except resources.SpecError:
        return None  # reconcile says what is wrong with it


def _to_find(resource: Manifest, parsed: Resource | None, children: Iterable[Manifest]) -> tuple[str, ...]:
    """The names of Jobs that are not among `children`, and on whose absence something follows that cannot be undone: an end, or a
    merge. (One that is to be made is found when it is made.)"""
    status: Mapping[str, Any] = resource.get("status") or {}
    if not isinstance(parsed, BatchJob) or is_terminal(status):
        return ()
    made: Mapping[str, Any] = status.get("jobs") or {}
    stops = parsed.spec.cancel or parsed.spec.suspend or parsed.spec.deadline_seconds
    shown = {child["metadata"]["name"] for child in children if child["kind"] == kinds.JOB.kind}
    found = []
    for phase in reversed(PHASES):  # the last that is there decides, whatever came before it
        name = derived(parsed.metadata.name, phase)
        if name in shown:
            break
        if (stops and (phase != "merge" or made.get(phase))) or len(made.get(phase) or ()) >= MADE:
            found.append(name)
    return tuple(found)


def _settled(resource: Manifest, live: Manifest) -> bool:
    """Whether it is the resource's own, and stays: not one of an earlier resource of the name, nor a stranger's."""
    return Owner.of(resource).controls(live) and not live["metadata"].get("deletionTimestamp")


def _asked_by(resource: Manifest) -> str:
    return f"{resource['metadata'].get('uid')}/{resource['metadata'].get('generation')}"


def _waits_long(child: Manifest, staffed: Collection[str | None], now: float) -> bool:
    """`staffed`: the uids of what has pods."""
    status: dict[str, Any] = child.get("status") or {}
    spec: dict[str, Any] = child.get("spec") or {}
    if child["kind"] == kinds.POD.kind:
        waits = status.get("phase") == "Pending" and bool(spec.get("nodeName"))
    elif child["kind"] == kinds.JOB.kind:
        over = is_true(child, "Complete") or is_true(child, "Failed")
        waits = not (spec.get("suspend") or over or child["metadata"].get("deletionTimestamp")) and uid_of(child) not in staffed
    elif child["kind"] == kinds.CLAIM.kind:
        waits = status.get("phase") == "Pending"
    else:
        return False
    began = status.get("startTime") or child["metadata"].get("creationTimestamp")
    return waits and bool(began) and now - seconds(str(began)) > EVENTS_AFTER_S
