"""Which of its namespaces the operator can look after. One that was deleted, or whose rights are missing, stops none of the others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Final

from banyan_operator.cluster.client import Api, ApiError
from banyan_operator.kube.kinds import LEASE, RESOURCES

log = logging.getLogger(__name__)

LOOK_S: Final = 30.0
SAY_LOOKS: Final = 10  # between two words about the same
NOTHING: Final = "metadata.name=-"  # of a list: whether we may ask is all that is asked


class NamespacesChangedError(Exception):
    """The operator is to start again, for more namespaces or for fewer."""


async def reachable(api: Api, namespaces: Collection[str], lease: str | None) -> tuple[str, ...]:
    """Those in which we may list our resources and hold `lease` (None: none is held), or in which nobody can tell just now."""
    may = await asyncio.gather(*(_may_lead(api, namespace, lease) for namespace in namespaces))
    return tuple(namespace for namespace, one in zip(namespaces, may, strict=True) if one is not False)


async def watch(api: Api, present: Collection[str], absent: Collection[str], lease: str | None) -> None:
    """Raises NamespacesChangedError when one of either can be looked after no more, or again. Says now and then which can not."""
    looks = 0
    while len(present) + len(absent) > 1:  # of a single one everything else tells
        if absent and looks % SAY_LOOKS == 0:
            log.warning(
                "not looked after: namespace %s; the operator may list nothing, or hold no lease there. Create it, and give the operator's "
                "ServiceAccount the rights of the chart's RBAC (helm upgrade), or take it out of operator.namespaces",
                ", ".join(sorted(absent)),
            )
        looks += 1
        await asyncio.sleep(LOOK_S)
        if found := [one for one in sorted(absent) if await _may_lead(api, one, lease)]:
            raise NamespacesChangedError(f"namespace {', '.join(found)} can be looked after now")
        if lost := [one for one in sorted(present) if await _may_lead(api, one, lease) is False]:
            raise NamespacesChangedError(f"namespace {', '.join(lost)} can not be looked after any more")


async def _may_lead(api: Api, namespace: str, lease: str | None) -> bool | None:
    """None: nobody can tell."""
    try:
        for kind in RESOURCES:
            await api.list(kind, namespace, fields=NOTHING)
        if lease is not None and await api.get(LEASE, namespace, lease) is None:
            # one that nobody holds; where the namespace is going, or was never there, it is refused
            metadata = {"name": lease, "namespace": namespace}
            await api.create(LEASE, namespace, {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": metadata, "spec": {}})
    except ApiError as error:
        return False if error.status in (403, 404) else None
    return True
