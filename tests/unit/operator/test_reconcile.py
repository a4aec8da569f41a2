"""What the operator does about a resource: children made, put back and taken away; refusals explained."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from banyan_operator.plan import Manifest, Outcome, Ref, World
from tests.unit.operator.conftest import DONE, SETTINGS, Turn, a_batch, a_server, merge, turn
from tests.unit.operator.test_desired import render, workload

NOW = 1_700_000_000.0


def observe(manifest: Manifest, *children: Manifest, outcome: Outcome = DONE, **world: Any) -> Turn:
    return turn(manifest, World(now=NOW, children=children, **world), SETTINGS, outcome)


def live(manifest: Manifest) -> list[Manifest]:
    """All children as they are after they were applied."""
    return [merge(child, {"metadata": {"uid": "u", "resourceVersion": "1"}}) for child in render(manifest)]


def accepted(plan: Turn) -> tuple[str, str, str]:
    found = next(one for one in plan.status["conditions"] if one["type"] == "Accepted")
    return found["status"], found["reason"], found["message"]


def test_children_are_applied_in_the_order_in_which_they_are_needed():
    plan = observe(a_server(cache={"type": "PersistentVolumeClaim", "size": "1Gi"}, ingress={"hosts": ["a.b"]}))
    kinds = ["ServiceAccount", "PersistentVolumeClaim", "Service", "Service", "ControllerRevision", "Deployment", "Ingress"]
    assert [child["kind"] for child in plan.apply] == kinds
    assert [event.reason for event in plan.events] == ["Created"]
    assert plan.events[0].message.endswith(" with 1 replica")


def test_nothing_is_written_where_all_is_as_wanted():
    server = a_server()
    first = observe(server, *live(server))
    again = observe(server | {"status": dict(first.status)}, *live(server))
    assert (first.apply, again.apply, again.delete, again.report.status, again.events) == ((), (), (), None, ())


def test_a_deleted_child_is_made_again():
    server = a_server()
    children = [child for child in live(server) if child["kind"] != "Service"]
    assert [child["metadata"]["name"] for child in observe(server, *children).apply] == ["tiny", "tiny--pods"]


def test_a_spoiled_child_is_put_back():
    server, children = a_server(), live(a_server())
    deployment = next(child for child in children if child["kind"] == "Deployment")
    deployment["spec"]["replicas"] = 9
    (applied,) = observe(server, *children).apply
    assert applied["spec"]["replicas"] == 1


def test_children_of_a_section_that_went_away_are_deleted():
    before = live(a_server(ingress={"hosts": ["a.b"]}, cache={"type": "PersistentVolumeClaim", "size": "1Gi"}))
    plan = observe(a_server(), *before)
    assert {Ref.of(one) for one in plan.delete} >= {
        Ref("networking.k8s.io/v1", "Ingress", "tiny"),
        Ref("v1", "PersistentVolumeClaim", "tiny--cache"),
    }


def test_a_claim_that_is_to_be_kept_has_no_owner_and_is_taken_up_again():
    keeping = a_server(cache={"type": "PersistentVolumeClaim", "size": "1Gi", "retain": True})
    claim = next(child for child in live(keeping) if child["kind"] == "PersistentVolumeClaim")
    assert "ownerReferences" not in claim["metadata"]
    assert not observe(a_server(), claim).delete
    plan = observe(keeping, claim)
    assert accepted(plan)[0] == "True"
    assert all(child["kind"] != "PersistentVolumeClaim" for child in plan.apply)


def test_a_claim_can_grow_and_changes_in_nothing_else():
    old = live(a_server(cache={"type": "PersistentVolumeClaim", "size": "10Gi"}))
    grown = observe(a_server(cache={"type": "PersistentVolumeClaim", "size": "20Gi", "storageClassName": "fast"}), *old)
    (claim,) = (child for child in grown.apply if child["kind"] == "PersistentVolumeClaim")
    assert claim["spec"] == {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "20Gi"}}}
    assert "ClaimSpecFixed" in [event.reason for event in grown.events]
    smaller = observe(a_server(cache={"type": "PersistentVolumeClaim", "size": "5Gi"}), *old)
    (claim,) = (child for child in smaller.apply if child["kind"] == "PersistentVolumeClaim")
    assert claim["spec"]["resources"]["requests"]["storage"] == "10Gi"


@pytest.mark.parametrize("kind", ["Service", "Deployment", "ServiceAccount"])
def test_an_object_of_somebody_else_stops_everything_and_is_named(kind):
    server, children = a_server(), live(a_server())
    foreign = next(child for child in children if child["kind"] == kind)
    foreign["metadata"] = {
        "name": foreign["metadata"]["name"],
        "ownerReferences": [{"uid": "x", "controller": True, "kind": "Y", "name": "z"}],
    }
    plan = observe(server, foreign)
    assert (plan.apply, plan.delete) == ((), ())
    status, reason, message = accepted(plan)
    assert (status, reason) == ("False", "NameConflict")
    assert f"{kind} {foreign['metadata']['name']}" in message
    assert plan.status["phase"] == "Failed"


def test_an_object_that_its_owner_gives_away_is_adopted():
    server, children = a_server(), live(a_server())
    theirs = next(child for child in children if child["kind"] == "Service")
    theirs["metadata"] = {"name": theirs["metadata"]["name"], "uid": "theirs"}
    assert accepted(observe(server, theirs))[1] == "NameConflict"
    given = merge(theirs, {"metadata": {"annotations": {"serving.banyan.dev/adopt": "true"}}})
    plan = observe(server, given)
    assert accepted(plan)[0] == "True"
    (applied,) = (child for child in plan.apply if Ref.of(child) == Ref.of(theirs))
    assert applied["metadata"]["ownerReferences"][0]["uid"] == server["metadata"]["uid"]


def left(children: Iterable[Manifest]) -> list[Manifest]:
    """As they are without their owner: somebody took it, or it was deleted with --cascade=orphan."""
    return [merge(child, {"metadata": {"ownerReferences": None}}) for child in children]


NEWER = replace(SETTINGS, runtime_image="registry.example/banyan-runtime:0.2", operator_version="0.2.0")
CLAIMED = a_server(cache={"type": "PersistentVolumeClaim", "size": "1Gi"}, ingress={"hosts": ["a.b"]}, networkPolicy={"enabled": True})


@pytest.mark.parametrize("resource", [CLAIMED, merge(CLAIMED, {"metadata": {"uid": "made-again"}})], ids=["the same", "made again"])
def test_children_that_lost_their_owner_get_it_back_and_their_pods_stay(resource):
    before = live(CLAIMED)
    plan = turn(resource, World(now=NOW, children=tuple(left(before))), NEWER)
    assert accepted(plan)[0] == "True"
    assert {Ref.of(one) for one in plan.apply} == {Ref.of(one) for one in before}
    for one in plan.apply:
        assert [owner["uid"] for owner in one["metadata"]["ownerReferences"]] == [resource["metadata"]["uid"]], one["kind"]
    assert workload(plan.apply)["spec"]["template"] == workload(before)["spec"]["template"]
    assert "RolloutStarted" not in [event.reason for event in plan.events]
    assert plan.condition("Progressing")["reason"] != "Creating"


@pytest.mark.parametrize("kind", sorted({child["kind"] for child in render(CLAIMED)}))
def test_one_child_that_lost_its_owner_gets_it_back_and_the_others_are_left_alone(kind):
    before = live(CLAIMED)
    plan = observe(CLAIMED, *(left([child])[0] if child["kind"] == kind else child for child in before))
    assert {Ref.of(one) for one in plan.apply} == {Ref.of(child) for child in before if child["kind"] == kind}
    assert plan.plan.drifted == {Ref.of(one) for one in plan.apply}
    assert plan.delete == ()


def test_earlier_records_that_lost_their_owner_get_it_back():
    first, second = live(a_server()), render(a_server(runtime={"contextLength": 4096}))
    (earlier,) = (child for child in first if child["kind"] == "ControllerRevision")
    now = [merge(child, {"metadata": {"uid": "u"}}) for child in (*second, earlier)]
    plan = observe(a_server(runtime={"contextLength": 4096}), *left(now))
    (back,) = (one for one in plan.apply if Ref.of(one) == Ref.of(earlier))
    assert back["metadata"]["ownerReferences"] == earlier["metadata"]["ownerReferences"]
    assert (back["data"], back["metadata"]["labels"]) == (earlier["data"], earlier["metadata"]["labels"])


def test_garbage_of_an_earlier_resource_of_this_name_is_waited_for():
    server, children = a_server(), live(a_server())
    for child in children:
        child["metadata"]["ownerReferences"][0]["uid"] = "uid-of-the-earlier-one"
    plan = observe(server, *children)
    assert (plan.apply, plan.delete) == ((), ())
    assert accepted(plan)[0] == "True"
    assert plan.requeue_after_s == 5


@pytest.mark.parametrize(
    ("spec", "missing", "reason", "field"),
    [
        ({}, Ref("v1", "PersistentVolumeClaim", "models"), "ClaimNotFound", "spec.model.uri"),
        ({"auth": {"apiKeysSecretRef": {"name": "k"}}}, Ref("v1", "Secret", "k"), "SecretNotFound", "spec.auth.apiKeysSecretRef"),
        (
            {"model": {"chatTemplate": {"name": "t", "key": "k"}}},
            Ref("v1", "ConfigMap", "t"),
            "ConfigMapNotFound",
            "spec.model.chatTemplate",
        ),
    ],
)
def test_a_missing_reference_is_named_with_its_field_and_nothing_is_made(spec, missing, reason, field):
    plan = observe(a_server(**spec), missing=frozenset({missing}))
    assert plan.apply == ()
    assert accepted(plan)[:2] == ("False", reason)
    assert f"{missing.name} ({field})" in accepted(plan)[2]
    assert plan.requeue_after_s == 30


def test_a_reference_that_vanishes_leaves_the_running_server_alone():
    server, children = a_server(), live(a_server())
    plan = observe(server, *children, missing=frozenset({Ref("v1", "PersistentVolumeClaim", "models")}))
    assert (plan.apply, plan.delete) == ((), ())


GONE = frozenset({Ref("v1", "PersistentVolumeClaim", "models")})


def test_a_server_that_lacks_a_reference_is_kept_up_and_may_become_smaller():
    children = [child for child in live(a_server(replicas=3)) if child["kind"] != "Service"]
    plan = observe(a_server(replicas=1), *children, missing=GONE)
    assert [child["kind"] for child in plan.apply] == ["Service", "Service", "Deployment"]
    assert plan.apply[-1]["spec"]["replicas"] == 1
    assert "Scaled" in [event.reason for event in plan.events]
    assert accepted(plan)[:2] == ("False", "ClaimNotFound")
    assert [child["kind"] for child in plan.delete] == ["PodDisruptionBudget"]  # of one pod it would let no node be drained
    after = observe(a_server(replicas=0), *live(a_server(replicas=0)), missing=GONE)
    assert next(one for one in after.status["conditions"] if one["type"] == "Available")["reason"] == "ScaledToZero"


@pytest.mark.parametrize(
    "spec", [{"replicas": 4}, {"runtime": {"contextLength": 512}}, {"service": {"port": 81}, "runtime": {"image": "other:1"}}]
)
def test_what_lacks_a_reference_gets_no_new_pods(spec: dict[str, Any]):
    plan = observe(a_server(**{"replicas": 3, **spec}), *live(a_server(replicas=3)), missing=GONE)
    assert (plan.apply, plan.delete) == ((), ())
    assert accepted(plan)[:2] == ("False", "ClaimNotFound")


def test_what_lacks_a_reference_keeps_a_template_that_was_changed_by_hand():
    """To put it back would end pods whose successors cannot start."""
    children = live(a_server(replicas=3))
    deployment = next(child for child in children if child["kind"] == "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["image"] = "mended:by-hand"
    assert [child["kind"] for child in observe(a_server(replicas=3), *children).apply] == ["Deployment"]
    assert observe(a_server(replicas=3), *children, missing=GONE).apply == ()


def test_an_invalid_spec_keeps_the_children_and_says_the_field():
    server = a_server(replicas=-1, model={"uri": "nowhere"})
    plan = observe(server, *live(a_server()))
    assert (plan.apply, plan.delete, plan.requeue_after_s) == ((), (), None)
    status, reason, message = accepted(plan)
    assert (status, reason) == ("False", "InvalidSpec")
    assert "spec.replicas" in message
    assert "spec.model.uri" in message
    assert plan.status["phase"] == "Failed"
    assert [event.reason for event in plan.events] == ["InvalidSpec"]


def test_an_invalid_batch_is_pending_and_can_be_corrected():
    plan = observe(a_batch(input={"uri": "nowhere"}))
    assert (plan.status["phase"], accepted(plan)[1]) == ("Pending", "InvalidSpec")
    assert next(one for one in plan.status["conditions"] if one["type"] == "Complete")["reason"] == "InvalidSpec"
    assert observe(a_batch() | {"status": dict(plan.status)}, server=None).status["phase"] == "Pending"


def test_what_is_not_built_is_refused_with_its_field():
    plan = observe(a_server(runtime={"quantization": "awq"}))
    assert plan.apply == ()
    assert accepted(plan)[1] == "Unsupported"
    assert "spec.runtime.quantization" in accepted(plan)[2]


def test_a_pod_template_that_cannot_be_merged_is_an_invalid_spec():
    plan = observe(a_server(podTemplate={"spec": {"containers": "x"}}))
    assert accepted(plan)[1] == "InvalidSpec"
    assert "spec.podTemplate.spec.containers" in accepted(plan)[2]


@pytest.mark.parametrize(
    ("said", "reason"), [("spec.template.spec.nodeName: Invalid value", "InvalidSpec"), ("exceeded quota: q", "QuotaExceeded")]
)
def test_what_the_api_server_refuses_is_passed_on(said, reason):
    plan = observe(a_server(), outcome=Outcome(refused={Ref("apps/v1", "Deployment", "tiny"): said}))
    assert accepted(plan)[1] == reason
    assert f"Deployment tiny: {said}" in accepted(plan)[2]
    assert plan.apply  # what was refused once may be taken later


def test_a_paused_server_is_watched_but_not_touched():
    server, children = a_server(paused=True, runtime={"contextLength": 4096}), live(a_server())
    plan = observe(server, *children[1:])
    assert (plan.apply, plan.delete, plan.requeue_after_s) == ((), (), None)
    assert plan.status["phase"] == "Paused"
    assert next(one for one in plan.status["conditions"] if one["type"] == "Progressing")["reason"] == "Paused"


def test_while_paused_only_the_record_of_what_runs_is_written():
    children = [one for one in live(a_server()) if one["kind"] != "ControllerRevision"]
    newer = replace(SETTINGS, runtime_image="registry.example/banyan-runtime:0.2")
    paused = a_server(paused=True, service={"port": 99})
    (record,) = turn(paused, World(now=NOW, children=tuple(children)), newer).apply
    assert record["kind"] == "ControllerRevision"
    assert record["data"]["template"] == next(one for one in children if one["kind"] == "Deployment")["spec"]["template"]
    assert turn(paused, World(now=NOW, children=(*children, record)), newer).apply == ()


@pytest.mark.parametrize("manifest", [a_server(), a_batch()])
def test_a_resource_that_is_being_deleted_is_left_to_the_garbage_collector(manifest):
    going = merge(manifest, {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})
    plan = observe(going, *live(manifest))
    assert (plan.apply, plan.delete, plan.status["phase"]) == ((), (), "Terminating")
    again = observe(going | {"status": dict(plan.status)}, *live(manifest))
    assert again.report.status is None


def progressing(plan: Turn) -> dict[str, Any]:
    return next(one for one in plan.status["conditions"] if one["type"] == "Progressing")


def test_a_deployment_that_was_paused_by_hand_is_put_back():
    """It would hold every rollout, and Kubernetes keeps no deadline meanwhile."""
    children = [merge(child, {"spec": {"paused": True}}) if child["kind"] == "Deployment" else child for child in live(a_server())]
    assert [(child["kind"], child["spec"]["paused"]) for child in observe(a_server(), *children).apply] == [("Deployment", False)]
    left_out = [merge(child, {"spec": {"paused": None}}) if child["kind"] == "Deployment" else child for child in live(a_server())]
    assert not observe(a_server(), *left_out).apply


@pytest.mark.parametrize("finalizers", [[], ["example.com/lb-cleanup"]])
def test_what_is_to_go_before_it_is_made_again_is_told(finalizers):
    gone = {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": finalizers}}
    children = [
        merge(child, gone) if child["kind"] == "Service" and child["metadata"]["name"] == "tiny" else child for child in live(a_server())
    ]
    plan = observe(a_server(), *children)
    assert "Service tiny" in progressing(plan)["message"]
    assert ("example.com/lb-cleanup" in progressing(plan)["message"]) == bool(finalizers)
    earlier = [merge(child, {"metadata": {"uid": "before"}}) for child in live(a_batch())]
    for child in earlier:
        child["metadata"]["ownerReferences"] = [{**one, "uid": "gone"} for one in child["metadata"]["ownerReferences"]]
    running = next(one for one in observe(a_batch(), *earlier).status["conditions"] if one["type"] == "Running")
    assert (running["status"], running["reason"]) == ("False", "Starting")
    assert "nightly--" in running["message"]


def test_a_changed_spec_starts_a_rollout_and_says_so():
    plan = observe(a_server(runtime={"contextLength": 4096}, replicas=2), *live(a_server()))
    assert "Deployment" in [child["kind"] for child in plan.apply]
    assert [event.reason for event in plan.events] == ["RolloutStarted", "Scaled"]
    assert plan.status["phase"] == "Pending"


def test_deciding_is_pure():
    server, children = a_server(), live(a_server())
    before = repr((server, children))
    assert observe(server, *children) == observe(server, *children)
    assert repr((server, children)) == before
