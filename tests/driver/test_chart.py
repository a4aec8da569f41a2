"""The chart, rendered by helm: what it grants, what it refuses, and that it says the same thing twice."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from banyan_operator.kube import kinds

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "banyan"


def helm(*args: str) -> subprocess.CompletedProcess[str]:
    beside = Path(sys.executable).parent / "helm"
    program = str(beside) if beside.exists() else shutil.which("helm")
    if program is None:
        pytest.skip("helm is not installed")
    return subprocess.run([program, *args], capture_output=True, text=True, timeout=60)


def render(*args: str) -> list[dict[str, Any]]:
    done = helm("template", "banyan", str(CHART), "--namespace", "banyan-system", *args)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def of_kind(documents: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [document for document in documents if document["kind"] == kind]


def test_the_operator_may_do_what_it_does_to_every_kind_and_no_verb_more() -> None:
    (role,) = of_kind(render(), "ClusterRole")
    granted = {
        (group, resource): set(rule["verbs"]) for rule in role["rules"] for group in rule["apiGroups"] for resource in rule["resources"]
    }
    watched, owned = {"get", "list", "watch"}, {"get", "list", "watch", "create", "patch", "delete"}
    only_watched = {kinds.INFERENCE_SERVER, kinds.REPLICA_SET, kinds.POD}
    wanted = {
        (kind.group, kind.plural): watched if kind in only_watched else owned
        for kind in (*kinds.RESOURCES, *kinds.CHILDREN)
        if kind != kinds.BATCH_JOB
    }
    group = kinds.GROUP
    wanted |= {
        (group, "batchjobs"): watched | {"delete"},
        (group, "inferenceservers/status"): {"patch"},
        (group, "batchjobs/status"): {"patch"},
        (group, "inferenceservers/finalizers"): {"update"},
        (group, "batchjobs/finalizers"): {"update"},
        ("", "configmaps"): {"get"},
        ("", "secrets"): {"get"},
        ("", "events"): {"get", "list", "create", "patch"},
    }
    assert granted == wanted


def test_without_checks_of_secrets_no_right_to_secrets_is_asked_for() -> None:
    (role,) = of_kind(render("--set", "operator.checkSecrets=false"), "ClusterRole")
    assert not any("secrets" in rule["resources"] for rule in role["rules"])


def test_an_operator_for_some_namespaces_has_roles_there_and_no_cluster_role() -> None:
    documents = render("--set", "operator.namespaces={a,b}")
    assert of_kind(documents, "ClusterRole") == []
    assert {role["metadata"]["namespace"] for role in of_kind(documents, "Role")} == {"a", "b", "banyan-system"}
    environment = of_kind(documents, "Deployment")[0]["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "BANYAN_NAMESPACES", "value": "a,b"} in environment


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


def test_the_pod_fits_the_restricted_level() -> None:
    pod = of_kind(render(), "Deployment")[0]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_images_are_named_by_tag_or_digest_and_default_to_the_charts_version() -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    digest = "sha256:" + "0" * 64
    container = of_kind(render("--set", f"runtime.image.digest={digest}"), "Deployment")[0]["spec"]["template"]["spec"]["containers"][0]
    assert container["image"].endswith(f"banyan-operator:{version}")
    assert next(one["value"] for one in container["env"] if one["name"] == "BANYAN_RUNTIME_IMAGE").endswith(f"banyan-runtime@{digest}")


@pytest.mark.parametrize(
    "value",
    ["replica=2", "operator.logLevel=loud", "operator.workers=0", "image.digest=latest", "operator.namespace=a", "image.repository="],
)
def test_a_value_that_does_not_exist_or_fit_is_refused(value: str) -> None:
    done = helm("template", "banyan", str(CHART), "--set", value)
    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr


def test_the_chart_says_the_same_thing_twice() -> None:
    assert render("--set", "rbac.aggregate=true") == render("--set", "rbac.aggregate=true")


def test_every_object_passes_the_schemas_of_kubernetes() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for document in render("--set", "rbac.aggregate=true"):
        kubernetes_validate.validate(document, "1.36", strict=True)
