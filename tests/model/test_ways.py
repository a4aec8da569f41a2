"""Which way steps are computed: what is chosen of what was measured, and that what is chosen computes the same."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from banyan_runtime.model import capture, contest, fused_products, ways
from banyan_runtime.model.attention import Held
from banyan_runtime.model.attention.triton_paged import TritonAttention
from banyan_runtime.model.contest import Contest
from banyan_runtime.model.fused import FusedKernels
from banyan_runtime.model.fused_products import AHEAD_BYTES, FusedGated, FusedLinear, Tile
from banyan_runtime.model.kernels import tiles
from banyan_runtime.model.layers import PlainKernels
from banyan_runtime.model.runner import ModelRunner
from banyan_runtime.model.torch_forward import TorchForward
from banyan_runtime.model.ways import AHEAD, GAIN, WIDE, Option, Product, Ways, fastest
from banyan_runtime.step import TableShape

from . import conftest
from .conftest import TinyModel, make
from .driver import Again, Driver
from .pretended import PretendedGpu, pretended, small_kernels
from .test_attention import Room
from .test_pretended import texts
from .test_triton import DEVICE, DTYPES, assert_near, some

OPTIONS: dict[str, Any] = {"cuda_graph_max_bs": 4, "cuda_graph_max_tokens": 16, "chunked_prefill_size": 32, "max_running_requests": 4}
HALVES = [dtype for dtype in DTYPES if dtype.itemsize == 2]


# --- what is chosen ---


@given(st.lists(st.floats(-0.2, 0.2).filter(lambda gain: abs(gain - GAIN) > 0.001), max_size=6), st.floats(1e-4, 1.0))
def test_what_makes_a_step_faster_is_chosen(gains: list[float], before: float) -> None:
    """Where each gains or loses by itself."""

    def timed(rows: int, chosen: frozenset[Option]) -> float:
        seconds = before
        for option in chosen:
            seconds *= 1 - gains[int(str(option))]
        return seconds

    found = fastest(16, [str(at) for at in range(len(gains))], timed)
    if not gains:
        assert found is None
        return
    assert found is not None
    assert found.chosen == {str(at) for at, gain in enumerate(gains) if gain > GAIN}
    assert (found.before, found.after) == (before, timed(16, found.chosen))


def test_one_that_gains_only_beside_another_is_found_behind_it() -> None:
    times = {(): 1.0, ("a",): 0.9, ("b",): 1.1, ("a", "b"): 0.8}
    found = fastest(4, ["a", "b"], lambda rows, chosen: times[tuple(sorted(map(str, chosen)))])
    assert found is not None
    assert found.chosen == {"a", "b"}


@pytest.mark.parametrize("again", [(1.0, 0.999, 1.0, 0.99), (1.0, 1.1, 0.9, 1.0), (1.0, None, None, 0.5), (0.9, 0.9, 1.0, 0.9)])
def test_what_does_not_show_again_is_not_chosen(again: tuple[float | None, ...]) -> None:
    times = iter([1.0, 0.9, *again])
    found = fastest(4, ["a"], lambda rows, chosen: next(times))
    assert found is not None
    assert not found.chosen


def test_what_cannot_be_measured_stays_as_it_was() -> None:
    assert fastest(4, ["a"], lambda rows, chosen: None) is None
    found = fastest(4, ["a", "b"], lambda rows, chosen: None if "a" in chosen else 1.0 - 0.5 * len(chosen))
    assert found is not None
    assert found.chosen == {"b"}


def test_what_was_found_holds_down_to_the_next_smaller_size() -> None:
    several, product = Ways(), Product(8, 64, gated=False)
    for _ in range(2):
        several.add(product, lambda rows: rows > 2)
    several.add("once")
    assert several.options == [product]
    assert several.taken(product, 16) is None

    def seconds(rows: int) -> float:
        return 1.0 if rows == 64 or not several.trying[rows] else 0.5

    several.settle({2: 2, 16: 16, 64: 64, 128: 100}, seconds, several.possible)
    assert several.found is not None
    assert {rows: bool(one.chosen) for rows, one in several.found.items()} == {16: True, 64: False, 128: True}
    taken = [several.taken(product, rows) for rows in (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 100, 101, 256, 257, 5000)]
    assert taken == [None, None, 16, 16, 16, None, None, None, None, 128, 128, None, None, None, None]
    assert several.line() == "16: 1000.000 -> 500.000 with 8x64; 64: 1000.000; 128: 1000.000 -> 500.000 with 8x64"


# --- products of some rows ---


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [3, 16, 30, 64, 130])
@pytest.mark.parametrize(
    ("width", "outputs", "gated", "biased"), [(64, 5, False, True), (1600, 40, False, True), (192, 70, True, True), (1600, 33, True, False)]
)
def test_products_of_some_rows_are_the_products(width: int, outputs: int, gated: bool, biased: bool, rows: int, dtype: torch.dtype) -> None:
    """Lines in stretches too, of rows that lie beside others, twice over the same counters."""
    weight = some(outputs * (2 if gated else 1), width, dtype=dtype) / width**0.5
    bias = some(len(weight), dtype=dtype) if biased else None
    x = some(rows, 2 * width, dtype=dtype)[:, width:]
    plain, kernels = PlainKernels(), FusedKernels()
    expected = (plain.gated if gated else plain.linear)(weight, bias)(x)
    layer = (kernels.gated if gated else kernels.linear)(weight, bias)
    assert isinstance(layer, FusedLinear)
    most = next(size for size in ways.SIZES if size >= rows)
    assert (Tile.of(most, layer.product).splits > 1) == (width > 1000 and not gated)
    assert layer.agrees(most)
    kernels.ways.trying = {most: frozenset([layer.product])}
    for _ in range(2):
        assert_near(layer(x), expected)
    counters = layer._arrived._counters
    assert counters is None or not counters.any()


def test_one_that_does_not_agree_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = FusedLinear(some(8, 64, dtype=torch.float16), None)
    assert layer.agrees(16)
    assert not layer.agrees(2), "of so few rows there is another kernel"
    of_some = layer.of_some
    for wrong in (0.9, float("nan")):
        monkeypatch.setattr(layer, "of_some", lambda x, tile, wrong=wrong: of_some(x, tile) * wrong)
        assert not layer.agrees(16)


def test_widths_that_tiles_do_not_have_are_left_to_torch() -> None:
    for shape, dtype, there in (((8, 96), torch.float16, False), ((8, 64), torch.float32, False), ((8, 64), torch.bfloat16, True)):
        kernels = FusedKernels()
        for _ in range(2):
            kernels.linear(some(*shape, dtype=dtype), None)
        assert bool(kernels.ways.options) == there


def test_every_tile_fits_into_half_of_a_processor() -> None:
    shapes = itertools.product((8, 896, 1152, 4864, 14336, 151936), (64, 896, 4864, 14336), (False, True))
    for (outputs, width, gated), rows in itertools.product(shapes, ways.SIZES[2:]):
        tile = Tile.of(rows, Product(outputs, width, gated))
        assert width % tile.columns == 0
        assert 2 <= tile.stages <= 6
        each = -(-(width // tile.columns) // tile.splits)
        assert (tile.splits - 1) * each * tile.columns < width, "every stretch has columns"
        assert tile.splits == 1 or -(-outputs // tile.outputs) * -(-rows // tile.rows) <= fused_products._ARRIVED


# --- what comes next ---


def brought(out: tuple[int, int], gate_up: tuple[int, int], down: tuple[int, int]) -> list[tuple[int, int]]:
    """Of two weights: where what is brought begins, and how many bytes of it."""
    layers = [
        made(torch.empty(*shape, dtype=torch.float16, device="meta"), None)
        for made, shape in zip((FusedLinear, FusedGated, FusedLinear), (out, gate_up, down), strict=True)
    ]
    layers[0].before(*layers[1:])
    return [(part.storage_offset(), part.nbytes) for part in layers[0]._then]


def test_the_weights_that_come_next_are_brought_as_far_as_there_is_room() -> None:
    assert brought((896, 896), (2 * 4864, 896), (896, 4864)) == [(0, 4 * 4864 * 896), (0, (AHEAD_BYTES - 4 * 4864 * 896) // 128 * 128)]
    assert brought((64, 64), (128, 64), (64, 64)) == [(0, 128 * 64 * 2), (0, 64 * 64 * 2)]
    half = AHEAD_BYTES // 2
    assert brought((4096, 4096), (2 * 14336, 4096), (4096, 14336)) == [(0, half), (14336 * 4096, half)], (
        "gates and the ups that belong to them"
    )


def test_they_are_asked_for_where_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []

    class Launches:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *args, **named: told.append(named)

    kernels = FusedKernels()
    weight = some(128, 64, dtype=torch.float16)
    out, gate_up, down = kernels.linear(weight[:64], None), kernels.gated(weight, None), kernels.linear(weight[:64], None)
    assert isinstance(out, FusedLinear)
    assert AHEAD not in kernels.ways.seen
    out._options = {"DEPENDENT": True}
    kernels.before(out, gate_up, down)
    assert AHEAD in kernels.ways.seen
    monkeypatch.setattr(out, "_kernel", Launches())
    monkeypatch.setattr(out, "_tiles", Launches())
    x = some(9, 64, dtype=torch.float16)
    for chosen in ({}, {1: frozenset([AHEAD]), 16: frozenset([AHEAD, out.product])}):
        kernels.ways.trying = chosen
        out(x[:1]), out(x[:2]), out(x)
    assert [(one["THEN"], one["BEYOND"]) for one in told] == [(0, 0), (0, 0), (128 * 64, 64 * 64), (0, 0), (128 * 64, 64 * 64)]


# --- measured when a server starts ---


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[PretendedGpu]:
    if torch.cuda.is_available():
        pytest.skip("there is a real one")
    monkeypatch.setattr(fused_products, "_OUTPUTS", 128)
    small_kernels(monkeypatch)
    with pretended(monkeypatch, tmp_path) as found:
        monkeypatch.setattr(ways, "SIZES", (8,))  # with the largest step there is, of four rows
        monkeypatch.setattr(contest, "CONTEST_S", 1e9)
        monkeypatch.setattr(contest, "CONTEXT", 16)
        monkeypatch.setattr(conftest, "TIE", 0.2)  # of half precision; logits are some 3.5 apart
        yield found


def started(
    folder: Path, gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]
) -> tuple[Any, ModelRunner, list[str]]:
    """A model, its runner and which kernels it launched. `seconds`: of a step that launched so many tiles."""
    launched: list[str] = []
    launch, record = gpu.launch, capture.CudaRecorder.record

    def noted(executor: Any, *arguments: Any) -> Any:
        launched.append(f"{executor.fn.__module__.rpartition('.')[2]}.{executor.fn.__name__}")
        return launch(executor, *arguments)

    def measured(recorder: Any, body: Callable[[], None]) -> float:
        before = len(launched)
        record(recorder, body)
        return seconds(launched[before:].count("tiles.tile"))

    monkeypatch.setattr(gpu, "launch", noted)
    monkeypatch.setattr(capture.CudaRecorder, "seconds", measured)
    model = make(folder, "llama", hidden_size=64, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2)
    return model, model.load(device="cuda", dtype="float16", **OPTIONS), launched


def serve(model: TinyModel, runner: ModelRunner, gpu: PretendedGpu) -> None:
    requests = texts(3, 2, 3)
    driver = Driver(runner, rows=4, context=64)
    gpu.waits.clear()
    driver.run(requests, chunk=20)
    assert gpu.waits == []
    for request in requests:
        assert request.output == model.choices(request.prompt, request.output)


def test_a_start_measures_once_and_serves_what_was_faster(
    gpu: PretendedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model, runner, launched = started(tmp_path / "model", gpu, monkeypatch, lambda count: 1.0 / (1 + count))
    forward = runner.forward
    assert isinstance(forward, TorchForward)
    chosen = forward.decoder.kernels.ways
    assert chosen.found is not None
    assert {rows: one.chosen for rows, one in chosen.found.items()} == {8: frozenset(chosen.options) - {WIDE}}
    before = set(launched)
    serve(model, runner, gpu)
    assert "tiles.tile" in set(launched)
    assert set(launched) <= before | {"note"}
    told = [record.getMessage() for record in caplog.records if "Ways of decode steps" in record.getMessage()]
    assert len(told) == 1, "not once more behind the trial"
    assert "8: 1000.000 -> " in told[0]


def test_a_way_that_cannot_be_gone_is_told_and_left(
    gpu: PretendedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            def launch(*args: Any, **named: Any) -> None:
                raise RuntimeError("PTX assembly aborted due to errors")

            return launch

    monkeypatch.setattr(tiles, "tile", Broken())
    runner = started(tmp_path / "model", gpu, monkeypatch, lambda count: 1.0)[1]
    forward = runner.forward
    assert isinstance(forward, TorchForward)
    assert not any(forward.decoder.kernels.ways.trying.values())
    told = [record.getMessage() for record in caplog.records if "not gone" in record.getMessage()]
    (words,) = told
    assert words.endswith("(--disable-autotune tries none): RuntimeError: PTX assembly aborted due to errors")


def test_a_way_that_fails_while_a_graph_is_captured_is_left(gpu: PretendedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It agrees before; the step computed without is captured and served."""
    of_some = FusedLinear.of_some

    def failing(layer: FusedLinear, x: torch.Tensor, tile: Tile) -> torch.Tensor:
        if gpu.graph is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return of_some(layer, x, tile)

    monkeypatch.setattr(FusedLinear, "of_some", failing)
    model, runner, _ = started(tmp_path / "model", gpu, monkeypatch, lambda count: 1.0)
    forward = runner.forward
    assert isinstance(forward, TorchForward)
    assert not any(forward.decoder.kernels.ways.trying.values())
    serve(model, runner, gpu)


def test_behind_its_time_nothing_is_tried(gpu: PretendedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "CONTEST_S", -1.0)
    runner = started(tmp_path / "model", gpu, monkeypatch, lambda count: 1.0 / (1 + count))[1]
    forward = runner.forward
    assert isinstance(forward, TorchForward)
    assert forward.decoder.kernels.ways.found == {}


def test_whoever_wants_none_measured_has_none_measured(gpu: PretendedGpu, tmp_path: Path) -> None:
    model = make(tmp_path / "model", "llama", hidden_size=64, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2)
    runner = model.load(device="cuda", dtype="float16", disable_autotune=True, disable_cuda_graph=True)
    forward = runner.forward
    assert isinstance(forward, TorchForward)
    assert forward.decoder.kernels.ways.options
    assert forward.decoder.kernels.ways.found == {}


@torch.inference_mode()
def test_attention_in_four_warps_where_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of decode steps, in 16 bits; of others nothing changes."""
    room = Room([20, 30], kind=TritonAttention, device=DEVICE, dtype=torch.float16, dim=64)
    told: list[int] = []

    class Launches:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *args, **named: told.append(named["num_warps"])

    attention = room.attention
    assert isinstance(attention, TritonAttention)
    room.prefill()
    room.table.apply(step := room.step([(0, 19, 20), (1, 29, 30)]))
    attention.plan(step, room.table)
    monkeypatch.setattr(attention._kernels, "turn_and_attend", Launches())
    spec = room.spec
    qkv = some(2, (spec.heads + 2 * spec.kv_heads) * spec.head_dim, dtype=torch.float16)
    for wide in (False, True):
        attention.turn_and_attend(0, qkv, (qkv, qkv), None, wide=wide)
    assert told == [2, 4]


def test_where_attention_is_not_ours_nothing_is_measured() -> None:
    """FlashInfer plans on the host for the steps that are captured for good."""
    several = Ways()
    for _ in range(2):
        several.add(AHEAD)
    another: Any = object()
    beside = Contest(several, another, TableShape(1, 16), Again(), lambda held: pytest.fail("it is computed"), lambda: 0.0)
    beside.settle([Held.empty(1, torch.device("cpu"))])
    assert several.found is None
