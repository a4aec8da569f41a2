"""HTTP on the wire: uvicorn, with connections that are bounded in what they cost and in how long they take (`connection.py`).

uvicorn's parser reads headers without end and waits for ever. Here a request's head is counted before the parser sees it, a
body has to make progress, an answer has to be taken, and what is no valid request gets the API's error object. All clocks are
looked at in one sweep a second, so a request costs no timers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import resource
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from email.utils import formatdate
from typing import Any, Final, Protocol

import uvicorn
from starlette.types import ASGIApp

from banyan_runtime.errors import ConfigError
from banyan_runtime.front.errors import ApiError
from banyan_runtime.server.connection import RESERVED_FILES, Connection, Limits

log = logging.getLogger("banyan.http")

BACKLOG: Final = 2048  # connections that may wait to be accepted
CONNECTIONS_CLOSE_S: Final = 2  # at the end, for clients to take their answers
HANDLERS_END_S: Final = 1  # from then on, for handlers to notice that their clients are gone
STILL_SENT_HERE_S: Final = 1.5  # since somebody elsewhere asked last: until whoever spreads the requests seems to know that we go
SWEEP_EVERY_S: Final = 1.0
PROBE_EVERY_S: Final = 0.1
ASKED_LATELY_S: Final = 30.0  # before we go: somebody elsewhere may have more to ask
FEWEST_CONNECTIONS: Final = 16


class Elsewhere(Protocol):
    """What other processes of this server answer. A request goes there with its connection."""

    def answers(self, begun: bytes) -> bool:
        """Whether the request that begins so is to be answered there; of less than a request line nothing is."""
        ...

    def may_stay(self, method: bytes, url: bytes) -> bool:
        """Whether it can be answered here, too."""
        ...

    def take(self, connection: int, begun: bytes) -> bool:
        """Pass on a descriptor and what was read of it. False: nobody is there to take it."""
        ...


class Http(uvicorn.Server):
    """uvicorn without its signal handlers: when to stop is the business of whoever runs it."""

    def __init__(self, app: ASGIApp, limits: Limits | None = None) -> None:
        """Raises ConfigError where the system grants too few open files."""
        limits = limits or Limits()
        self.limits = replace(limits, connections=min(limits.connections, _room()))
        self.draining = False
        self.on_refused: Callable[[int], None] = lambda status: None  # the status of an answer that the application did not give
        self.elsewhere: Elsewhere | None = None
        self.half_closed: set[Connection] = set()
        self.asked_from_afar = float("-inf")  # when a client that is not on this machine was last connected to ask more than how we are
        self._was_crowded = False
        self._news = asyncio.Event()  # somebody is there again, or it is time to end
        protocol: Any = functools.partial(Connection, http=self)
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                http=protocol,
                ws="none",
                lifespan="on",
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=int(self.limits.idle_s),
                timeout_graceful_shutdown=CONNECTIONS_CLOSE_S + HANDLERS_END_S,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield

    @property
    def sought(self) -> bool:
        """Whether some client may still send a request: on a connection that it has, or on new ones, for a load balancer
        (kube-proxy on another node) may learn seconds after us that we go."""
        if time.monotonic() - self.asked_from_afar < STILL_SENT_HERE_S:
            return True
        open_ones = (each for each in self.server_state.connections if isinstance(each, Connection))
        return any(not each.only_probed and not each.transport.is_closing() for each in open_ones)

    def drain(self) -> None:
        """From now on every answer is the last of its connection, and says so."""
        self.draining = True
        now = time.monotonic()
        if now - self.asked_from_afar < ASKED_LATELY_S:
            self.asked_from_afar = now
        for each in list(self.server_state.connections):
            assert isinstance(each, Connection)
            each.close_after_answer()

    async def take(self, connection: socket.socket, begun: bytes) -> None:
        """Serve a connection of which another process has read this much."""
        protocol = functools.partial(
            Connection,
            http=self,
            begun=begun,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        try:
            await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)
        except OSError:  # it is gone already
            connection.close()

    @property
    def crowded(self) -> bool:
        return len(self.server_state.connections) > self.limits.connections

    def end(self) -> None:
        """Stop, once the answers that are under way are given."""
        self.should_exit = True
        self._news.set()

    def opened(self) -> None:
        """A connection has begun. With the first one time goes on, for which nobody cared before."""
        if len(self.server_state.connections) == 1:
            self._date()
            self._news.set()

    def closed_half(self, connection: Connection) -> None:
        """The client has ended its side: to be probed from now on."""
        if not self.half_closed:
            self._news.set()
        self.half_closed.add(connection)

    async def main_loop(self) -> None:
        """uvicorn's looks ten times a second whether anybody is there or not; here nothing moves while nobody is connected."""
        swept = float("-inf")
        while not self.should_exit:
            self._news.clear()
            now = time.monotonic()
            for connection in list(self.half_closed):
                self._look_at(connection, Connection.probe, now)
            if now - swept >= SWEEP_EVERY_S:
                swept = now
                self._sweep(now)
            connected = bool(self.server_state.connections)
            pause = PROBE_EVERY_S if self.half_closed else swept + SWEEP_EVERY_S - now if connected else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._news.wait()

    def _sweep(self, now: float) -> None:
        self._date()
        if self.crowded and not self._was_crowded:
            log.warning("more than %d connections are open: until some end only probes are answered", self.limits.connections)
        self._was_crowded = self.crowded
        for each in list(self.server_state.connections):
            assert isinstance(each, Connection)
            self._look_at(each, Connection.sweep, now)

    def _date(self) -> None:
        self.server_state.default_headers = [(b"date", formatdate(usegmt=True).encode()), *self.config.encoded_headers]

    def give_up(self, error: ApiError) -> None:
        """The server ends: every request that has no answer yet gets this one, also where its body is still on the way."""
        for each in list(self.server_state.connections):
            assert isinstance(each, Connection)
            each.give_up(error)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for the answers that are under way, CONNECTIONS_CLOSE_S at most; clients that have not taken theirs by then are cut
        off. uvicorn would cancel what answers them instead, and log each as a failure of the application."""
        cut = asyncio.get_running_loop().call_later(CONNECTIONS_CLOSE_S, self._cut)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()

    def _cut(self) -> None:
        for each in list(self.server_state.connections):
            assert isinstance(each, Connection)
            each.transport.abort()

    @staticmethod
    def _look_at(connection: Connection, look: Any, now: float) -> None:
        try:
            look(connection, now)
        except Exception:  # one connection must not end the server
            log.exception("a connection failed and is cut")
            connection.transport.abort()


def _room() -> int:
    """How many connections this process may have. Raises ConfigError for too few to serve anybody."""
    files = _open_files()
    if files < RESERVED_FILES + FEWEST_CONNECTIONS:
        raise ConfigError(
            f"this process may open {files} files only (`ulimit -n`, RLIMIT_NOFILE), of which a server needs {RESERVED_FILES} for itself; "
            f"raise the limit to 65536, or at least to {RESERVED_FILES + FEWEST_CONNECTIONS}"
        )
    return files - RESERVED_FILES


def _open_files() -> int:
    """How many descriptors this process may have, after asking for as many as it can get."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return soft if soft != resource.RLIM_INFINITY else 1 << 20
