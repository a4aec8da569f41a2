"""What the operator's process runs beside kopf: the lease, the workers, resyncs and the operator's own HTTP.

The process ends by a signal, by a watch that kopf cannot go on with, or by the loss of the lease. Its Deployment starts it again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Collection, Mapping
from typing import Any, Final

from banyan_operator import __version__
from banyan_operator.cluster.apply import Applier
from banyan_operator.cluster.client import Api
from banyan_operator.cluster.connection import Connection
from banyan_operator.cluster.deadman import Deadman
from banyan_operator.cluster.driver import Driver
from banyan_operator.cluster.gather import Gatherer
from banyan_operator.cluster.health import Health
from banyan_operator.cluster.leader import RELEASE_S, RENEW_DEADLINE_S, Lease, LeaseLostError, RivalError, Rivals
from banyan_operator.cluster.metrics import Metrics, QueueCollector, StoreCollector
from banyan_operator.cluster.namespaces import watch
from banyan_operator.cluster.options import Options
from banyan_operator.cluster.podclient import Pods
from banyan_operator.cluster.queue import WorkQueue
from banyan_operator.cluster.recorder import Recorder
from banyan_operator.cluster.report import Reporter
from banyan_operator.cluster.resync import Resync
from banyan_operator.cluster.store import Store, owners
from banyan_operator.kube.addresses import in_url
from banyan_operator.kube.kinds import RESOURCES, WATCHED
from banyan_operator.plan import Settings
from banyan_operator.reconcile import decide

log = logging.getLogger(__name__)

LEASE: Final = "banyan-operator"
LOST_S: Final = 4.0  # for everything to end, once the lease is lost
STOP_S: Final = 5.0  # for the writes in progress, and for kopf's watches, once asked to stop
WATCHES: Final = "watcher for "  # how kopf calls the tasks of its watches
WORK_LIMIT_S: Final = 120.0  # one key is at work for longer only if something is stuck


class UnwatchedError(Exception):
    """Kopf does not watch everything that it was told to."""


class Manager:
    """`start` and `stop` are called by kopf. `ended` is set when the process cannot go on; `error` tells why."""

    def __init__(
        self, options: Options, metrics: Metrics, deadman: Deadman, connection: Connection, absent: Collection[str] = frozenset()
    ) -> None:
        """`absent`: namespaces that are to be looked after, too, and cannot be just now."""
        self._absent = absent
        metrics.absent.set(len(absent))
        self._options, self._metrics, self._deadman, self.connection = options, metrics, deadman, connection
        self.ended = asyncio.Event()
        self.error: BaseException | None = None
        self._synced = False
        self._task: asyncio.Task[None] | None = None

        self._api = api = Api(connection, metrics.observe_call)
        store, self._queue = Store(), WorkQueue(time.monotonic)
        metrics.registry.register(StoreCollector(store))
        metrics.registry.register(QueueCollector(self._queue))
        self._pods = Pods(lambda pod: self.driver.concerns(owners(pod)))
        self.driver = Driver(
            store=store,
            queue=self._queue,
            gatherer=Gatherer(store, api, self._pods),
            applier=Applier(store, api, metrics, lambda keys: self.driver.concerns(keys)),
            reporter=Reporter(store, api, Recorder(api), metrics, lambda keys: self.driver.concerns(keys)),
            metrics=metrics,
            settings=Settings(
                runtime_image=options.runtime_image,
                operator_version=__version__,
                image_pull_policy=options.image_pull_policy,
                image_pull_secrets=options.image_pull_secrets,
                namespace=options.namespace,
                listen=options.listen,
            ),
            decide=decide,
        )
        self._resync = Resync(store, api, metrics, options.namespaces, self.driver.concerns, options.resync_s)
        identity = f"{options.namespace}/{_candidate(os.environ)}"
        places, gone = options.leases if options.leader_election else (), set[str]()
        self._leases = [Lease(api, namespace, LEASE, identity, gone=gone) for namespace in places]
        self._rivals = Rivals(api, LEASE, options.namespaces, options.lease_namespace)
        self._health = Health(metrics, self.trouble, self._unready)

    async def start(self) -> None:
        """Return once everything was listed. Kopf looks for what it is to watch afterwards, and never again: by then it is served."""
        options = self._options
        try:
            await self._health.start(options.host, options.port)
            where = f"{in_url(options.host)}:{options.port}"
            log.info("banyan-operator %s on %s, /livez /readyz /metrics on %s", __version__, self._api.host, where)
            await self._resync.everything()
        except BaseException as error:
            self.error = None if isinstance(error, asyncio.CancelledError) else error
            await self.stop()  # kopf cleans up only after what has started
            raise
        self._synced = True
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End what is at work, and let the next operator take over."""
        self._deadman.arm(STOP_S + RELEASE_S + 2, "not everything could be stopped in time")
        watches = asyncio.create_task(_end_watches())
        if self._task is not None:
            await self.driver.drain(STOP_S if self.error is None else 0.0)
            self._task.cancel()
            await asyncio.wait((self._task,), timeout=1.0)
        await asyncio.gather(*(lease.release() for lease in self._leases))
        self._metrics.leader.set(0)
        await watches
        await self._pods.close()
        await self._api.close()
        await self._health.stop()
        self.ended.set()  # kopf waits for it, and would give the task that does 5 s more

    def trouble(self) -> str | None:
        """Why this process should be restarted, or None."""
        if (stuck := self._queue.oldest_work_s()) > WORK_LIMIT_S:
            return f"a worker has been at one resource for {stuck:.0f} s"
        if (oldest := max((lease.age_s for lease in self._leases), default=0.0)) > RENEW_DEADLINE_S:
            return f"the lease was not renewed for {oldest:.0f} s"
        return None

    def _unready(self) -> str | None:
        return self._resync.trouble or self._rivals.trouble or (None if self._synced else "not everything was listed yet")

    # --- its one task ---

    async def _run(self) -> None:
        """Lead and work, until cancelled or until something of it fails."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._resync.run())
                group.create_task(_all_watched())
                group.create_task(watch(self._api, self._options.namespaces, self._absent, LEASE if self._leases else None))
                if self._leases:
                    await self._win(group)
                group.create_task(self._work())
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._end(_first(error))

    async def _win(self, group: asyncio.TaskGroup) -> None:
        """Return as the leader. The leases are held by tasks of `group` from then on, whatever else takes its time."""
        await self._rivals.gone()
        for lease in self._leases:
            await lease.acquire()
            group.create_task(self._hold(lease))
        self._deadman.watch(lambda: min(lease.deadline() for lease in self._leases))
        if (rival := await self._rivals.found()) is not None:  # it looked before we held our lease, and sees it now as we see its
            raise RivalError(rival)

    async def _hold(self, lease: Lease) -> None:
        try:
            await lease.hold()
        except LeaseLostError as error:
            log.error("%s; ending, so that nothing is written any more", error)
            self.driver.stopping = True
            self._deadman.arm(LOST_S, "the lease is lost")
            self._end(error)  # at once: the other tasks may take long to be cancelled
            raise

    async def _work(self) -> None:
        await self._resync.everything()  # who stood by for long decides on what is, not on what the watches remember
        self._metrics.leader.set(1)
        for kind in RESOURCES:
            self._metrics.most.labels(kind.kind.lower()).set(self._options.workers)
        async with asyncio.TaskGroup() as group:
            for _ in range(self._options.workers):
                group.create_task(self.driver.work())

    def _end(self, error: BaseException) -> None:
        self.error = self.error or error
        self.ended.set()


def _watches() -> list[asyncio.Task[Any]]:
    """The tasks of kopf's watches."""
    return [task for task in asyncio.all_tasks() if task.get_name().startswith(WATCHES)]


async def _all_watched() -> None:
    """Return when kopf watches every kind. Raises UnwatchedError where it has passed over one.

    Kopf looks once for what is served, and begins all watches together. A kind whose definition has just been applied can be listed
    before the API server tells that it is served.
    """
    names = set[str]()
    while not names:
        await asyncio.sleep(1.0)
        names = {task.get_name().removeprefix(WATCHES).partition(".")[0] for task in _watches()}
    if left := sorted({kind.plural for kind in WATCHED if not kind.optional} - names):
        raise UnwatchedError(f"{', '.join(left)} can be listed, and kopf does not watch them")


async def _end_watches() -> None:
    """End those that kopf has left. It ends them by itself where it is told to stop, but not where one of them failed (a CRD that is
    deleted, say): then it gives the others 5 s, cancels them together with the tasks that they need for their end, and waits for ever."""
    left = _watches()
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=STOP_S)


def _first(error: BaseException) -> BaseException:
    """Of a group of errors one: the loss of the lease if it is among them."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    found = [_first(one) for one in error.exceptions]
    return next((one for one in found if isinstance(one, LeaseLostError)), found[0])


def _candidate(environment: Mapping[str, str]) -> str:
    """The pod, by its uid: a container that is started again in it takes up the lease that the one before held, which has ended.
    Outside a pod each process is one of its own."""
    return f"{environment.get('POD_NAME') or os.uname().nodename}_{environment.get('POD_UID') or uuid.uuid4()}"
