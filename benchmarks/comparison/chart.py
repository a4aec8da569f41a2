"""A picture of a comparison: bars as SVG, no library."""

from __future__ import annotations

from html import escape
from typing import Final

from comparison.result import Compared, Result, figure, middle, of_limit, shown, value

COLOURS: Final = {"banyan": "#1b7837", "llama.cpp": "#4575b4", "openvino": "#f1a340", "vllm": "#998ec3", "transformers": "#999999"}
OTHER: Final = ("#a6dba0", "#d9f0d3", "#666666")
WIDTH, LEFT, BAR, GAP, HEAD = 860, 250, 14, 14, 30


def chart(result: Result) -> str:
    """For each model and plan a bar a peer: its speed as a share of the best one's, with its own figure written beside it."""
    parts: list[str] = []
    names = list(dict.fromkeys(name for model in result.models.values() for plan in model.rounds.values() for name in plan))
    others = iter(OTHER * len(names))
    colours = {name: COLOURS.get(name) or next(others) for name in names}
    y = 52
    for compared in result.models.values():
        parts.append(f'<text x="10" y="{y + 14}" font-weight="bold">{escape(compared.title)}</text>')
        y = _model(compared, colours, y + HEAD, parts) + GAP
    legend = "".join(
        f'<rect x="{x}" y="28" width="12" height="12" fill="{colour}"/><text x="{x + 16}" y="38">{escape(name)}</text>'
        for x, (name, colour) in zip(range(10, WIDTH, 150), colours.items(), strict=False)
    )
    title = f"Speed as a share of the fastest, {result.date}; black line: the machine's limit by arithmetic, where it is within the picture"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="{WIDTH}" height="{y}" fill="white"/><text x="10" y="16">{escape(title)}</text>\n{legend}\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _model(compared: Compared, colours: dict[str, str], y: int, parts: list[str]) -> int:
    for plan, by_peer in compared.rounds.items():
        values = {name: middle([value(plan, one.summary) for one in rounds]) for name, rounds in by_peer.items()}
        known = {name: number for name, number in values.items() if number}
        if not known:
            continue
        more = figure(plan).more_is_better
        speeds = {name: number if more else 1 / number for name, number in known.items()}
        best, full = max(speeds.values()), WIDTH - LEFT - 90
        parts.append(f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(f"{plan}, {figure(plan).words}")}</text>')
        shares = [of_limit(plan, one) for rounds in by_peer.values() for one in rounds]
        top = max((share for share in shares if share), default=None)
        began = y
        for name, speed in speeds.items():
            width = full * speed / best
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 2}" fill="{colours[name]}"/>')
            parts.append(f'<text x="{LEFT + width + 4:.1f}" y="{y + 10}">{shown(known[name])}</text>')
            y += BAR
        if top is not None and (at := LEFT + full / top) <= WIDTH - 20:
            parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{began - 2}" y2="{y}" stroke="black"/>')
        y += GAP
    return y
