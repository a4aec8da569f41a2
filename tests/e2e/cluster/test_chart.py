"""The chart as it stands in the cluster."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.cluster.kubectl import Kubectl, KubectlError, is_true
from tests.e2e.conftest import RELEASE, chart_values, helm
from tests.e2e.conftest import ROOT as REPOSITORY


def test_helm_test_passes(system: Kubectl) -> None:
    assert "Phase:          Succeeded" in helm("test", RELEASE, "--namespace", system.namespace, "--timeout", "1m")


def test_an_upgrade_to_the_same_values_restarts_nothing(system: Kubectl) -> None:
    before = [pod["metadata"]["uid"] for pod in system.items("pods", "app.kubernetes.io/component=operator")]
    helm("upgrade", RELEASE, str(REPOSITORY / "charts" / "banyan"), "--namespace", system.namespace, "--wait", *chart_values())
    assert [pod["metadata"]["uid"] for pod in system.items("pods", "app.kubernetes.io/component=operator")] == before


def test_the_operator_works_behind_its_network_policy(system: Kubectl, team: Kubectl, server: Callable[..., str]) -> None:
    chart = str(REPOSITORY / "charts" / "banyan")
    helm("upgrade", RELEASE, chart, "--namespace", system.namespace, "--wait", *chart_values(), "--set", "networkPolicy.enabled=true")
    try:
        system.until("networkpolicy/banyan-operator", lambda _: True, 10)
        system("delete", "pod", "-l", "app.kubernetes.io/component=operator")  # a new one has no connection from before
        system.until("deployment/banyan-operator", lambda one: one["status"].get("readyReplicas") == 1, 60)
        name = server("guarded-operator")
        team.until(f"isrv/{name}", is_true("Ready"), 120)
        team.until(f"isrv/{name}", lambda one: one["status"]["model"].get("contextLength"), 30)  # asked of the pod itself
        assert "Succeeded" in helm("test", RELEASE, "--namespace", system.namespace, "--timeout", "1m")
    finally:
        helm("upgrade", RELEASE, chart, "--namespace", system.namespace, "--wait", *chart_values())


def test_no_pip_is_where_the_operator_runs(system: Kubectl) -> None:
    with pytest.raises(KubectlError, match="No module named"):
        system("exec", "deployment/banyan-operator", "--", "python", "-m", "pip", "--version")
    found = system(
        "exec", "deployment/banyan-operator", "--", "sh", "-c", "command -v pip pip3; ls /usr/lib/python3*/ensurepip 2>/dev/null; true"
    )
    assert found == ""


def test_the_operator_logs_what_it_does_and_no_error(system: Kubectl) -> None:
    log = system("logs", "deployment/banyan-operator")
    assert " INFO leading: " in log
    assert "Traceback" not in log
