"""The driver over a scripted API server: what it does around a decision, whatever the decision is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from banyan_operator.cluster.apply import Applier
from banyan_operator.cluster.driver import Driver
from banyan_operator.cluster.gather import Gatherer
from banyan_operator.cluster.metrics import Metrics, QueueCollector, StoreCollector
from banyan_operator.cluster.podclient import Pods
from banyan_operator.cluster.queue import WorkQueue
from banyan_operator.cluster.recorder import Recorder
from banyan_operator.cluster.relist import Relist
from banyan_operator.cluster.report import Reporter
from banyan_operator.cluster.store import Store
from banyan_operator.kube import kinds
from banyan_operator.kube.kinds import BATCH_JOB, DEPLOYMENT, INFERENCE_SERVER, POD_MONITOR
from banyan_operator.kube.objects import Key, Ref
from banyan_operator.plan import Event, Manifest, Outcome, Plan, Report, Settings, World
from banyan_operator.reconcile import decide
from tests.driver.apiserver import ApiServer, Call, connected, refusal, unserved

BATCH = {"apiVersion": "serving.banyan.dev/v1alpha1", "kind": "BatchJob"}
KEY = Key("InferenceServer", "team", "smollm2")
SERVER: Manifest = {
    "apiVersion": "serving.banyan.dev/v1alpha1",
    "kind": "InferenceServer",
    "metadata": {"name": "smollm2", "namespace": "team"},
    "spec": {"model": {"uri": "catalog://smollm2-135m"}},
}
OURS = {"app.kubernetes.io/managed-by": "banyan-operator", "serving.banyan.dev/server": "smollm2"}
PLACE = DEPLOYMENT.path("team", "smollm2")
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

    async def work(self, seconds: float = 0.3) -> None:
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


def test_what_is_asked_for_is_applied_and_then_no_request_is_made() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.work()
        assert rig.writes()[0] == ("PATCH", PLACE)
        assert rig.server.objects[KEY_PLACE]["status"] == {"phase": "Ready"}
        settled = len(rig.server.calls)
        rig.queue.add(KEY)
        await rig.work()
        assert len(rig.server.calls) == settled

    run(until_there, scenario)


KEY_PLACE = INFERENCE_SERVER.path("team", "smollm2")


def test_a_strangers_object_is_left_alone_and_told() -> None:
    stranger = {**wanted({**SERVER, "metadata": {"uid": "else"}}), "metadata": {"name": "smollm2", "namespace": "team"}}

    async def scenario(rig: Rig) -> None:
        rig.server.store(PLACE, stranger)
        before = rig.server.objects[PLACE]
        await rig.work()
        assert rig.server.objects[PLACE] == before
        assert ("PATCH", PLACE) not in rig.writes()
        assert rig.server.objects[KEY_PLACE]["status"] == {"phase": "nobody that it names"}

    run(always, scenario)


def test_a_refusal_is_told_in_the_same_reconcile_and_tried_again_later() -> None:
    async def scenario(rig: Rig) -> None:
        rig.server.answer = lambda call: refusal(422, "Invalid", "no such field") if call.path == PLACE and call.method == "PATCH" else None
        await rig.work()
        assert rig.server.objects[KEY_PLACE]["status"] == {"phase": "no such field"}
        assert rig.events() == ["Told"]
        assert rig.queue.backlog.next_due() is not None
        assert rig.count('controller_runtime_terminal_reconcile_errors_total{controller="inferenceserver"}') == 1

    run(always, scenario)


def test_an_api_that_is_not_served_is_told_and_not_tried_for_ever() -> None:
    async def scenario(rig: Rig) -> None:
        rig.server.answer = lambda call: unserved() if call.path == PLACE else None
        await rig.work(0.6)
        assert rig.server.objects[KEY_PLACE]["status"] == {"phase": "its API is not served in this cluster"}
        assert len([call for call in rig.server.calls if call.path == PLACE]) <= 2
        due = rig.queue.backlog.next_due()
        assert due is not None
        assert due - time.monotonic() > 30

    run(always, scenario)


def test_a_bug_in_the_decision_costs_only_its_own_resource_a_delay() -> None:
    def decide(resource: Manifest, world: World, _: Settings) -> Decided:
        if resource["metadata"]["name"] == "smollm2":
            raise ZeroDivisionError
        return Decided(report=lambda _: Report(status={"phase": "Ready"}))

    async def scenario(rig: Rig) -> None:
        rig.see({**SERVER, "metadata": {**SERVER["metadata"], "name": "other"}})
        await rig.work()
        assert {path.rpartition("inferenceservers/")[2] for _, path in rig.writes()} == {"other/status"}
        assert rig.count('controller_runtime_reconcile_panics_total{controller="inferenceserver"}') == 1

    run(decide, scenario)


def test_our_own_status_write_wakes_nobody() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.work()
        adds = rig.queue.adds
        rig.driver.seen(INFERENCE_SERVER, "MODIFIED", rig.server.objects[KEY_PLACE])
        assert rig.queue.adds == adds
        rig.see({**rig.server.objects[KEY_PLACE], "spec": {"replicas": 2}})
        assert rig.queue.adds == adds + 1

    run(until_there, scenario)


def test_a_spec_that_is_edited_while_the_status_is_written_is_taken_up_at_once() -> None:
    """The write's answer, or its refusal, shows the edit before the watch does; the watch then brings nothing new."""
    specs: list[Any] = []

    def decide(resource: Manifest, world: World, _: Settings) -> Decided:
        specs.append(resource["spec"])
        status = {"seen": resource["metadata"]["generation"]}
        return Decided(report=lambda _: Report(status=None if resource.get("status") == status else status))

    async def scenario(rig: Rig) -> None:
        def edit(call: Call) -> None:
            if call.path == STATUS and len(specs) == 1:
                rig.server.answer = lambda _: None
                rig.server.store(KEY_PLACE, {**rig.server.objects[KEY_PLACE], "spec": {"replicas": 7}})

        rig.server.answer = edit
        await rig.work()
        assert specs[-1] == {"replicas": 7}
        assert rig.server.objects[KEY_PLACE]["status"] == {"seen": 2}

    run(decide, scenario)


def test_a_status_is_not_written_onto_another_object_of_the_name() -> None:
    """Deleted and made again between decision and write: the new one keeps its clean status, and is then decided on itself."""

    def decide(resource: Manifest, world: World, _: Settings) -> Decided:
        status = {"phase": "Succeeded", "of": resource["metadata"]["uid"]}
        return Decided(report=lambda _: Report(status=None if resource.get("status") == status else status))

    async def scenario(rig: Rig) -> None:
        statuses: list[Any] = []

        def remake(call: Call) -> None:
            if call.path == STATUS and not statuses:
                rig.server.remove(KEY_PLACE)
                rig.server.store(KEY_PLACE, {**SERVER, "metadata": {**SERVER["metadata"], "uid": "another"}})
            if call.path == STATUS:
                statuses.append(rig.server.objects[KEY_PLACE].get("status"))

        rig.server.answer = remake
        await rig.work()
        assert statuses == [None, None]  # the first write changed nothing
        assert rig.server.objects[KEY_PLACE]["status"] == {"phase": "Succeeded", "of": "another"}

    run(decide, scenario)


def test_a_child_that_was_made_anew_by_others_is_not_taken_for_the_one_that_was_seen() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.work()
        rig.server.remove(PLACE)
        rig.server.store(PLACE, {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "smollm2", "uid": "theirs"}})
        rig.queue.add(KEY)
        await rig.work()
        assert "spec" not in rig.server.objects[PLACE]

    run(always, scenario)


def test_a_child_that_lost_its_owner_gets_it_back_and_one_that_is_left_behind_on_purpose_does_not() -> None:
    """With `kubectl delete --cascade=orphan` a child's watch may run ahead of the resource's: its owner back, it would be collected."""

    async def scenario(rig: Rig) -> None:
        await rig.work()
        orphan = {**rig.server.objects[PLACE], "metadata": {**rig.server.objects[PLACE]["metadata"]}}
        del orphan["metadata"]["ownerReferences"]
        rig.see(orphan)
        await rig.work()
        assert "ownerReferences" in rig.server.objects[PLACE]["metadata"]
        resource = rig.server.objects[KEY_PLACE]
        going = {**resource["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["orphan"]}
        rig.server.store(KEY_PLACE, {**resource, "metadata": going})  # which no watch has shown yet
        rig.see(orphan)
        await rig.work()
        assert "ownerReferences" not in rig.server.objects[PLACE]["metadata"]

    run(always, scenario)


def test_a_child_wakes_its_owner_and_a_server_its_batch_jobs() -> None:
    job = {
        "apiVersion": "serving.banyan.dev/v1alpha1",
        "kind": "BatchJob",
        "metadata": {"name": "nightly", "namespace": "team"},
        "spec": {"serverRef": {"name": "smollm2"}},
    }

    async def scenario(rig: Rig) -> None:
        def queued() -> list[Key]:
            found = sorted(rig.queue.backlog.ready)
            rig.queue.backlog.ready.clear()
            return found

        rig.see(job)
        assert BATCH_JOB.kind in {key.kind for key in queued()}
        rig.see(wanted(rig.server.objects[KEY_PLACE]))
        assert queued() == [KEY]
        rig.unsee(PLACE)
        assert queued() == [KEY]
        ready = {"conditions": [{"type": "Available", "status": "True"}]}
        rig.see({**rig.server.objects[KEY_PLACE], "status": ready})
        assert queued() == [Key("BatchJob", "team", "nightly"), KEY]

    run(until_there, scenario)


def test_what_was_made_for_the_first_time_is_no_drift_and_what_was_deleted_or_lost_its_label_is() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.work()
        assert rig.count('banyan_operator_drift_total{kind="Deployment"}') == 0
        rig.unsee(PLACE)
        await rig.work()
        assert PLACE in rig.server.objects
        assert rig.count('banyan_operator_drift_total{kind="Deployment"}') == 1
        live = rig.server.objects[PLACE]  # without our label its watch shows it as deleted
        rig.server.store(PLACE, {**live, "metadata": {**live["metadata"], "labels": {}}})
        rig.driver.seen(DEPLOYMENT, "DELETED", rig.server.objects[PLACE])
        await rig.work()
        assert rig.server.objects[PLACE]["metadata"]["labels"] == OURS
        assert rig.count('banyan_operator_drift_total{kind="Deployment"}') == 2
        assert [child["kind"] for child in rig.store.children(KEY)] == ["Deployment"]

    run(until_there, scenario)


def test_an_object_that_another_controller_fights_for_is_put_back_ever_more_slowly() -> None:
    contested: list[bool] = []

    def decide(resource: Manifest, world: World, _: Settings) -> Decided:
        def report(outcome: Outcome) -> Report:
            contested.append(REF in outcome.contested)
            return Report()

        return Decided(Plan(apply=(wanted(resource),), drifted=frozenset({REF})), report)

    async def scenario(rig: Rig) -> None:
        for _ in range(20):
            rig.queue.add(KEY)
            await rig.work(0.05)
        applies = [call for call in rig.writes() if call == ("PATCH", PLACE)]
        assert 6 <= len(applies) <= 7
        assert contested[-1]

    run(decide, scenario)


def test_retry_after_is_kept_whatever_is_heard_meanwhile() -> None:
    async def scenario(rig: Rig) -> None:
        busy = {"Retry-After": "30"}
        rig.server.answer = lambda call: refusal(429, "TooManyRequests", "later", **busy) if call.method == "PATCH" else None
        await rig.work()
        calls = len(rig.server.calls)
        rig.see({**SERVER, "spec": {"replicas": 5}})
        await rig.work()
        assert len(rig.server.calls) == calls
        due = rig.queue.backlog.next_due()
        assert due is not None
        assert due - time.monotonic() > 25

    run(until_there, scenario)


def test_events_are_posted_after_the_status_and_not_without_it() -> None:
    async def scenario(rig: Rig) -> None:
        rig.server.answer = lambda call: refusal(500, "InternalError", "etcd is away") if call.path == STATUS else None
        await rig.work()
        assert rig.events() == []
        rig.server.answer = lambda _: None
        rig.queue.backlog.failures.clear()
        rig.queue.add(KEY)
        await rig.work()
        assert rig.events() == ["Told"]
        order = [call.path for call in rig.server.calls if call.method != "GET"]
        (told,) = (at for at, path in enumerate(order) if path.endswith("/events"))
        assert order[told - 1] == STATUS

    run(always, scenario)


def test_a_secret_that_is_missing_is_looked_for_again_soon_and_then_more_rarely() -> None:
    spec = {"model": {"uri": "catalog://smollm2-135m"}, "auth": {"apiKeysSecretRef": {"name": "keys"}}}
    seen: list[frozenset[Ref]] = []

    def decide(resource: Manifest, world: World, _: Settings) -> Decided:
        seen.append(world.missing)
        return Decided()

    async def scenario(rig: Rig) -> None:
        rig.see({**SERVER, "spec": spec})
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


def test_an_optional_kind_is_asked_for_where_it_is_wanted_and_only_there() -> None:
    spec = {"model": {"uri": "catalog://smollm2-135m"}, "metrics": {"podMonitor": {"enabled": True}}}
    worlds: list[World] = []

    def decide(resource: Manifest, world: World, _: Settings) -> Decided:
        worlds.append(world)
        return Decided()

    async def scenario(rig: Rig) -> None:
        await rig.work()
        assert rig.server.calls == []  # this one wants none
        rig.server.answer = lambda call: unserved() if "monitoring.coreos.com" in call.path else None
        rig.see({**SERVER, "spec": spec})
        await rig.work()
        assert worlds[-1].absent == {"PodMonitor"}
        assert len(rig.server.calls) == 1
        rig.queue.add(KEY)
        await rig.work()
        assert worlds[-1].absent == {"PodMonitor"}
        assert len(rig.server.calls) == 1  # known for a while
        due = rig.queue.backlog.next_due()
        assert due is not None
        assert 50 < due - time.monotonic() <= 60

    run(decide, scenario)

    async def served(rig: Rig) -> None:
        rig.server.store(POD_MONITOR.path("team", "smollm2"), wanted(rig.server.objects[KEY_PLACE], POD_MONITOR))
        rig.see({**SERVER, "spec": spec})
        await rig.work()
        assert worlds[-1].absent == frozenset()
        assert [child["kind"] for child in worlds[-1].children] == ["PodMonitor"]
        assert rig.queue.backlog.next_due() is None

    run(decide, served)


MONITORED = {"model": {"uri": "catalog://smollm2-135m"}, "metrics": {"podMonitor": {"enabled": True}}}
MONITOR = POD_MONITOR.path("team", "smollm2")


def really(resource: Manifest, world: World, settings: Settings) -> Any:
    """What the operator decides."""
    return decide({**resource, "metadata": {"creationTimestamp": "2026-01-01T00:00:00Z", **resource["metadata"]}}, world, settings)


def monitored(rig: Rig) -> str:
    conditions = rig.server.objects[KEY_PLACE]["status"]["conditions"]
    return str(next((one["status"] for one in conditions if one["type"] == "Monitored"), ""))


def edit(rig: Rig, spec: Manifest) -> None:
    rig.see({**rig.server.objects[KEY_PLACE], "spec": spec})


def test_a_monitor_comes_goes_and_comes_back_with_the_spec_and_with_its_resource() -> None:
    async def scenario(rig: Rig) -> None:
        edit(rig, MONITORED)
        await rig.work()
        assert monitored(rig) == "True"
        edit(rig, SERVER["spec"])
        await rig.work()
        assert MONITOR not in rig.server.objects
        rig.queue.add(KEY)
        await rig.work()
        assert rig.writes().count(("DELETE", MONITOR)) == 1
        edit(rig, MONITORED)
        await rig.work()
        assert MONITOR in rig.server.objects
        assert monitored(rig) == "True"
        # Deleted and made again; what belonged to the first goes later, and nothing shows it.
        rig.unsee(KEY_PLACE)
        again = rig.see({**SERVER, "metadata": {**SERVER["metadata"], "uid": "again"}, "spec": MONITORED})
        await rig.work()
        assert monitored(rig) == "False"
        assert rig.queue.backlog.next_due() is not None  # no watch will tell
        rig.server.remove(MONITOR)
        rig.queue.add(KEY)
        await rig.work()
        assert rig.server.objects[MONITOR]["metadata"]["ownerReferences"][0]["uid"] == again["metadata"]["uid"]
        assert monitored(rig) == "True"

    run(really, scenario)


def test_a_monitor_that_was_deleted_is_made_again_at_the_next_change_of_what_it_is_to_be() -> None:
    """The apply names the object that was known: it conflicts, and the next one finds none."""

    async def scenario(rig: Rig) -> None:
        edit(rig, MONITORED)
        await rig.work()
        rig.server.answer = lambda call: (
            refusal(409, "Conflict", "uid mismatch") if call.method == "PATCH" and call.path == MONITOR else None
        )
        live = rig.store.get(POD_MONITOR_KEY)
        assert live is not None
        changed = {**live, "metadata": {**live["metadata"], "labels": {}, "resourceVersion": "999"}}
        rig.store.note(changed)  # it looks drifted
        rig.queue.add(KEY)
        await rig.work(0.1)
        assert rig.store.get(POD_MONITOR_KEY) is None
        rig.server.remove(MONITOR)
        rig.server.answer = lambda _: None
        await rig.work(1.0)
        assert MONITOR in rig.server.objects

    run(really, scenario)


POD_MONITOR_KEY = Key("PodMonitor", "team", "smollm2")


def test_the_audit_finds_a_monitor_that_was_deleted_and_one_that_nobody_wants() -> None:
    async def scenario(rig: Rig) -> None:
        edit(rig, MONITORED)
        await rig.work()
        relist = Relist(rig.store, rig.api, rig.metrics, (), rig.driver.concerns)
        rig.server.remove(MONITOR)
        await relist.everything()
        await rig.work()
        assert MONITOR in rig.server.objects
        rig.store.forget(POD_MONITOR_KEY)  # an operator that has just started
        rig.see({**rig.server.objects[KEY_PLACE], "spec": SERVER["spec"]})
        await rig.work()
        await relist.everything()
        await rig.work()
        assert MONITOR not in rig.server.objects
        rig.server.answer = lambda call: unserved() if "monitoring.coreos.com" in call.path else None
        async with asyncio.timeout(10):
            await relist.everything()
        assert relist.trouble is None

    run(really, scenario)


def test_a_job_that_gets_no_pod_is_asked_why() -> None:
    """Quota, Pod Security, a webhook: only its Events tell."""
    worlds: list[World] = []

    def decide(resource: Manifest, world: World, _: Settings) -> Decided:
        worlds.append(world)
        return Decided()

    label = {"app.kubernetes.io/managed-by": "banyan-operator", "serving.banyan.dev/batchjob": "nightly"}
    job_key = Key("BatchJob", "team", "nightly")
    why = {"reason": "FailedCreate", "message": "exceeded quota: pods", "metadata": {"name": "e"}}

    def answer(call: Call) -> Any:
        wanted = "involvedObject.uid=j,type=Warning"
        return web.json_response({"metadata": {}, "items": [why]}) if call.query.get("fieldSelector") == wanted else None

    async def scenario(rig: Rig) -> None:
        rig.server.answer = answer
        rig.see({**BATCH, "metadata": {"name": "nightly", "namespace": "team"}, "spec": {}})

        async def asked(spec: Manifest, status: Manifest, made: str = "2026-01-01T00:00:00Z") -> bool:
            meta = {"name": "nightly", "namespace": "team", "uid": "j", "labels": label, "creationTimestamp": made}
            rig.see({"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": spec, "status": status})
            rig.queue.add(job_key)
            await rig.work(0.1)
            return bool(worlds[-1].events)

        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        assert not await asked({"suspend": True}, {})
        assert not await asked({}, {"startTime": now})
        assert not await asked({}, {"conditions": [{"type": "Failed", "status": "True"}]})
        assert await asked({}, {"startTime": "2026-01-01T00:00:00Z"})
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "nightly", "uid": "j", "controller": True}
        meta = {"name": "p", "namespace": "team", "labels": label, "ownerReferences": [owner]}
        rig.see({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {}, "status": {"phase": "Pending"}})
        assert not await asked({}, {"startTime": "2026-01-01T00:00:01Z"})

    run(decide, scenario)
