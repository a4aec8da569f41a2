"""What a server runs is decided once: it survives upgrades of operator, chart and CRDs, and changes with the spec alone."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from banyan_operator import api
from banyan_operator.desired import server
from banyan_operator.desired.difference import difference
from banyan_operator.desired.metadata import RENDERED_BY, SPEC_HASH, owner
from banyan_operator.plan import Manifest, Settings
from tests.unit.operator.conftest import SETTINGS, a_server, merge
from tests.unit.operator.test_desired import CASES, EVERYTHING

NEWER = replace(
    SETTINGS,
    runtime_image="registry.example/banyan-runtime:0.2",
    operator_version="0.2.0",
    image_pull_policy="Always",
    image_pull_secrets=("chart-secret",),
)


class Cluster:
    """Applies what is wanted and deletes what is not, as an API server would store it."""

    def __init__(self) -> None:
        self.children: list[Manifest] = []
        self.restarts = 0

    def reconcile(self, manifest: Manifest, settings: Settings = SETTINGS) -> None:
        parsed = api.parse(manifest)
        assert isinstance(parsed, api.InferenceServer)
        changes = difference(owner(parsed), server.children(parsed, settings, self.children), self.children)
        assert not changes.waiting
        assert not changes.conflicts
        for wanted in changes.apply:
            self.apply(wanted)
        for gone in changes.delete:
            self.children.remove(gone)
        again = difference(owner(parsed), server.children(parsed, settings, self.children), self.children)
        assert (again.apply, again.delete) == ([], [])

    def apply(self, wanted: Manifest) -> None:
        live = self.find(wanted["kind"], wanted["metadata"]["name"])
        stored = as_stored(wanted)
        if live is not None:
            if wanted["kind"] == "ControllerRevision":
                assert live["data"] == wanted["data"], "data cannot change"
            if wanted["kind"] == "Deployment" and live["spec"]["template"] != stored["spec"]["template"]:
                self.restarts += 1
            self.children.remove(live)
        self.children.append(stored)

    def find(self, kind: str, name: str) -> Manifest | None:
        return next((one for one in self.children if one["kind"] == kind and one["metadata"]["name"] == name), None)

    @property
    def deployment(self) -> Manifest:
        return next(one for one in self.children if one["kind"] == "Deployment")

    @property
    def template(self) -> dict[str, Any]:
        found: dict[str, Any] = self.deployment["spec"]["template"]
        return found

    @property
    def image(self) -> str:
        return str(self.template["spec"]["containers"][0]["image"])

    @property
    def records(self) -> list[Manifest]:
        found = [one for one in self.children if one["kind"] == "ControllerRevision"]
        return sorted(found, key=lambda one: int(one["revision"]))


def as_stored(manifest: Manifest) -> Manifest:
    """With what the API server fills into a Deployment."""
    live: Manifest = json.loads(json.dumps(manifest))
    if live["kind"] == "Deployment":
        pod = live["spec"]["template"]["spec"]
        for name in ("hostNetwork", "hostPID", "hostIPC"):
            if pod.get(name) is False:
                del pod[name]
        pod.setdefault("dnsPolicy", "ClusterFirst")
        pod.setdefault("schedulerName", "default-scheduler")
        pod["serviceAccount"] = pod["serviceAccountName"]
        live["spec"]["template"]["metadata"]["creationTimestamp"] = None
        for container in pod["containers"]:
            container.setdefault("terminationMessagePath", "/dev/termination-log")
            container.setdefault("resources", {})
            for name in ("startupProbe", "livenessProbe", "readinessProbe"):
                container[name].setdefault("successThreshold", 1)
                container[name]["httpGet"].setdefault("scheme", "HTTP")
            for variable in container["env"]:
                if field := variable.get("valueFrom", {}).get("fieldRef"):
                    field.setdefault("apiVersion", "v1")
        for volume in pod["volumes"]:
            if "configMap" in volume:
                volume["configMap"].setdefault("defaultMode", 0o644)
    return live


def with_generation(manifest: Manifest, generation: int) -> Manifest:
    return {**manifest, "metadata": {**manifest["metadata"], "generation": generation}}


SERVERS = {name: manifest for name, manifest in CASES.items() if manifest["kind"] == "InferenceServer"}


@pytest.mark.parametrize("name", SERVERS)
def test_a_new_operator_or_chart_restarts_nothing_also_when_replicas_change(name):
    cluster = Cluster()
    cluster.reconcile(SERVERS[name])
    before = copy.deepcopy(cluster.template)
    scaled = with_generation(SERVERS[name], 2)
    scaled["spec"] = {
        **scaled["spec"],
        "replicas": 5,
        "cache": {"type": "None"} if name == "server-catalog-no-cache" else scaled["spec"].get("cache", {}),
    }
    for manifest in (SERVERS[name], scaled):
        cluster.reconcile(manifest, NEWER)
    assert cluster.template == before
    assert cluster.restarts == 0
    assert cluster.deployment["spec"]["replicas"] == 5


def test_a_change_of_what_pods_see_takes_the_operators_present_defaults():
    cluster = Cluster()
    cluster.reconcile(a_server())
    cluster.reconcile(a_server(runtime={"contextLength": 4096}), NEWER)
    assert cluster.image.endswith(":0.2")
    assert cluster.template["spec"]["imagePullSecrets"] == [{"name": "chart-secret"}]
    assert cluster.restarts == 1


def test_a_text_in_refresh_takes_the_operators_present_defaults_once():
    cluster = Cluster()
    cluster.reconcile(a_server())
    cluster.reconcile(a_server(rollout={"refresh": "november"}), NEWER)
    assert cluster.image.endswith(":0.2")
    cluster.reconcile(a_server(rollout={"refresh": "november"}, replicas=3), replace(NEWER, runtime_image="x:0.3"))
    assert cluster.image.endswith(":0.2")
    assert cluster.restarts == 1


def test_an_earlier_spec_gets_its_own_template_back_as_long_as_it_is_kept():
    cluster = Cluster()
    cluster.reconcile(a_server())
    first = copy.deepcopy(cluster.template)
    cluster.reconcile(a_server(runtime={"contextLength": 4096}), NEWER)
    cluster.reconcile(a_server(), NEWER)
    assert cluster.template == first
    assert [record["revision"] for record in cluster.records] == [2, 3]
    cluster.reconcile(a_server(rollout={"revisionHistoryLimit": 0}), NEWER)
    assert [record["revision"] for record in cluster.records] == [3]


def test_as_many_earlier_templates_are_kept_as_the_spec_says_those_used_last():
    cluster = Cluster()
    for length in range(1024, 1034):
        cluster.reconcile(a_server(runtime={"contextLength": length}, rollout={"revisionHistoryLimit": 2}))
    cluster.reconcile(a_server(runtime={"contextLength": 1032}, rollout={"revisionHistoryLimit": 2}))
    assert [record["revision"] for record in cluster.records] == [8, 10, 11]
    names = {record["metadata"]["name"] for record in cluster.records}
    assert f"tiny--{cluster.template['metadata']['annotations'][SPEC_HASH]}" in names


def test_drift_of_the_live_template_is_put_back_from_the_record():
    cluster = Cluster()
    cluster.reconcile(a_server())
    before = copy.deepcopy(cluster.template)
    cluster.template["spec"]["containers"][0]["image"] = "evil"
    cluster.reconcile(a_server(), NEWER)
    assert cluster.template == before


def test_a_record_that_somebody_deleted_comes_back_from_what_runs():
    cluster = Cluster()
    cluster.reconcile(EVERYTHING)
    before, (record,) = copy.deepcopy(cluster.template), copy.deepcopy(cluster.records)
    cluster.children.remove(cluster.records[0])
    cluster.reconcile(EVERYTHING, NEWER)
    assert cluster.template == before
    assert cluster.restarts == 0
    assert cluster.records[0]["data"] == record["data"]
    assert cluster.records[0]["metadata"]["name"] == record["metadata"]["name"]


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("settings", [SETTINGS, NEWER], ids=["same operator", "newer operator"])
def test_what_somebody_wrote_into_the_deployment_is_not_recorded_where_the_record_is_lost(name, settings):
    cluster = Cluster()
    cluster.reconcile(SERVERS[name])
    wanted = Cluster()
    wanted.reconcile(SERVERS[name], settings)
    cluster.children.remove(cluster.records[0])
    cluster.template["spec"]["containers"][0]["image"] = "evil"
    cluster.reconcile(SERVERS[name], settings)
    assert cluster.template == wanted.template
    assert [one["data"] for one in cluster.records] == [one["data"] for one in wanted.records]


@pytest.mark.parametrize("name", SERVERS)
def test_a_lost_record_comes_back_from_what_runs_also_after_a_restart_by_hand(name):
    cluster = Cluster()
    cluster.reconcile(SERVERS[name])
    cluster.template["metadata"]["annotations"]["kubectl.kubernetes.io/restartedAt"] = "2026-01-01T00:00:00Z"
    before = copy.deepcopy(cluster.template)
    cluster.children.remove(cluster.records[0])
    cluster.reconcile(SERVERS[name], NEWER)
    assert cluster.template == before
    assert cluster.restarts == 0


def test_a_record_that_is_out_of_sight_is_never_overwritten_with_other_data():
    """Somebody took its label, and the operator is another: what is recorded now has another name, or holds the same."""
    for settings in (SETTINGS, NEWER):
        cluster = Cluster()
        cluster.reconcile(a_server())
        record = cluster.records[0]
        cluster.children.remove(record)
        cluster.template["spec"]["containers"][0]["image"] = "other"
        cluster.reconcile(a_server(), settings)
        (now,) = cluster.records
        assert (now["metadata"]["name"] == record["metadata"]["name"]) == (now["data"] == record["data"]) == (settings is SETTINGS)


def test_a_deployment_that_was_deleted_comes_back_with_the_template_that_was_decided():
    cluster = Cluster()
    cluster.reconcile(a_server())
    before = copy.deepcopy(cluster.template)
    cluster.children.remove(cluster.deployment)
    cluster.reconcile(a_server(), NEWER)
    assert cluster.template == before


@pytest.mark.parametrize("name", SERVERS)
def test_another_version_that_would_write_the_same_writes_nothing(name):
    cluster = Cluster()
    cluster.reconcile(SERVERS[name])
    cluster.reconcile(SERVERS[name], NEWER)
    assert {one["metadata"]["annotations"][RENDERED_BY] for one in cluster.children} == {"0.1.0"}
    cluster.reconcile({**SERVERS[name], "spec": {**SERVERS[name]["spec"], "service": {"port": 99}}}, NEWER)
    assert [one["kind"] for one in cluster.children if one["metadata"]["annotations"][RENDERED_BY] == "0.2.0"] == ["Service"]


def test_records_of_an_earlier_resource_of_this_name_decide_nothing():
    cluster = Cluster()
    cluster.reconcile(a_server())
    old = [one for one in cluster.children if one["kind"] == "ControllerRevision"]
    again = a_server()
    again["metadata"]["uid"] = "another"
    parsed = api.parse(again)
    assert isinstance(parsed, api.InferenceServer)
    (deployment,) = (one for one in server.children(parsed, NEWER, old) if one["kind"] == "Deployment")
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"].endswith(":0.2")


SPECS: list[dict[str, Any]] = [{}, {"runtime": {"contextLength": 4096}}, {"rollout": {"refresh": "x"}}, {"drain": {"preStopSeconds": 1}}]


@pytest.mark.matrix(gate=5)
@pytest.mark.parametrize("seed", range(50))
def test_whatever_happens_pods_restart_only_for_another_spec(seed):
    """Edits, upgrades and roll-backs of the operator, lost records, at random: a spec that stays keeps its template."""
    rng = random.Random(seed)
    cluster, operators = Cluster(), [SETTINGS, NEWER, replace(NEWER, runtime_image="x:0.3")]
    settings, spec = SETTINGS, SPECS[0]
    cluster.reconcile(a_server(**spec))
    for generation in range(2, 60):
        before, restarts, same = copy.deepcopy(cluster.template), cluster.restarts, spec
        match rng.randrange(6):
            case 0:
                settings = rng.choice(operators)
            case 1:
                spec = rng.choice(SPECS)
            case 2:
                cluster.children = [one for one in cluster.children if one["kind"] != "ControllerRevision" or rng.random() < 0.5]
            case 3:
                cluster.children = [one for one in cluster.children if one["kind"] == "ControllerRevision" or rng.random() < 0.9]
        other = {
            "replicas": rng.randrange(3),
            "service": {"port": rng.randrange(1, 99)},
            "rollout": {"revisionHistoryLimit": rng.randrange(3)},
        }
        cluster.reconcile(with_generation(a_server(**merge(other, spec)), generation), settings)
        if spec is same:
            assert cluster.template == before
            assert cluster.restarts == restarts
