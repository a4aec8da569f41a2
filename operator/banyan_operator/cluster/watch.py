"""Kopf, used for one thing only: to watch. It lists, watches, reconnects, and hands every sighting to a callback.

It runs in a thread and an event loop of its own, because it ends every task of its loop when it stops and takes the process's
signals for itself. Its handlers write nothing and return None: a returned value would be patched into the object's status.
When it ends (an ERROR event in a watch ends it), it is started again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import kopf

from banyan_operator.cluster import kinds
from banyan_operator.cluster.kinds import Kind

log = logging.getLogger(__name__)

Sighting = Callable[[Kind, str | None, Mapping[str, Any]], None]
"""Told of each event: the kind, its type (None in a first list, ADDED, MODIFIED, DELETED), the object. Runs in kopf's thread."""

RESTART_CAP_S: Final = 30.0


class EndlessBackoffs:
    """Delays between tries of one API call, s. Endless, or kopf would give up after a minute and end."""

    FIRST: Final = (1, 1, 2, 3, 5, 8, 13, 21)

    def __iter__(self) -> Iterator[float]:
        for delay in self.FIRST:
            yield delay * random.uniform(0.8, 1.2)
        while True:
            yield 30 * random.uniform(0.8, 1.2)


def settings() -> kopf.OperatorSettings:
    made = kopf.OperatorSettings()
    made.scanning.disabled = True
    made.posting.enabled = False
    made.peering.standalone = True
    made.networking.error_backoffs = EndlessBackoffs()
    made.networking.request_timeout = 60
    made.networking.connect_timeout = 10
    made.networking.enforce_retry_after = True
    made.watching.server_timeout = 300
    made.watching.inactivity_timeout = 70
    made.watching.chunk_size = 500
    for kind in kinds.CHILDREN:
        made.watching.label_selectors[kind.group, kind.version, kind.plural] = kinds.CHILD_SELECTOR
    made.persistence.finalizer = "serving.banyan.dev/unused"  # never written; a leak would show
    made.queueing.worker_limit = 64
    made.queueing.idle_timeout = 5
    return made


def registry(seen: Sighting) -> kopf.OperatorRegistry:
    """Handlers for every kind of ours: each only passes the sighting on."""
    made = kopf.OperatorRegistry()

    def login(**context: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_kubeconfig(**context) or kopf.login_with_service_account(**context)

    kopf.on.login(registry=made, id="login")(login)
    for kind in (*kinds.RESOURCES, *kinds.CHILDREN):
        kopf.on.event(kind.group, kind.version, kind.plural, registry=made, id="watch")(handler(kind, seen))
    return made


def handler(kind: Kind, seen: Sighting) -> Callable[..., Any]:
    async def on_event(event: Mapping[str, Any], **_: Any) -> None:
        seen(kind, event["type"], {"apiVersion": kind.api_version, "kind": kind.kind, **event["object"]})

    return on_event


class Watches:
    """The thread with kopf in it, and its supervisor."""

    def __init__(self, seen: Sighting, namespaces: Sequence[str], identity: str, on_restart: Callable[[], None]) -> None:
        self._seen = seen
        self._namespaces = tuple(namespaces)
        self._identity = identity
        self._on_restart = on_restart
        self._stopping = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flag: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="watches", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 3.0) -> None:
        self._stopping.set()
        if self._loop is not None and self._flag is not None:
            try:
                self._loop.call_soon_threadsafe(self._flag.set)
            except RuntimeError:
                pass  # the loop has ended already
        self._thread.join(timeout_s)

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                asyncio.run(self._watch())
            except Exception as error:
                log.error("the watches ended: %s: %s", type(error).__name__, error)
            if self._stopping.is_set():
                return
            self._on_restart()
            self._stopping.wait(min(RESTART_CAP_S, 2.0**failures))
            failures += 1

    async def _watch(self) -> None:
        self._loop, self._flag = asyncio.get_running_loop(), asyncio.Event()
        if self._stopping.is_set():
            return
        await kopf.operator(
            registry=registry(self._seen),
            settings=settings(),
            identity=cast(Any, self._identity),  # else kopf asks for the user's name, which a pod may not have
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            stop_flag=self._flag,
        )
