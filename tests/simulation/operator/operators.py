"""An operator: everything of `banyan_operator.cluster` but kopf, the lease and the HTTP servers, as `manager.py` puts it together, on
the simulated API server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from banyan_operator.cluster import podclient
from banyan_operator.cluster.apply import Applier
from banyan_operator.cluster.client import Api, ApiError
from banyan_operator.cluster.driver import Driver
from banyan_operator.cluster.gather import Gatherer
from banyan_operator.cluster.metrics import Metrics
from banyan_operator.cluster.queue import WorkQueue
from banyan_operator.cluster.recorder import Recorder
from banyan_operator.cluster.report import Reporter
from banyan_operator.cluster.resync import Resync
from banyan_operator.cluster.store import Store
from banyan_operator.kube import kinds
from banyan_operator.kube.kinds import Kind, Manifest
from banyan_operator.kube.objects import Key, uid_of
from banyan_operator.plan import Settings, World
from banyan_operator.reconcile import Decision, decide
from tests.simulation.operator.calls import Client
from tests.simulation.operator.watches import Watch

if TYPE_CHECKING:
    from tests.simulation.operator.run import Simulation

WORKERS = 2
VERSIONS = (
    Settings(runtime_image="registry.example/banyan-runtime:0.1", operator_version="0.1.0"),
    Settings(runtime_image="registry.example/banyan-runtime:0.2", operator_version="0.2.0", image_pull_secrets=("mirror",)),
    Settings(runtime_image="mirror.example/banyan-runtime:0.3", operator_version="0.3.0", image_pull_secrets=("other", "mirror")),
)


class _Metrics(Metrics):
    """One for all operators of this process. Tells of bugs, and of what was put back."""

    def failed(self, kind: str, *, refused: bool = False, bug: bool = False) -> None:
        if bug:
            raise BugError


class BugError(BaseException):
    """What no reconcile may raise."""


class _Driver(Driver):
    """The order of a set is not the same in two processes; that of a replayed seed has to be."""

    def concerns(self, keys: Iterable[Key]) -> None:
        super().concerns(sorted(keys))


class _Gatherer(Gatherer):
    operator: Operator

    async def world(self, key: Key, resource: Manifest) -> World:
        self.operator.begins(key)
        return await super().world(key, resource)


class Operator:
    def __init__(self, sim: Simulation, number: int, settings: Settings) -> None:
        self.sim, self.number, self.settings = sim, number, settings
        self.dead = False
        self.leads = False
        self.calls_left: int | None = None  # it dies in the call with this number
        loop, rng = sim.loop, sim.rng
        api = cast(Api, Client(sim.server, sim.weather, self))
        metrics = METRICS
        self.store, self.queue = Store(), WorkQueue(loop.time, lambda: rng.uniform(0.5, 1.0))
        gatherer = _Gatherer(self.store, api, self, sim.server.now, loop.time)
        gatherer.operator = self
        concerns = self._concerns
        self.driver = _Driver(
            store=self.store,
            queue=self.queue,
            gatherer=gatherer,
            applier=Applier(self.store, api, metrics, concerns, loop.time),
            reporter=Reporter(self.store, api, Recorder(api, sim.server.now), metrics, concerns),
            metrics=metrics,
            settings=settings,
            decide=self._decide,
        )
        self.resync = Resync(self.store, api, metrics, (), concerns)
        self.watches = [Watch(sim.hub, sim.server, rng, kind, sim.lag_of(kind), sim.watch_trouble, self._seen) for kind in kinds.WATCHED]
        self.tasks: list[asyncio.Task[None]] = []
        self._at_work: dict[asyncio.Task[Any], Key] = {}
        self._hold: dict[Key, float] = {}
        self._answers: dict[str, tuple[float, Mapping[str, Any] | None]] = {}

    def __str__(self) -> str:
        return f"operator {self.number} ({self.settings.operator_version})"

    # --- its life ---

    def start(self) -> None:
        for watch in self.watches:
            watch.start()
        self.tasks.append(self.sim.loop.create_task(self._guarded(self._run())))

    def kill(self) -> None:
        self.dead = True
        for watch in self.watches:
            watch.close()
        for task in self.tasks:
            task.cancel()

    async def _run(self) -> None:
        await self.resync.everything()
        if self.sim.rng.random() < 0.3:  # it stands by for a while
            await asyncio.sleep(self.sim.rng.random() * 5)
        await self.resync.everything()
        self.leads = True
        loop = self.sim.loop
        self.tasks += [loop.create_task(self._guarded(self.resync.run()))]
        self.tasks += [loop.create_task(self._guarded(self.driver.work())) for _ in range(WORKERS)]

    async def _guarded(self, work: Any) -> None:
        try:
            await work
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BugError as error:
            self.sim.fail("the operator has a bug", error.__context__)
        except BaseException as error:
            self.sim.fail("a task of the operator ended", error)

    def _concerns(self, keys: Iterable[Key]) -> None:
        self.driver.concerns(keys)

    def _seen(self, kind: Kind, type_: str | None, manifest: Manifest) -> None:
        if self.sim.tracing:
            meta = manifest["metadata"]
            self.sim.trace(f"{self} sees {type_} {kind.kind} {meta['name']} {uid_of(manifest)[:8]} v{meta['resourceVersion']}")
        self.driver.seen(kind, type_, manifest)

    # --- what it does ---

    def begins(self, key: Key) -> None:
        """A reconcile begins."""
        task = asyncio.current_task()
        assert task is not None
        self._at_work[task] = key
        if self._hold.pop(key, 0.0) > self.sim.loop.now + 1e-3:
            self.sim.fail(f"{key} is reconciled before the Retry-After of its last try was over")

    def answered(self, task: asyncio.Task[Any] | None, error: ApiError) -> None:
        """A call failed for the key at work."""
        key = self._at_work.get(task) if task is not None else None
        if key is not None and error.retry_after_s:
            self._hold[key] = max(self._hold.get(key, 0.0), self.sim.loop.now + error.retry_after_s)

    def _decide(self, resource: Manifest, world: World, settings: Settings) -> Decision:
        decision = decide(resource, world, settings)
        if self.sim.tracing:
            plan = decision.plan
            applies = [f"{one['kind']} {one['metadata']['name']}" for one in plan.apply]
            deletes = [f"{one['kind']} {one['metadata']['name']}" for one in plan.delete]
            self.sim.trace(f"{self} decides {resource['kind']} {resource['metadata']['name']}: apply {applies}, delete {deletes}")
        return decision

    # --- pods ---

    async def readyz(self, pod: Manifest) -> Mapping[str, Any] | None:
        return self._asked(pod, self.sim.cluster.readyz)

    async def progress(self, pods: Sequence[Manifest]) -> dict[str, Mapping[str, Any]]:
        said = {str(pod["metadata"]["name"]): self._asked(pod, self.sim.cluster.progress) for pod in pods}
        return {name: body for name, body in said.items() if body is not None}

    def _asked(self, pod: Manifest, ask: Callable[[Manifest], Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
        """What the pod said last; nobody asks it more often than every two seconds."""
        when, answer = self._answers.get(uid_of(pod), (float("-inf"), None))
        if self.sim.loop.now - when >= podclient.FRESH_S:
            answer = ask(pod)
            self._answers[uid_of(pod)] = (self.sim.loop.now, answer)
        return answer


METRICS = _Metrics("simulated")
