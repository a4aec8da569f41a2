"""Objects of an API that may be missing and that no watch shows: monitors."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from banyan_operator.cluster.resync import Resync
from banyan_operator.kube.kinds import POD_MONITOR
from banyan_operator.kube.objects import Key
from banyan_operator.plan import Manifest, Settings, World
from banyan_operator.reconcile import decide
from tests.support.kube.http import refusal, unserved
from tests.unit.operator.rig import KEY, KEY_PLACE, SERVER, Decided, Rig, run, wanted


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


def test_a_resync_finds_a_monitor_that_was_deleted_and_one_that_nobody_wants() -> None:
    async def scenario(rig: Rig) -> None:
        edit(rig, MONITORED)
        await rig.work()
        resync = Resync(rig.store, rig.api, rig.metrics, (), rig.driver.concerns)
        rig.server.remove(MONITOR)
        await resync.everything()
        await rig.work()
        assert MONITOR in rig.server.objects
        rig.store.forget(POD_MONITOR_KEY)  # an operator that has just started
        rig.see({**rig.server.objects[KEY_PLACE], "spec": SERVER["spec"]})
        await rig.work()
        await resync.everything()
        await rig.work()
        assert MONITOR not in rig.server.objects
        rig.server.answer = lambda call: unserved() if "monitoring.coreos.com" in call.path else None
        async with asyncio.timeout(10):
            await resync.everything()
        assert resync.trouble is None
        rig.server.answer = lambda _: refusal(503, "ServiceUnavailable", "it starts")
        tries = asyncio.create_task(resync.everything())
        for _ in range(1000):
            if "podmonitors" in (resync.trouble or ""):
                break
            await asyncio.sleep(0.01)
        tries.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await tries
        assert "podmonitors" in (resync.trouble or "")
        rig.server.answer = lambda call: unserved() if "monitoring.coreos.com" in call.path else None
        async with asyncio.timeout(10):
            await resync.everything()
        assert resync.trouble is None, "it is not served, which is no trouble, also behind an outage"

    run(really, scenario)
