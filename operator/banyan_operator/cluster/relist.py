"""Exact lists. Kopf lists again when it has lost its place (410), and shows what is there, not what has gone meanwhile.

So whatever kopf lists is listed once more here, whole, and the store brought in line with it. An audit of everything, once an hour,
is for what nobody has thought of; the counter of its repairs tells. And for the kinds that no watch shows, since their API may be
missing.
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

SETTLE_S: Final = 1.0  # the objects of one of kopf's lists come one by one
AGAIN_S: Final = 5.0  # after a list that failed
BEGUN_S: Final = 30.0  # for kopf to have asked for all kinds, behind the first


class UnwatchedError(Exception):
    """Kopf does not watch everything that it was told to."""


class Relist:
    """Keeps the store true. `concerns` is told what resources a difference concerns."""

    def __init__(
        self,
        store: Store,
        api: Api,
        metrics: Metrics,
        namespaces: Sequence[str],
        concerns: Callable[[Iterable[Key]], None],
        audit_s: float = 3600.0,
    ) -> None:
        self._store, self._api, self._metrics, self._concerns = store, api, metrics, concerns
        self._namespaces: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self._audit_s = audit_s
        self._paths = {kind.path(namespace): kind for kind in kinds.WATCHED for namespace in self._namespaces}
        self._wanted: set[Kind] = set()
        self._news = asyncio.Event()
        self._failed: dict[Kind, str] = {}
        self._refused: set[str] = set()  # paths of watches
        self._unwatched = {path for path, kind in self._paths.items() if not kind.optional}  # of which kopf has asked for nothing yet
        self._begun = asyncio.Event()  # for any it has

    @property
    def trouble(self) -> str | None:
        """What could not be listed or watched when it was last tried, or None."""
        told = [f"{kind.plural} can not be listed: {said}" for kind, said in self._failed.items()]
        blind = sorted({self._paths[path].plural for path in self._refused} - {kind.plural for kind in self._failed})
        told += [
            f"{plural} can not be watched (403): give the operator's ServiceAccount the rights of the chart's RBAC" for plural in blind
        ]
        return "; ".join(told) or None

    def asked(self, path: str) -> None:
        """Kopf asks for what is at this path. Whatever the answer, it has not passed over it: it asks again until it is told, or an error
        ends its life."""
        if path in self._paths:
            self._unwatched.discard(path)
            self._begun.set()

    def listed(self, path: str) -> None:
        """Kopf has listed what is at this path: list it soon, too."""
        if (kind := self._paths.get(path)) is not None:
            self._ask(kind)

    def watched(self, path: str, allowed: bool) -> None:
        """Kopf has begun to watch what is at this path, or was refused to: it is blind there then, whatever was listed."""
        if path in self._paths:
            (self._refused.discard if allowed else self._refused.add)(path)

    async def all_watched(self) -> None:
        """Return when every kind should have been asked for. Raises UnwatchedError where one was not.

        Kopf looks once for what is served, and passes over what is not. That is told by other pages than the lists that were asked
        before, and of a kind that has just come (its CRD was applied) they tell later. How long it looks depends on the API server; what it
        finds it asks for at once.
        """
        await self._begun.wait()
        await asyncio.sleep(BEGUN_S)
        if left := sorted({self._paths[path].plural for path in self._unwatched}):
            raise UnwatchedError(f"{', '.join(left)} can be listed, but no watch has begun within {BEGUN_S:.0f} s")

    async def everything(self) -> None:
        """List every kind, and keep trying until each could be listed: nothing may be decided before."""
        left = list(kinds.WATCHED)
        delay = 1.0
        while left := [kind for kind in left if not await self._list(kind, first=True)]:
            await asyncio.sleep(delay)
            delay = min(AGAIN_S, delay * 2)

    async def run(self) -> None:
        """For ever: what was asked for, and everything now and then."""
        while True:
            await self._asked()
            asked, self._wanted = self._wanted or set(kinds.WATCHED), set()
            for kind in kinds.WATCHED:
                if kind in asked and not await self._list(kind):
                    self._ask(kind)
            if self._wanted:
                await asyncio.sleep(AGAIN_S)

    async def _asked(self) -> None:
        """Return when something is asked for, or when the next audit is due."""
        if self._wanted:
            return
        self._news.clear()
        try:
            async with asyncio.timeout(self._audit_s):
                await self._news.wait()
        except TimeoutError:
            return
        await asyncio.sleep(SETTLE_S)

    def _ask(self, kind: Kind) -> None:
        self._wanted.add(kind)
        self._news.set()

    async def _list(self, kind: Kind, *, first: bool = False) -> bool:
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
            concerned, repaired = self._store.note_list(kind, namespace, items, version)
            self._concerns(concerned)
            if repaired and not first:
                self._metrics.repairs.labels(kind.kind).inc(repaired)
                log.info("relist: %d %s that the watches had not shown", repaired, kind.plural)
        self._failed.pop(kind, None)
        return True


def _remedy(kind: Kind, error: ApiError) -> str:
    """What is to be done where a kind of ours is not served: all others come with Kubernetes."""
    if not error.unserved or kind.role is not Role.RESOURCE:
        return ""
    return f". The definition {kind.plural}.{kind.group} is missing: kubectl apply --server-side -f crds/"
