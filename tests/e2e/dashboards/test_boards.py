"""The chart's dashboards and rules as files: well formed, complete, and as Helm renders them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from banyan_runtime.front.routes import OPEN_PATHS, ROUTES
from tests.e2e.dashboards.rig import CHART, CHART_VALUES, ROOT, helm, rendered

BOARDS = {path.stem: path.read_text() for path in sorted((CHART / "dashboards").glob("*.json"))}
RULES = CHART / "files" / "rules.yaml"
TESTS = Path(__file__).parent / "rules.test.yaml"


def panels(board: str) -> list[dict[str, Any]]:
    return [panel for panel in json.loads(BOARDS[board])["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    rules = [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    return rules + [target["expr"] for board in BOARDS for panel in panels(board) for target in panel["targets"]]


def test_the_dashboards_are_what_their_source_says(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "charts" / "dashboards"), str(tmp_path)], check=True)
    assert {path.stem: path.read_text() for path in tmp_path.glob("*.json")} == BOARDS, "run: python charts/dashboards"


@pytest.mark.parametrize("board", BOARDS)
def test_a_dashboard_has_its_own_uid_a_chosen_data_source_and_panels_that_do_not_overlap(board: str) -> None:
    found = json.loads(BOARDS[board])
    assert (found["uid"], found["id"], found["schemaVersion"]) == (board, None, 39)
    source, *variables = found["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    assert all(variable["datasource"]["uid"] == "${datasource}" for variable in variables)
    numbers = [panel["id"] for panel in found["panels"]]
    assert len(numbers) == len(set(numbers))
    taken: set[tuple[int, int]] = set()
    for panel in found["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not taken & cells, panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    for panel in panels(board):
        marks = [target["refId"] for target in panel["targets"]]
        assert marks
        assert len(marks) == len(set(marks))
        assert all(target["datasource"] == {"type": "prometheus", "uid": "${datasource}"} for target in panel["targets"])
    declared = {"datasource", *(variable["name"] for variable in variables), "__rate_interval", "__range", "__all"}
    assert set(re.findall(r"\$\{?(\w+)", BOARDS[board])) <= declared


def test_rates_are_of_counters_and_percentiles_of_rates_of_buckets() -> None:
    for expression in expressions():
        for name in re.findall(r"(?:rate|increase)\((\w+)", expression):
            assert name.endswith(("_total", "_bucket", "_sum", "_count")), expression
        for rest in expression.split("histogram_quantile(")[1:]:
            assert re.match(r"[\d.]+, sum by \(le[,)].*?(rate|increase)\(\w+_bucket", rest), expression
        assert not re.search(r"(?<!rate\()(?<!increase\()\b\w+_(total|bucket|sum|count)\b", expression), f"a counter as it is: {expression}"


def config_maps(*args: str) -> list[dict[str, Any]]:
    return [document for document in rendered(*args) if document["kind"] == "ConfigMap"]


def test_the_share_of_errors_leaves_out_probes_and_scrapes_and_nothing_else() -> None:
    asked = {
        expression: re.findall(r'handler!~"([^"]+)"', expression) for expression in expressions() if "_http_requests_total" in expression
    }
    ratios = [patterns for patterns in asked.values() if len(patterns) > 1]
    assert len(ratios) == 3  # a rule, an alert and a panel
    (pattern,) = {pattern for patterns in ratios for pattern in patterns}
    left_out = {route.path for route in ROUTES if re.fullmatch(pattern, route.path)}
    assert left_out == {*OPEN_PATHS, "/load", "/v1/loads"}


def test_each_dashboard_is_in_a_config_map_that_grafanas_sidecar_finds_byte_for_byte() -> None:
    found = config_maps("--set", CHART_VALUES)
    assert {name: text for one in found for name, text in one["data"].items()} == {f"{name}.json": text for name, text in BOARDS.items()}
    for one in found:
        assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert one["metadata"]["annotations"] == {"grafana_folder": "Banyan"}
        assert len(json.dumps(one)) < 100 * 1024
    moved = config_maps(
        *("--set", "metrics.dashboards.enabled=true,metrics.dashboards.namespace=grafana,metrics.dashboards.annotations=null"),
        *("--set", "metrics.dashboards.labels.grafana_dashboard=null,metrics.dashboards.labels.mine=yes"),
    )
    assert {one["metadata"]["namespace"] for one in moved} == {"grafana"}
    assert all(one["metadata"]["labels"]["mine"] == "yes" and "grafana_dashboard" not in one["metadata"]["labels"] for one in moved)
    assert not any("annotations" in one["metadata"] for one in moved)
    assert config_maps() == []


def rule(*args: str) -> list[dict[str, Any]]:
    return [document for document in rendered(*args) if document["kind"] == "PrometheusRule"]


def test_the_prometheus_rule_holds_the_files_rules_without_those_that_the_values_name() -> None:
    (found,) = rule("--set", CHART_VALUES, "--set", "metrics.prometheusRule.additionalLabels.release=prometheus")
    assert found["spec"] == yaml.safe_load(RULES.read_text())
    assert found["metadata"]["labels"]["release"] == "prometheus"
    without = "{BanyanBatchStuck,inferenceserver:banyan_requests:rate5m}"
    (less,) = rule("--set", f"metrics.prometheusRule.enabled=true,metrics.prometheusRule.disabled={without}")
    names = lambda one: {r.get("alert", r.get("record")) for group in one["spec"]["groups"] for r in group["rules"]}
    assert names(found) - names(less) == {"BanyanBatchStuck", "inferenceserver:banyan_requests:rate5m"}
    assert rule() == []


def test_a_rule_to_leave_out_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        rule("--set", "metrics.prometheusRule.enabled=true,metrics.prometheusRule.disabled={NoSuch}")
    assert "there is no rule NoSuch; there are inferenceserver:banyan_requests:rate5m, " in str(refused.value.stderr)


def test_helm_renders_the_same_where_the_prometheus_operators_definitions_are_and_where_not() -> None:
    without = helm("--set", CHART_VALUES)
    assert without == helm("--set", CHART_VALUES, "--api-versions", "monitoring.coreos.com/v1")
    kinds = {document["kind"] for document in yaml.safe_load_all(without) if document}
    assert {"PrometheusRule", "PodMonitor", "ConfigMap"} <= kinds
    assert not {document["kind"] for document in rendered()} & {"PrometheusRule", "PodMonitor", "ServiceMonitor", "ConfigMap"}


def test_the_monitor_of_workloads_looks_where_the_operator_does() -> None:
    def selector(*args: str) -> dict[str, Any]:
        (found,) = [one for one in rendered("--set", "metrics.workloads.enabled=true", *args) if one["kind"] == "PodMonitor"]
        where: dict[str, Any] = found["spec"]["namespaceSelector"]
        return where

    assert selector() == {"any": True}
    assert selector("--set", "operator.namespaces={a,b}") == {"matchNames": ["a", "b"]}


def promtool(*args: str) -> str:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    done = subprocess.run(["promtool", *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_rules_pass_promtool() -> None:
    assert "SUCCESS" in promtool("check", "rules", str(RULES))


def test_alerts_fire_when_they_should_and_else_are_quiet() -> None:
    assert "SUCCESS" in promtool("test", "rules", str(TESTS))


def test_every_alert_has_a_case_in_which_it_fires_and_says_what_is_wrong_and_what_to_do() -> None:
    alerts = {r["alert"]: r for group in yaml.safe_load(RULES.read_text())["groups"] for r in group["rules"] if "alert" in r}
    fires = set()
    for case in yaml.safe_load(TESTS.read_text())["tests"]:
        fires |= {test["alertname"] for test in case.get("alert_rule_test", ()) if test["exp_alerts"]}
        for test in case.get("promql_expr_test", ()):
            fires |= {name for sample in test["exp_samples"] for name in re.findall(r'alertname="(\w+)"', sample["labels"])}
    assert fires == set(alerts)
    for name, one in alerts.items():
        assert one["labels"]["severity"] in ("critical", "warning"), name
        assert set(one["annotations"]) == {"summary", "description"}, name


def test_the_documentation_names_every_alert_and_recording_rule_and_shows_every_dashboard() -> None:
    text = (ROOT / "docs" / "monitoring.md").read_text()
    rules = [r for group in yaml.safe_load(RULES.read_text())["groups"] for r in group["rules"]]
    told = dict(re.findall(r"^\| (Banyan\w+) \|.*\| (\w+) \|$", text, re.MULTILINE))
    assert told == {r["alert"]: r["labels"]["severity"] for r in rules if "alert" in r}
    recorded = re.findall(r"`(?:inferenceserver:banyan_|…)([\w:]+)`", text)
    assert sorted(recorded) == sorted(r["record"].removeprefix("inferenceserver:banyan_") for r in rules if "record" in r)
    for board in BOARDS:
        picture = ROOT / "docs" / "dashboards" / f"{board}.png"
        assert f"(dashboards/{picture.name})" in text
        assert picture.stat().st_size < 300_000
