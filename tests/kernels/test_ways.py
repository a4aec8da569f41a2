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
from banyan_runtime.model import device as devices
from banyan_runtime.model.attention import Held
from banyan_runtime.model.attention.triton_paged import TritonAttention
from banyan_runtime.model.contest import Contest
from banyan_runtime.model.fused import FusedKernels
from banyan_runtime.model.fused_products import FusedLinear, Tile, cut
from banyan_runtime.model.kernels import SMALL, dependent, tiles
from banyan_runtime.model.layers import PlainKernels
from banyan_runtime.model.pool import cell_bytes
from banyan_runtime.model.runner import ModelRunner
from banyan_runtime.model.torch_forward import TorchForward
from banyan_runtime.model.ways import GAIN, Option, Product, Staged, Ways, fastest
from banyan_runtime.step import TableShape
from tests.kernels.test_pretended import texts
from tests.kernels.test_triton import DEVICE, DTYPES, assert_near, some
from tests.support.models import tiny as conftest
from tests.support.models.driver import Again, Driver
from tests.support.models.pretended import PretendedGpu, pretended, small_kernels
from tests.support.models.tiny import TinyModel, make
from tests.unit.model.test_attention import Room

OPTIONS: dict[str, Any] = {"cuda_graph_max_bs": 4, "cuda_graph_max_tokens": 16, "chunked_prefill_size": 32, "max_running_requests": 4}
HALVES = [dtype for dtype in DTYPES if dtype.itemsize == 2]


# --- what is chosen ---


def numbered(at: int) -> Product:
    return Product(at, 64, gated=False)


ONE, OTHER = numbered(0), numbered(1)


@given(st.lists(st.floats(-0.2, 0.2).filter(lambda gain: abs(gain) > 2 * GAIN), max_size=6), st.floats(1e-4, 1.0))
def test_what_makes_a_step_faster_is_chosen(gains: list[float], before: float) -> None:
    """Where each gains or loses by itself."""

    def timed(rows: int, chosen: frozenset[Option]) -> float:
        seconds = before
        for option in chosen:
            assert isinstance(option, Product)
            seconds *= 1 - gains[option.outputs]
        return seconds

    found = fastest(16, [numbered(at) for at in range(len(gains))], timed)
    if not gains:
        assert found is None
        return
    assert found is not None
    assert found.chosen == {numbered(at) for at, gain in enumerate(gains) if gain > 0}
    assert (found.before, found.after) == (before, timed(16, found.chosen))


@pytest.mark.parametrize("alone", [1.1, 0.999])
def test_those_that_gain_only_together_are_found(alone: float) -> None:
    times = {frozenset[Product](): 1.0, frozenset([ONE]): alone, frozenset([OTHER]): alone, frozenset([ONE, OTHER]): 0.8}
    found = fastest(4, [ONE, OTHER], lambda rows, chosen: times[chosen])
    assert found is not None
    assert found.chosen == {ONE, OTHER}


@pytest.mark.parametrize("again", [(1.0, 0.999, 1.0, 0.997), (1.0, 1.1, 0.9, 1.0), (0.9, 0.9, 1.0, 0.9)])
def test_what_does_not_show_again_is_not_chosen(again: tuple[float | None, ...]) -> None:
    times = iter([1.0, 0.9, *again])
    found = fastest(4, [ONE], lambda rows, chosen: next(times))
    assert found is not None
    assert not found.chosen


@pytest.mark.parametrize(("gain", "chosen"), [(0.9, {ONE}), (0.99, set())])
def test_of_what_could_not_be_measured_again_a_clear_gain_alone_is_chosen(gain: float, chosen: set[Option]) -> None:
    times = iter([1.0, gain, 1.0, None, None, 0.5])
    found = fastest(4, [ONE], lambda rows, chosen: next(times))
    assert found is not None
    assert found.chosen == chosen


@pytest.mark.parametrize("tiles_gain", [False, True])
@pytest.mark.parametrize("waiting_gains", [False, True])
def test_tiles_are_measured_where_weights_do_not_wait(waiting_gains: bool, tiles_gain: bool) -> None:
    """With a third one that gains, so that all together do; and without one that changes nothing."""
    asked: list[frozenset[Option]] = []

    def timed(rows: int, chosen: frozenset[Option]) -> float:
        asked.append(chosen)
        waits, tiled = (0.9 if waiting_gains else 1.1), (0.95 if tiles_gain else 1.05)
        return (0.5 if OTHER in chosen else 1.0) * (waits if Staged(ONE) in chosen else tiled if ONE in chosen else 1.0)

    found = fastest(4, [ONE, Staged(ONE), OTHER], timed)
    assert found is not None
    assert found.chosen == {OTHER, *([Staged(ONE)] if waiting_gains else [ONE] if tiles_gain else [])}
    assert not [chosen for chosen in asked if {ONE, Staged(ONE)} <= chosen], "of which one changes nothing"


@given(st.lists(st.permutations([0.8, 0.9, 1.0]), min_size=1, max_size=5))
def test_of_three_ways_of_a_product_the_fastest_is_found(costs: list[list[float]]) -> None:
    """Whichever two of them the third lies between."""
    products = [numbered(at) for at in range(len(costs))]
    asked: list[frozenset[Option]] = []

    def timed(rows: int, chosen: frozenset[Option]) -> float:
        asked.append(chosen)
        seconds = 1.0
        for product, (plain, tiled, waiting) in zip(products, costs, strict=True):
            seconds *= waiting if Staged(product) in chosen else tiled if product in chosen else plain
        return seconds

    found = fastest(16, [*products, *map(Staged, products)], timed)
    best = {
        option
        for product, (plain, tiled, waiting) in zip(products, costs, strict=True)
        for option, cost in ((product, tiled), (Staged(product), waiting))
        if cost == min(plain, tiled, waiting)
    }
    assert found is not None
    assert found.chosen == best
    assert len(asked) <= 2 + 2 * len(products) + 4


def test_what_cannot_be_measured_stays_as_it_was() -> None:
    assert fastest(4, [ONE], lambda rows, chosen: None) is None
    found = fastest(4, [ONE, OTHER], lambda rows, chosen: None if ONE in chosen else 1.0 - 0.5 * len(chosen))
    assert found is not None
    assert found.chosen == {OTHER}


def test_what_was_found_holds_down_to_the_next_smaller_size() -> None:
    several, product = Ways(), Product(8, 64, gated=False)
    for _ in range(2):
        several.add(product, lambda rows: rows > 4)
    several.add(ONE)  # once
    assert several.options == [product]
    assert several.taken(product, 16) is None

    def seconds(rows: int) -> float:
        return 1.0 if rows == 64 or not several.current[rows] else 0.5

    several.settle({4: 2, 16: 16, 64: 64, 128: 100}, seconds, several.possible)
    assert several.found is not None
    assert {rows: bool(one.chosen) for rows, one in several.found.items()} == {16: True, 64: False, 128: True}
    taken = [several.taken(product, rows) for rows in (1, 4, 8, 9, 16, 17, 32, 33, 64, 65, 100, 101, 256, 257, 5000)]
    assert taken == [None, None, None, 16, 16, None, None, None, None, 128, 128, None, None, None, None]
    assert several.line() == "16: 1000.000 -> 500.000 with 8x64; 64: 1000.000; 128: 1000.000 -> 500.000 with 8x64; not measured: 4"


# --- products of some rows ---


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [30, 3, 16, 64, 130])
@pytest.mark.parametrize(
    ("width", "outputs", "gated", "biased"), [(1600, 40, False, True), (64, 5, False, True), (192, 70, True, True), (1600, 33, True, False)]
)
def test_products_of_some_rows_are_the_products(width: int, outputs: int, gated: bool, biased: bool, rows: int, dtype: torch.dtype) -> None:
    """Lines in stretches too, of rows that lie beside others, twice over the same counters."""
    weight = some(outputs * (2 if gated else 1), width, dtype=dtype) / width**0.5
    bias = some(len(weight), dtype=dtype) if biased else None
    x = some(rows, 2 * width, dtype=dtype)[:, width:]
    plain, kernels = PlainKernels(), FusedKernels()
    # In 32 bits: libraries may add up parts of products in 16.
    expected = (plain.gated if gated else plain.linear)(weight.float(), None if bias is None else bias.float())(x.float()).to(dtype)
    layer = (kernels.gated if gated else kernels.linear)(weight, bias)
    assert isinstance(layer, FusedLinear)
    most = next(size for size in ways.SIZES if size >= rows)
    assert (Tile.of(most, layer.product, SMALL).splits > 1) == (width > 1000 and not gated)
    assert layer.agrees(most)
    kernels.ways.current = {most: frozenset([layer.product])}
    for _ in range(2):
        assert_near(layer(x), expected)
    counters = layer._arrived._counters
    assert counters is None or not counters.any()


@pytest.mark.matrix(gate=1)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [3, 1, 2, 8, 13, 16])
@pytest.mark.parametrize(
    ("width", "outputs", "gated", "biased"),
    [(2600, 40, False, True), (64, 40, False, True), (896, 21, True, False), (1544, 33, True, True)],
)
def test_products_whose_weights_wait_are_the_products(
    width: int, outputs: int, gated: bool, biased: bool, rows: int, dtype: torch.dtype
) -> None:
    """Of rows that lie beside others; of one with the sum and the norm before it, if one program has all columns. Lines in stretches, too,
    twice over the same counters."""
    weight = some(outputs * (2 if gated else 1), width, dtype=dtype) / width**0.5
    bias = some(len(weight), dtype=dtype) if biased else None
    wide = some(rows, 2 * width, dtype=dtype)
    h, delta = wide[:, width:], some(rows, 2 * width, dtype=dtype)[:, width:]
    plain, kernels = PlainKernels(), FusedKernels()
    gain = some(width, dtype=dtype) + 1
    sums, normed = plain.norm(gain, 1e-5).added(h, delta)
    made = (plain.gated if gated else plain.linear)(weight.float(), None if bias is None else bias.float())
    layer = (kernels.gated if gated else kernels.linear)(weight, bias)
    assert isinstance(layer, FusedLinear)
    size = ways.of(rows)
    assert size is not None
    assert layer.stages(size)
    kernels.ways.current = {size: frozenset([Staged(layer.product)])}
    for _ in range(2):
        assert_near(layer(h), made(h.float()).to(dtype))
    counters = layer._arrived._counters
    assert (counters is not None) == (width > 2048)
    assert counters is None or not counters.any()
    entry = kernels.entry(kernels.norm(gain, 1e-5), layer)
    assert layer.stages(size) == (rows > 1 or width <= 2048)
    assert not layer.stages(32)
    if not layer.stages(size):
        return
    found = entry(h, delta)
    torch.testing.assert_close(found[0], sums)
    assert_near(found[1], made(normed.float()).to(dtype))


def test_one_row_is_compared_with_what_comes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = FusedKernels()
    layer = kernels.linear(some(8, 64, dtype=torch.float16), None)
    assert isinstance(layer, FusedLinear)
    kernels.entry(kernels.norm(some(64, dtype=torch.float16), 1e-5), layer)
    of_staged = layer.of_staged

    def wrong(x: torch.Tensor, delta: torch.Tensor | None = None, norm: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        sums, found = of_staged(x, delta, norm)
        return sums, found if norm is None else found * 0.9

    monkeypatch.setattr(layer, "of_staged", wrong)
    assert layer.stages(8)
    assert not layer.stages(1)


def test_weights_wait_where_kernels_begin_before_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where sixteen lines of one fit beside those of others."""
    for begin_early in (False, True):
        monkeypatch.setattr(dependent, "options", lambda device, there=begin_early: {"DEPENDENT": there})
        for shape, dtype, fit in (
            ((40, 64), torch.float16, True), ((40, 2048), torch.bfloat16, True), ((2048, 4160), torch.float16, False),
            ((40, 4160), torch.float16, True),
            ((40, 32), torch.float16, False), ((40, 68), torch.float16, False), ((40, 64), torch.float32, False),
        ):  # fmt: skip
            kernels = FusedKernels()
            for _ in range(2):
                kernels.linear(some(*shape, dtype=dtype), None)
            offered = {option for option in kernels.ways.options if not isinstance(option, Product)}
            assert offered == ({Staged(Product(*shape, gated=False))} if fit and begin_early else set())
            assert all(not kernels.ways.possible(option, 32) for option in offered)


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


def test_every_tile_fits_into_a_processor() -> None:
    shapes = itertools.product((8, 896, 1152, 4096, 4864, 6144, 14336, 151936), (64, 192, 896, 4096, 4864, 14336), (False, True))
    for (outputs, width, gated), rows, shared in itertools.product(shapes, ways.SIZES, (SMALL, 227 << 10)):
        tile = Tile.of(rows, Product(outputs, width, gated), shared)
        assert width % tile.columns == 0
        assert 2 <= tile.stages <= 6
        stage = 2 * tile.columns * (tile.rows + tile.outputs * (2 if gated else 1))
        assert tile.stages * stage <= shared + stage * (tile.rows < 64)  # of which the last need not be there
        each = -(-(width // tile.columns) // tile.splits)
        assert (tile.splits - 1) * each * tile.columns < width, "every stretch has columns"
        assert tile.splits == 1 or -(-outputs // tile.outputs) * -(-rows // tile.rows) <= fused_products._ARRIVED


def test_lines_are_asked_for_together_where_they_are_few() -> None:
    small, large = Product(896, 4864, gated=False), Product(4096, 14336, gated=False)
    assert cut(1, small, 2, whole=True) == {"OUTPUTS": 1, "COLUMNS": 1024, "WHOLE": True, "num_warps": 4}
    assert cut(2, small, 2, whole=True) == {"OUTPUTS": 2, "COLUMNS": 2048, "WHOLE": True, "num_warps": 4}
    short = Product(2048, 2048, gated=False)
    for product, itemsize, whole in ((small, 2, False), (small, 4, True), (large, 2, True), (short, 2, True)):
        assert not cut(1, product, itemsize, whole=whole)["WHOLE"]


# --- measured when a server starts ---


@pytest.mark.parametrize("slots", [2 * 16, 7])
def test_each_row_is_measured_with_keys_of_its_own(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory that is gone afterwards, and so is what the table said of it. Where there is little, rows share."""
    monkeypatch.setattr(contest, "CONTEXT", 16)
    room = Room([20, 30], kind=TritonAttention, device=DEVICE, dtype=torch.float16, dim=16)
    each = cell_bytes(room.spec, torch.float16) * min(contest.LAYERS, room.spec.layers) // room.spec.layers
    free = (1 << 40) if slots > 7 else contest.SHARE * slots * each
    monkeypatch.setattr(devices, "available_bytes", lambda device: free)
    attention, several = room.attention, Ways()
    assert isinstance(attention, TritonAttention)
    for _ in range(2):
        several.add(ONE)
    own, table = attention.pool, attention.reserve(room.shape)
    seen: list[tuple[int, list[int]]] = []

    def compute(held: Held) -> None:
        attention.plan_held(held)
        assert attention.pool is not own
        keys = [attention.pool.slots(layer)[0] for layer in range(room.spec.layers)]
        assert keys[0].shape[1] == 1 + slots
        assert not any(part.data_ptr() == own.slots(0)[0].data_ptr() for part in keys)
        seen.append((held.size, table.slots[: held.size, :16].reshape(-1).tolist()))

    Contest(several, attention, room.shape, Again(), compute, lambda: 0.0).settle([Held.empty(2, torch.device(DEVICE))])
    assert {size for size, _ in seen} == {2}
    assert seen[0][1] == [1 + at % slots for at in range(2 * 16)]
    assert attention.pool is own
    assert attention.cells.pool is own, "the other's memory is let go of before it is counted what graphs take"
    assert not table.slots.any()


@pytest.mark.long
def test_without_memory_to_measure_nothing_is_chosen(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Nor is it taken for graphs that do not fit. What is wrong otherwise is not kept back."""
    for error, kept_back in ((torch.OutOfMemoryError("CUDA out of memory"), True), (RuntimeError("device-side assert"), False)):

        def failing(*args: Any, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(contest, "KvPool", failing)
        room = Room([20], kind=TritonAttention, device=DEVICE, dtype=torch.float16, dim=16)
        assert isinstance(room.attention, TritonAttention)
        room.attention.reserve(room.shape)
        several = Ways()
        for _ in range(2):
            several.add(ONE)
        beside = Contest(several, room.attention, room.shape, Again(), lambda held: None, lambda: 0.0)
        steps = [Held.empty(2, torch.device(DEVICE))]
        if kept_back:
            beside.settle(steps)
            assert several.found == {}
            assert several.taken(ONE, 2) is None
            assert [record.levelname for record in caplog.records] == ["WARNING"]
        else:
            with pytest.raises(RuntimeError, match="device-side"):
                beside.settle(steps)


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
    """A model, its runner and which kernels it launched. `seconds`: of a step that launched so many tiles. Of steps that are measured
    nobody reads the numbers, so that none are computed."""
    launched: list[str] = []
    launch, record = gpu.launch, capture.CudaRecorder.record
    measuring = False

    def noted(executor: Any, *arguments: Any) -> Any:
        launched.append(f"{executor.fn.__module__.rpartition('.')[2]}.{executor.fn.__name__}")
        return None if measuring else launch(executor, *arguments)

    def measured(recorder: Any, body: Callable[[], None]) -> float:
        nonlocal measuring
        before, measuring = len(launched), True
        try:
            record(recorder, body)
        finally:
            measuring = False
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


@pytest.mark.long
def test_a_start_measures_once_and_serves_what_was_faster(
    gpu: PretendedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model, runner, launched = started(tmp_path / "model", gpu, monkeypatch, lambda count: 1.0 / (1 + count))
    forward = runner.forward
    assert isinstance(forward, TorchForward)
    chosen = forward.decoder.kernels.ways
    assert chosen.found is not None
    assert {rows: one.chosen for rows, one in chosen.found.items()} == {8: frozenset(chosen.options)}
    before = set(launched)
    serve(model, runner, gpu)
    assert "tiles.tile" in set(launched)
    assert set(launched) <= before | {"note"}
    told = [record.getMessage() for record in caplog.records if "8: 1000.000 -> " in record.getMessage()]
    assert len(told) == 1, "not once more behind the trial"


@pytest.mark.long
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
    assert not any(forward.decoder.kernels.ways.current.values())
    told = [record.getMessage() for record in caplog.records if "not gone" in record.getMessage()]
    (words,) = told
    assert "--disable-autotune" in words
    assert words.endswith("RuntimeError: PTX assembly aborted due to errors")


@pytest.mark.long
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
    assert not any(forward.decoder.kernels.ways.current.values())
    serve(model, runner, gpu)


@pytest.mark.long
def test_behind_its_time_nothing_is_tried(gpu: PretendedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "CONTEST_S", -1.0)
    runner = started(tmp_path / "model", gpu, monkeypatch, lambda count: 1.0 / (1 + count))[1]
    forward = runner.forward
    assert isinstance(forward, TorchForward)
    assert forward.decoder.kernels.ways.found == {}
    assert forward.decoder.kernels.ways.line() == "not measured: 8"


@pytest.mark.long
def test_whoever_wants_none_measured_has_none_measured(gpu: PretendedGpu, tmp_path: Path) -> None:
    model = make(tmp_path / "model", "llama", hidden_size=64, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2)
    runner = model.load(device="cuda", dtype="float16", disable_autotune=True, disable_cuda_graph=True)
    forward = runner.forward
    assert isinstance(forward, TorchForward)
    assert forward.decoder.kernels.ways.options
    assert forward.decoder.kernels.ways.found == {}


def test_where_attention_is_not_ours_nothing_is_measured() -> None:
    """FlashInfer plans on the host for the steps that are captured for good."""
    several = Ways()
    for _ in range(2):
        several.add(numbered(8))
    another: Any = object()
    beside = Contest(several, another, TableShape(1, 16), Again(), lambda held: pytest.fail("it is computed"), lambda: 0.0)
    beside.settle([Held.empty(1, torch.device("cpu"))])
    assert several.found is None


def test_large_weights_are_read_so_by_one_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = FusedLinear(some(8, 64, dtype=torch.float16), None)
    for most, small, large in ((2, [False, True, True, False], [False, True, False, False]), (0, [False] * 4, [False] * 4)):
        monkeypatch.setattr(fused_products, "MOST_ROWS", most)
        for room, expected in ((layer.weight.nbytes, small), (layer.weight.nbytes - 1, large)):
            monkeypatch.setattr(fused_products, "MOST_BYTES", room)
            assert [layer.few(rows) for rows in range(4)] == expected
