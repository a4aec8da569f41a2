"""The arithmetic and the table of the comparison with other servers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.paths import ROOT

FOLDER = ROOT / "benchmarks"
QWEN = {
    "num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2,
    "vocab_size": 151_936,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("load", "comparison", "peers")]:
        del sys.modules[name]


def test_a_step_of_one_stream_reads_every_weight_once() -> None:
    from comparison.limits import Machine, Shape

    shape = Shape.of(QWEN)
    assert shape.streamed_bytes == pytest.approx(988e6, rel=0.001)  # the file's size: embedding and head are one
    assert shape.kv_bytes == 12_288
    assert 1 / shape.decode_s(Machine(75e9, 900e9), 1, 512) == pytest.approx(75, rel=0.02)


def test_many_streams_are_bound_by_multiplications() -> None:
    from comparison.limits import Machine, Shape

    shape = Shape.of(QWEN)
    assert 64 / shape.decode_s(Machine(75e9, 900e9), 64, 512) == pytest.approx(872, rel=0.02)
    assert shape.prefill_s(Machine(75e9, 900e9), 8192) == pytest.approx(9.7, rel=0.02)


def test_a_shared_prefix_is_counted_once_and_not_at_all_when_it_is_warm() -> None:
    from comparison.limits import Machine, Shape, least_s
    from load.cases import plans

    cold, warm = plans("prefix", 0)
    shape, machine = Shape.of(QWEN), Machine(75e9, 900e9)
    first, second = least_s(cold, shape, machine), least_s(warm, shape, machine, [cold])
    assert first is not None
    assert second is not None
    assert first == pytest.approx(1.65, rel=0.1)
    assert second == pytest.approx(0.8, rel=0.1)
    assert first - second == pytest.approx(shape.prefill_s(machine, 1024), rel=0.01)


def test_there_is_no_limit_where_the_client_decides_when_requests_come() -> None:
    from comparison.limits import Machine, Shape, least_s
    from load.cases import plans

    for case in ("poisson:2", "turns"):
        assert least_s(plans(case, 0)[0], Shape.of(QWEN), Machine(75e9, 900e9)) is None


def rounds(walls: list[float], **changed: Any) -> list[Any]:
    """Rounds of a plan with 100 output tokens."""
    from comparison.result import Round
    from load.sample import Played, Sample
    from load.summary import Summary

    samples = [Sample(0, 0.0, [0.1, 0.2], 0.3, 10, 100, **changed)]
    return [Round(Summary.of(Played(samples, wall_s)), 1.0, 0.05, 2.0, 0.5) for wall_s in walls]


def result(by_plan: dict[str, dict[str, list[Any]]]) -> Any:
    from comparison.limits import Machine
    from comparison.result import Compared, Result

    model = Compared("a model", {"banyan": "bf16"}, {"vllm": "it wants AVX512"}, [Machine(20e9, 100e9)], by_plan)
    return Result("2026-11-22", "a CPU", "0,1", "compare.py", {"banyan": "1"}, {"transformers": "no room"}, {"m": model})


def test_ratios_are_of_rounds_side_by_side_and_against_the_best_other() -> None:
    from comparison.result import table

    text = table(
        result({
            "conc16": {
                "banyan": rounds([1.0, 2.0, 10.0]), "banyan-torch": rounds([0.1] * 3), "a": rounds([2.0, 4.0, 20.0]),
                "b": rounds([30.0] * 3),
            },
            "prefix cold": {"banyan": rounds([1.0] * 3), "a": rounds([3.0] * 3)},
        }),
        "banyan",
    )  # fmt: skip
    throughput, prefix = (line for line in text.splitlines() if line.startswith(("| conc16,", "| prefix cold,")))
    assert "**2.00** (a)" in throughput  # 100 / 1, 2, 10 s against 100 / 2, 4, 20 s
    assert throughput.endswith("| 200 | 0.25 | 5% to 5% |")  # 100 tokens in 0.5 s; in the middle round 50 a second
    assert "**3.00** (a)" in prefix  # fewer seconds are better
    assert prefix.endswith("| 0.500 | 0.50 | 5% to 5% |") or prefix.endswith("| 0.5 | 0.50 | 5% to 5% |")
    assert "vllm: not measured. it wants AVX512" in text
    assert "transformers: not measured. no room" in text


def test_a_peer_with_errors_has_no_figure_and_is_not_the_best() -> None:
    from comparison.result import table

    text = table(result({"conc16": {"banyan": rounds([1.0]), "a": rounds([0.1], error="HTTP 500: no")}}), "banyan")
    row = next(line for line in text.splitlines() if line.startswith("| conc16,"))
    assert "| 100 | – | – |" in row


def test_the_picture_is_xml_with_a_bar_a_peer() -> None:
    from xml.etree import ElementTree

    from comparison.chart import COLOURS, chart

    text = chart(result({"conc16": {"banyan": rounds([1.0]), "llama.cpp": rounds([2.0])}}))
    assert ElementTree.fromstring(text).tag.endswith("svg")
    bars = [line for line in text.splitlines() if line.startswith('<rect x="250"') and f'fill="{COLOURS["llama.cpp"]}"' in line]
    assert len(bars) == 1


def test_a_library_in_process_plays_a_plan_as_a_server_would() -> None:
    from load.cases import plans
    from peers.inprocess import play

    class Counting:
        """Gives each request a token a step, and notes how many run together."""

        about = ""

        def __init__(self) -> None:
            self.going: dict[int, int] = {}
            self.most = 0

        def add(self, number: int, prompt: tuple[int, ...], max_tokens: int, temperature: float) -> None:
            del prompt, temperature
            self.going[number] = max_tokens
            self.most = max(self.most, len(self.going))

        def step(self) -> list[tuple[int, int]]:
            told = [(number, 1) for number in self.going]
            self.going = {number: left - 1 for number, left in self.going.items() if left > 1}
            return told

    library = Counting()
    samples, wall_s = play(plans("conc8", 0)[0], library)
    assert library.most == 8
    assert [(sample.output_tokens, len(sample.pieces), sample.prompt_tokens) for sample in samples] == [(64, 64, 128)] * 16
    assert all(0 <= sample.sent <= sample.pieces[0] <= sample.ended <= wall_s for sample in samples)
