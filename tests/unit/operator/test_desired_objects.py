"""Budget, network policy, monitors: when they are wanted, what they say; and that every list is merged by its own keys."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import pytest

from banyan_operator import api
from banyan_operator.api import SpecError
from banyan_operator.desired import batch, server
from banyan_operator.desired.batchjob import Order
from banyan_operator.desired.drift import settled
from banyan_operator.desired.monitors import wanted_optional
from banyan_operator.desired.podtemplate import merged
from banyan_operator.kube.kinds import POD_MONITOR, SERVICE_MONITOR
from banyan_operator.kube.objects import Ref
from banyan_operator.plan import Manifest, Settings
from tests.unit.operator.conftest import SETTINGS, a_batch, a_server, an_own_server_batch, merge

IN_CLUSTER = replace(SETTINGS, namespace="banyan-system")
MONITORED: dict[str, Any] = {"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}}


def render(manifest: Manifest, settings: Settings = IN_CLUSTER, absent: frozenset[str] = frozenset()) -> dict[str, list[Manifest]]:
    parsed = api.parse(manifest)
    if isinstance(parsed, api.InferenceServer):
        children = server.children(parsed, settings, (), absent)
    else:
        children = batch.children(parsed, settings, (Order("work"),), server_url="http://x", absent=absent)
    found: dict[str, list[Manifest]] = {}
    for child in children:
        found.setdefault(child["kind"], []).append(child)
    return found


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"replicas": 2}, {"maxUnavailable": 1}),
        ({"replicas": 2, "disruption": {"maxUnavailable": "30%"}}, {"maxUnavailable": "30%"}),
        ({"replicas": 2, "disruption": {"maxUnavailable": 0}}, {"maxUnavailable": 0}),
        ({"replicas": 4, "disruption": {"minAvailable": 3}}, {"minAvailable": 3}),
        ({"replicas": 1}, None),
        ({"replicas": 0}, None),
        ({"replicas": 2, "disruption": {"enabled": False}}, None),
    ],
)
def test_evictions_take_one_pod_at_a_time_unless_the_spec_says_otherwise(spec, says):
    found = render(a_server(**spec)).get("PodDisruptionBudget", [])
    if says is None:
        assert found == []
        return
    budget = found[0]["spec"]
    assert {key: budget[key] for key in ("maxUnavailable", "minAvailable") if key in budget} == says
    (deployment,) = render(a_server(**spec))["Deployment"]
    assert budget["selector"] == deployment["spec"]["selector"]


def policy(manifest: Manifest) -> dict[str, Any]:
    (found,) = render(merge(manifest, {"spec": {"networkPolicy": {"enabled": True}}}))["NetworkPolicy"]
    spec: dict[str, Any] = found["spec"]
    return spec


def ports(rules: list[dict[str, Any]]) -> set[int]:
    return {port["port"] for rule in rules for port in rule.get("ports", ())}


OPERATOR = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "banyan-system"}}}


def test_a_policy_lets_in_the_namespace_or_who_is_named_prometheus_and_the_operator():
    (rule,) = policy(a_server())["ingress"]
    assert rule == {"from": [{"podSelector": {}}, OPERATOR], "ports": [{"port": 8000, "protocol": "TCP"}]}
    named, prometheus = {"ipBlock": {"cidr": "10.0.0.0/8"}}, {"podSelector": {"matchLabels": {"app": "prometheus"}}}
    (rule,) = policy(a_server(networkPolicy={"from": [named], "metricsFrom": [prometheus]}))["ingress"]
    assert rule["from"] == [named, prometheus, OPERATOR]
    (rule,) = policy(a_batch())["ingress"]
    assert (rule["from"], ports([rule])) == ([{"podSelector": {}}, OPERATOR], {9100})
    assert "NetworkPolicy" not in render(a_server()) | render(a_batch())


@pytest.mark.parametrize(
    ("manifest", "reaches", "namespaces"),
    [
        (a_server(), {53}, set()),
        (a_server(model={"uri": "catalog://smollm2-135m"}), {53, 443}, set()),
        (a_server(model={"uri": "hf://org/name"}), {53, 443}, set()),
        (a_server(model={"uri": "hf://org/name", "huggingFace": {"endpoint": "http://mirror.example.com:8080"}}), {53, 8080}, set()),
        (a_server(model={"uri": "s3://models/x", "s3": {"endpoint": "https://minio.storage.svc.cluster.local"}}), {53, 443}, {"storage"}),
        (a_server(networkPolicy={"egress": [{"ports": [{"port": 3128}]}]}), {53, 3128}, set()),
        (a_batch(), {53, 8000}, set()),
        (a_batch(input={"uri": "s3://batches/in/"}), {53, 8000, 443}, set()),
        (a_batch(output={"uri": "s3://out/x/"}, s3={"endpoint": "http://s3:9000"}), {53, 8000, 9000}, {"team"}),
        (an_own_server_batch(server={"model": {"uri": "catalog://smollm2-135m"}}), {53, 443}, set()),
    ],
)
def test_a_policy_lets_out_to_names_to_storage_to_the_model_and_to_what_is_named(manifest, reaches, namespaces):
    egress = policy(manifest)["egress"]
    assert ports(egress) == reaches
    peers = [peer for rule in egress for peer in rule.get("to", ())]
    found = {peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] for peer in peers if "namespaceSelector" in peer}
    assert found == namespaces


@pytest.mark.parametrize(
    ("manifest", "field"),
    [
        (a_batch(output={"uri": "s3://out/x/"}, s3={"endpoint": "http://minio:99999"}), "spec.s3.endpoint"),
        (a_server(model={"uri": "hf://org/name", "huggingFace": {"endpoint": "http://[:::1]"}}), "spec.model.huggingFace.endpoint"),
        (a_server(model={"uri": "s3://models/x", "s3": {"endpoint": "http://[::1]:99999"}}), "spec.model.s3.endpoint"),
    ],
)
def test_an_endpoint_that_is_no_url_is_told_with_its_field(manifest, field):
    with pytest.raises(SpecError, match=re.escape(field)):
        render(merge(manifest, {"spec": {"networkPolicy": {"enabled": True}}}), IN_CLUSTER)


@pytest.mark.parametrize("left_out", ["maxSkew", "topologyKey", "whenUnsatisfiable"])
def test_a_spread_constraint_without_what_the_api_server_asks_for_is_told_with_its_field(left_out):
    whole = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    scheduling = {"topologySpreadConstraints": [whole, {key: value for key, value in whole.items() if key != left_out}]}
    of_server = an_own_server_batch(server={"scheduling": scheduling})
    where = f"scheduling.topologySpreadConstraints[1].{left_out}"
    for manifest, path in ((a_server(scheduling=scheduling), "spec"), (a_batch(scheduling=scheduling), "spec"), (of_server, "spec.server")):
        with pytest.raises(SpecError, match=re.escape(f"{path}.{where}: is required")):
            render(manifest)


def test_workers_of_a_batch_prefer_different_nodes_unless_the_spec_says_how_they_are_spread():
    many: dict[str, Any] = {"workers": 4, "output": {"uri": "s3://out/x/"}}
    own = {"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    of_server = an_own_server_batch(server={"scheduling": {"topologySpreadConstraints": [own]}})
    for manifest in (a_batch(**many), a_batch(), an_own_server_batch(**many)):  # one may become four
        (job,) = render(manifest)["Job"]
        pod = job["spec"]["template"]
        (constraint,) = pod["spec"]["topologySpreadConstraints"]
        chosen = constraint.pop("labelSelector")["matchLabels"]
        assert constraint == {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
        assert chosen.items() <= pod["metadata"]["labels"].items()
        assert chosen["app.kubernetes.io/component"] == "work"
    for manifest in (a_batch(**many, scheduling={"topologySpreadConstraints": [own]}), of_server):
        (job,) = render(manifest)["Job"]
        (constraint,) = job["spec"]["template"]["spec"]["topologySpreadConstraints"]
        assert constraint["topologyKey"] == "zone"
    for order in (Order("plan"), Order("merge")):
        children = batch.children(api.parse(a_batch()), SETTINGS, (order,), server_url="http://x")
        assert not any("topologySpreadConstraints" in one["spec"]["template"]["spec"] for one in children if one["kind"] == "Job")


def test_a_batchs_policy_and_monitor_are_of_all_its_pods():
    """Those that plan and merge reach the storage too, and say how far they are."""
    manifest = a_batch(metrics={"podMonitor": {"enabled": True}})
    chosen = policy(manifest)["podSelector"]["matchLabels"]
    assert chosen == render(manifest)["PodMonitor"][0]["spec"]["selector"]["matchLabels"]
    parsed = api.parse(manifest)
    assert isinstance(parsed, api.BatchJob)
    orders = (Order("plan"), Order("work"), Order("merge"))
    jobs = [one for one in batch.children(parsed, IN_CLUSTER, orders, server_url="http://x") if one["kind"] == "Job"]
    assert len(jobs) == 3
    for job in jobs:
        assert chosen.items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert (
        not chosen.items()
        <= render(a_server(manifest["metadata"]["name"]))["Deployment"][0]["spec"]["template"]["metadata"]["labels"].items()
    )


def test_a_batchs_worker_reaches_the_pods_of_its_server():
    (rule,) = (rule for rule in policy(a_batch())["egress"] if "to" in rule)
    (deployment,) = render(a_server("tiny"))["Deployment"]
    assert rule["to"] == [{"podSelector": deployment["spec"]["selector"]}]


def test_monitors_scrape_every_pod_once():
    found = render(a_server(metrics=MONITORED))
    (pods,), (service,) = found["PodMonitor"], found["ServiceMonitor"]
    (deployment,) = found["Deployment"]
    named = [{"action": "replace", "targetLabel": "inferenceserver", "replacement": "tiny"}]
    port = {"port": "http", "path": "/metrics", "interval": "15s", "relabelings": named}
    assert pods["spec"] == {"selector": deployment["spec"]["selector"], "podMetricsEndpoints": [port]}
    assert service["spec"]["endpoints"] == [port]
    chosen = [
        one
        for one in found["Service"]
        if service["spec"]["selector"]["matchLabels"].items() <= one["metadata"]["labels"].items()
        and not any(need["key"] in one["metadata"]["labels"] for need in service["spec"]["selector"]["matchExpressions"])
    ]
    assert [one["metadata"]["name"] for one in chosen] == ["tiny"]
    (worker,) = render(a_batch(metrics={"podMonitor": {"enabled": True, "interval": "1m"}}))["PodMonitor"]
    named = [{"action": "replace", "targetLabel": "batchjob", "replacement": "nightly"}]
    assert worker["spec"]["podMetricsEndpoints"] == [{"port": "progress", "path": "/metrics", "interval": "1m", "relabelings": named}]


def test_labels_of_a_monitor_are_added_and_take_none_of_ours():
    extra = {"release": "prometheus", "app.kubernetes.io/instance": "mine"}
    found = render(a_server(metrics={"podMonitor": {"enabled": True, "additionalLabels": extra}}))
    (monitor,) = found["PodMonitor"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["metadata"]["labels"]["app.kubernetes.io/instance"] == "tiny"


def test_what_the_cluster_has_no_api_for_is_left_out_and_named():
    manifest = a_server(metrics=MONITORED)
    assert wanted_optional(api.parse(manifest)) == (Ref.to(POD_MONITOR, "tiny"), Ref.to(SERVICE_MONITOR, "tiny"))
    assert wanted_optional(api.parse(a_server())) == ()
    assert wanted_optional(api.parse(a_batch(metrics={"podMonitor": {"enabled": True}}))) == (Ref.to(POD_MONITOR, "nightly--batch"),)
    found = render(manifest, absent=frozenset({"PodMonitor"}))
    assert "PodMonitor" not in found
    assert "ServiceMonitor" in found


# --- lists that are merged by keys ---

TWO_CONSTRAINTS = [
    {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"},
    {"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"},
]
TWO_PROTOCOLS = [
    {"name": "extra", "containerPort": 9000},
    {"name": "extra-udp", "containerPort": 9000, "protocol": "UDP"},
]


def with_pod(spec: dict[str, Any]) -> Manifest:
    return a_server(podTemplate={"spec": spec})


@pytest.mark.parametrize(
    "manifest",
    [
        a_server(scheduling={"topologySpreadConstraints": TWO_CONSTRAINTS}),
        with_pod({"topologySpreadConstraints": TWO_CONSTRAINTS}),
        with_pod({"containers": [{"name": "server", "ports": TWO_PROTOCOLS}]}),
        with_pod({"containers": [{"name": "side", "image": "x", "ports": TWO_PROTOCOLS}]}),
    ],
)
def test_what_differs_in_a_second_key_stays_two_and_settles(manifest):
    (deployment,) = render(manifest)["Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    live = copy.deepcopy(deployment)
    for container in live["spec"]["template"]["spec"]["containers"]:
        for port in container["ports"]:
            port.setdefault("protocol", "TCP")
    assert settled(live, deployment)
    twice = [one for one in pod.get("topologySpreadConstraints", ()) if one["topologyKey"] == "zone"]
    twice += [port for container in pod["containers"] for port in container["ports"] if port["containerPort"] == 9000]
    assert len(twice) == 2
    for container in live["spec"]["template"]["spec"]["containers"]:
        container["ports"] = [port for port in container["ports"] if port["protocol"] != "UDP"]
    live["spec"]["template"]["spec"]["topologySpreadConstraints"] = pod["topologySpreadConstraints"][:1]
    if pod["topologySpreadConstraints"][1:] or any("UDP" in str(container["ports"]) for container in pod["containers"]):
        assert not settled(live, deployment)


def test_a_users_port_replaces_ours_of_its_number_and_protocol_alone():
    base: Manifest = {
        "metadata": {},
        "spec": {"containers": [{"name": "server", "ports": [{"name": "http", "containerPort": 8000, "protocol": "TCP"}]}]},
    }
    user = api.parse(
        with_pod(
            {
                "containers": [
                    {"name": "server", "ports": [{"containerPort": 8000, "hostPort": 80}, {"containerPort": 8000, "protocol": "UDP"}]}
                ]
            }
        )
    )
    (container,) = merged(base, user.spec.pod_template)["spec"]["containers"]
    assert container["ports"] == [
        {"name": "http", "containerPort": 8000, "protocol": "TCP", "hostPort": 80},
        {"containerPort": 8000, "protocol": "UDP"},
    ]


def test_a_port_that_somebody_opened_in_a_policy_or_took_from_a_service_is_seen():
    found = render(a_server(networkPolicy={"enabled": True}))
    (opened,) = copy.deepcopy(found["NetworkPolicy"])
    opened["spec"]["ingress"][0]["ports"].append({"port": 22, "protocol": "TCP"})
    assert not settled(opened, found["NetworkPolicy"][0])
    service = copy.deepcopy(found["Service"][0])
    service["spec"]["ports"] += [{"port": 99, "protocol": "TCP"}, {"name": "quic", "port": 80, "protocol": "UDP"}]
    assert settled(service, found["Service"][0]), "somebody else's ports beside ours"
    service["spec"]["ports"] = [{**service["spec"]["ports"][0], "protocol": "UDP"}]
    assert not settled(service, found["Service"][0])
