"""The chart, rendered by helm: what it grants, what it refuses, and that it says the same thing twice."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from banyan_operator.cluster.manager import LEASE
from banyan_operator.cluster.options import parse
from banyan_operator.kube import kinds
from banyan_operator.kube.addresses import PROGRESS_PORT, SERVER_PORT
from banyan_operator.kube.kinds import Kind, Role
from tests.support.paths import ROOT

CHART = ROOT / "charts" / "banyan"


def helm(*args: str) -> subprocess.CompletedProcess[str]:
    beside = Path(sys.executable).parent / "helm"
    program = str(beside) if beside.exists() else shutil.which("helm")
    if program is None:
        pytest.skip("helm is not installed")
    return subprocess.run([program, *args], capture_output=True, text=True, timeout=60)


@functools.cache
def rendered(*args: str) -> str:
    done = helm("template", "banyan", str(CHART), "--namespace", "banyan-system", *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def render(*args: str) -> list[dict[str, Any]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # of libyaml: definitions are long
    return [document for document in yaml.load_all(rendered(*args), loader) if document]


def of_kind(documents: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [document for document in documents if document["kind"] == kind]


WATCHED = {"get", "list", "watch"}
VERBS: dict[Role, set[str]] = {
    Role.RESOURCE: WATCHED,
    Role.CHILD: WATCHED | {"create", "patch", "delete"},
    Role.GRANDCHILD: WATCHED,
}
"""What a kind's role in the one table of kinds needs."""
BEYOND: dict[Kind, set[str]] = {
    kinds.BATCH_JOB: WATCHED | {"delete"},  # a finished one, once its time is over
    kinds.CONFIG_MAP: {"get"},
    kinds.SECRET: {"get"},
    kinds.EVENT: {"get", "list", "create", "patch"},
}
"""What a kind needs for more than its role, or where its role says nothing."""


def granted(role: dict[str, Any]) -> dict[tuple[str, str], set[str]]:
    """Verbs by group and resource. A resource that stands in two rules is a mistake."""
    found: dict[tuple[str, str], set[str]] = {}
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                assert (group, resource) not in found, f"{resource}.{group} stands in two rules"
                found[group, resource] = set(rule["verbs"])
    return found


def test_the_operator_may_do_what_the_table_of_kinds_says_and_no_verb_more() -> None:
    (role,) = of_kind(render(), "ClusterRole")
    wanted = {(kind.group, kind.plural): BEYOND.get(kind) or VERBS[kind.role] for kind in kinds.TABLE if kind != kinds.LEASE}
    for kind in kinds.RESOURCES:
        wanted[kind.group, f"{kind.plural}/status"] = {"patch"}
        wanted[kind.group, f"{kind.plural}/finalizers"] = {"update"}  # where blockOwnerDeletion is guarded (OpenShift)
    wanted["", "pods/status"] = {"patch"}  # those on nodes that do not answer are given up
    wanted[kinds.LEASE.group, kinds.LEASE.plural] = {"list"}  # by name: whether an operator for some namespaces leads
    assert granted(role) == wanted
    assert next(rule for rule in role["rules"] if rule["resources"] == ["leases"])["resourceNames"] == [LEASE]


def test_without_checks_of_secrets_no_right_to_secrets_is_asked_for() -> None:
    (role,) = of_kind(render("--set", "operator.checkSecrets=false"), "ClusterRole")
    assert not any("secrets" in rule["resources"] for rule in role["rules"])


def test_an_operator_for_some_namespaces_has_roles_there_and_no_cluster_role() -> None:
    documents = render("--set", "operator.namespaces={a,b}")
    assert of_kind(documents, "ClusterRole") == []
    assert {role["metadata"]["namespace"] for role in of_kind(documents, "Role")} == {"a", "b", "kube-system"}
    (outside,) = [role for role in of_kind(documents, "Role") if role["metadata"]["namespace"] == "kube-system"]
    assert granted(outside) == {("coordination.k8s.io", "leases"): {"get"}}
    alone = render("--set", "operator.namespaces={a,b},operator.leaseNamespace=")
    assert {role["metadata"]["namespace"] for role in of_kind(alone, "Role")} == {"a", "b"}
    assert environment(of_kind(documents, "Deployment")[0]["spec"]["template"]["spec"])["BANYAN_NAMESPACES"] == "a,b"


@pytest.mark.parametrize(
    "args",
    [(), ("--set", "operator.namespaces={b,a}"), ("--set", "operator.leaseNamespace=apart")],
    ids=["the whole cluster", "some namespaces", "a namespace of its own"],
)
def test_leases_lie_where_the_operator_looks_for_them_and_it_may_hold_them(args: tuple[str, ...]) -> None:
    documents = render(*args)
    leases = {lease["metadata"]["namespace"]: lease for lease in of_kind(documents, "Lease")}
    assert set(leases) == set(parse([], environment(of_kind(documents, "Deployment")[0]["spec"]["template"]["spec"])).leases)
    for namespace, lease in leases.items():
        assert lease["metadata"]["name"] == LEASE
        assert "spec" not in lease  # whatever the chart said there, an upgrade would write over who holds it
        roles = [role for role in of_kind(documents, "Role") if role["metadata"]["namespace"] == namespace]
        rules = [rule for role in roles for rule in role["rules"] if rule["resources"] == ["leases"]]
        assert [(rule.get("resourceNames"), rule["verbs"]) for rule in rules] == [(None, ["create"]), ([LEASE], ["get", "update"])]


def test_the_definitions_are_those_of_the_repository_and_outlive_the_release() -> None:
    rendered = {document["metadata"]["name"]: document for document in of_kind(render(), "CustomResourceDefinition")}
    for path in (ROOT / "crds").glob("*.yaml"):
        wanted = yaml.safe_load(path.read_text())
        found = rendered[wanted["metadata"]["name"]]
        assert found["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
        assert found == wanted
    assert of_kind(render("--set", "crds.enabled=false"), "CustomResourceDefinition") == []
    loose = of_kind(render("--set", "crds.keep=false"), "CustomResourceDefinition")
    assert all("annotations" not in document["metadata"] for document in loose)


def operator_pod(*args: str) -> dict[str, Any]:
    pod: dict[str, Any] = of_kind(render(*args), "Deployment")[0]["spec"]["template"]["spec"]
    return pod


def test_every_pod_of_the_chart_fits_the_restricted_level_unless_the_values_say_otherwise() -> None:
    documents = render()
    for pod in (operator_pod(), of_kind(documents, "Pod")[0]["spec"]):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
    chosen = operator_pod(
        "--set", "podSecurityContext.runAsUser=null,podSecurityContext.fsGroup=7,securityContext.readOnlyRootFilesystem=false"
    )
    assert "runAsUser" not in chosen["securityContext"]
    assert chosen["securityContext"]["fsGroup"] == 7
    assert chosen["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is False


def test_pull_secrets_have_one_form_and_reach_the_operator_as_names() -> None:
    pod = operator_pod(
        "--set", "imagePullSecrets[0].name=ours,runtime.imagePullSecrets[0].name=first,runtime.imagePullSecrets[1].name=second"
    )
    assert pod["imagePullSecrets"] == [{"name": "ours"}]
    assert environment(pod)["BANYAN_IMAGE_PULL_SECRETS"] == "first,second"
    for field in ("imagePullSecrets", "runtime.imagePullSecrets"):
        done = helm("template", "banyan", str(CHART), "--set", f"{field}[0]=plain")
        assert done.returncode != 0
        assert field.rpartition(".")[2] in done.stderr


def environment(pod: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in pod["containers"][0]["env"]}


def test_what_the_chart_puts_into_the_environment_the_operator_understands() -> None:
    pod = operator_pod("--set", "runtime.imagePullSecrets[0].name=first,operator.namespaces={a,b},operator.workers=3")
    options = parse([], environment(pod) | {"KUBERNETES_SERVICE_HOST": "10.96.0.1"})
    assert (options.host, options.listen) == ("0.0.0.0", "0.0.0.0")
    assert parse([], environment(pod) | {"KUBERNETES_SERVICE_HOST": "fd00::1"}).host == "::"
    assert options.image_pull_secrets == ("first",)
    assert options.namespaces == ("a", "b")
    assert (options.workers, options.resync_s) == (3, 300)
    ports = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
    assert ports == {"http": options.port, "probes": options.probe_port}
    assert pod["containers"][0]["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "probes"}


def test_two_replicas_are_spread_and_guarded() -> None:
    two = render("--set", "replicas=2")
    (budget,) = of_kind(two, "PodDisruptionBudget")
    deployment = of_kind(two, "Deployment")[0]
    pod_labels = deployment["spec"]["template"]["metadata"]["labels"]
    (spread,) = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert (spread["maxSkew"], spread["topologyKey"], spread["whenUnsatisfiable"]) == (1, "kubernetes.io/hostname", "DoNotSchedule")
    for selector in (budget["spec"]["selector"], spread["labelSelector"], deployment["spec"]["selector"]):
        assert selector["matchLabels"].items() <= pod_labels.items()
    assert budget["spec"]["maxUnavailable"] == 1
    assert of_kind(render(), "PodDisruptionBudget") == []
    assert operator_pod()["topologySpreadConstraints"] == [spread]  # it may be scaled by hand
    own = operator_pod("--set", "replicas=2,topologySpreadConstraints[0].topologyKey=topology.kubernetes.io/zone")
    (spread,) = own["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("topology.kubernetes.io/zone", "ScheduleAnyway")
    assert spread["labelSelector"]["matchLabels"].items() <= pod_labels.items()
    assert "topologySpreadConstraints" not in operator_pod("--set", "spreadOverNodes=false")


def test_names_are_the_users_where_they_say_so_and_the_same_as_ever_where_not() -> None:
    plain = of_kind(render(), "Deployment")[0]
    assert plain["metadata"]["name"] == "banyan-operator"
    wanted = {"app.kubernetes.io/name": "banyan-operator", "app.kubernetes.io/instance": "banyan"}
    assert plain["spec"]["selector"]["matchLabels"] == wanted  # a Deployment's selector cannot change
    documents = render("--set", "fullnameOverride=llm,nameOverride=serving")
    named = of_kind(documents, "Deployment")[0]
    assert named["metadata"]["name"] == "llm"
    assert named["spec"]["selector"]["matchLabels"] == wanted | {"app.kubernetes.io/name": "serving"}
    assert of_kind(documents, "Service")[0]["spec"]["selector"] == named["spec"]["selector"]["matchLabels"]


def selects(selector: dict[str, str], document: dict[str, Any]) -> bool:
    return bool(selector.items() <= document["metadata"]["labels"].items())


def test_monitors_select_the_operators_port_for_metrics_and_carry_the_users_labels() -> None:
    documents = render(
        *("--set", "metrics.serviceMonitor.enabled=true,metrics.serviceMonitor.additionalLabels.release=prometheus"),
        *("--set", "metrics.podMonitor.enabled=true,metrics.podMonitor.interval=1m"),
    )
    (service_monitor,) = of_kind(documents, "ServiceMonitor")
    (pod_monitor,) = of_kind(documents, "PodMonitor")
    (service,) = of_kind(documents, "Service")
    (deployment,) = of_kind(documents, "Deployment")
    assert service_monitor["metadata"]["labels"]["release"] == "prometheus"
    assert selects(service_monitor["spec"]["selector"]["matchLabels"], service)
    assert selects(pod_monitor["spec"]["selector"]["matchLabels"], deployment["spec"]["template"])
    assert service_monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    assert pod_monitor["spec"]["podMetricsEndpoints"][0] == {"port": "http", "path": "/metrics", "interval": "1m", "honorLabels": True}
    assert not selects(service_monitor["spec"]["selector"]["matchLabels"], of_kind(documents, "Pod")[0])
    assert of_kind(render(), "ServiceMonitor") == of_kind(render(), "PodMonitor") == []
    refused = helm("template", "banyan", str(CHART), "--set", "metrics.serviceMonitor.enabled=true,metrics.service=false")
    assert "needs metrics.service" in refused.stderr


def test_the_network_policy_lets_out_to_the_api_server_and_our_pods_alone() -> None:
    (policy,) = of_kind(render("--set", "networkPolicy.enabled=true,networkPolicy.apiServerPorts={16443}"), "NetworkPolicy")
    names, api_server, pods = policy["spec"]["egress"]
    assert {port["port"] for port in names["ports"]} == {53}
    assert api_server == {"ports": [{"port": 16443, "protocol": "TCP"}]}
    assert {port["port"] for port in pods["ports"]} == {SERVER_PORT, PROGRESS_PORT}
    assert pods["to"][0]["podSelector"]["matchLabels"] == {kinds.MANAGED_BY_LABEL: kinds.FIELD_MANAGER}
    assert of_kind(render(), "NetworkPolicy") == []


def test_images_are_named_by_tag_or_digest_and_default_to_the_charts_version() -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    digest = "sha256:" + "0" * 64
    container = of_kind(render("--set", f"runtime.image.digest={digest}"), "Deployment")[0]["spec"]["template"]["spec"]["containers"][0]
    assert container["image"].endswith(f"banyan-operator:{version}")
    assert next(one["value"] for one in container["env"] if one["name"] == "BANYAN_RUNTIME_IMAGE").endswith(f"banyan-runtime@{digest}")


@pytest.mark.parametrize(
    "value",
    [
        "replica=2",
        "operator.logLevel=loud",
        "operator.workers=0",
        "image.digest=latest",
        "operator.namespace=a",
        "image.repository=",
        "metrics.serviceMonitor=true",
        "operator.namespaces={ }",
        r"operator.namespaces={a\,b}",
        "operator.leaseNamespace=",
        "fullnameOverride=BAD_Name",
        r"podLabels.app\.kubernetes\.io/name=x",
    ],
)
def test_a_value_that_does_not_exist_or_fit_is_refused(value: str) -> None:
    done = helm("template", "banyan", str(CHART), "--set", value)
    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr


EVERYTHING = (
    *("--set", "rbac.aggregate=true,replicas=2,networkPolicy.enabled=true,networkPolicy.metricsFrom[0].podSelector.matchLabels.a=b"),
    *("--set", "metrics.serviceMonitor.enabled=true,metrics.podMonitor.enabled=true"),
)


def test_the_chart_says_the_same_thing_twice() -> None:
    texts = {helm("template", "banyan", str(CHART), *EVERYTHING).stdout for _ in range(3)}
    assert len(texts) == 1
    assert "kind: Deployment" in texts.pop()


def test_every_object_passes_the_schemas_of_kubernetes() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for document in render(*EVERYTHING):
        if not document["apiVersion"].startswith("monitoring.coreos.com/"):
            kubernetes_validate.validate(document, "1.36", strict=True)
