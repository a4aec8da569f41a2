"""The addresses behind a server's name, and which of them a line goes to."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import math
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

RESOLVE_S: Final = 10.0
EJECT_S: Final = 10.0
HOME_LOAD: Final = 1.25  # so much of the mean load a line's home may have before the line goes elsewhere

Resolve = Callable[[str, int], Awaitable[list[str]]]  # (host, port) -> addresses; raises OSError


@dataclass(slots=True)
class _Address:
    outstanding: int = 0
    ejected_until: float = float("-inf")


class Balancer:
    """Chooses among addresses, without clock or chance: `now` is in seconds, a draw is from [0, 1)."""

    def __init__(self, addresses: Iterable[str] = ()) -> None:
        self._known: dict[str, _Address] = {}
        self._listed: tuple[str, ...] = ()
        self.update(addresses)

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._listed

    @property
    def known(self) -> Collection[str]:
        """Those there are now, and those where something still runs."""
        return self._known.keys()

    def update(self, addresses: Iterable[str]) -> None:
        """These addresses there are now. What runs at others may end there, but nothing new goes to them."""
        self._listed = tuple(dict.fromkeys(addresses))
        gone = [name for name, known in self._known.items() if name not in self._listed and not known.outstanding]
        for name in gone:
            del self._known[name]
        for name in self._listed:
            self._known.setdefault(name, _Address())

    def choose(self, key: bytes, now: float, draws: tuple[float, float], *, avoid: str = "") -> str:
        """The address for a line: its home by `key`, so that equal beginnings meet one cache; under load, the lesser of two
        drawn ones. `avoid`: where the line failed last. Ejected addresses are taken only if there is no other.
        """
        assert self._listed
        if len(self._listed) == 1:
            return self._listed[0]
        able = [name for name in self._listed if self._known[name].ejected_until <= now and name != avoid]
        able = able or [name for name in self._listed if name != avoid]
        load = {name: self._known[name].outstanding for name in able}
        mean = (sum(load.values()) + 1) / len(able)
        home = max(able, key=lambda name: _weight(name, key))
        if load[home] + 1 <= math.ceil(HOME_LOAD * mean):
            return home
        one, two = (able[int(draw * len(able))] for draw in draws)
        return one if load[one] <= load[two] else two

    def begin(self, address: str) -> None:
        self._known.setdefault(address, _Address()).outstanding += 1

    def end(self, address: str) -> None:
        known = self._known[address]
        known.outstanding -= 1
        if not known.outstanding and address not in self._listed:
            del self._known[address]

    def eject(self, address: str, now: float) -> None:
        """It refused or cut: others first for a while."""
        if address in self._known:
            self._known[address].ejected_until = now + EJECT_S


def _weight(address: str, key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=8, key=address.encode()[:64]).digest()


class Endpoints:
    """A balancer whose addresses are looked up again every 10 s, when a line is to be sent."""

    def __init__(self, host: str, port: int, *, resolve: Resolve | None = None) -> None:
        self._host = host
        self._port = port
        self._resolve = resolve or resolve_host
        self._single = is_single(host)
        self._resolved_at = float("-inf")
        self._lookup: asyncio.Task[None] | None = None
        self.balancer = Balancer([host] if self._single else ())

    async def choose(self, key: bytes, draws: tuple[float, float], *, avoid: str = "") -> str:
        """The address for a line. Raises OSError while the name has never been resolved."""
        now = time.monotonic()
        if not self._single and now - self._resolved_at > RESOLVE_S and self._lookup is None:
            self._lookup = asyncio.create_task(self._look_up())
        if not self.balancer.addresses:
            if self._lookup is not None:
                await asyncio.shield(self._lookup)
            if not self.balancer.addresses:
                raise OSError(f"the name {self._host} has no address")
        return self.balancer.choose(key, now, draws, avoid=avoid)

    async def close(self) -> None:
        if self._lookup is not None:
            self._lookup.cancel()
            await asyncio.wait([self._lookup])

    async def _look_up(self) -> None:
        try:
            with contextlib.suppress(OSError):  # a name server that is away takes no server away
                if found := await self._resolve(self._host, self._port):
                    self.balancer.update(found)
        finally:
            self._lookup = None
            if self.balancer.addresses:
                self._resolved_at = time.monotonic()


async def resolve_host(host: str, port: int) -> list[str]:
    """All addresses of a name, of one family: a pod with two addresses is still one pod. Raises OSError."""
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
