"""The chart as it stands in the cluster."""

from __future__ import annotations

from tests.cluster.conftest import RELEASE, chart_values, helm
from tests.cluster.conftest import ROOT as REPOSITORY
from tests.cluster.kubectl import Kubectl


def test_helm_test_passes(system: Kubectl) -> None:
    assert "Phase:          Succeeded" in helm("test", RELEASE, "--namespace", system.namespace, "--timeout", "1m")


def test_an_upgrade_to_the_same_values_restarts_nothing(system: Kubectl) -> None:
    before = [pod["metadata"]["uid"] for pod in system.items("pods", "app.kubernetes.io/component=operator")]
    helm("upgrade", RELEASE, str(REPOSITORY / "charts" / "banyan"), "--namespace", system.namespace, "--wait", *chart_values())
    assert [pod["metadata"]["uid"] for pod in system.items("pods", "app.kubernetes.io/component=operator")] == before


def test_the_operator_logs_what_it_does_and_no_error(system: Kubectl) -> None:
    log = system("logs", "deployment/banyan-operator")
    assert " INFO leading: " in log
    assert "Traceback" not in log
