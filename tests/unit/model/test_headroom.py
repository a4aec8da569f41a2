"""What a GPU's memory goes to, by arithmetic alone."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan_runtime.config import ServerConfig
from banyan_runtime.engine.limits import EngineLimits
from banyan_runtime.engine.memory.tables import SLACK
from banyan_runtime.model import capacity, headroom
from banyan_runtime.model.headroom import GIB, MIB, Demand, Graphs, Largest, Measured, Taken
from banyan_runtime.step import RunnerInfo

SOME = settings(deadline=None, derandomize=True)
INFO = RunnerInfo("A", "a", 1000, 4096, 0, "bfloat16", "cuda", "triton", 0, 0, 0)


@st.composite
def devices(draw: st.DrawFn) -> Measured:
    """In order: others and CUDA, weights, what stays of the trial, and its peak, each of what is left."""
    total = draw(st.integers(1 * GIB, 200 * GIB))

    def part(of: int) -> int:
        return draw(st.integers(0, of))

    others = part(total // 2)
    weights = part(total - others)
    loaded = total - others - weights
    lasting = part(min(loaded, GIB))
    peak = part(loaded - lasting)
    kv, tables, graphs = (part(peak // 3) for _ in range(3))
    free = total - others
    return Measured(total, free, 0, loaded, loaded - lasting - peak, loaded - lasting, kv, tables, graphs)


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    page, rows, width = draw(st.sampled_from([1, 16, 64])), draw(st.integers(1, 4096)), draw(st.integers(1, 1 << 17))
    fixed = draw(st.integers(0, 128 * MIB))
    return Demand(
        draw(st.integers(256, 1 << 20)), page, lambda tokens: fixed + 8 * min(rows, tokens // page) * min(width, tokens),
        draw(st.none() | st.floats(0.05, 0.98)), draw(st.none() | st.integers(8, 1 << 22)),
    )  # fmt: skip


@SOME
@given(devices(), demands())
def test_a_pool_leaves_what_steps_need_and_the_margin_and_nothing_beyond_a_page(device: Measured, demand: Demand) -> None:
    plan = headroom.plan(device, demand)

    def left(tokens: int) -> int:
        """Behind pool and tables when the largest steps run once more."""
        return device.free_after - demand.kv(tokens) - demand.beside(tokens) - device.need

    assert plan.tokens % demand.page_size == 0
    if plan.tokens:
        assert left(plan.tokens) >= device.margin
        assert device.margin >= max(0.019 * device.total, 512 * MIB)
    else:
        asked = [limit for limit in (plan.asked, demand.wanted) if limit is not None]
        assert left(demand.least) < device.margin or min(asked) < demand.page_size
    assert left(plan.fitting + demand.page_size) < device.margin, "a page more would not fit"


@SOME
@given(devices(), demands())
def test_a_fraction_and_a_number_of_tokens_are_limits_and_never_more_than_fits(device: Measured, demand: Demand) -> None:
    plan = headroom.plan(device, demand)
    alone = headroom.plan(device, dataclasses.replace(demand, fraction=None, wanted=None))
    assert plan.tokens <= alone.tokens
    assert plan.fitting == alone.fitting
    assert plan.cut == (plan.asked is not None and plan.asked > alone.fitting)
    if demand.wanted is not None:
        assert plan.tokens <= demand.wanted
    if demand.fraction is not None and plan.tokens:
        assert device.weights + demand.kv(plan.tokens) <= demand.fraction * device.free_at_first + 1


@SOME
@given(devices(), demands())
def test_the_line_accounts_for_the_whole_device(device: Measured, demand: Demand) -> None:
    tokens = headroom.plan(device, demand).tokens
    if not tokens:
        return
    shown = sum(size for _, size in headroom.parts(device, demand, tokens))
    assert shown <= device.total
    named = dict(headroom.parts(device, demand, tokens))
    taken = device.free_at_peak + device.trial_kv + device.trial_tables - demand.kv(tokens) - demand.beside(tokens)
    assert device.total - shown == taken - device.margin
    assert re.search(r"unused -?\d", headroom.line(device, demand, tokens))
    assert named.get("weights", 0) == device.weights


@SOME
@given(devices(), demands(), st.integers(0, GIB))
def test_a_smaller_pool_is_a_tenth_smaller_and_fits_beside_what_others_took_meanwhile(
    device: Measured, demand: Demand, elsewhere: int
) -> None:
    tokens = headroom.plan(device, demand).tokens
    now = dataclasses.replace(device, elsewhere=elsewhere)
    smaller = headroom.shrunk(now, demand, tokens)
    assert smaller % demand.page_size == 0
    assert smaller <= 0.9 * tokens
    assert smaller >= 0.9 * tokens - demand.page_size or smaller == demand.fitting(device.room - elsewhere)
    assert not smaller or demand.kv(smaller) + demand.beside(smaller) <= device.room - elsewhere


@pytest.mark.parametrize("chunk", [None, -1, 512, 2048])
@pytest.mark.parametrize("rows", [None, 3, 5000])
@pytest.mark.parametrize("page_size", [1, 16])
def test_no_limit_of_the_engine_is_above_what_is_tried(chunk: int | None, rows: int | None, page_size: int) -> None:
    config = ServerConfig(model_path="x", device="cuda", chunked_prefill_size=chunk, max_running_requests=rows, page_size=page_size)
    tried = Largest.of(config, INFO.context_len, 100_000)
    for pool in (16, 640, 4096, 5_000, 99_984):
        info = dataclasses.replace(INFO, pool_tokens=pool // page_size * page_size)
        limits = EngineLimits.of(config, info)
        most = limits.chunk or max(limits.max_prefill_tokens, limits.max_model_len)
        assert tried.rows >= limits.max_running
        assert tried.prompt_tokens >= min(most, pool, limits.max_running * limits.max_model_len)
        assert limits.max_model_len + SLACK <= min(info.context_len, pool) + capacity._SLACK
    limits = EngineLimits.of(config, dataclasses.replace(INFO, pool_tokens=100_000))
    assert (tried.rows, tried.prompt_tokens) == (limits.max_running, min(limits.chunk or 16_384, limits.max_running * 4096))


FULL = Measured(
    total=16 * GIB, free_at_first=15 * GIB, own_at_first=0, free_loaded=5 * GIB, free_at_peak=GIB // 2, free_after=5 * GIB - 64 * MIB,
    trial_kv=MIB, trial_tables=MIB, graphs=GIB,
)  # fmt: skip
POOL = Demand(1 << 15, 16, lambda tokens: 2 * MIB)


def test_a_refusal_says_what_takes_what_and_what_is_missing() -> None:
    found = headroom.refusal(FULL, POOL, "Do this.")
    for told in (
        " 16.00 GB", "weights 10.00 GB", "activations 3.44 GB", "graphs 1.00 GB", "tables 2.00 MB", "KV 16 tokens 1.00 MB",
        "margin 0.50 GB", "CUDA 1.00 GB", "workspaces 64.00 MB", "Do this.",
    ):  # fmt: skip
        assert told in found, (told, found)


def measured(**changes: Any) -> Measured:
    return dataclasses.replace(FULL, **changes)


def test_a_remedy_is_the_largest_part_that_is_enough() -> None:
    def remedy(device: Measured, *, wide: bool = False) -> str:
        return headroom.remedy(device, POOL, wide=wide)

    assert "--dtype=bfloat16" in remedy(FULL, wide=True)
    assert " 1.00 MB " in remedy(FULL)
    hopeless = measured(free_at_first=16 * GIB, free_loaded=GIB // 4, free_after=GIB // 4, free_at_peak=GIB // 4, graphs=0)
    assert " 0.25 GB " in remedy(hopeless)
    unknown = measured(free_at_peak=FULL.free_after)
    assert not re.search(r"\d", remedy(unknown)), "no number is known"


OPTIONS = {"rows": "cuda_graph_max_bs", "tokens": "cuda_graph_max_tokens"}


def asking(*named: str, **options: Any) -> tuple[ServerConfig, Graphs]:
    """For 256 rows and 512 tokens, some of it by name."""
    graphs = Graphs(256, 512)
    return ServerConfig(model_path="x", **{OPTIONS[name]: getattr(graphs, name) for name in named}, **options), graphs


def test_fewer_graphs_are_tried_first_of_what_was_left_open() -> None:
    assert headroom.tries(*asking()) == [Graphs(256, 512), Graphs(64, 128), Graphs(8, 16), Graphs(0, 0)]
    assert headroom.tries(*asking("rows")) == [
        Graphs(256, 512), Graphs(256, 128), Graphs(256, 16), Graphs(256, 0), Graphs(64, 128), Graphs(8, 16), Graphs(0, 0),
    ]  # fmt: skip
    assert headroom.tries(*asking("tokens")) == [
        Graphs(256, 512), Graphs(64, 512), Graphs(8, 512), Graphs(1, 512), Graphs(64, 128), Graphs(8, 16), Graphs(0, 0),
    ]  # fmt: skip
    assert headroom.tries(*asking("rows", "tokens")) == headroom.tries(*asking())
    assert headroom.tries(asking()[0], Graphs(0, 48)) == [Graphs(0, 48), Graphs(0, 16), Graphs(0, 0)]
    assert headroom.tries(asking()[0], Graphs(0, 0)) == [Graphs(0, 0)]


@pytest.mark.parametrize(
    ("named", "captured", "opened", "insists"),
    [
        ((), Graphs(256, 512), "", ""),
        ((), Graphs(64, 128), "--cuda-graph-max-bs=64 --cuda-graph-max-tokens=128", ""),
        ((), Graphs(0, 0), "--disable-cuda-graph", ""),
        (("rows",), Graphs(256, 0), "--cuda-graph-max-tokens=0", ""),
        (("rows",), Graphs(8, 16), "--cuda-graph-max-tokens=16", "--cuda-graph-max-bs=8"),
        (("rows",), Graphs(0, 0), "", "--disable-cuda-graph"),
        (("tokens",), Graphs(1, 512), "--cuda-graph-max-bs=1", ""),
        (("tokens",), Graphs(0, 0), "", "--disable-cuda-graph"),
        (("rows", "tokens"), Graphs(64, 128), "", "--cuda-graph-max-bs=64 --cuda-graph-max-tokens=128"),
    ],
)
def test_graphs_that_were_asked_for_are_insisted_on(named: tuple[str, ...], captured: Graphs, opened: str, insists: str) -> None:
    config, graphs = asking(*named)
    found = headroom.settled(config, Largest(100, 10), Largest(100, 10), graphs, captured)
    assert (found.open, found.insists) == (opened, insists)
    both = headroom.settled(config, Largest(100, 10), Largest(64, 10), graphs, captured)
    assert both.open == " ".join(["--chunked-prefill-size=64", *opened.split()])
    assert both.insists == insists


def test_steps_become_smaller_until_there_is_a_pool_and_defaults_until_it_is_by_far_the_largest_part() -> None:
    largest, open_limits = Largest(8192, 2048), ServerConfig(model_path="x")
    asked = dataclasses.replace(open_limits, chunked_prefill_size=8192, max_running_requests=2048)
    for config in (open_limits, asked):
        assert headroom.settle(FULL, POOL, Taken(3 * GIB, GIB), largest, config) == Largest(4096, 2048)
        assert headroom.settle(FULL, POOL, Taken(GIB, 3 * GIB), largest, config) == Largest(8192, 1024)
    roomy = measured(free_at_peak=2 * GIB)  # for a pool of 1.5 GB
    assert headroom.settle(roomy, POOL, Taken(GIB, GIB // 8), largest, open_limits) is None
    assert headroom.settle(roomy, POOL, Taken(GIB, GIB // 4), largest, open_limits) == Largest(8192, 1024), "rows may take an eighth of it"
    assert headroom.settle(roomy, POOL, Taken(GIB, GIB // 4), Largest(8192, headroom.LEAST_ROWS), open_limits) is None
    assert headroom.settle(roomy, POOL, Taken(2 * GIB, GIB), largest, open_limits) == Largest(4096, 2048)
    assert headroom.settle(roomy, POOL, Taken(2 * GIB, 2 * GIB), largest, asked) is None
    assert headroom.settle(FULL, POOL, Taken(3 * GIB, 2 * GIB), Largest(headroom.SHORTEST_STEP, 1), asked) is None


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 13))
def test_whatever_steps_are_halved_they_end_at_the_smallest(tokens: int, rows: int) -> None:
    largest: Largest | None = Largest(tokens, rows)
    seen = 0
    while largest is not None:
        last, seen = largest, seen + 1
        largest = largest.smaller(prompts=True) or largest.smaller(prompts=False)
        assert largest is None or (largest.prompt_tokens, largest.rows) < (last.prompt_tokens, last.rows)
    assert last.rows == 1
    assert last.prompt_tokens < 2 * headroom.SHORTEST_STEP
    assert seen <= 2 + np.log2(tokens) + np.log2(rows) + 2
