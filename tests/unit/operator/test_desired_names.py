"""Names of children: no two can be the same, whatever users call their resources. A Job is made once."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from banyan_operator import api
from banyan_operator.api.resources import MAX_NAME, NAME_RULES
from banyan_operator.desired import batch, server
from banyan_operator.desired.batchjob import Order
from banyan_operator.desired.batchpod import PHASES
from banyan_operator.desired.difference import difference
from banyan_operator.desired.metadata import owner
from banyan_operator.kube.objects import Ref
from banyan_operator.plan import Manifest
from tests.unit.operator.conftest import SETTINGS, a_batch, a_server, an_own_server_batch, merge

CACHE = {"type": "PersistentVolumeClaim", "size": "1Gi", "accessMode": "ReadWriteMany"}
ALL_OF_A_SERVER: dict[str, Any] = {
    "replicas": 2,
    "cache": CACHE,
    "ingress": {"hosts": ["a.example"]},
    "networkPolicy": {"enabled": True},
    "metrics": {"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}},
}
ALL_OF_A_BATCH: dict[str, Any] = {
    "server": {"cache": CACHE},
    "networkPolicy": {"enabled": True},
    "metrics": {"podMonitor": {"enabled": True}},
}
ENDS = ("pods", "server", "cache", "batch", "work", "batch-cache")


def children(manifest: Manifest) -> tuple[Manifest, ...]:
    parsed = api.parse(manifest)
    if isinstance(parsed, api.InferenceServer):
        return server.children(parsed, SETTINGS)
    return batch.children(parsed, SETTINGS, [Order(phase) for phase in PHASES], server_url="http://x")


def random_name(rng: random.Random) -> str:
    """Made of the words that we ourselves put behind a name."""
    return "-".join(rng.choice(("x", *ENDS)) for _ in range(rng.randint(1, 4)))


def test_no_two_resources_want_an_object_of_one_name():
    rng = random.Random(7)
    names = {random_name(rng) for _ in range(300)} | {"x", "x-pods", "x-cache", "x-server", "x-batch", "x-work", "x-batch-cache"}
    seen: dict[Ref, str] = {}
    for name in sorted(name for name in names if all(rule.holds({"metadata": {"name": name}}) for rule in NAME_RULES)):
        for manifest in (a_server(name, **ALL_OF_A_SERVER), an_own_server_batch(name, **ALL_OF_A_BATCH)):
            for child in children(manifest):
                other = seen.setdefault(Ref.of(child), f"{manifest['kind']} {name}")
                assert other == f"{manifest['kind']} {name}", Ref.of(child)


def test_a_name_with_two_dashes_is_refused_and_told_why():
    for manifest in (a_server("x--pods"), a_batch("a--b")):
        with pytest.raises(api.SpecError) as refused:
            api.parse(manifest)
        assert [problem.field for problem in refused.value.problems] == ["metadata.name"]


def test_names_of_the_longest_resource_are_short_enough_for_what_they_are():
    name = "a" * MAX_NAME
    for child in (*children(a_server(name, **ALL_OF_A_SERVER)), *children(an_own_server_batch(name, **ALL_OF_A_BATCH))):
        length, label = len(child["metadata"]["name"]), re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", child["metadata"]["name"])
        assert length <= 63
        assert label
        if child["kind"] == "Job":
            assert length + len("-99999") <= 63  # a pod's host name


# --- a Job is made once ---


@pytest.mark.parametrize(
    ("made", "manifest"), [(an_own_server_batch(), an_own_server_batch(image="changed:1")), (a_batch(), a_batch(env=[{"name": "A"}]))]
)
@pytest.mark.parametrize("suspended", [False, True])
def test_a_job_that_exists_is_never_changed_but_to_suspend_it(made, manifest, suspended):
    live = [one for one in children(made) if not one["metadata"]["name"].endswith(("--plan", "--merge"))]
    (job,) = (one for one in live if one["kind"] == "Job")
    job["spec"] |= {"suspend": suspended, "selector": {"matchLabels": {"controller-uid": "x"}}, "manualSelector": False}
    parsed = api.parse(manifest)
    assert isinstance(parsed, api.BatchJob)
    for suspend in (suspended, not suspended, suspended):
        wanted = batch.children(parsed, SETTINGS, [Order("work", suspend=suspend)], server_url="http://y", live=live)
        (now,) = (one for one in wanted if one["kind"] == "Job")
        assert {**now["spec"], "suspend": None} == {**job["spec"], "suspend": None}
        changes = difference(owner(parsed), wanted, live)
        applied = [one for one in changes.apply if one["kind"] == "Job"]
        assert len(applied) == (job["spec"]["suspend"] != suspend)
        assert not [ref for ref in changes.drifted if ref.kind == "Job"], "our own decision is no drift"
        if applied:
            live[live.index(job)] = job = applied[0]
    job["spec"]["suspend"] = not suspended
    wanted = batch.children(parsed, SETTINGS, [Order("work", suspend=suspended)], server_url="http://y", live=live)
    assert [ref.kind for ref in difference(owner(parsed), wanted, live).drifted] == ["Job"], "somebody else's is"


def test_the_workers_of_a_job_that_exists_change_in_one_write_and_nothing_else_does():
    on_s3 = {"output": {"uri": "s3://out/x/"}}
    before = api.parse(a_batch(**on_s3, workers=2))
    after = api.parse(a_batch(**on_s3, workers=5))
    assert isinstance(before, api.BatchJob)
    assert isinstance(after, api.BatchJob)
    live = [one for one in batch.children(before, SETTINGS, [Order("work")], server_url="http://y") if one["kind"] == "Job"]
    (now,) = (one for one in batch.children(after, SETTINGS, [Order("work")], server_url="http://z", live=live) if one["kind"] == "Job")
    assert now["spec"] == live[0]["spec"] | {"completions": 5, "parallelism": 5}
    changes = difference(owner(after), [now], live)
    assert (changes.apply, changes.drifted) == ([now], [])
    over = [merge(live[0], {"status": {"conditions": [{"type": "Complete", "status": "True"}]}})]
    (kept,) = (one for one in batch.children(after, SETTINGS, [Order("work")], server_url="http://z", live=over) if one["kind"] == "Job")
    assert kept["spec"] == live[0]["spec"], "a Job that is over takes no other number"
