"""The driver over a scripted API server, and decisions to give it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from banyan_operator.cluster.apply import Applier
from banyan_operator.cluster.driver import Driver
from banyan_operator.cluster.gather import Gatherer
from banyan_operator.cluster.metrics import Metrics, QueueCollector, StoreCollector
from banyan_operator.cluster.podclient import Pods
from banyan_operator.cluster.queue import WorkQueue
from banyan_operator.cluster.recorder import Recorder
from banyan_operator.cluster.report import Reporter
from banyan_operator.cluster.store import Store
from banyan_operator.kube import kinds
from banyan_operator.kube.kinds import DEPLOYMENT, INFERENCE_SERVER
from banyan_operator.kube.objects import Key, Ref
from banyan_operator.plan import Event, Manifest, Outcome, Plan, Report, Settings, World
from tests.support.kube.http import ApiServer, connected

KEY = Key("InferenceServer", "team", "smollm2")
SERVER: Manifest = {
    "apiVersion": "serving.banyan.dev/v1alpha1",
    "kind": "InferenceServer",
    "metadata": {"name": "smollm2", "namespace": "team"},
    "spec": {"model": {"uri": "catalog://smollm2-135m"}},
}
OURS = {"app.kubernetes.io/managed-by": "banyan-operator", "serving.banyan.dev/server": "smollm2"}
PLACE = DEPLOYMENT.path("team", "smollm2")
KEY_PLACE = INFERENCE_SERVER.path("team", "smollm2")
STATUS = INFERENCE_SERVER.path("team", "smollm2", "status")
REF = Ref("apps/v1", "Deployment", "smollm2")


def wanted(resource: Manifest, kind: kinds.Kind = DEPLOYMENT) -> Manifest:
    owner = {**{name: resource[name] for name in ("apiVersion", "kind")}, "name": "smollm2", "uid": resource["metadata"]["uid"]}
    made = {"serving.banyan.dev/applied-hash": "0123456789"}
    meta = {"name": "smollm2", "namespace": "team", "labels": OURS, "annotations": made, "ownerReferences": [{**owner, "controller": True}]}
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": meta, "spec": {"replicas": 1}}


@dataclass
class Decided:
    plan: Plan = field(default_factory=Plan)
    report: Callable[[Outcome], Report] = lambda _: Report()


Decide = Callable[[Manifest, World, Settings], Decided]


class Rig:
    def __init__(self, server: ApiServer, api: Any, decide: Decide) -> None:
        self.server, self.api, self.store, self.queue = server, api, Store(), WorkQueue(time.monotonic)
        self.metrics = Metrics("0")
        self.metrics.registry.register(StoreCollector(self.store))
        self.metrics.registry.register(QueueCollector(self.queue))
        concerns = lambda keys: self.driver.concerns(keys)
        self.driver = Driver(
            store=self.store,
            queue=self.queue,
            gatherer=Gatherer(self.store, api, Pods(lambda _: None)),
            applier=Applier(self.store, api, self.metrics, concerns),
            reporter=Reporter(self.store, api, Recorder(api), self.metrics, concerns),
            metrics=self.metrics,
            settings=Settings(runtime_image="i", operator_version="0"),
            decide=decide,
        )
        self.see(SERVER)

    def see(self, resource: Manifest) -> Manifest:
        """The API server has it, and a watch shows it."""
        kind = kinds.of(resource)
        place = kind.path("team", resource["metadata"]["name"])
        self.server.store(place, resource)
        self.driver.seen(kind, "MODIFIED", self.server.objects[place])
        return self.server.objects[place]

    def unsee(self, place: str) -> None:
        gone = self.server.objects[place]
        self.server.remove(place)
        later = {**gone, "metadata": {**gone["metadata"], "resourceVersion": str(self.server.revision)}}
        self.driver.seen(kinds.of(gone), "DELETED", later)

    async def work(self, seconds: float = 0.1) -> None:
        """Let two workers run until nothing is left to do now."""
        tasks = [asyncio.create_task(self.driver.work()) for _ in range(2)]
        await asyncio.sleep(seconds)
        for _ in range(1000):  # on a busy machine that was not enough
            if not (self.queue.backlog.ready or self.queue.backlog.working):
                break
            await asyncio.sleep(0.01)
        await self.driver.drain(2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.driver.stopping = False

    def writes(self) -> list[tuple[str, str]]:
        return [(call.method, call.path) for call in self.server.calls if call.method != "GET"]

    def events(self) -> list[str]:
        return [call.body["reason"] for call in self.server.calls if call.body and call.body.get("kind") == "Event"]

    def count(self, series: str) -> float:
        lines = [line.split() for line in self.metrics.render().decode().splitlines()]
        return next((float(value) for name, value in (line for line in lines if len(line) == 2) if name == series), 0.0)


def run(decide: Decide, scenario: Any, server: ApiServer | None = None) -> Any:
    async def go() -> Any:
        api_server = server or ApiServer()
        async with connected(api_server) as api:
            return await scenario(Rig(api_server, api, decide))

    return asyncio.run(go())


def until_there(resource: Manifest, world: World, _: Settings) -> Decided:
    """A decision that settles: one Deployment, and a status that says whether it is there."""
    there = any(child["kind"] == "Deployment" and child["metadata"].get("labels") == OURS for child in world.children)
    status = {"phase": "Ready" if there else "Pending"}
    report = Report(status=None if status == resource.get("status") else status)
    return Decided(Plan(apply=() if there else (wanted(resource),)), lambda _: report)


def always(resource: Manifest, world: World, _: Settings) -> Decided:
    """A decision that says how its apply went."""

    def report(outcome: Outcome) -> Report:
        said = {**outcome.refused, **outcome.forbidden, **outcome.taken, **outcome.failed}.get(REF, "fine")
        status = {"phase": said}
        changed = status != resource.get("status")
        return Report(status if changed else None, (Event("Normal", "Told", said),) if changed else ())

    return Decided(Plan(apply=(wanted(resource),)), report)
