"""Lists everything now and then, because a watch may die without a word: repairs the store, and queues every resource."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from banyan_operator.cluster import kinds
from banyan_operator.cluster.client import Api, ApiError
from banyan_operator.cluster.kinds import Kind
from banyan_operator.cluster.metrics import Metrics
from banyan_operator.cluster.queue import WorkQueue
from banyan_operator.cluster.store import Store

log = logging.getLogger(__name__)

CHILDREN_EVERY: Final = 4  # rounds


class Resync:
    """Keeps the store true. `changed` is told of every object that the watches had missed."""

    def __init__(
        self,
        store: Store,
        queue: WorkQueue,
        api: Api,
        metrics: Metrics,
        namespaces: Sequence[str],
        changed: Callable[[Mapping[str, Any]], None],
        every_s: float = 60.0,
    ) -> None:
        self._store, self._queue, self._api, self._metrics = store, queue, api, metrics
        self._namespaces: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self._changed, self._every_s = changed, every_s

    async def everything(self) -> None:
        """List every kind, and keep trying until each could be listed: nothing may be decided before."""
        for kind in (*kinds.CHILDREN, *kinds.RESOURCES):
            delay = 1.0
            while not await self._list(kind, first=True):
                await asyncio.sleep(delay)
                delay = min(10.0, delay * 2)

    async def run(self) -> None:
        """For ever: the resources in every round, one after the other their children too."""
        turn = 0
        while True:
            await asyncio.sleep(self._every_s)
            turn += 1
            for number, kind in enumerate(kinds.CHILDREN):
                if number % CHILDREN_EVERY == turn % CHILDREN_EVERY:
                    await self._list(kind)
            for kind in kinds.RESOURCES:
                await self._list(kind)
            for key in self._store.resources():
                self._queue.add(key)

    async def _list(self, kind: Kind, *, first: bool = False) -> bool:
        selector = "" if kind in kinds.RESOURCES else kinds.CHILD_SELECTOR
        for namespace in self._namespaces:
            try:
                items, version = await self._api.list(kind, namespace, labels=selector)
            except ApiError as error:
                log.warning("%s could not be listed: %s", kind.plural, error)
                return False
            self._metrics.last_event.labels(kind.kind).set_to_current_time()
            repaired = self._store.replace(kind, namespace, items, version)
            for manifest in repaired:
                self._changed(manifest)
            if repaired and not first:
                self._metrics.repairs.labels(kind.kind).inc(len(repaired))
                log.warning("resync: %d %s the watches had missed", len(repaired), kind.plural)
        return True
