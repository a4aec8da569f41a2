"""Carries a Plan out: applies and deletes. Every part may fail and be repeated by the next reconcile."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from banyan_operator.cluster.client import Api, ApiError
from banyan_operator.cluster.metrics import Metrics
from banyan_operator.cluster.store import Store
from banyan_operator.kube import kinds
from banyan_operator.kube.kinds import Manifest
from banyan_operator.kube.lru import Lru
from banyan_operator.kube.objects import Key, Ref, controller, key_of, uid_of
from banyan_operator.kube.ownership import Owner, whose
from banyan_operator.plan import Outcome, Plan

WINDOW_S: Final = 300.0
LIMIT: Final = 5  # repairs of one object in the window; more is a fight
SLOW_S: Final = 60.0


class Repairs:
    """When each object was put back: where somebody else keeps changing one, the operator slows down."""

    def __init__(self) -> None:
        self._times: dict[Key, deque[float]] = {}

    def wait_s(self, key: Key, now: float) -> float:
        """How long to leave the object alone from now on, s; 0: put it back now."""
        times = self._recent(key, now)
        if times is None or len(times) <= LIMIT:
            return 0.0
        return max(0.0, times[-1] + SLOW_S - now)

    def note(self, key: Key, now: float) -> None:
        self._times.setdefault(key, deque(maxlen=LIMIT + 1)).append(now)

    def _recent(self, key: Key, now: float) -> deque[float] | None:
        times = self._times.get(key)
        if times is None:
            return None
        while times and now - times[0] > WINDOW_S:
            times.popleft()
        if not times:
            del self._times[key]
            return None
        return times


log = logging.getLogger(__name__)

TAKEN_S: Final = 10.0  # an object in the way that no watch shows is looked for again after so long
FORBIDDEN_S: Final = 30.0  # rights may be given at any time, and nothing tells
REFUSED_S: Final = 30.0  # so may quota
UNSERVED_S: Final = 60.0  # so may an API come
REMEMBER: Final = 50_000
NOTHING: Final[Mapping[Key, Manifest]] = {}


@dataclass
class Applied(Outcome):
    """What came of a plan, and when to try again."""

    unseen: dict[Key, Manifest] = field(default_factory=dict)
    """Objects of the resource that no watch shows: without our label, or made a moment ago. Nothing was done to them; the plan is to be
    made again with them."""
    error: ApiError | None = None
    """The failure that asks for another try soonest, if there is one."""
    wait_s: float | None = None
    """When to look again although nothing failed, s."""

    def keeps_back(self, *, new: bool) -> str | None:
        """Why a Deployment must not be written now. `new`: it is not there yet."""
        refs = (*self.refused, *self.forbidden, *self.taken, *self.failed, *self.contested)
        for record in (ref for ref in refs if ref.kind == kinds.CONTROLLER_REVISION.kind):
            # without it the next operator could not tell what pods are to run
            return f"ControllerRevision {record.name}, which records what its pods run, is not written"
        for service in (ref for ref in self.taken if new and ref.kind == kinds.SERVICE.kind):
            return f"Service {service.name}, under which its pods are reached, is somebody else's"
        return None

    def again(self, delay_s: float) -> None:
        self.wait_s = delay_s if self.wait_s is None else min(delay_s, self.wait_s)


@dataclass(frozen=True)
class Stranger:
    """An object in the way."""

    owner: str


class Applier:
    """Writes children. Each answer is noted in the store at once, so that the next reconcile reads its own writes."""

    def __init__(
        self,
        store: Store,
        api: Api,
        metrics: Metrics,
        concerns: Callable[[frozenset[Key]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._api, self._metrics, self._concerns, self._clock = store, api, metrics, concerns, clock
        self._repairs = Repairs()
        self._made = Lru[Key, str](REMEMBER)  # what was applied and not deleted by us → uid of the resource that it is for

    async def apply(self, resource: Manifest, plan: Plan, unseen: Mapping[Key, Manifest] = NOTHING) -> Applied:
        """The applies, in order, then the deletes, then statuses. One that fails does not stop the others.

        `unseen`: objects that no watch shows and that were known when the plan was made.
        """
        applied = Applied()
        for manifest in plan.apply:
            if manifest["kind"] == kinds.DEPLOYMENT.kind:
                why = applied.keeps_back(new=self._store.get(key_of(manifest)) is None)
                if why is not None:
                    applied.failed[Ref.of(manifest)] = why
                    continue
            await self._apply(resource, manifest, Ref.of(manifest) in plan.drifted, unseen, applied)
        for live in plan.delete:
            await self._delete(live, applied)
        for pod in plan.status:
            await self._tell(pod, applied)
        return applied

    async def _apply(self, resource: Manifest, manifest: Manifest, drifted: bool, unseen: Mapping[Key, Manifest], applied: Applied) -> None:
        ref, key = Ref.of(manifest), key_of(manifest)
        deleted = self._store.get(key) is None and self._made.get(key) == uid_of(resource)
        drifted = drifted or deleted
        if drifted and (wait := self._repairs.wait_s(key, self._clock())):
            applied.contested.add(ref)
            applied.again(wait)
            return
        try:
            target = await self._target(resource, manifest, unseen, applied)
            if isinstance(target, Stranger):
                applied.taken[ref] = target.owner
                applied.again(TAKEN_S)
                return
            if target is None:
                applied.failed[ref] = "it is there, and no watch shows it"
                return
            if "ownerReferences" in manifest["metadata"] and self._is_left(key, unseen) and await self._goes(resource):
                applied.failed[ref] = f"{resource['kind']} {resource['metadata']['name']} is being deleted"
                applied.again(TAKEN_S)
                return
            self._concerns(self._store.note(await self._api.apply(target)))
        except ApiError as error:
            if key.kind in kinds.OPTIONAL and (error.conflict or error.unserved):
                self._store.forget(key)  # no watch shows what has become of it: the next try asks
            _sort(applied, ref, error)
            log.warning("%s could not be applied: %s", key, error)
            return
        self._made[key] = uid_of(resource)
        if drifted:
            self._repairs.note(key, self._clock())
            self._metrics.drift.labels(manifest["kind"]).inc()
        log.info("%s %s", "put back" if drifted else "applied", key)

    async def _target(
        self, resource: Manifest, manifest: Manifest, unseen: Mapping[Key, Manifest], applied: Applied
    ) -> Manifest | Stranger | None:
        """The manifest for the object that it is meant for, whether there is one or not. None: it was made in ignorance of it.

        An apply creates what is absent and takes over what is present. What no watch shows may still exist: a stranger's, or one
        of ours that lost its label; what a watch shows may belong to another of our resources.
        """
        meta = manifest["metadata"]
        key = key_of(manifest)
        live = self._store.get(key) or unseen.get(key)
        if live is None:
            live = await self._api.get(kinds.of(manifest), meta["namespace"], meta["name"])
            if live is None:
                return manifest
            if Owner.of(resource).controls(live):
                applied.unseen[key] = live
                return None
        if not Owner.of(resource).may_change(live):
            return Stranger(whose(live))
        return {**manifest, "metadata": {**meta, "uid": uid_of(live)}}

    def _is_left(self, key: Key, unseen: Mapping[Key, Manifest]) -> bool:
        live = self._store.get(key) or unseen.get(key)
        return live is not None and controller(live) is None

    async def _goes(self, resource: Manifest) -> bool:
        """Whether the resource is on its way out, by the API server's word. What it leaves behind on purpose (--cascade=orphan) loses
        its owner after that; with the owner put back it would be collected as garbage."""
        meta = resource["metadata"]
        now = await self._api.get(kinds.of(resource), meta["namespace"], meta["name"])
        return now is None or uid_of(now) != uid_of(resource) or bool(now["metadata"].get("deletionTimestamp"))

    async def _delete(self, live: Manifest, applied: Applied) -> None:
        meta, key = live["metadata"], key_of(live)
        try:
            await self._api.delete(kinds.of(live), meta["namespace"], meta["name"], uid_of(live))
            log.info("deleted %s", key)
        except ApiError as error:
            if not error.conflict:  # else that very object is gone already
                _sort(applied, Ref.of(live), error)
                log.warning("%s could not be deleted: %s", key, error)
                return
        if key.kind in kinds.OPTIONAL:
            self._store.forget(key)  # no watch shows that it is gone
        self._made.pop(key, None)

    async def _tell(self, pod: Manifest, applied: Applied) -> None:
        meta = pod["metadata"]
        try:
            told = await self._api.patch_status(kinds.of(pod), meta["namespace"], meta["name"], pod["status"], meta["resourceVersion"])
        except ApiError as error:
            if error.status != 404:
                _sort(applied, Ref.of(pod), error)
                log.warning("%s could not be given up: %s", key_of(pod), error)
            return
        self._concerns(self._store.note(told))
        log.info("gave up %s: %s", key_of(pod), pod["status"]["message"])


def _sort(applied: Applied, ref: Ref, error: ApiError) -> None:
    if error.unserved:
        applied.forbidden[ref] = "its API is not served in this cluster"
        applied.again(UNSERVED_S)
    elif error.forbidden:
        applied.forbidden[ref] = error.message
        applied.again(FORBIDDEN_S)
    elif error.refused:
        applied.refused[ref] = error.message
        applied.again(REFUSED_S)
    else:
        applied.failed[ref] = error.message
        if applied.error is None or (error.retry_after_s or 0) > (applied.error.retry_after_s or 0):
            applied.error = error
