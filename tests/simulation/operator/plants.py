"""Defects, each put back with one small patch: what the simulation has to find."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from banyan_operator.cluster import resync, store
from banyan_operator.cluster.apply import Applier
from banyan_operator.cluster.queue import Backlog
from banyan_operator.cluster.report import Reporter
from banyan_operator.cluster.store import Store
from banyan_operator.desired import names, podtemplate, revisions
from banyan_operator.kube import kinds
from banyan_operator.kube.kinds import Manifest
from banyan_operator.kube.objects import Key, Ref, controller, key_of, labelled_owner, uid_of
from banyan_operator.kube.ownership import Owner
from banyan_operator.observed import course, ending, pods
from banyan_operator.observed import seen as observed_seen
from banyan_operator.observed import server as observed_server
from banyan_operator.observed.ending import Ending
from banyan_operator.observed.seen import Stage
from banyan_operator.observed.written import written
from banyan_operator.reconcile import batch as reconcile_batch
from banyan_operator.reconcile import server as reconcile_server
from tests.support.kube.apiserver import Server

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Plant:
    defect: str  # of the operator, as it was
    patch: Patch
    says: str  # what the simulation says of it, as a pattern
    within: int  # schedules
    seed: int = 1  # where many schedules are needed from 1 on, one that shows it, so that the test is quick


def rendered_anew(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(revisions, "decided", lambda server, children: None)


def ends_on_a_partial_view(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ending, "over", lambda self, now: True)


def cancelled_in_the_plan_that_suspends(patch: pytest.MonkeyPatch) -> None:
    def at_rest(self: Stage, *, but_lost: bool = False) -> bool:
        status = self.job.get("status") or {}
        return not (status.get("active") or status.get("terminating") or any(pod.phase == "Running" for pod in self.pods))

    patch.setattr(Stage, "at_rest", at_rest)


def over_after_a_failed_write(patch: pytest.MonkeyPatch) -> None:
    def blind(*arguments: Any) -> Any:
        return replace(written(*arguments), complete=True)

    def at_rest(self: Stage, *, but_lost: bool = False) -> bool:
        return not any(pod.may_run for pod in self.pods)

    patch.setattr(reconcile_batch, "written", blind)
    patch.setattr(Stage, "at_rest", at_rest)


def merged_before_the_work_is_over(patch: pytest.MonkeyPatch) -> None:
    """A first pod's success is taken for the Job's end."""
    patch.setattr(Ending, "over", lambda self, now: True)
    patch.setattr(ending, "_due", lambda work, kind, workers: 0.0)


def lost_pods_are_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reconcile_batch, "_of_the_abandoned", lambda seen, world: ())


def given_up_in_their_grace(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pods.Pod, "abandoned", lambda self, now: self.may_run and self.deleted is not None)


def planned_without_a_plan(patch: pytest.MonkeyPatch) -> None:
    real = course.known
    patch.setattr(reconcile_batch, "known", lambda *arguments: replace(real(*arguments), planned=True))


def status_without_a_version(patch: pytest.MonkeyPatch) -> None:
    real = Server.patch_status
    patch.setattr(Server, "patch_status", lambda self, key, status, version: real(self, key, status, ""))


def owners_by_name(patch: pytest.MonkeyPatch) -> None:
    def controls(self: Owner, live: Mapping[str, Any]) -> bool:
        owner = controller(live)
        return owner is not None and (owner["kind"], owner["name"]) == (self.kind, self.name)

    patch.setattr(Owner, "controls", controls)


def own_status_is_no_news_at_all(patch: pytest.MonkeyPatch) -> None:
    """The answer to a status write shows the edit that came before it, and only the status was looked for."""
    real = Store.note

    def note(self: Store, manifest: Mapping[str, Any], *, own: bool = False) -> frozenset[Key]:
        concerned = real(self, manifest, own=own)
        return store.NOBODY if own else concerned

    patch.setattr(Store, "note", note)
    _status_for_the_same_object(patch)


def _status_for_the_same_object(patch: pytest.MonkeyPatch) -> None:
    """A status is refused by another object of the name, not by a later version of the same one: its answer can show an edit."""
    uids: dict[tuple[int, str], str] = {}
    commit, real = Server._commit, Server.patch_status

    def noting(self: Server, *arguments: Any) -> Manifest:
        made = commit(self, *arguments)
        uids[id(self), made["metadata"]["resourceVersion"]] = uid_of(made)
        return made

    def patch_status(self: Server, key: Key, status: Mapping[str, Any], version: str) -> Manifest:
        live = self.objects.get(key)
        same = live is not None and uids.get((id(self), version)) == uid_of(live)
        return real(self, key, status, "" if same else version)

    patch.setattr(Server, "_commit", noting)
    patch.setattr(Server, "patch_status", patch_status)


def gone_for_ever(patch: pytest.MonkeyPatch) -> None:
    async def target(self: Applier, resource: Manifest, manifest: Manifest, unseen: Any, applied: Any) -> Manifest:
        meta = manifest["metadata"]
        live = self._store.get(key_of(manifest)) or await self._api.get(kinds.of(manifest), meta["namespace"], meta["name"])
        return manifest if live is None else {**manifest, "metadata": {**meta, "uid": uid_of(live)}}

    real = Store._remember_gone
    patch.setattr(Store, "_remember_gone", lambda self, uid, until: real(self, uid, 10**12))
    patch.setattr(Applier, "_target", target)


def owners_by_label_alone(patch: pytest.MonkeyPatch) -> None:
    def owners(child: Mapping[str, Any]) -> frozenset[Key]:
        found = None if child["kind"] in ("InferenceServer", "BatchJob") else labelled_owner(child)
        return frozenset() if found is None else frozenset({found})

    real = Store._concerned
    patch.setattr(store, "owners", owners)
    patch.setattr(Store, "_concerned", lambda self, key, before, after, own: real(self, key, None if after else before, after, own))


def no_hold(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Backlog, "hold", lambda self, key, until: None)


def merge_keys_of_one_field(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(podtemplate.MERGE_KEYS, "topologySpreadConstraints", ("topologyKey",))
    patch.setitem(podtemplate.MERGE_KEYS, "ports", ("containerPort",))


def repairs_of_what_did_not_drift(patch: pytest.MonkeyPatch) -> None:
    real = reconcile_server.difference

    def difference(*arguments: Any) -> Any:
        found = real(*arguments)
        found.drifted = [Ref.of(one) for one in found.apply]
        return found

    patch.setattr(reconcile_server, "difference", difference)
    patch.setattr(reconcile_batch, "difference", difference)


def names_that_collide(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(names, "SEPARATOR", "-")


def pods_by_label(patch: pytest.MonkeyPatch) -> None:
    def pods_of(owners: Iterable[Manifest], children: Iterable[Manifest]) -> Any:
        return pods.newest_first(pods._pod(child) for child in children if child["kind"] == "Pod")

    patch.setattr(observed_server, "pods_of", pods_of)
    patch.setattr(observed_seen, "pods_of", pods_of)


def nothing_is_listed_again(patch: pytest.MonkeyPatch) -> None:
    async def run(self: resync.Resync) -> None:
        pass

    patch.setattr(resync.Resync, "run", run)


def late_sightings_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store, "version", lambda manifest: 1 << 60 if manifest is None else _Always())


class _Always(int):
    """Newer than whatever it is compared with."""

    def __ge__(self, other: object) -> bool:
        return False

    def __gt__(self, other: object) -> bool:
        return False


def siblings_are_taken_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(names, "SEPARATOR", "-")
    patch.setattr(Owner, "may_change", lambda self, live: True)


def told_before_it_is_written(patch: pytest.MonkeyPatch) -> None:
    async def write(self: Reporter, resource: Manifest, report: Any) -> None:
        for event in report.events:
            await self._recorder.post(resource, event)
        await self._status(resource, report.status)

    patch.setattr(Reporter, "write", write)


def over_while_work_goes_on(patch: pytest.MonkeyPatch) -> None:
    real = course._merging

    def merging(job: Any, seen: Any, merge: Stage, wish: Any, now: float) -> course.Course:
        return replace(real(job, seen, merge, wish, now), over=course._merged(merge) if merge.over(now) else None)

    patch.setattr(course, "_merging", merging)


def what_went_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Store, "remains", lambda self, key: ())


PLANTS = (
    Plant("2: what pods run is rendered anew by each operator", rendered_anew, "pods are restarted", 2000, seed=2064169215),
    Plant("3: a Job's end is taken for all of it", ends_on_a_partial_view, "Succeeded with|Failed with|may still run|goes on", 2000),
    Plant(
        "4: Cancelled in the plan that suspends",
        cancelled_in_the_plan_that_suspends,
        "may still run|its worker runs|a worker of a BatchJob|the work goes on",
        2000,
        seed=4016809969,
    ),
    Plant(
        "4: a terminal status after a failed write",
        over_after_a_failed_write,
        "may still run|a worker of a BatchJob|goes on",
        2000,
        seed=550873468,
    ),
    Plant("a merge before the work is over", merged_before_the_work_is_over, "the work goes on", 2000, seed=1188342906),
    Plant("work without a plan", planned_without_a_plan, "nothing was planned", 500),
    Plant(
        "5: a status is written whatever object has the name",
        status_without_a_version,
        "older than|another run|started before",
        2000,
        seed=1180572374,
    ),
    Plant("5: what a deleted resource owned counts as of its successor", owners_by_name, "", 2000, seed=2887034890),
    Plant(
        "6: an edit under a status write is lost",
        own_status_is_no_news_at_all,
        "observedGeneration|still to be|instead of",
        4000,
        seed=3483815742,
    ),
    Plant("7: a child that loses our label is gone for ever", gone_for_ever, "", 2000, seed=4059906722),
    Plant("7: a child that loses the owner label queues nobody", owners_by_label_alone, "", 2000, seed=2101733606),
    Plant("9: Retry-After is ignored", no_hold, "Retry-After", 2000, seed=930414979),
    Plant("10: merge keys of one field", merge_keys_of_one_field, "", 2000, seed=3017416985),
    Plant("10: repairs where nothing drifted", repairs_of_what_did_not_drift, "repairs were counted", 2000),
    Plant("11: names collide", names_that_collide, "", 2000, seed=1252418180),
    Plant("11: a sibling's objects are taken over", siblings_are_taken_over, "", 2000),
    Plant("12: pods of nobody count", pods_by_label, "", 2000, seed=2204859212),
    Plant("no resync", nothing_is_listed_again, "", 2000, seed=24520513),
    Plant("a late sighting counts as news", late_sightings_count, "", 2000, seed=2867329471),
    Plant("13: a Job that has ended and was removed is made again", what_went_is_forgotten, "was done already", 2000, seed=4164177691),
    Plant("13: over while work that was made again goes on", over_while_work_goes_on, "may still run", 2000, seed=1666448233),
    Plant("14: a pod on a node that never comes back is waited for", lost_pods_are_waited_for, "goes on|nothing holds it up", 2000),
    Plant("14: a pod is given up that its node ends", given_up_in_their_grace, "its node ends it", 2000, seed=3634390239),
    Plant("Events before what they tell of", told_before_it_is_written, "was told", 2000, seed=3878446708),
)
