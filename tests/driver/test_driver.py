"""The driver over a scripted API server: what it does around a decision, whatever the decision is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from banyan_operator.cluster.apply import Carrier
from banyan_operator.cluster.driver import Driver
from banyan_operator.cluster.metrics import Metrics, QueueCollector, StoreCollector
from banyan_operator.cluster.observe import Observer
from banyan_operator.cluster.podclient import Pods
from banyan_operator.cluster.queue import WorkQueue
from banyan_operator.cluster.recorder import Recorder
from banyan_operator.cluster.store import Store
from banyan_operator.kube.kinds import DEPLOYMENT, INFERENCE_SERVER, Key
from banyan_operator.plan import Event, Manifest, Plan, Ref, Settings, World
from tests.driver.apiserver import ApiServer, connected, refusal

KEY = Key("InferenceServer", "team", "smollm2")
SERVER: Manifest = {
    "apiVersion": "serving.banyan.dev/v1alpha1",
    "kind": "InferenceServer",
    "metadata": {"name": "smollm2", "namespace": "team", "uid": "u1", "generation": 1, "resourceVersion": "10"},
    "spec": {"model": {"uri": "catalog://smollm2-135m"}},
}
WANTED: Manifest = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "smollm2", "namespace": "team", "labels": {"serving.banyan.dev/server": "smollm2"}},
    "spec": {"replicas": 1},
}
PLACE = "/apis/apps/v1/namespaces/team/deployments/smollm2"
Decide = Callable[[Manifest, World, Settings], Plan]


class Rig:
    def __init__(self, server: ApiServer, api: Any, decide: Decide) -> None:
        self.server, self.store, self.queue = server, Store(), WorkQueue(time.monotonic)
        self.metrics = Metrics("0")
        self.metrics.registry.register(StoreCollector(self.store))
        self.metrics.registry.register(QueueCollector(self.queue))
        self.driver = Driver(
            store=self.store,
            queue=self.queue,
            api=api,
            observer=Observer(self.store, api, Pods()),
            carrier=Carrier(self.store, api, Recorder(api), self.metrics),
            metrics=self.metrics,
            settings=Settings(runtime_image="i", operator_version="0"),
            reconcile=decide,
        )
        self.see(SERVER)

    def see(self, resource: Manifest) -> None:
        """The API server has it, and a watch shows it."""
        self.server.objects[INFERENCE_SERVER.path("team", resource["metadata"]["name"])] = resource
        self.driver.seen(INFERENCE_SERVER, "ADDED", resource)

    async def work(self, seconds: float = 0.3) -> None:
        """Let two workers run until nothing is left to do now."""
        tasks = [asyncio.create_task(self.driver.work()) for _ in range(2)]
        await asyncio.sleep(seconds)
        await self.driver.drain(2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.driver.stopping = False

    def writes(self) -> list[tuple[str, str]]:
        return [(call.method, call.path) for call in self.server.calls if call.method != "GET"]


def run(decide: Decide, scenario: Any, server: ApiServer | None = None) -> Any:
    async def go() -> Any:
        api_server = server or ApiServer()
        async with connected(api_server) as api:
            return await scenario(Rig(api_server, api, decide))

    return asyncio.run(go())


def until_there(resource: Manifest, world: World, _: Settings) -> Plan:
    """A decision that settles: one Deployment, and a status that says whether it is there."""
    there = any(child["kind"] == "Deployment" for child in world.children)
    status = {"phase": "Ready" if there else "Pending"}
    return Plan(apply=() if there else (WANTED,), status=None if status == resource.get("status") else status)


def test_what_is_asked_for_is_applied_and_then_no_request_is_made() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.work()
        assert rig.writes()[0] == ("PATCH", PLACE)
        settled = len(rig.server.calls)
        for key in rig.store.resources():
            rig.queue.add(key)
        await rig.work()
        first = len(rig.server.calls)
        rig.queue.add(KEY)
        await rig.work()
        assert first - settled <= 1  # the status, once the Deployment was seen
        assert len(rig.server.calls) == first

    run(until_there, scenario)


def test_a_strangers_object_is_shown_to_the_decision_before_anything_is_written() -> None:
    stranger = {**WANTED, "metadata": {"name": "smollm2", "namespace": "team", "uid": "theirs", "resourceVersion": "3"}}
    worlds: list[World] = []

    def decide(resource: Manifest, world: World, _: Settings) -> Plan:
        worlds.append(world)
        foreign = any(child["metadata"].get("uid") == "theirs" for child in world.children)
        return Plan(apply=() if foreign else (WANTED,), status={"phase": "Failed"} if foreign else None)

    async def scenario(rig: Rig) -> None:
        await rig.work()
        assert rig.server.objects[PLACE] == stranger
        assert rig.writes() == [("PATCH", "/apis/serving.banyan.dev/v1alpha1/namespaces/team/inferenceservers/smollm2/status")]

    run(decide, scenario, ApiServer(objects={PLACE: stranger}))
    assert worlds[-1].children == (stranger,)


def test_a_refusal_is_told_in_the_same_reconcile_and_tried_again_later() -> None:
    def decide(resource: Manifest, world: World, _: Settings) -> Plan:
        said = world.refused.get(Ref("apps/v1", "Deployment", "smollm2"), "")
        events = (Event("Normal", "Created", "Deployment"), *((Event("Warning", "InvalidSpec", said),) if said else ()))
        return Plan(apply=(WANTED,), status={"phase": said or "fine"}, events=events)

    async def scenario(rig: Rig) -> None:
        rig.server.answer = lambda call: refusal(422, "Invalid", "no such field") if call.path == PLACE and call.method == "PATCH" else None
        await rig.work()
        bodies = [call.body for call in rig.server.calls]
        assert {"status": {"phase": "no such field"}} in bodies
        reasons = [body["reason"] for body in bodies if body and body.get("kind") == "Event"]
        assert reasons == ["InvalidSpec"]
        assert rig.queue.backlog.next_due() is not None
        assert 'controller_runtime_terminal_reconcile_errors_total{controller="inferenceserver"} 1.0' in rig.metrics.render().decode()

    run(decide, scenario)


def test_a_bug_in_the_decision_costs_only_its_own_resource_a_delay() -> None:
    def decide(resource: Manifest, world: World, _: Settings) -> Plan:
        if resource["metadata"]["name"] == "smollm2":
            raise ZeroDivisionError
        return Plan(status={"phase": "Ready"})

    async def scenario(rig: Rig) -> None:
        rig.see({**SERVER, "metadata": {**SERVER["metadata"], "name": "other", "uid": "u2"}})
        await rig.work()
        assert [path.rpartition("inferenceservers/")[2] for _, path in rig.writes()] == ["other/status"]
        assert 'controller_runtime_reconcile_panics_total{controller="inferenceserver"} 1.0' in rig.metrics.render().decode()

    run(decide, scenario)


def test_our_own_status_write_wakes_nobody() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.work()
        adds = rig.queue.adds
        written = {**SERVER, "metadata": {**SERVER["metadata"], "resourceVersion": "900"}, "status": {"phase": "Ready"}}
        rig.driver.seen(INFERENCE_SERVER, "MODIFIED", written)
        assert rig.queue.adds == adds
        spec = {**written, "metadata": {**written["metadata"], "resourceVersion": "901", "generation": 2}}
        rig.driver.seen(INFERENCE_SERVER, "MODIFIED", spec)
        assert rig.queue.adds == adds + 1

    run(until_there, scenario)


def test_a_child_wakes_its_owner_and_a_server_its_batch_jobs() -> None:
    job = {
        "apiVersion": "serving.banyan.dev/v1alpha1",
        "kind": "BatchJob",
        "metadata": {"name": "nightly", "namespace": "team", "uid": "b", "resourceVersion": "4"},
        "spec": {"serverRef": {"name": "smollm2"}},
    }

    async def scenario(rig: Rig) -> None:
        rig.store.put(job)
        rig.queue.backlog.ready.clear()
        live = {**WANTED, "metadata": {**WANTED["metadata"], "uid": "d", "resourceVersion": "5"}}
        rig.driver.seen(DEPLOYMENT, None, live)
        assert list(rig.queue.backlog.ready) == [KEY]
        rig.queue.backlog.ready.clear()
        rig.driver.seen(DEPLOYMENT, "DELETED", live)
        assert list(rig.queue.backlog.ready) == [KEY]
        rig.queue.backlog.ready.clear()
        ready = {**SERVER, "metadata": {**SERVER["metadata"], "resourceVersion": "11"}, "status": {"phase": "Ready"}}
        rig.driver.seen(INFERENCE_SERVER, "MODIFIED", ready)
        assert list(rig.queue.backlog.ready) == [Key("BatchJob", "team", "nightly")]

    run(until_there, scenario)


def test_an_object_that_another_controller_fights_for_is_put_back_ever_more_slowly() -> None:
    def decide(resource: Manifest, world: World, _: Settings) -> Plan:
        return Plan(apply=(WANTED,))

    async def scenario(rig: Rig) -> None:
        for _ in range(20):
            rig.queue.add(KEY)
            await rig.work(0.05)
        applies = [call for call in rig.writes() if call == ("PATCH", PLACE)]
        assert 6 <= len(applies) <= 7
        assert any(call.body and call.body.get("reason") == "DriftLoop" for call in rig.server.calls)

    run(decide, scenario)


def test_a_secret_that_is_missing_is_looked_for_again_soon_and_then_more_rarely() -> None:
    spec = {"model": {"uri": "catalog://smollm2-135m"}, "auth": {"apiKeysSecretRef": {"name": "keys"}}}
    guarded = {**SERVER, "metadata": {**SERVER["metadata"], "resourceVersion": "12", "generation": 2}, "spec": spec}
    seen: list[frozenset[Ref]] = []

    def decide(resource: Manifest, world: World, _: Settings) -> Plan:
        seen.append(world.missing)
        return Plan()

    async def scenario(rig: Rig) -> None:
        rig.driver.seen(INFERENCE_SERVER, "MODIFIED", guarded)
        await rig.work()
        asked = [call.path for call in rig.server.calls]
        assert asked == ["/api/v1/namespaces/team/secrets/keys"]
        due = rig.queue.backlog.next_due()
        assert due is not None
        assert due - time.monotonic() < 1.1
        rig.queue.add(KEY)
        await rig.work(0.1)
        assert len(rig.server.calls) == 1  # not asked again before its time

    run(decide, scenario)
    assert seen[0] == {Ref("v1", "Secret", "keys")}
