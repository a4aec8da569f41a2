"""Children that were made anew, orphaned, deleted or fought for, and whom they wake."""

from __future__ import annotations

from banyan_operator.kube.kinds import BATCH_JOB, DEPLOYMENT
from banyan_operator.kube.objects import Key
from banyan_operator.plan import Manifest, Outcome, Plan, Report, Settings, World
from tests.unit.operator.rig import KEY, KEY_PLACE, OURS, PLACE, REF, Decided, Rig, always, run, until_there, wanted


def test_a_child_that_was_made_anew_by_others_is_not_taken_for_the_one_that_was_seen() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.work()
        rig.server.remove(PLACE)
        rig.server.store(PLACE, {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "smollm2", "uid": "theirs"}})
        rig.queue.add(KEY)
        await rig.work()
        assert "labels" not in rig.server.objects[PLACE]["metadata"]

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
        assert 6 <= len(applies) < 15  # 7 on a machine with nothing else to do
        assert contested[-1]

    run(decide, scenario)
