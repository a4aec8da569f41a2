"""One operator acts, the others stand by: a Lease, renewed by its holder, taken over when it was not renewed for its duration.

Expiry is judged by the taker's own clock from when it first saw the lease unchanged, so that clocks need not agree.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from banyan_operator.cluster.client import Api, ApiError
from banyan_operator.kube import kinds
from banyan_operator.plan import Manifest

log = logging.getLogger(__name__)

DURATION_S: Final = 15.0
RENEW_DEADLINE_S: Final = 10.0
RETRY_S: Final = 2.0
CALL_S: Final = 4.0  # of one call, so that a hanging one leaves time for another
RELEASE_S: Final = 2.0


class LeaseLostError(Exception):
    """The lease could not be renewed in time; another may act by now."""


@dataclass
class Observed:
    """The lease as last seen, and since when it has not changed."""

    version: str
    since: float

    def expired(self, now: float) -> bool:
        return now - self.since >= DURATION_S


class Lease:
    """One candidate for the lease `name` in `namespace`."""

    def __init__(self, api: Api, namespace: str, name: str, identity: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._namespace, self._name, self._identity = namespace, name, identity
        self._clock = clock
        self._observed: Observed | None = None
        self._renewed: float | None = None
        self._taken = False  # another holds it, although we did

    @property
    def held(self) -> bool:
        """Whether it was won, and not given back."""
        return self._renewed is not None

    @property
    def age_s(self) -> float:
        """How long ago it was won or renewed last, s."""
        assert self._renewed is not None
        return self._clock() - self._renewed

    def deadline(self) -> float:
        """When another may act, by this process's monotonic clock."""
        return float("inf") if self._renewed is None else self._renewed + DURATION_S

    async def acquire(self) -> None:
        """Return once this candidate holds the lease; it has to be held (`hold`) from then on."""
        told = False
        while not await self._try():
            if not told:
                log.info("standing by: lease %s/%s is held by another", self._namespace, self._name)
                told = True
            await asyncio.sleep(RETRY_S)
        log.info("leading: %s holds lease %s/%s", self._identity, self._namespace, self._name)

    async def hold(self) -> None:
        """Renew until cancelled. Raises LeaseLostError when that did not work for RENEW_DEADLINE_S, or another has it."""
        while True:
            await asyncio.sleep(RETRY_S)
            if not await self._try() and (self._taken or self.age_s >= RENEW_DEADLINE_S):
                how = "is held by another" if self._taken else f"was not renewed for {self.age_s:.0f} s"
                raise LeaseLostError(f"lease {self._namespace}/{self._name} {how}")

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
            log.warning("the lease could not be released: %s", error)

    async def _try(self) -> bool:
        """Take or renew the lease if that is allowed now."""
        began = self._clock()
        try:
            async with asyncio.timeout(CALL_S):
                found = await self._api.get(kinds.LEASE, self._namespace, self._name)
                if found is None:
                    await self._api.create(kinds.LEASE, self._namespace, self._fresh())
                elif not self._free(found):
                    self._taken = self.held
                    return False
                else:
                    await self._api.replace(kinds.LEASE, self._namespace, self._name, self._next(found))
        except TimeoutError:
            log.warning("lease %s/%s: no answer within %.0f s", self._namespace, self._name, CALL_S)
            return False
        except ApiError as error:
            if error.status != 409:  # 409: another was quicker, which is how it should be
                log.warning("lease %s/%s: %s", self._namespace, self._name, error)
            return False
        self._renewed = began
        return True

    def _free(self, found: Manifest) -> bool:
        holder = found["spec"].get("holderIdentity") or ""
        version = found["metadata"]["resourceVersion"]
        now = self._clock()
        if self._observed is None or self._observed.version != version:
            self._observed = Observed(version, now)
        return holder in ("", self._identity) or self._observed.expired(now)

    def _fresh(self) -> Manifest:
        now = _micro_time()
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
        fresh, old = self._fresh()["spec"], found["spec"]
        if old.get("holderIdentity") == self._identity:
            fresh["acquireTime"] = old.get("acquireTime") or fresh["acquireTime"]
            fresh["leaseTransitions"] = old.get("leaseTransitions") or 0
        else:
            fresh["leaseTransitions"] = (old.get("leaseTransitions") or 0) + 1
        return {**found, "spec": fresh}


def _micro_time() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
