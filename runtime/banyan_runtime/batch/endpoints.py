"""Addresses behind a server's name, and the choice of one for a line."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import math
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

RESOLVE_S: Final = 10.0
EJECT_S: Final = 10.0
HOME_LOAD: Final = 1.25  # share of the mean load up to which a line goes to its home

Resolve = Callable[[str, int], Awaitable[list[str]]]  # (host, port) -> addresses; raises OSError


class Balancer:
    """Choice among addresses. `now`: monotonic seconds."""

    def __init__(self, addresses: Iterable[str] = ()) -> None:
        self.addresses = tuple(addresses)
        self.outstanding: Counter[str] = Counter()  # requests in flight by address
        self._ejected_until: dict[str, float] = {}

    def choose(self, key: bytes, now: float, *, avoid: str = "") -> str:
        """Choose the home of `key`, so that prompts that begin alike share a cache; under load, the least loaded address.
        Ejected addresses, and `avoid`, are chosen only if there is no other.
        """
        if len(self.addresses) == 1:
            return self.addresses[0]
        able = [name for name in self.addresses if name != avoid] or self.addresses
        able = [name for name in able if self._ejected_until.get(name, now) <= now] or able
        mean = (sum(self.outstanding[name] for name in able) + 1) / len(able)
        home = max(able, key=lambda name: hashlib.blake2b(key, digest_size=8, key=name.encode()[:64]).digest())
        if self.outstanding[home] + 1 <= math.ceil(HOME_LOAD * mean):
            return home
        return min(able, key=self.outstanding.__getitem__)

    def eject(self, address: str, now: float) -> None:
        """Prefer other addresses for a while."""
        self._ejected_until[address] = now + EJECT_S


class Endpoints:
    """Balancer over the addresses of a host, which are resolved again every 10 s."""

    def __init__(self, host: str, port: int, *, resolve: Resolve | None = None) -> None:
        self._host = host
        self._port = port
        self._resolve = resolve or resolve_host
        self._single = is_single(host)
        self._resolved_at = float("-inf")
        self._lookup: asyncio.Task[None] | None = None
        self.balancer = Balancer([host] if self._single else ())

    async def choose(self, key: bytes, *, avoid: str = "") -> str:
        """Choose the address for a line. Raises OSError while the name has never been resolved."""
        now = time.monotonic()
        if not self._single and now - self._resolved_at > RESOLVE_S and self._lookup is None:
            self._lookup = asyncio.create_task(self._look_up())
        if not self.balancer.addresses:
            if self._lookup is not None:
                await asyncio.shield(self._lookup)
            if not self.balancer.addresses:
                raise OSError(f"the name {self._host} has no address")
        return self.balancer.choose(key, now, avoid=avoid)

    async def close(self) -> None:
        if self._lookup is not None:
            self._lookup.cancel()
            await asyncio.wait([self._lookup])

    async def _look_up(self) -> None:
        try:
            with contextlib.suppress(OSError):  # addresses outlive a failure of the name service
                if found := await self._resolve(self._host, self._port):
                    self.balancer.addresses = tuple(found)
        finally:
            self._lookup = None
            if self.balancer.addresses:
                self._resolved_at = time.monotonic()


async def resolve_host(host: str, port: int) -> list[str]:
    """Return all addresses of a name, of one family: a pod with two addresses is one pod. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family = found[0][0]
    return sorted({str(entry[4][0]) for entry in found if entry[0] == family})


def is_single(host: str) -> bool:
    """Whether a host is one endpoint whatever a name server says."""
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
