"""The chart's dashboards and rules against a Prometheus that scrapes a server under load, a batch and the operator."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.dashboards import rig as parts
from tests.e2e.dashboards.rig import CHART, Rig, eventually, substituted
from tests.support.s3.servers import free_port

BOARDS = {path.stem: json.loads(path.read_text()) for path in sorted((CHART / "dashboards").glob("*.json"))}
PANELS = {name: [panel for panel in board["panels"] if panel["type"] != "row"] for name, board in BOARDS.items()}
LOAD_S = 6
LINES, FAILED = 50, 2
CONCURRENCY = 3  # of the batch
BATCH_S = 4  # what the batch takes at least: several scrapes, however fast the machine
RATE_INTERVAL_S = 20  # Grafana's is four scrapes; a machine with other work misses many
SPARE = re.compile(r" or vector\(0\)")  # what a panel shows where nothing has ever happened


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, tiny_chat: Path) -> Iterator[Rig]:
    """After the load and the end of the batch, with an operator that stands by: both tell of the same resources."""
    if not parts.have_prometheus():
        pytest.skip("Prometheus is not installed (Debian: prometheus)")
    folder = tmp_path_factory.mktemp("rig")
    flags = ("--runner", "torch", "--max-queued-requests", "4", "--max-running-requests", "4", "--max-total-tokens", "2048")
    operators = ("banyan-operator-0", "banyan-operator-1")
    with parts.running(folder, tiny_chat, "tiny", *flags, port=free_port(), operators=operators) as found:
        failed: list[BaseException] = []
        tokens = max(6, parts.tokens_in(found, BATCH_S * CONCURRENCY / LINES))

        def work() -> None:
            try:
                parts.work(found, LINES, tokens, "--max-concurrency", str(CONCURRENCY))
            except BaseException as error:
                failed.append(error)

        batch = threading.Thread(target=work)
        batch.start()
        parts.load(found, LOAD_S, 5)
        batch.join()
        assert failed == []
        over = 'increase(banyan_batchjob_duration_seconds_count{result="succeeded"}[1m]) > 0'
        eventually(lambda: found.prometheus.now(over), "the end of the batch in Prometheus")
        found.ended = time.time() + parts.SCRAPE_S  # the first point of the panels that is not before this scrape
        yield found


def asked(rig: Rig, expression: str) -> list[dict[str, Any]]:
    """What the panel gets for the time since the beginning: series with at least one number."""
    query = substituted(expression, rig.variables, RATE_INTERVAL_S, int(rig.ended - rig.began) + 1)
    series = rig.prometheus.series(query, rig.began, rig.ended)
    return [one for one in series if any(value != "NaN" for _, value in one["values"])]


@pytest.mark.parametrize("board", BOARDS)
def test_every_query_of_every_panel_returns_data(rig: Rig, board: str) -> None:
    empty = [
        f"{panel['title']}: {target['expr']}" for panel in PANELS[board] for target in panel["targets"] if not asked(rig, target["expr"])
    ]
    assert empty == []


@pytest.mark.parametrize("board", BOARDS)
def test_every_label_that_a_legend_shows_is_there(rig: Rig, board: str) -> None:
    for panel in PANELS[board]:
        for target in panel["targets"]:
            labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            series = asked(rig, SPARE.sub("", target["expr"]))
            assert all(labels <= one["metric"].keys() for one in series), f"{panel['title']}: {target['expr']}"


KEYWORDS = {"by", "without", "on", "ignoring", "group_left", "group_right", "and", "or", "unless", "bool", "offset"}


def names_in(expression: str) -> set[str]:
    """The metrics of an expression."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"", "", expression)
    bare = re.sub(r"\b(by|without|on|ignoring|group_left|group_right) *\([^)]*\)", "", bare)
    return {name for name in re.findall(r"(?<![\w.:])([a-z_][\w:]*)\b(?! *\()", bare) if name not in KEYWORDS}


def test_every_metric_that_is_asked_for_stands_on_a_live_page(rig: Rig) -> None:
    """Also those behind `or vector(0)` and in alerts, whose queries return nothing here."""
    assert names_in('sum by (a) (rate(x_total{b="c"}[5m]) and on (d) y:z) > 0.5') == {"x_total", "y:z"}
    declared = set(re.findall(r"^# TYPE (\S+)", rig.live(), re.MULTILINE)) | set(rig.prometheus.get("label/__name__/values"))
    known = declared | {f"{name}_{part}" for name in declared for part in ("bucket", "sum", "count")}
    rules = yaml.safe_load((CHART / "files" / "rules.yaml").read_text())["groups"]
    expressions = [rule["expr"] for group in rules for rule in group["rules"]]
    expressions += [target["expr"] for panels in PANELS.values() for panel in panels for target in panel["targets"]]
    assert {name for expression in expressions for name in names_in(expression)} - known == set()


def test_every_choice_of_a_dashboard_has_what_to_choose_from(rig: Rig) -> None:
    for board in BOARDS.values():
        for variable in board["templating"]["list"][1:]:
            found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"])
            assert found is not None
            series = asked(rig, f"group by ({found[2]}) ({found[1]})")
            assert all(one["metric"].get(found[2]) for one in series), variable
            assert series, variable


def at_the_end(rig: Rig, expression: str) -> list[float]:
    return [float(one["values"][-1][1]) for one in asked(rig, expression) if float(one["values"][-1][0]) >= rig.ended - parts.SCRAPE_S]


def test_an_operator_that_stands_by_counts_nothing_twice(rig: Rig) -> None:
    assert at_the_end(rig, "count by (name) (banyan_batchjob_phase == 1)") == [2]  # both tell of it
    shown = {panel["title"]: panel["targets"][0]["expr"] for panel in (*PANELS["banyan-operator"], *PANELS["banyan-batches"])}
    for title in ("Replicas", "Batches by phase", "Conditions that are False", "Progress"):
        assert set(at_the_end(rig, shown[title])) == {1}, title
    assert at_the_end(rig, shown["Failed lines"]) == [FAILED]
    assert at_the_end(rig, shown["Lines left"]) == [0]


def test_every_rule_can_be_evaluated_and_every_recording_rule_records(rig: Rig) -> None:
    rules = [rule for group in rig.prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == sum(len(group["rules"]) for group in yaml.safe_load((CHART / "files" / "rules.yaml").read_text())["groups"])
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in rules if rule["type"] == "recording" and not asked(rig, rule["name"])] == []
    firing = {alert["labels"]["alertname"] for alert in rig.prometheus.get("alerts")["alerts"] if alert["state"] == "firing"}
    assert firing == set()  # nothing is wrong here
