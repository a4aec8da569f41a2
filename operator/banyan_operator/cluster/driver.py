"""The workers: take a key, gather what is around it, decide (elsewhere), apply, report, come back when asked to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from banyan_operator.cluster.apply import Applier
from banyan_operator.cluster.client import ApiError
from banyan_operator.cluster.gather import Gatherer
from banyan_operator.cluster.metrics import Metrics
from banyan_operator.cluster.queue import WorkQueue
from banyan_operator.cluster.report import Reporter
from banyan_operator.cluster.store import Store
from banyan_operator.kube.kinds import Kind, Manifest
from banyan_operator.kube.objects import Key, key_of
from banyan_operator.plan import Settings, World
from banyan_operator.reconcile import Decision

log = logging.getLogger(__name__)

Decide = Callable[[Manifest, World, Settings], Decision]

DEADLINE_S: Final = 60.0  # of one reconcile


class Driver:
    """Turns sightings into keys, and keys into work."""

    def __init__(
        self,
        *,
        store: Store,
        queue: WorkQueue,
        gatherer: Gatherer,
        applier: Applier,
        reporter: Reporter,
        metrics: Metrics,
        settings: Settings,
        decide: Decide,
    ) -> None:
        self._store, self._queue = store, queue
        self._gatherer, self._applier, self._reporter = gatherer, applier, reporter
        self._metrics, self._settings, self._decide = metrics, settings, decide
        self.stopping = False

    def seen(self, kind: Kind, type_: str | None, manifest: Mapping[str, Any]) -> None:
        """Note a watch's event (its type, None in a list), and queue the resources that it concerns."""
        self._metrics.last_event.labels(kind.kind).set_to_current_time()
        self.concerns(self._store.note_gone(manifest) if type_ == "DELETED" else self._store.note(manifest))

    def concerns(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._queue.add(key)

    async def reconcile(self, key: Key) -> float | None:
        """Bring one resource closer to what it asks for; returns when to look again, s, or None. Raises ApiError."""
        resource = self._store.get(key)
        if resource is None:
            return None
        world = await self._gatherer.world(key, resource)
        decision = self._decide(resource, world, self._settings)
        unseen = self._unseen((key_of(child), child) for child in world.children)
        applied = await self._applier.apply(resource, decision.plan, unseen)
        if applied.unseen and applied.error is None:  # what is to become of them is decided with them
            unseen = self._unseen((unseen | applied.unseen).items())
            world = replace(world, children=(*self._store.children(key), *unseen.values()), remains=self._store.remains(key))
            decision = self._decide(resource, world, self._settings)
            applied = await self._applier.apply(resource, decision.plan, unseen)
        self._metrics.refused(key.kind, len(applied.refused) + len(applied.forbidden))
        report = decision.report(applied)
        try:
            await self._reporter.write(resource, report)
        except ApiError as error:
            raise _later(error, applied.error) from error
        if applied.error is not None:
            raise applied.error
        times = (report.requeue_after_s, applied.wait_s, self._gatherer.look_again_s(key, world))
        return min((t for t in times if t is not None), default=None)

    def _unseen(self, children: Iterable[tuple[Key, Manifest]]) -> dict[Key, Manifest]:
        """Those that no watch shows."""
        return {key: child for key, child in children if self._store.get(key) is None}

    # --- workers ---

    async def work(self) -> None:
        """One worker, until it is cancelled; it begins nothing once `stopping` is set."""
        while not self.stopping:
            key, waited = await self._queue.get()
            if self.stopping:
                self._queue.done(key)
                return
            with self._metrics.working(key.kind, waited):
                try:
                    await self._attempt(key)
                finally:
                    self._queue.done(key)

    async def drain(self, timeout_s: float) -> None:
        """Begin nothing more, and wait until what is at work is done, or for so long."""
        self.stopping = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._queue.idle()
        except TimeoutError:
            log.warning("not everything was done within %.0f s; the next operator goes on with it", timeout_s)

    async def _attempt(self, key: Key) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                again_s = await self.reconcile(key)
        except ApiError as error:
            delay = self._queue.retry(key, conflict=error.conflict or error.status == 404, not_before_s=error.retry_after_s)
            self._metrics.failed(key.kind, refused=error.refused)
            log.warning("%s: %s; again in %.1f s", key, error, delay)
        except TimeoutError:
            delay = self._queue.retry(key)
            self._metrics.failed(key.kind)
            log.warning("%s: not done within %.0f s; again in %.1f s", key, DEADLINE_S, delay)
        except Exception:
            delay = self._queue.retry(key)
            self._metrics.failed(key.kind, bug=True)
            log.exception("%s: a bug of the operator; again in %.1f s", key, delay)
        else:
            self._queue.succeeded(key)
            self._metrics.succeeded(key.kind, again=again_s is not None)
            if again_s is not None:
                self._queue.add_after(key, again_s)


def _later(error: ApiError, earlier: ApiError | None) -> ApiError:
    """Of two failures of one reconcile the one that asks for the longer wait (Retry-After)."""
    return earlier if earlier is not None and (earlier.retry_after_s or 0) > (error.retry_after_s or 0) else error
