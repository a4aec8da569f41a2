"""Which graphs a start ends up with, by what became of each try of the largest steps (`test_memory.py`: what becomes of them)."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from banyan_runtime.config import ServerConfig
from banyan_runtime.errors import ConfigError
from banyan_runtime.model import headroom, trial
from banyan_runtime.model.headroom import FEWER, Graphs, Largest, Settled

ALL = Graphs(256, 8192)
OPEN = [ALL, *(Graphs(max(rows, bool(tokens)), tokens) for rows, tokens in FEWER)]


@dataclass
class Try:
    """Served with all that was asked for, unless it insists on something."""

    served: bool = True
    insists: str = ""
    hopeless: bool = False
    prepared: bool = True
    graphs: Graphs = ALL
    measured = refused = SimpleNamespace()
    last = Largest(1, 1)

    def demand(self, largest: Largest) -> None:
        return None

    def possible(self, config: ServerConfig) -> Largest:
        return self.last

    def settled(self, config: ServerConfig, asked: Graphs) -> Settled:
        return Settled(config, "", self.insists or ("graphs" if headroom.insists_on(config, asked, self.graphs) else ""))


def tried(monkeypatch: pytest.MonkeyPatch, by_graphs: dict[Graphs, Try], **options: Any) -> tuple[Graphs | str, list[Graphs]]:
    """The graphs, or why there is no start; and what was tried."""
    asked: list[Graphs] = []

    def attempt(config: ServerConfig, choice: Any, *_: object) -> Try:
        asked.append(choice.graphs)
        found = by_graphs.get(choice.graphs, Try(served=False))
        found.graphs = choice.graphs
        return found

    @dataclass(frozen=True)
    class Chosen:
        graphs: Graphs = ALL

    choice = Chosen()
    monkeypatch.setattr(trial, "_try", attempt)
    monkeypatch.setattr(trial, "_remedy", lambda *_: "nothing helps")
    monkeypatch.setattr(headroom, "refusal", lambda measured, demand, remedy: remedy)
    gauge: Any = SimpleNamespace(total=1, settled=lambda: 1)
    try:
        found = trial.try_largest(ServerConfig(model_path="x", **options), choice, lambda _: None, gauge, 1, 0)  # type: ignore[arg-type, return-value]
    except ConfigError as error:
        return str(error), asked
    return found.graphs, asked


def test_the_first_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tried(monkeypatch, {ALL: Try()}) == (ALL, [ALL])
    assert tried(monkeypatch, {ALL: Try(served=False, prepared=False), OPEN[1]: Try()}) == (OPEN[1], OPEN[:2])


def test_graphs_nobody_asked_for_give_way_to_limits_that_somebody_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    smaller = Try(insists="--chunked-prefill-size=64")
    assert tried(monkeypatch, {ALL: smaller, OPEN[2]: Try(), OPEN[3]: Try()}) == (OPEN[2], OPEN[:3])


def test_limits_that_fit_with_no_graphs_are_refused_with_what_fits_beside_all(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {graphs: Try(insists=f"--chunked-prefill-size={64 * place}") for place, graphs in enumerate(OPEN, 1)}
    told, graphs = tried(monkeypatch, found)
    assert "--chunked-prefill-size=64" in str(told)
    assert graphs == OPEN


def test_graphs_that_were_asked_for_are_refused_with_those_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"cuda_graph_max_bs": 256, "cuda_graph_max_tokens": 8192}
    told, graphs = tried(monkeypatch, {ALL: Try(served=False, prepared=False), OPEN[1]: Try()}, **asked)
    assert " graphs, " in str(told)
    assert graphs == OPEN[:2]
    told, graphs = tried(monkeypatch, {ALL: Try(insists="--max-running-requests=9"), OPEN[1]: Try()}, **asked)
    assert "--max-running-requests=9" in str(told)
    assert graphs == [ALL]


def test_what_does_not_fit_with_any_graphs_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tried(monkeypatch, {ALL: Try(served=False, hopeless=True), OPEN[1]: Try()}) == ("nothing helps", [ALL])
    assert tried(monkeypatch, {}) == ("nothing helps", OPEN)
