"""What a comparison found, as data that is written down, and the ratios that are told of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Final

import msgspec
from load.summary import Percentiles, Summary

from comparison.limits import Machine


@dataclass(slots=True)
class Round:
    """One peer's turn at a plan. `others`: how much of the servers' CPUs went to something else meanwhile, 0 to 1."""

    summary: Summary
    server_cpu_s: float
    others: float
    load_average: float
    limit_s: float | None  # least wall time, by the probe of the same round; of a stream's token for bs1


@dataclass(slots=True)
class Compared:
    """All of one model. Rounds by plan and peer; round i of all peers was measured side by side."""

    title: str
    about: dict[str, str] = field(default_factory=dict)  # by peer, as it started
    missing: dict[str, str] = field(default_factory=dict)  # by peer: why it has no figures
    probes: list[Machine] = field(default_factory=list)
    rounds: dict[str, dict[str, list[Round]]] = field(default_factory=dict)


@dataclass(slots=True)
class Result:
    date: str
    cpu: str
    cpus: str
    command: str
    versions: dict[str, str]
    missing: dict[str, str]
    models: dict[str, Compared]

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1)


@dataclass(frozen=True, slots=True)
class Figure:
    """What a case is judged by."""

    words: str
    more_is_better: bool


def figure(plan: str) -> Figure:
    if plan == "bs1":
        return Figure("tok/s of a stream", True)
    if plan.startswith(("prefix", "prefill")):
        return Figure("s", False)
    if plan.startswith("turns"):
        return Figure("s to first token, later turns", False)
    if plan.startswith("poisson"):
        return Figure("good answers/s", True)
    return Figure("output tok/s", True)


def value(plan: str, summary: Summary) -> float | None:
    """The figure of a plan; None if requests failed or there is none."""
    if summary.errors:
        return None
    if plan == "bs1":
        return 1 / summary.tpot_s.p50 if summary.tpot_s else None
    if plan.startswith(("prefix", "prefill")):
        return summary.wall_s
    if plan.startswith("turns"):
        return summary.later_ttft_s.p50 if summary.later_ttft_s else None
    if plan.startswith("poisson"):
        return summary.good_per_s
    return summary.output_tokens_per_s


def limit(plan: str, one: Round) -> float | None:
    """The best value of the figure that the machine could give, by arithmetic."""
    if one.limit_s is None:
        return None
    if plan == "bs1":
        return 1 / one.limit_s
    return one.limit_s if not figure(plan).more_is_better else one.summary.output_tokens / one.limit_s


def times_better(plan: str, ours: Round, theirs: Round) -> float | None:
    """How many times better than theirs ours is, from the two of one round."""
    mine, other = value(plan, ours.summary), value(plan, theirs.summary)
    if not mine or not other:
        return None
    return mine / other if figure(plan).more_is_better else other / mine


def of_limit(plan: str, one: Round) -> float | None:
    """1 where the machine's limit is reached."""
    mine, best = value(plan, one.summary), limit(plan, one)
    if not mine or not best:
        return None
    return mine / best if figure(plan).more_is_better else best / mine


def middle(values: list[float | None]) -> float | None:
    """The median of those that there are."""
    known = [one for one in values if one is not None]
    return median(known) if known else None


def milliseconds(values: list[Percentiles | None], percent: str) -> float | None:
    """The median of the rounds' percentile, `percent` being p50, p90 or p99."""
    return middle([None if one is None else 1000 * float(getattr(one, percent)) for one in values])


NONE: Final = "–"


def shown(number: float | None, form: str = "{:.3g}") -> str:
    if number is None:
        return NONE
    return f"{number:.0f}" if form == "{:.3g}" and number >= 100 else form.format(number)


def table(result: Result, subject: str) -> str:
    """Markdown: for each model and plan the medians of all, how many times better `subject` is than the best other, and the limit."""
    parts = [
        f"# Banyan beside other servers, {result.date}\n",
        f"{result.cpu}; servers on CPUs {result.cpus}. Medians of interleaved rounds; ratios are medians of each round's own.\n",
        "The limit is arithmetic with the round's probe: weights, keys and values read once a step, every multiplication once.",
        "`of limit`: 1 would be all of it; above 1 the probe read less than there was, as on a busy machine it does.\n",
        f"`{result.command}`\n",
        *(f"- {name}: {version}" for name, version in result.versions.items()),
        *(f"- {name}: not measured. {reason}" for name, reason in result.missing.items()),
    ]
    for compared in result.models.values():
        parts.append(f"\n## {compared.title}\n")
        if compared.probes:
            reads, flops = [one.bytes_s / 1e9 for one in compared.probes], [one.flop_s / 1e9 for one in compared.probes]
            parts.append(f"Probe: {min(reads):.0f} to {max(reads):.0f} GB/s read, {min(flops):.0f} to {max(flops):.0f} GFLOP/s.\n")
        parts += [f"- {name}: {about}" for name, about in compared.about.items() if about]
        parts += [f"- {name}: not measured. {reason}" for name, reason in compared.missing.items()]
        names = sorted({name for by_peer in compared.rounds.values() for name in by_peer}, key=lambda name: (name != subject, name))
        parts.append(f"\n| case | {' | '.join(names)} | {subject} / best other | limit | of limit | others' CPU |")
        parts.append(f"|---|{'---|' * (len(names) + 4)}")
        parts += [_row(plan, by_peer, names, subject) for plan, by_peer in compared.rounds.items()]
        parts += _details(compared, names)
    return "\n".join(parts) + "\n"


def best_other(plan: str, by_peer: dict[str, list[Round]], subject: str) -> str | None:
    """The peer with the best median; other forms of the subject (banyan-torch) are none."""
    medians = {
        name: middle([value(plan, one.summary) for one in rounds])
        for name, rounds in by_peer.items()
        if not name.startswith("banyan") and name != subject
    }
    known = {name: number for name, number in medians.items() if number is not None}
    if not known:
        return None
    return (max if figure(plan).more_is_better else min)(known, key=lambda name: known[name])


def _row(plan: str, by_peer: dict[str, list[Round]], names: list[str], subject: str) -> str:
    cells = [shown(middle([value(plan, one.summary) for one in by_peer.get(name, [])])) for name in names]
    ours, other = by_peer.get(subject, []), best_other(plan, by_peer, subject)
    ratio = NONE
    if other is not None and ours:
        pairs = zip(ours, by_peer[other], strict=False)
        ratio = f"**{shown(middle([times_better(plan, mine, theirs) for mine, theirs in pairs]), '{:.2f}')}** ({other})"
    best = shown(middle([limit(plan, one) for one in ours]))
    share = shown(middle([of_limit(plan, one) for one in ours]), "{:.2f}")
    everyone = [one.others for rounds in by_peer.values() for one in rounds]
    crowd = f"{min(everyone):.0%} to {max(everyone):.0%}" if everyone else NONE
    return f"| {plan}, {figure(plan).words} | {' | '.join(cells)} | {ratio} | {best} | {share} | {crowd} |"


def _details(compared: Compared, names: list[str]) -> list[str]:
    """Times behind the figures, in milliseconds, medians of the rounds."""
    lines = [
        "\n| case | peer | rounds | TTFT p50, p99 ms | ITL p50, p99 ms | E2E p50 ms | cached | errors | server CPU s | client CPU s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for plan, by_peer in compared.rounds.items():
        for name in names:
            rounds = by_peer.get(name, [])
            if not rounds:
                continue
            all_of = [one.summary for one in rounds]
            ttft = [milliseconds([s.ttft_s for s in all_of], percent) for percent in ("p50", "p99")]
            itl = [milliseconds([s.itl_s for s in all_of], percent) for percent in ("p50", "p99")]
            e2e = milliseconds([s.e2e_s for s in all_of], "p50")
            lines.append(
                f"| {plan} | {name} | {len(rounds)} | {', '.join(map(shown, ttft))} | {', '.join(map(shown, itl))} | {shown(e2e)} "
                f"| {shown(middle([s.cache_hit_rate for s in all_of]), '{:.0%}')} | {sum(sum(s.errors.values()) for s in all_of)} "
                f"| {shown(middle([one.server_cpu_s for one in rounds]))} | {shown(middle([s.client_cpu_s for s in all_of]))} |"
            )
    return lines
