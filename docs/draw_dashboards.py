"""Draws the chart's dashboards from real data: `python docs/draw_dashboards.py [--minutes 4] [--out docs/dashboards]`, from the repository.

Two servers of SmolLM2-135M, a batch, the operator and a Prometheus run on this machine, under the load of the tests' rig. Every panel's
query goes to Prometheus' range API as Grafana sends it, and the answer is drawn where the panel stands. Needs Debian's `prometheus` and
`pip install matplotlib`.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import math
import re
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from PIL import Image

ROOT: Final = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from banyan_runtime.hub import resolve  # noqa: E402
from tests.e2e.dashboards import rig as parts  # noqa: E402
from tests.support.s3.servers import free_port  # noqa: E402

FLAGS: Final = ("--max-running-requests", "8", "--max-queued-requests", "6", "--max-total-tokens", "1200")
RATE_INTERVAL_S: Final = 15
OLD_S: Final = 10
LEFT: Final = 0.034  # of the picture's width, for the numbers beside an axis
LEGENDS: Final = 8  # more do not fit below a panel
POINTS: Final = 150
CELL: Final = 0.74, 0.36  # inches of a column and a row of Grafana's grid
COLOURS: Final = ("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#c0d8ff", "#fade2a", "#ffa6b0")
BACK, PAPER, INK, FAINT = "#111217", "#181b1f", "#d8d9da", "#3a3d43"
SHADES: Final = {"green": "#73bf69", "orange": "#ff9830", "red": "#f2495c"}


def measured(minutes: float, folder: Path) -> list[tuple[dict[str, Any], dict[str, list[dict[str, Any]]], float, float]]:
    """Each board with what its queries returned."""
    with parts.running(folder, resolve("catalog://smollm2-135m"), "smollm2-135m", *FLAGS, port=free_port(), replicas=2) as rig:
        batches = threading.Thread(target=_batches, args=(rig, minutes))
        threading.Timer(minutes * 6, batches.start).start()
        for wave, clients in enumerate((3, 8, 20, 6, 3)):
            parts.load(rig, minutes * 12, clients, tokens=48, seed=wave)
        since, until = rig.began, time.time()
        found = [(board, answers(rig, board, since, until), since, until) for board in boards()]
        batches.join()
        return found


def _batches(rig: parts.Rig, minutes: float) -> None:
    """A short one, and one that outlasts the load."""
    parts.work(rig, 12, 8, "--max-concurrency", "4", name="hourly")
    parts.work(rig, round(minutes * 35), 16, "--max-concurrency", "4", "--priority", "-1")


def boards() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((parts.CHART / "dashboards").glob("*.json"))]


def answers(rig: parts.Rig, board: dict[str, Any], since: float, until: float) -> dict[str, list[dict[str, Any]]]:
    """By query: series."""
    chosen = dict.fromkeys(("namespace", "inferenceserver", "pod", "batchjob"), ".*")
    step = max(1, round((until - since) / POINTS))
    found = {}
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            query = parts.substituted(target["expr"], chosen, RATE_INTERVAL_S, round(until - since))
            found[target["expr"]] = rig.prometheus.series(query, since, until, step)
    return found


def drawn(board: dict[str, Any], found: dict[str, list[dict[str, Any]]], since: float, until: float) -> Figure:
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"]) + 2
    width, height = 24 * CELL[0], rows * CELL[1]
    figure = plt.figure(figsize=(width, height), facecolor=BACK)
    figure.text(0.006, 1 - 0.5 * CELL[1] / height * 1.6, board["title"], color=INK, fontsize=15, weight="bold", va="center")
    words = f"drawn from the panels' queries, {time.strftime('%Y-%m-%d %H:%M', time.gmtime(since))} UTC, {(until - since) / 60:.0f} minutes"
    figure.text(0.994, 1 - 0.5 * CELL[1] / height * 1.6, words, color="#8e8e8e", fontsize=9, va="center", ha="right")
    for panel in board["panels"]:
        place = panel["gridPos"]
        left, top = place["x"] / 24, 1 - (place["y"] + 1.6) / rows
        if panel["type"] == "row":
            figure.text(left + 0.006, top - 0.6 / rows, panel["title"], color=INK, fontsize=11, weight="bold", va="center")
            continue
        box = (left + 0.002, top - place["h"] / rows + 0.12 / rows, place["w"] / 24 - 0.004, (place["h"] - 0.24) / rows)
        figure.add_artist(
            plt.Rectangle(box[:2], box[2], box[3], facecolor=PAPER, edgecolor="#24272d", transform=figure.transFigure, zorder=-1)
        )
        figure.text(box[0] + 0.004, box[1] + box[3] - 0.55 / rows, panel["title"], color=INK, fontsize=8.5, va="center")
        _DRAW[panel["type"]](figure, box, panel, found, since, until, rows)
    return figure


def _named(target: dict[str, Any], series: dict[str, Any]) -> str:
    shown = re.sub(r"{{(\w+)}}", lambda one: series["metric"].get(one[1], ""), target["legendFormat"])
    return shown if shown != "__auto" else ""


def _lines(panel: dict[str, Any], found: dict[str, list[dict[str, Any]]]) -> list[tuple[str, list[float], list[float]]]:
    """(name, times, values) of each series."""
    found_here = [(_named(target, one), one["values"]) for target in panel["targets"] for one in found[target["expr"]]]
    step = min((after[0] - before[0] for _, points in found_here for before, after in pairwise(points)), default=1)
    lines = []
    for name, points in found_here:
        at, values = [float(points[0][0])], [float(points[0][1])]
        for before, after in pairwise(points):
            if after[0] - before[0] > 1.5 * step:  # nothing in between: no line
                at.append(before[0] + step)
                values.append(math.nan)
            at.append(float(after[0]))
            values.append(float(after[1]))
        lines.append((name, at, values))
    return lines


def _last(panel: dict[str, Any], found: dict[str, list[dict[str, Any]]], until: float) -> list[tuple[str, float]]:
    """What an instant query shows: the numbers at the end of the time range."""
    return [(name, values[-1]) for name, at, values in _lines(panel, found) if until - at[-1] < OLD_S and math.isfinite(values[-1])]


def told(value: float, unit: str) -> str:
    """A number with its unit, as Grafana writes it."""
    if unit == "percentunit":
        return f"{value * 100:.3g}%"
    if unit == "s":
        for limit, scale, name in ((1e-3, 1e6, "µs"), (1, 1e3, "ms"), (60, 1, "s"), (3600, 1 / 60, "min")):
            if abs(value) < limit:
                return f"{value * scale:.3g} {name}" if value else "0 s"
        return f"{value / 3600:.3g} h"
    if unit in ("bytes", "Bps"):
        for name in ("B", "KiB", "MiB", "GiB", "TiB"):
            if abs(value) < 1024 or name == "TiB":
                return f"{value:.3g} {name}" + ("/s" if unit == "Bps" else "")
            value /= 1024
    suffix = {"reqps": " req/s", "ops": " /s", "suffix: tokens/s": " tok/s"}.get(unit, "")
    return (f"{value / 1000:.3g}k" if abs(value) >= 1000 else f"{value:.3g}") + suffix


def _stat(figure: Figure, box: Any, panel: Any, found: Any, since: float, until: float, rows: int) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    values = [value for _, value in _last(panel, found, until)]
    colour = SHADES["green"]
    for step in defaults.get("thresholds", {}).get("steps", ()):
        if values and (step["value"] is None or values[0] >= step["value"]):
            colour = SHADES[step["color"]]
    shown = told(values[0], defaults["unit"]) if values else "No data"
    figure.text(box[0] + box[2] / 2, box[1] + box[3] * 0.42, shown, color=colour, fontsize=15, ha="center", va="center", weight="bold")


def _axes(figure: Figure, box: Any, rows: int, unit: str, *, under: float = 2.0, left: float = LEFT) -> Any:
    space = figure.add_axes((box[0] + left, box[1] + under / rows, box[2] - left - 0.008, box[3] - (under + 1.2) / rows), facecolor=PAPER)
    space.tick_params(colors="#9a9b9d", labelsize=6.5, length=0)
    space.grid(color=FAINT, linewidth=0.4)
    space.yaxis.set_major_formatter(lambda value, _: told(value, unit))
    for spine in space.spines.values():
        spine.set_visible(False)
    return space


def _times(space: Any, since: float, until: float) -> None:
    space.set_xlim(since, until)
    space.xaxis.set_major_locator(mpl.ticker.MaxNLocator(5))
    space.xaxis.set_major_formatter(lambda at, _: time.strftime("%H:%M:%S", time.gmtime(at)))


def _timeseries(figure: Figure, box: Any, panel: Any, found: Any, since: float, until: float, rows: int) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    space = _axes(figure, box, rows, defaults["unit"])
    stacked = defaults["custom"]["stacking"]["mode"] == "normal"
    base: dict[float, float] = {}
    lines = [(name, at, values) for name, at, values in _lines(panel, found) if any(math.isfinite(value) for value in values)]
    for number, (name, at, values) in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        if stacked:
            low = [base.get(moment, 0.0) for moment in at]
            values = [under + value for under, value in zip(low, values, strict=True)]
            space.fill_between(at, low, values, color=colour, alpha=0.3, linewidth=0)
            base.update((moment, value) for moment, value in zip(at, values, strict=True) if math.isfinite(value))
        shown = (name or panel["title"])[:34] if number < LEGENDS else "_"
        space.plot(at, values, color=colour, linewidth=0.9, label=shown)
    space.set_ylim(bottom=0, top=defaults.get("max"))
    if not any(value for _, _, values in lines for value in values if math.isfinite(value)):
        space.set_ylim(0, 1)
    _times(space, since, until)
    if lines:
        place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (-0.8 * LEFT / (box[2] - LEFT), -0.16), "borderpad": 0}
        legend = space.legend(**place, ncols=4, fontsize=6, frameon=False, handlelength=1, columnspacing=1)
        for text in legend.get_texts():
            text.set_color(INK)


def _bargauge(figure: Figure, box: Any, panel: Any, found: Any, since: float, until: float, rows: int) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    values = _last(panel, found, until)
    space = _axes(figure, box, rows, defaults["unit"], under=0.6, left=0.075)
    space.barh(range(len(values)), [value for _, value in values], color="#5794f2", height=0.6)
    most = defaults.get("max") or max((value for _, value in values), default=1.0) * 1.25 or 1.0
    space.set_xlim(0, most)
    space.set_yticks(range(len(values)), [name for name, _ in values])
    space.tick_params(axis="y", labelsize=7, colors=INK)
    space.xaxis.set_visible(False)
    for row, (_, value) in enumerate(values):
        space.text(most, row, told(value, defaults["unit"]), color=INK, fontsize=8, ha="right", va="center")


def _heatmap(figure: Figure, box: Any, panel: Any, found: Any, since: float, until: float, rows: int) -> None:
    space = _axes(figure, box, rows, "s", under=1.2)
    lines = sorted(
        (math.inf if name == "+Inf" else float(name), dict(zip(at, values, strict=True))) for name, at, values in _lines(panel, found)
    )
    moments = sorted({moment for _, line in lines for moment in line})
    columns = [[line.get(moment, 0.0) for _, line in lines] for moment in moments]
    counts = [[column[row] - (column[row - 1] if row else 0.0) for column in columns] for row in range(len(lines))]
    used = [row for row, line in enumerate(counts) if max(line, default=0) > 0.01]
    first, last = (min(used), max(used) + 1) if used else (0, len(lines))
    map_ = mpl.colormaps["Oranges_r"].with_extremes(under=PAPER)
    grid = [counts[row] for row in range(first, last)]
    space.imshow(grid, aspect="auto", origin="lower", cmap=map_, vmin=0.01, extent=(since, until, 0, last - first), interpolation="nearest")
    space.set_yticks(range(last - first + 1), [told(lines[row - 1][0], "s") if row else "0" for row in range(first, last + 1)])
    _times(space, since, until)
    space.grid(visible=False)


_DRAW: Final = {"stat": _stat, "timeseries": _timeseries, "bargauge": _bargauge, "heatmap": _heatmap}


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw the chart's dashboards from real data.")
    parser.add_argument("--minutes", type=float, default=4.0, help="of load")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "dashboards")
    parser.add_argument("--data", type=Path, help="keep what was measured in this file, or draw from it if it is there")
    args = parser.parse_args()
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # watches that end with the operator
    args.out.mkdir(parents=True, exist_ok=True)
    if args.data is not None and args.data.exists():
        found = json.loads(args.data.read_text())
        shown = {board["uid"]: board for board in boards()}
        found = [(shown[board["uid"]], *rest) for board, *rest in found]
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = measured(args.minutes, Path(folder))
        if args.data is not None:
            args.data.write_text(json.dumps(found))
    for board, answer, since, until in found:
        figure = drawn(board, answer, since, until)
        file = args.out / f"{board['uid']}.png"
        bitmap = io.BytesIO()
        figure.savefig(bitmap, dpi=78, facecolor=BACK)
        Image.open(bitmap).convert("RGB").quantize(200, dither=Image.Dither.NONE).save(file, optimize=True)
        plt.close(figure)
        print(f"{file}  {file.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
