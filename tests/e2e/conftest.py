"""A real cluster with the chart installed, teams' namespaces in it that enforce Pod Security `restricted`, and an S3 server.

KUBECONFIG leads to the cluster; both images are on its nodes already (BANYAN_TEST_OPERATOR_IMAGE, BANYAN_TEST_RUNTIME_IMAGE).
BANYAN_TEST_S3_ADDRESS is this machine's address as pods see it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster.batches import MODEL, Bucket
from tests.e2e.cluster.kubectl import Kubectl, KubectlError, Manifest
from tests.e2e.cluster.volumes import Volumes, claim
from tests.support.paths import ROOT
from tests.support.s3.servers import S3Server, weed

OPERATOR_IMAGE = os.environ.get("BANYAN_TEST_OPERATOR_IMAGE", "localhost/banyan-operator:dev")
RUNTIME_IMAGE = os.environ.get("BANYAN_TEST_RUNTIME_IMAGE", "localhost/banyan-runtime:dev")
SYSTEM = "banyan-system"
RELEASE = "banyan"
DEPLOYMENT = "banyan-operator"
LEASES = Kubectl("kube-system")
"""Where the lease of an operator for the whole cluster is."""

INSTALL_THEMSELVES = ("test_readme", "test_smoke", "test_upgrade")

TIMES: dict[str, float] = {}
"""What the run measured, in seconds, in the order of the story; printed at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    ours = [item for item in items if item.path.is_relative_to(here / "cluster") or item.path == here / "readme" / "test_readme.py"]
    why = None
    if "KUBECONFIG" not in os.environ or shutil.which("kubectl") is None:
        why = "no cluster (KUBECONFIG and kubectl): make test-cluster, or make test-cluster CLUSTER=kind"
    # What installs the chart by itself comes first, while the cluster is bare.
    items.sort(key=lambda item: item in ours and item.path.stem not in INSTALL_THEMSELVES)
    for item in ours:
        item.add_marker(pytest.mark.cluster)
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=why))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TIMES:
        terminalreporter.section("measured on the cluster")
        for what, seconds in TIMES.items():
            terminalreporter.line(f"{seconds:7.1f} s  {what}")


def helm(*args: str) -> str:
    beside = Path(sys.executable).parent / "helm"
    program = str(beside) if beside.exists() else "helm"
    done = subprocess.run([program, *args], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout


def chart_values() -> list[str]:
    values = {}
    for prefix, image in (("image", OPERATOR_IMAGE), ("runtime.image", RUNTIME_IMAGE)):
        repository, _, tag = image.rpartition(":")
        values |= {f"{prefix}.repository": repository, f"{prefix}.tag": tag, f"{prefix}.pullPolicy": "IfNotPresent"}
    return [word for name, value in values.items() for word in ("--set", f"{name}={value}")]


def restricted(name: str) -> Manifest:
    labels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def take_away(namespace: str) -> None:
    """The chart, its definitions, and the namespace with all that is in it."""
    kubectl = Kubectl(namespace)

    def try_to(*command: str) -> None:
        with contextlib.suppress(KubectlError):  # it is gone already
            kubectl(*command, timeout=100)

    try_to("delete", "isrv,bj", "--all", "--all-namespaces", "--wait=false")
    helm("uninstall", RELEASE, "--namespace", namespace, "--ignore-not-found", "--wait", "--timeout", "1m")
    try_to("delete", "crd", "inferenceservers.serving.banyan.dev", "batchjobs.serving.banyan.dev", "--timeout=60s")
    try_to("delete", "namespace", namespace, "--timeout=90s")


@pytest.fixture(scope="module")
def bare_cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing of ours is in the cluster: for modules that install the chart by themselves, into their NAMESPACE."""
    found = Kubectl("default")("get", "crd,clusterrole", "-o", "name").split()
    left = [name for name in found if "banyan" in name]
    assert left == [], "the chart, or what it left, is in the cluster"
    yield
    take_away(request.module.NAMESPACE)


@pytest.fixture(scope="session")
def system() -> Iterator[Kubectl]:
    """The operator's namespace, the chart installed in it."""
    kubectl = Kubectl(SYSTEM)
    kubectl.apply(restricted(SYSTEM))
    began = time.monotonic()
    helm(
        "upgrade",
        "--install",
        RELEASE,
        str(ROOT / "charts" / "banyan"),
        "--namespace",
        SYSTEM,
        "--wait",
        "--timeout",
        "2m",
        *chart_values(),
    )
    TIMES["helm install until the operator is ready"] = time.monotonic() - began
    yield kubectl
    helm("uninstall", RELEASE, "--namespace", SYSTEM, "--wait", "--timeout", "1m")
    kubectl("delete", "crd", "inferenceservers.serving.banyan.dev", "batchjobs.serving.banyan.dev", "--wait=false")
    kubectl("delete", "namespace", SYSTEM, "--wait=false")


@pytest.fixture(scope="session")
def volumes() -> Iterator[Volumes]:
    workshop = Kubectl(f"banyan-workshop-{uuid.uuid4().hex[:6]}")
    workshop("create", "namespace", workshop.namespace)
    wait_for_service_account(workshop)
    yield Volumes(workshop, OPERATOR_IMAGE)
    workshop("delete", "namespace", workshop.namespace, "--wait=false")


@pytest.fixture(scope="session")
def new_team(system: Kubectl, volumes: Volumes) -> Iterator[Callable[..., Kubectl]]:
    """Makes a namespace with claims: name -> what lies in it, by path."""
    made: list[Kubectl] = []

    def make(claims: dict[str, dict[str, Path]]) -> Kubectl:
        team = Kubectl(f"team-{uuid.uuid4().hex[:6]}")
        team.apply(restricted(team.namespace))
        made.append(team)
        wait_for_service_account(team)
        team.apply(*(claim(name) for name in claims))
        for name, content in claims.items():
            volumes.fill(team, name, content)
        return team

    yield make
    # Pods first: a namespace with pods in it is looked at again only after half of their grace period.
    for team in made:
        team("delete", "isrv,bj", "--all", "--wait=false")
    for team in made:
        team.pods_left("app.kubernetes.io/part-of=banyan", 0, 90)
        team("delete", "namespace", team.namespace, "--wait=false")
    for team in made:  # to its end, so that the provisioner removes the claims' folders while the cluster is there
        team.gone(f"namespace/{team.namespace}", 60)


@pytest.fixture(scope="session")
def team(new_team: Callable[..., Kubectl]) -> Kubectl:
    """A namespace with the small model on its claim `models`."""
    return new_team({"models": {MODEL: ROOT / "examples" / "models" / "tiny-chat"}})


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """SeaweedFS, reached by pods and by tests under the same address."""
    address = os.environ.get("BANYAN_TEST_S3_ADDRESS")
    if not address:
        pytest.skip("BANYAN_TEST_S3_ADDRESS is not set: pods need an address under which this machine's S3 server is reached")
    with weed(tmp_path_factory.mktemp("weed"), address) as server:
        yield server


@pytest.fixture
def bucket(s3: S3Server) -> Bucket:
    return Bucket(s3)


@pytest.fixture
def server(team: Kubectl) -> Iterator[Callable[..., str]]:
    """Applies an InferenceServer of the small model, and deletes it afterwards; returns its name."""
    names: list[str] = []

    def make(name: str, **spec: object) -> str:
        team.apply(inference_server(name, **spec))
        names.append(name)
        return name

    yield make
    for name in names:
        team("delete", "isrv", name, "--ignore-not-found", "--wait=false")


def inference_server(name: str, **spec: object) -> Manifest:
    """A small and quick server; `spec` replaces fields."""
    return {
        "apiVersion": "serving.banyan.dev/v1alpha1",
        "kind": "InferenceServer",
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": f"pvc://models/{MODEL}", "servedNames": [MODEL]},
            "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}},
            "drain": {"preStopSeconds": 2, "terminationGracePeriodSeconds": 30},
            **spec,
        },
    }


def wait_for_service_account(kubectl: Kubectl) -> None:
    kubectl.until("serviceaccount/default", lambda _: True, 20)


def operator_metrics(system: Kubectl) -> dict[str, float]:
    """The operator's series by name with labels, as one scrape shows them."""
    lines = system.page(DEPLOYMENT, "/metrics", 20).splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


def leader(lease: Manifest) -> str:
    """The operator's pod that holds its lease; "" where none does."""
    name: str = ((lease.get("spec") or {}).get("holderIdentity") or "").rpartition("/")[2].partition("_")[0]
    return name
