"""One operator acts, the others stand by: a Lease, renewed by its holder, taken over when it was not renewed for its duration.

Expiry is judged by the taker's own clock from when it first saw the lease unchanged, so that clocks need not agree.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from banyan_operator.cluster.client import Api, ApiError
from banyan_operator.kube import kinds
from banyan_operator.plan import Manifest

log = logging.getLogger(__name__)

DURATION_S: Final = 15.0
RENEW_DEADLINE_S: Final = 10.0  # not renewed for so long, the lease counts as lost,
GONE_S: Final = 14.0  # and after so long nothing of this process may be left
RETRY_S: Final = 2.0
CALL_S: Final = 4.0  # of one try, so that a hanging one leaves time for another
RELEASE_S: Final = 2.0


class RivalError(Exception):
    """Another operator began to look after the same namespaces in the same moment."""


class LeaseLostError(Exception):
    """The lease could not be renewed in time; another may act by now."""


@dataclass
class Observed:
    """The lease as last seen, and since when it has not changed."""

    version: str
    since: float
    holder: str

    def expired(self, now: float) -> bool:
        return now - self.since >= DURATION_S


class Rivals:
    """Operators that look after some of the same namespaces, and hold another lease: one for the whole cluster, where this one is
    for some namespaces, or one for some, where this one is for all."""

    def __init__(
        self,
        api: Api,
        name: str,
        namespaces: Sequence[str],
        cluster_wide: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`namespaces`: what this operator is for; none: all. `cluster_wide`: the namespace of the lease for the whole cluster; "":
        it is not looked at."""
        self._api, self._name, self._clock = api, name, clock
        self._namespaces, self._cluster_wide = namespaces, cluster_wide
        self._observed: dict[str, Observed] = {}
        self.trouble: str | None = None
        """Why nobody can tell whether another leads, while that is so."""

    async def gone(self) -> None:
        """Return when none leads."""
        told = None
        while True:
            try:
                rival, self.trouble = await self.found(), None
            except ApiError as error:
                self.trouble = f"whether another operator looks after the same namespaces can not be seen: {error}"
                if error.status == 403:
                    self.trouble += "; give its ServiceAccount the rights of the chart's RBAC"
                rival = None
            if rival is None and self.trouble is None:
                return
            why = rival or self.trouble
            if why != told:
                level = logging.INFO if self.trouble is None else logging.WARNING
                log.log(level, "standing by, because of others for the same namespaces: %s", why)
                told = why
            await asyncio.sleep(RETRY_S)

    async def found(self) -> str | None:
        """One that leads, as a text, or None. Raises ApiError where the leases can not be read: then one may."""
        leases = [one for one in await self._leases() if self._live(one)]
        return next((f"lease {one['metadata']['namespace']}/{self._name} is held by {_holder(one)}" for one in leases), None)

    async def _leases(self) -> list[Manifest]:
        if self._namespaces:
            places = {self._cluster_wide} - {"", *self._namespaces}
            found = [await self._api.get(kinds.LEASE, place, self._name) for place in places]
            return [one for one in found if one is not None]
        listed, _ = await self._api.list(kinds.LEASE, None, fields=f"metadata.name={self._name}")
        return [one for one in listed if one["metadata"]["namespace"] != self._cluster_wide and one["metadata"]["name"] == self._name]

    def _live(self, lease: Manifest) -> bool:
        place, version = lease["metadata"]["namespace"], lease["metadata"]["resourceVersion"]
        if place not in self._observed or self._observed[place].version != version:
            self._observed[place] = Observed(version, self._clock(), _holder(lease))
        return bool(_holder(lease)) and not self._observed[place].expired(self._clock())


class Lease:
    """One candidate for the lease `name` in `namespace`. `clock` gives seconds that only grow, `unix` those that are written down."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        identity: str,
        clock: Callable[[], float] = time.monotonic,
        unix: Callable[[], float] = time.time,
        gone: set[str] | None = None,
    ) -> None:
        """`gone`: holders of which a lease was seen to expire, shared by the leases of one candidate. Who does not renew one is over as
        a whole (`hold`, the dead man's timer), so none of its others need be waited for."""
        self._api = api
        self._namespace, self._name, self._identity = namespace, name, identity
        self._clock, self._unix = clock, unix
        self._gone = set[str]() if gone is None else gone
        self._observed: Observed | None = None
        self._mine: Manifest | None = None  # as last written: the next renewal needs no look
        self._renewed: float | None = None
        self._taken = False  # another holds it, although we did

    def __str__(self) -> str:
        return f"lease {self._namespace}/{self._name}"

    @property
    def held(self) -> bool:
        """Whether it was won, and not given back."""
        return self._renewed is not None

    @property
    def age_s(self) -> float:
        """How long ago it was won or renewed last, s; 0: it is not held."""
        return 0.0 if self._renewed is None else self._clock() - self._renewed

    def deadline(self) -> float:
        """When nothing of this process may be left, by its clock: another may act soon after."""
        return float("inf") if self._renewed is None else self._renewed + GONE_S

    async def acquire(self) -> None:
        """Return once this candidate holds the lease; it has to be held (`hold`) from then on."""
        told = ""
        while not await self._try():
            holder = self._holder()
            if holder != told:
                log.info("standing by: %s is held by %s", self, holder or "nobody, but could not be taken")
                told = holder
            await asyncio.sleep(RETRY_S)
        log.info("leading: %s holds %s", self._identity, self)

    async def hold(self) -> None:
        """Renew until cancelled. Raises LeaseLostError when that did not work for RENEW_DEADLINE_S, or another has it."""
        while True:
            await asyncio.sleep(min(RETRY_S, max(0.0, RENEW_DEADLINE_S - self.age_s)))
            if not await self._try() and (self._taken or self.age_s >= RENEW_DEADLINE_S):
                how = f"is held by {self._holder()}" if self._taken else f"was not renewed for {self.age_s:.0f} s"
                raise LeaseLostError(f"{self} {how}")

    async def release(self) -> None:
        """Let the next one take over at once. Best effort: an expired lease does the same, later."""
        if self._renewed is None:
            return
        self._renewed = None
        try:
            async with asyncio.timeout(RELEASE_S):
                found = await self._api.get(kinds.LEASE, self._namespace, self._name)
                if found is not None and found["spec"].get("holderIdentity") == self._identity:
                    found["spec"]["holderIdentity"] = ""
                    await self._api.replace(kinds.LEASE, self._namespace, self._name, found)
        except (ApiError, TimeoutError) as error:
            log.warning("%s could not be released: %s", self, error)

    # --- one try ---

    async def _try(self) -> bool:
        """Take or renew the lease if that is allowed now."""
        began = self._clock()
        limit = CALL_S if not self.held else max(0.1, min(CALL_S, RENEW_DEADLINE_S - self.age_s))
        try:
            async with asyncio.timeout(limit):
                found = self._mine or await self._api.get(kinds.LEASE, self._namespace, self._name)
                if found is None:
                    self._mine = await self._api.create(kinds.LEASE, self._namespace, self._fresh())
                elif not self._free(found):
                    self._taken = self.held
                    return False
                else:
                    self._mine = await self._api.replace(kinds.LEASE, self._namespace, self._name, self._next(found))
        except (ApiError, TimeoutError) as error:
            known, self._mine = self._mine, None
            if isinstance(error, TimeoutError):
                log.warning("%s: no answer within %.0f s", self, limit)
            elif error.status != 409:
                log.warning("%s: %s", self, error)
            elif known is not None:  # somebody else wrote it: look whether it is still ours
                return await self._try()
            return False
        self._renewed = began
        return True

    def _free(self, found: Manifest) -> bool:
        version, now = found["metadata"]["resourceVersion"], self._clock()
        holder = _holder(found)
        if self._observed is None or self._observed.version != version:
            self._observed = Observed(version, now, holder)
        if holder and self._observed.expired(now):
            self._gone.add(holder)
        return holder in ("", self._identity) or holder in self._gone

    def _holder(self) -> str:
        return self._observed.holder if self._observed is not None else ""

    def _fresh(self) -> Manifest:
        now = datetime.fromtimestamp(self._unix(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "apiVersion": kinds.LEASE.api_version,
            "kind": kinds.LEASE.kind,
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": int(DURATION_S),
                "acquireTime": now,
                "renewTime": now,
                "leaseTransitions": 0,
            },
        }

    def _next(self, found: Manifest) -> Manifest:
        fresh, old = self._fresh()["spec"], found.get("spec") or {}
        if old.get("holderIdentity") == self._identity:
            fresh["acquireTime"] = old.get("acquireTime") or fresh["acquireTime"]
            fresh["leaseTransitions"] = old.get("leaseTransitions") or 0
        else:
            fresh["leaseTransitions"] = (old.get("leaseTransitions") or 0) + 1
        return {**found, "spec": fresh}


def _holder(lease: Manifest) -> str:
    return (lease.get("spec") or {}).get("holderIdentity") or ""
