"""Which kernel computes a product: the table, what --autotune measures, and that every kernel computes the same."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from banyan_runtime.errors import ConfigError
from banyan_runtime.model import autotune, capture, fused_products, kernel_choices
from banyan_runtime.model.attention import Held
from banyan_runtime.model.attention.triton_paged import TritonAttention
from banyan_runtime.model.autotune import StepTimer
from banyan_runtime.model.fused import FusedKernels
from banyan_runtime.model.fused_products import FusedLinear, Tile, cut
from banyan_runtime.model.kernel_choices import DEVICE as MEASURED_ON
from banyan_runtime.model.kernel_choices import ROWS, TABLE, Entry, Kernel, KernelChoices, Product, class_of
from banyan_runtime.model.kernels import SMALL, dependent
from banyan_runtime.model.layers import PlainKernels
from banyan_runtime.model.torch_forward import TorchForward
from banyan_runtime.models.config import Norm
from banyan_runtime.step import TableShape
from tests.kernels.test_pretended import texts
from tests.kernels.test_triton import DEVICE, DTYPES, assert_near, made_by, some
from tests.support.models import tiny as conftest
from tests.support.models.driver import Again, Driver
from tests.support.models.pretended import pretended, small_kernels
from tests.support.models.tiny import make
from tests.support.paths import ROOT
from tests.unit.model.test_attention import Room

RMS = Norm("rms", 1e-5)
HALVES = [dtype for dtype in DTYPES if dtype.itemsize == 2]
ONE, OTHER = Product(8, 64, gated=False), Product(16, 64, gated=True)


# --- the table ---


def test_every_entry_is_what_its_result_file_shows() -> None:
    layers = {"0.5b": 24, "8b": 8}
    for entry in TABLE:
        (line,) = [line for line in (ROOT / "benchmarks/results" / entry.source).read_text().splitlines() if line.startswith(entry.line)]
        found = {int(rows): (float(us), float(more)) for rows, us, more in re.findall(r"(\d+): +([\d.]+) \( *([+-][\d.]+)", line)}
        for rows in entry.rows:
            us, more = found[rows]
            gain = -more * layers[entry.line.split()[0]]
            assert (gain >= 0.01 * us) == (entry.kernel != "default"), (entry, gain, us)


def test_a_class_that_was_not_measured_takes_the_default_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = (Entry(ONE, (1,), "staged", "", ""), Entry(ONE, (4, 16), "tiles", "", ""), Entry(ONE, (64,), "default", "", ""))
    monkeypatch.setattr(kernel_choices, "TABLE", entries)
    offered: dict[int, list[Kernel]] = {1: ["default"]}  # the staged kernel is not there
    for name, tiled in ((f"NVIDIA {MEASURED_ON} NVL", {3, 4, 9, 16}), ("NVIDIA L40S", set())):
        choices = KernelChoices(name)
        for product in (ONE, ONE, OTHER):
            choices.add(product, lambda rows: offered.get(rows, ["default", "tiles"]))
        assert choices.products == [ONE], "what a step has once is not worth a choice"
        kernels = {rows: choices.kernel(ONE, rows) for rows in (0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 64, 65, 256, 257)}
        assert {rows for rows, kernel in kernels.items() if kernel == "tiles"} == tiled
        assert set(kernels.values()) <= {"tiles", "default"}
    assert choices.line() == "8x64: default (unmeasured) 1 2 4 8 16 32 64 128 256"
    choices.measured |= {(ONE, 1): "staged", (ONE, 64): "default"}
    assert choices.line() == "8x64: staged 1, default (unmeasured) 2 4 8 16 32 128 256, default 64"


# --- what --autotune measures ---


def test_the_kernel_with_the_fastest_step_is_chosen(caplog: pytest.LogCaptureFixture) -> None:
    """Of the largest step of each class. A kernel that fails, or gains no more than chance, is not chosen."""
    choices = KernelChoices("")
    for product in (ONE, OTHER) * 2:
        choices.add(product, lambda rows: ["default", "tiles", "staged"])
    choices.measured[OTHER, 4] = "staged"
    timed: list[int] = []

    def seconds(held: Held) -> float:
        timed.append(held.size)
        one, other = (choices.kernel(product, held.size) for product in (ONE, OTHER))
        if one == "staged" and held.size == 8:
            raise RuntimeError("out of resource: shared memory")
        costs = {"default": 1.0, "tiles": 0.999, "staged": 0.5} if held.size == 8 else {"default": 1.0, "tiles": 0.8, "staged": 1.1}
        return costs[one] + costs[other]

    autotune.autotune(choices, [Held.empty(size, torch.device("cpu")) for size in (3, 8, 300, 4)], seconds)
    assert choices.measured == {(ONE, 4): "tiles", (OTHER, 4): "tiles", (ONE, 8): "default", (OTHER, 8): "staged"}
    assert set(timed) == {4, 8}
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("slots", [2 * 16, 7])
def test_each_row_is_timed_with_keys_of_its_own(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the pool is small, rows share."""
    monkeypatch.setattr(autotune, "CONTEXT", 16)
    room = Room([20, slots - 20] if slots > 20 else [slots], kind=TritonAttention, device=DEVICE, dtype=torch.float16, dim=16)
    attention, shape = room.attention, TableShape(2, 20)
    assert isinstance(attention, TritonAttention)
    table = attention.reserve(shape)
    seen: list[list[int]] = []

    def compute(held: Held) -> None:
        attention.plan_held(held)
        seen.append(table.slots[: held.size, :16].reshape(-1).tolist())

    assert StepTimer(attention, shape, Again(), compute)(Held.empty(2, torch.device(DEVICE), own=attention.own)) == 1.0
    assert seen[0] == [1 + at % slots for at in range(2 * 16)]


def test_autotune_without_captured_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--autotune"):
        make(tmp_path / "model", "llama").load(autotune=True, device="cpu")


@pytest.mark.long
def test_a_start_with_autotune_measures_once_and_serves_what_was_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps that are timed compute nothing: a step is the faster, the more tiles it launches."""
    if torch.cuda.is_available():
        pytest.skip("there is a real one")
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(fused_products, "_OUTPUTS", 128)
    small_kernels(monkeypatch)
    with pretended(monkeypatch, tmp_path) as gpu:
        monkeypatch.setattr(kernel_choices, "ROWS", (4,))
        monkeypatch.setattr(autotune, "CONTEXT", 16)
        monkeypatch.setattr(conftest, "TIE", 0.2)  # of half precision; logits are some 3.5 apart
        launched: list[str] = []
        launch, record, timing = gpu.launch, capture.CudaRecorder.record, False

        def noted(executor: Any, *arguments: Any) -> Any:
            launched.append(executor.fn.__name__)
            return None if timing else launch(executor, *arguments)

        def seconds(recorder: Any, body: Callable[[], None]) -> float:
            nonlocal timing
            before, timing = len(launched), True
            record(recorder, body)
            timing = False
            return 1.0 / (1 + launched[before:].count("tile"))

        monkeypatch.setattr(gpu, "launch", noted)
        monkeypatch.setattr(capture.CudaRecorder, "seconds", seconds)
        model = make(tmp_path / "model", "llama", hidden_size=64, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2)
        runner = model.load(
            device="cuda", dtype="float16", autotune=True, cuda_graph_max_bs=4, cuda_graph_max_tokens=16, chunked_prefill_size=32,
            max_running_requests=4,
        )  # fmt: skip
        requests = texts(3, 2, 3)
        driver = Driver(runner, rows=4, context=64)
        forward = runner.forward
        assert isinstance(forward, TorchForward)
        assert isinstance(forward.decoder.kernels, FusedKernels)
        choices = forward.decoder.kernels.choices
        assert choices.measured == {(product, 4): "tiles" for product in choices.products}
        driver.run(requests, chunk=20)
        for request in requests:
            assert request.output == model.choices(request.prompt, request.output)
        told = [record.getMessage() for record in caplog.records if "as measured" in record.getMessage()]
        assert len(told) == 1


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
    expected = made_by(plain, gated)(weight.float(), None if bias is None else bias.float())(x.float()).to(dtype)
    layer = made_by(kernels, gated)(weight, bias)
    assert isinstance(layer, FusedLinear)
    most = class_of(rows)
    assert most is not None
    assert (Tile.of(most, layer.product, SMALL).splits > 1) == (width > 1000 and not gated)
    kernels.choices.measured[layer.product, most] = "tiles"
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
    sums, normed = plain.norm(RMS, gain).added(h, delta)
    made = made_by(plain, gated)(weight.float(), None if bias is None else bias.float())
    layer = made_by(kernels, gated)(weight, bias)
    assert isinstance(layer, FusedLinear)
    size = class_of(rows)
    assert size is not None
    kernels.choices.measured[layer.product, size] = "staged"
    for _ in range(2):
        assert_near(layer(h), made(h.float()).to(dtype))
    counters = layer._arrived._counters
    assert (counters is not None) == (width > 2048)
    assert counters is None or not counters.any()
    entry = kernels.entry(kernels.norm(RMS, gain), layer)
    found = entry(h, delta)
    torch.testing.assert_close(found[0], sums)
    assert_near(found[1], made(normed.float()).to(dtype))


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
            (product,) = kernels.choices.products
            assert [rows for rows in ROWS if "staged" in kernels.choices.offers(product, rows)] == (
                [1, 2, 4, 8, 16] if fit and begin_early else []
            )


def test_widths_that_tiles_do_not_have_are_left_to_torch() -> None:
    for shape, dtype, there in (((8, 96), torch.float16, False), ((8, 64), torch.float32, False), ((8, 64), torch.bfloat16, True)):
        kernels = FusedKernels()
        for _ in range(2):
            kernels.linear(some(*shape, dtype=dtype), None)
        (product,) = kernels.choices.products
        assert [rows for rows in ROWS if "tiles" in kernels.choices.offers(product, rows)] == (list(ROWS[2:]) if there else [])


def test_every_tile_fits_into_a_processor() -> None:
    shapes = itertools.product((8, 896, 1152, 4096, 4864, 6144, 14336, 151936), (64, 192, 896, 4096, 4864, 14336), (False, True))
    for (outputs, width, gated), rows, shared in itertools.product(shapes, ROWS, (SMALL, 227 << 10)):
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


def test_large_weights_are_read_so_by_one_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = FusedLinear(some(8, 64, dtype=torch.float16), None)
    for most, small, large in ((2, [False, True, True, False], [False, True, False, False]), (0, [False] * 4, [False] * 4)):
        monkeypatch.setattr(fused_products, "MOST_ROWS", most)
        for room, expected in ((layer.weight.nbytes, small), (layer.weight.nbytes - 1, large)):
            monkeypatch.setattr(fused_products, "MOST_BYTES", room)
            assert [layer.few(rows) for rows in range(4)] == expected
