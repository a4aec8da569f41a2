"""Lists of every kind, every five minutes. A list shows what a watch has missed, and the kinds that are not watched.

Kopf lists again when it has lost its place (410). It shows what is there then, and not what has gone meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from banyan_operator.cluster.client import Api, ApiError
from banyan_operator.cluster.metrics import Metrics
from banyan_operator.cluster.store import Store
from banyan_operator.kube import kinds
from banyan_operator.kube.kinds import Kind, Role
from banyan_operator.kube.objects import Key

log = logging.getLogger(__name__)

EVERY_S: Final = 300.0
RETRY_S: Final = 5.0  # at most, after a list that failed
SETTLE_S: Final = 1.0  # for a watch to tell how what is not in a list has ended


class Resync:
    """Brings the store in line with lists. `concerns` takes the resources that a difference concerns."""

    def __init__(
        self,
        store: Store,
        api: Api,
        metrics: Metrics,
        namespaces: Sequence[str],
        concerns: Callable[[Iterable[Key]], None],
        every_s: float = EVERY_S,
    ) -> None:
        self._store, self._api, self._metrics, self._concerns = store, api, metrics, concerns
        self._namespaces: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self._every_s = every_s
        self._failed: dict[Kind, str] = {}

    @property
    def trouble(self) -> str | None:
        """The kinds whose last list failed, or None."""
        return "; ".join(f"{kind.plural} can not be listed: {said}" for kind, said in self._failed.items()) or None

    async def run(self) -> None:
        """List everything now and then, until cancelled."""
        while True:
            await asyncio.sleep(self._every_s)
            await self.everything(behind_watches=True)

    async def everything(self, *, behind_watches: bool = False) -> None:
        """List every kind, and try again until each list succeeded. `behind_watches`: what differs is what the watches have missed."""
        left = list(kinds.WATCHED)
        delay = 1.0
        while left := [kind for kind in left if not await self._list(kind, behind_watches)]:
            await asyncio.sleep(delay)
            delay = min(RETRY_S, delay * 2)

    async def _list(self, kind: Kind, behind_watches: bool) -> bool:
        selector = "" if kind.role is Role.RESOURCE else kinds.CHILD_SELECTOR
        for namespace in self._namespaces:
            try:
                items, version = await self._api.list(kind, namespace, labels=selector)
            except ApiError as error:
                if kind.optional and (error.unserved or error.forbidden):  # told where one is wanted
                    break
                self._failed[kind] = f"{error}{_remedy(kind, error)}"
                log.warning("%s can not be listed: %s", kind.plural, self._failed[kind])
                return False
            self._metrics.last_event.labels(kind.kind).set_to_current_time()
            if behind_watches:
                await asyncio.sleep(SETTLE_S)
            concerned, repaired = self._store.note_list(kind, namespace, items, version)
            self._concerns(concerned)
            if repaired and behind_watches:
                self._metrics.repairs.labels(kind.kind).inc(repaired)
                log.info("resync: %d %s that the watches had not shown", repaired, kind.plural)
        self._failed.pop(kind, None)
        return True


def _remedy(kind: Kind, error: ApiError) -> str:
    """What is to be done where a kind of ours is not served: all others come with Kubernetes."""
    if not error.unserved or kind.role is not Role.RESOURCE:
        return ""
    return f". The definition {kind.plural}.{kind.group} is missing: kubectl apply --server-side -f crds/"
