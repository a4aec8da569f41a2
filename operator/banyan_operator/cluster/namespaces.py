"""Which of its namespaces the operator can look after. One that was deleted, or whose rights are missing, stops none of the others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import Final

from banyan_operator.cluster.client import Api, ApiError
from banyan_operator.kube.kinds import RESOURCES

log = logging.getLogger(__name__)

LOOK_S: Final = 30.0


class NamespaceFoundError(Exception):
    """One that was absent can be looked after: the next life does."""


async def reachable(api: Api, namespaces: Sequence[str]) -> tuple[str, ...]:
    """Those in which we may list our resources, or in which nobody can tell just now."""
    may = await asyncio.gather(*(_may_list(api, namespace) for namespace in namespaces))
    return tuple(namespace for namespace, one in zip(namespaces, may, strict=True) if one)


async def await_any(api: Api, absent: Collection[str]) -> None:
    """Raises NamespaceFoundError when one of them can be looked after; says now and then that they can not."""
    while absent:
        log.warning(
            "not looked after: namespace %s; the operator may list nothing there. Create it, and give its ServiceAccount the rights of the "
            "chart's RBAC (helm upgrade), or take it out of operator.namespaces",
            ", ".join(sorted(absent)),
        )
        for _ in range(10):
            await asyncio.sleep(LOOK_S)
            if found := [one for one in sorted(absent) if await _may_list(api, one, unknown=False)]:
                raise NamespaceFoundError(f"namespace {', '.join(found)} can be looked after now")


async def _may_list(api: Api, namespace: str, *, unknown: bool = True) -> bool:
    try:
        for kind in RESOURCES:
            await api.list(kind, namespace)
    except ApiError as error:
        return False if error.status in (403, 404) else unknown
    return True
