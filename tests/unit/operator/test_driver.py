"""What the driver does around a decision, whatever the decision is."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web

from banyan_operator.cluster import gather, queue
from banyan_operator.kube.kinds import INFERENCE_SERVER, SERVICE
from banyan_operator.kube.objects import Key, Ref
from banyan_operator.plan import Manifest, Plan, Report, Settings, World
from tests.support.kube.http import Call, refusal, unserved
from tests.unit.operator.rig import KEY, KEY_PLACE, PLACE, SERVER, STATUS, Decided, Rig, always, run, until_there, wanted

BATCH = {"apiVersion": "serving.banyan.dev/v1alpha1", "kind": "BatchJob"}


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


def test_a_strangers_object_is_left_alone_and_told() -> None:
    stranger = {**wanted({**SERVER, "metadata": {"uid": "else"}}), "metadata": {"name": "smollm2", "namespace": "team"}}

    async def scenario(rig: Rig) -> None:
        rig.server.store(PLACE, stranger)
        before = rig.server.objects[PLACE]
        await rig.work()
        assert rig.server.objects[PLACE] == before
        assert ("PATCH", PLACE) not in rig.writes()
        assert rig.server.objects[KEY_PLACE]["status"]["phase"] != "fine"

    run(always, scenario)


def test_no_pods_are_made_that_nobody_could_reach() -> None:
    def decide(resource: Manifest, world: World, _: Settings) -> Decided:
        return Decided(Plan((wanted(resource, SERVICE), wanted(resource))))

    async def scenario(rig: Rig) -> None:
        theirs = SERVICE.path("team", "smollm2")
        rig.server.store(theirs, {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "smollm2", "namespace": "team"}})
        await rig.work()
        assert PLACE not in rig.server.objects
        assert "ownerReferences" not in rig.server.objects[theirs]["metadata"]

    run(decide, scenario)


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
        assert rig.server.objects[KEY_PLACE]["status"]["phase"] != "fine"
        assert len([call for call in rig.server.calls if call.path == PLACE]) <= 2
        due = rig.queue.backlog.next_due()
        assert due is not None
        assert due - time.monotonic() > 30

    run(always, scenario)


def test_a_bug_in_the_decision_costs_only_its_own_resource_a_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "BACKOFF_FIRST_S", 60.0)  # no second try falls into the test

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


def test_a_secret_that_is_missing_is_looked_for_again_soon_and_then_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    first_s = 20.0  # less than the longest pause; no second look falls into the test
    monkeypatch.setattr(gather, "MISSING_FIRST_S", first_s)
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
        assert due - time.monotonic() <= first_s
        rig.queue.add(KEY)
        await rig.work(0.1)
        assert len(rig.server.calls) == 1, "not asked again before its time"

    run(decide, scenario)
    assert seen[0] == {Ref("v1", "Secret", "keys")}


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
