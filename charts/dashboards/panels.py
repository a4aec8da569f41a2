"""What a Grafana dashboard is made of here, and its JSON.

A board is rows of panels, a panel is queries. In them `{S`, `{B` and `{J` begin a selector by the board's variables: servers' pods, batch
workers' pods, and BatchJobs as the operator tells of them. Percentiles come from rates of buckets, so that they follow the time range.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
WIDTH: Final = 24  # of Grafana's grid
SELECTORS: Final = {
    "{S": '{namespace=~"$namespace",inferenceserver=~"$inferenceserver",pod=~"$pod"',
    "{B": '{namespace=~"$namespace",inferenceserver="",batchjob=~"$batchjob"',  # servers tell of batches of their own
    "{J": '{namespace=~"$namespace",name=~"$batchjob"',
}


@dataclass(frozen=True)
class Panel:
    """`queries`: (expression, legend). `kind`: timeseries, stat, bargauge or heatmap."""

    title: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    height: int = 7
    text: str = ""
    stacked: bool = False
    most: float | None = None  # of the axis
    steps: Sequence[tuple[float | None, str]] = ()  # from which value which colour


@dataclass(frozen=True)
class Variable:
    name: str
    label: str
    query: str


@dataclass(frozen=True)
class Board:
    uid: str
    title: str
    text: str
    variables: Sequence[Variable]
    rows: Sequence[tuple[str, Sequence[Panel]]] = field(default_factory=tuple)


def percentiles(metric: str, by: str = "inferenceserver", *, of: Sequence[float] = (0.5, 0.95, 0.99)) -> list[tuple[str, str]]:
    legend = " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(","))
    return [
        (f"histogram_quantile({q}, sum by (le, {by}) (rate({metric}_bucket{{S}}[$__rate_interval])))", f"p{q * 100:g} {legend}") for q in of
    ]


def stat(title: str, expression: str, unit: str = "short", **more: Any) -> Panel:
    return Panel(title, [(expression, "")], unit, "stat", **{"width": 3, "height": 4, **more})


def good_below(warning: float, bad: float) -> Sequence[tuple[float | None, str]]:
    return (None, "green"), (warning, "orange"), (bad, "red")


def expression(text: str) -> str:
    for short, selector in SELECTORS.items():
        text = text.replace(short + ",", selector + ",").replace(short + "}", selector + "}")
    return text


def dashboard(board: Board) -> dict[str, Any]:
    """What Grafana imports."""
    return {
        "id": None,
        "uid": board.uid,
        "title": board.title,
        "description": board.text,
        "tags": ["banyan"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [{"type": "dashboards", "title": "Banyan", "tags": ["banyan"], "asDropdown": False, "keepTime": True}],
        "annotations": {"list": []},
        "templating": {"list": [_source(), *map(_variable, board.variables)]},
        "panels": list(_placed(board)),
    }


def _source() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1, "hide": 0}


def _variable(variable: Variable) -> dict[str, Any]:
    return {
        "name": variable.name,
        "label": variable.label,
        "type": "query",
        "datasource": SOURCE,
        "definition": variable.query,
        "query": {"query": variable.query, "refId": variable.name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _placed(board: Board) -> Iterator[dict[str, Any]]:
    """Rows from top to bottom, panels from left to right."""
    number = y = 0
    for title, panels in board.rows:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
        }
        y += 1
        x = tallest = 0
        for panel in panels:
            if x + panel.width > WIDTH:
                x, y, tallest = 0, y + tallest, 0
            number += 1
            yield {"id": number, **_panel(panel), "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height}}
            x, tallest = x + panel.width, max(tallest, panel.height)
        y += tallest


def _panel(panel: Panel) -> dict[str, Any]:
    instant = panel.kind in ("stat", "bargauge")
    targets = [
        {
            "refId": chr(ord("A") + number),
            "datasource": SOURCE,
            "expr": expression(query),
            "legendFormat": legend or "__auto",
            "range": not instant,
            "instant": instant,
            **({"format": "heatmap"} if panel.kind == "heatmap" else {}),
        }
        for number, (query, legend) in enumerate(panel.queries)
    ]
    unit = {"tokens/s": "suffix: tokens/s"}.get(panel.unit, panel.unit)
    defaults: dict[str, Any] = {"unit": unit, "min": 0}
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.steps:
        defaults["thresholds"] = {"mode": "absolute", "steps": [{"value": value, "color": colour} for value, colour in panel.steps]}
        defaults["color"] = {"mode": "thresholds"}
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": 25 if panel.stacked else 5, "showPoints": "never", "stacking": stacking}
    return {
        "type": panel.kind,
        "title": panel.title,
        **({"description": panel.text} if panel.text else {}),
        "datasource": SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _OPTIONS[panel.kind],
    }


_LAST: Final = {"calcs": ["lastNotNull"], "fields": "", "values": False}
_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {"reduceOptions": _LAST, "colorMode": "value", "graphMode": "none", "textMode": "value"},
    "bargauge": {"reduceOptions": _LAST, "displayMode": "basic", "orientation": "horizontal"},
    "heatmap": {"calculate": False, "yAxis": {"unit": "s"}, "color": {"mode": "scheme", "scheme": "Oranges", "steps": 32}},
}
