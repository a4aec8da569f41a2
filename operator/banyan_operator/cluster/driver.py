"""The workers: take a key, look at the world, decide (elsewhere), carry the decision out, come back when asked to."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from banyan_operator.cluster import kinds
from banyan_operator.cluster.carry import Carrier
from banyan_operator.cluster.client import Api, ApiError
from banyan_operator.cluster.kinds import Key, Kind
from banyan_operator.cluster.metrics import Metrics
from banyan_operator.cluster.observe import Observer
from banyan_operator.cluster.queue import WorkQueue
from banyan_operator.cluster.store import Store
from banyan_operator.plan import Manifest, Plan, Ref, Settings, World

log = logging.getLogger(__name__)

Reconcile = Callable[[Manifest, World, Settings], Plan]

DEADLINE_S: Final = 60.0  # of one reconcile
STRANGER_S: Final = 10.0  # an object in the way that no watch shows is looked for again after so long


class Driver:
    """Turns sightings into keys, and keys into work."""

    def __init__(
        self,
        *,
        store: Store,
        queue: WorkQueue,
        api: Api,
        observer: Observer,
        carrier: Carrier,
        metrics: Metrics,
        settings: Settings,
        reconcile: Reconcile,
    ) -> None:
        self._store, self._queue, self._api = store, queue, api
        self._observer, self._carrier, self._metrics = observer, carrier, metrics
        self._settings, self._decide = settings, reconcile
        self._settled: dict[Key, tuple[str, int]] = {}  # uid and generation that were applied whole, by this process
        self._refused: dict[Key, tuple[str, int, dict[Ref, str]]] = {}
        self.stopping = False
        self.last_beat = time.monotonic()  # when a worker last began or ended something, or had nothing to do

    # --- what is heard ---

    def seen(self, kind: Kind, type_: str | None, manifest: Mapping[str, Any]) -> None:
        """Note a watch's event, and queue the resource that it is about."""
        self._metrics.last_event.labels(kind.kind).set_to_current_time()
        place = (kind.kind, manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        before = self._store.get(*place)
        changed = self._store.remove(manifest) if type_ == "DELETED" else self._store.put(manifest)
        if changed:
            self.changed(manifest, before if type_ != "DELETED" else None)

    def changed(self, manifest: Mapping[str, Any], before: Manifest | None = None) -> None:
        """Queue what a changed object concerns. Our own writes to a resource's status concern nobody but the users of a server."""
        current = dict(manifest)
        if manifest["kind"] not in (kinds.INFERENCE_SERVER.kind, kinds.BATCH_JOB.kind):
            owner = kinds.owner_of(current)
            if owner is not None:
                self._queue.add(owner)
            return
        key = kinds.key_of(current)
        if before is None or _asked(before) != _asked(current):
            self._queue.add(key)
        if key.kind == kinds.INFERENCE_SERVER.kind:
            for job in self._store.users_of_server(key.namespace, key.name):
                self._queue.add(job)

    # --- what is done ---

    async def work(self) -> None:
        """One worker, until it is cancelled; it begins nothing once `stopping` is set."""
        while True:
            key, waited = await self._next()
            if self.stopping:
                self._queue.done(key)
                return
            name = key.controller
            self._metrics.waited.labels(name, name).observe(waited)
            self._metrics.active.labels(name).inc()
            began = self.last_beat = time.monotonic()
            try:
                await self._attempt(key)
            finally:
                seconds = time.monotonic() - began
                self._metrics.active.labels(name).dec()
                self._metrics.seconds.labels(name).observe(seconds)
                self._metrics.worked.labels(name, name).observe(seconds)
                self.last_beat = time.monotonic()
                self._queue.done(key)

    async def drain(self, timeout_s: float) -> None:
        """Begin nothing more, and wait until what is at work is done, or for so long."""
        self.stopping = True
        try:
            await asyncio.wait_for(self._queue.idle(), timeout_s)
        except TimeoutError:
            log.warning("not everything was done within %.0f s; the next operator goes on with it", timeout_s)

    async def _next(self) -> tuple[Key, float]:
        while True:
            try:
                return await asyncio.wait_for(self._queue.get(), 10)
            except TimeoutError:
                self.last_beat = time.monotonic()  # nothing to do is a sign of life too

    async def _attempt(self, key: Key) -> None:
        name = key.controller
        try:
            again_s = await asyncio.wait_for(self.reconcile(key), DEADLINE_S)
        except ApiError as error:
            delay = self._queue.retry(key, conflict=error.status in (404, 409))
            if error.retry_after_s is not None and error.retry_after_s > delay:
                self._queue.add_after(key, error.retry_after_s)
            self._metrics.reconciles.labels(name, "error").inc()
            self._metrics.errors.labels(name).inc()
            if error.refused:
                self._metrics.terminal_errors.labels(name).inc()
            log.warning("%s: %s; again in %.1f s", key, error, delay)
        except TimeoutError:
            delay = self._queue.retry(key)
            self._metrics.reconciles.labels(name, "error").inc()
            self._metrics.errors.labels(name).inc()
            log.warning("%s: not done within %.0f s; again in %.1f s", key, DEADLINE_S, delay)
        except Exception:
            delay = self._queue.retry(key)
            self._metrics.reconciles.labels(name, "error").inc()
            self._metrics.panics.labels(name).inc()
            log.exception("%s: a bug of the operator; again in %.1f s", key, delay)
        else:
            self._queue.backlog.succeeded(key)
            self._metrics.reconciles.labels(name, "success" if again_s is None else "requeue_after").inc()
            if again_s is not None:
                self._queue.add_after(key, again_s)

    async def reconcile(self, key: Key) -> float | None:
        """Bring one resource closer to what it asks for; returns when to look again, s, or None."""
        resource = self._store.resource(key)
        if resource is None:
            self._settled.pop(key, None)
            self._refused.pop(key, None)
            return None
        wanted = (resource["metadata"]["uid"], resource["metadata"].get("generation") or 0)
        world = await self._observer.world(key, resource)
        world = dataclasses.replace(world, refused=self._refused_of(key, wanted))
        plan = self._decide(resource, world, self._settings)
        unseen = await self._unseen(resource, plan)
        if unseen:
            world = dataclasses.replace(world, children=(*world.children, *unseen))
            plan = self._decide(resource, world, self._settings)
        outcome = await self._carrier.objects(resource, plan, repairing=self._settled.get(key) == wanted)
        if outcome.refused != dict(world.refused):
            # The status has to tell at once what the API server has just said.
            self._refused[key] = (*wanted, outcome.refused)
            world = dataclasses.replace(world, refused=outcome.refused)
            plan = self._decide(resource, world, self._settings)
        await self._carrier.status(resource, plan.status)
        # "Created" and the like would be a lie where something was refused.
        await self._carrier.events(resource, [event for event in plan.events if event.type == "Warning" or not outcome.refused])
        if outcome.failed:
            raise outcome.failed[0]
        self._settled[key] = wanted
        times = [plan.requeue_after_s, outcome.wait_s, STRANGER_S if unseen else None]
        if world.missing:
            times.append(self._observer.references.retry_after_s(key.namespace, world.missing))
        return min((t for t in times if t is not None), default=None)

    def _refused_of(self, key: Key, wanted: tuple[str, int]) -> Mapping[Ref, str]:
        uid, generation, refused = self._refused.get(key, ("", 0, {}))
        return refused if (uid, generation) == wanted else {}

    async def _unseen(self, resource: Manifest, plan: Plan) -> tuple[Manifest, ...]:
        """Objects that the plan would make but that exist: a stranger's, or one of ours that lost its labels."""
        found: list[Manifest] = []
        for manifest in plan.apply:
            meta = manifest["metadata"]
            if self._store.get(manifest["kind"], meta["namespace"], meta["name"]) is None:
                live = await self._api.get(kinds.of(manifest), meta["namespace"], meta["name"])
                if live is not None:
                    found.append(live)
        return tuple(found)


def _asked(resource: Manifest) -> tuple[Any, ...]:
    """What of a resource its reconcile depends on, besides its status."""
    meta = resource["metadata"]
    return meta.get("uid"), meta.get("generation"), meta.get("labels"), meta.get("annotations"), meta.get("deletionTimestamp")
