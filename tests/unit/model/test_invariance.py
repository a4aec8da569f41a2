"""On the CPU the numbers of a request, to the last bit, do not depend on what it is computed beside."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from banyan_runtime.model import layers, runner, sampler
from banyan_runtime.model.attention import products
from banyan_runtime.model.invariance import LADDER, Measured, RowSizes, agreement
from banyan_runtime.model.layers import Kernels, PackedKernels, PlainKernels
from banyan_runtime.model.runner import ModelRunner
from tests.support.models.driver import Driver, Request
from tests.support.models.tiny import VOCAB, TinyModel, gate

Models = Callable[[str], TinyModel]
DTYPES = ["float32", "bfloat16"]


class Seen:
    """The logits of every row by its position: what the sampler is given. Tokens that need no sampler are drawn by it, too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logits: dict[tuple[int, int], torch.Tensor] = {}
        real = sampler.sample

        def record(logits: torch.Tensor, columns: object, positions: np.ndarray) -> object:
            for row, position in enumerate(positions.tolist()):
                self.logits[int(columns.seed[row]), position] = logits[row].clone()  # type: ignore[attr-defined]
            return real(logits, columns, positions)  # type: ignore[arg-type]

        monkeypatch.setattr(sampler, "sample", record)
        monkeypatch.setattr(runner._Asked, "plain", False)

    def take(self) -> dict[tuple[int, int], torch.Tensor]:
        taken, self.logits = self.logits, {}
        return taken


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)


@pytest.fixture(params=gate([2, 1, 3]))
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", str(request.param))
    yield request.param
    torch.set_num_threads(before)


def requests(lengths: list[int]) -> list[Request]:
    """The seed names the request in `Seen`; greedy sampling ignores it."""
    return [
        Request(np.random.default_rng(i).integers(0, VOCAB, length).tolist(), new_tokens=6, row=i, seed=i)
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("dtype", gate(DTYPES))
@pytest.mark.parametrize("family", gate(["qwen3", "llama-576", "qwen2-window"]))
def test_logits_are_bit_equal_alone_in_a_crowd_in_chunks_and_behind_a_prefix(
    tiny_model: Models, seen: Seen, threads: int, family: str, dtype: str
) -> None:
    assert_invariant(tiny_model(family).load(dtype=dtype), seen)


def assert_invariant(runner: ModelRunner, seen: Seen) -> None:
    lengths = [1, 2, 3, 17, 40, 129, 130, 300, 5, 261, 128, 64, 7]

    alone = requests(lengths)
    for request in alone:
        Driver(runner, rows=len(lengths), context=512).run([request])
    expected = seen.take()
    assert len(expected) == 6 * len(lengths)

    together = requests(lengths)
    Driver(runner, rows=len(lengths), context=512).run(together)
    assert_equal(seen.take(), expected)

    chunked = requests(lengths)
    for request in chunked:
        request.start = request.row
    Driver(runner, rows=len(lengths), context=512, shuffle=1).run(chunked, chunk=29)
    assert_equal(seen.take(), expected)

    source, *others = requests(lengths)[7:8] + requests(lengths)[7:8]
    driver = Driver(runner, rows=len(lengths), context=512, shuffle=2)
    driver.run([source])
    seen.take()
    others[0].row = 0
    driver.share(source, others[0], 211)
    driver.run(others)
    assert_equal(seen.take(), {key: value for key, value in expected.items() if key[0] == source.seed})


def assert_equal(found: dict[tuple[int, int], torch.Tensor], expected: dict[tuple[int, int], torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [key for key in expected if not torch.equal(found[key], expected[key])]
    assert not different, f"(request, position): {different}"


def cancelling(rows: int, width: int, dtype: torch.dtype, sign: int) -> torch.Tensor:
    """Rows whose halves cancel in a product of both signs, so that only rounding errors are left to compare."""
    half = torch.randn(rows, width // 2).to(dtype)
    return torch.cat((half, half.flip(1) * sign), 1)


@pytest.mark.parametrize("dtype", gate([torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("kernels", [PlainKernels, PackedKernels])
def test_rows_have_the_same_bits_in_every_block_size_that_is_used_wherever_they_stand(
    kernels: Callable[[], Kernels], dtype: torch.dtype
) -> None:
    if kernels is PackedKernels and not PackedKernels.supports(dtype):
        pytest.skip("this CPU has no such products")
    made = kernels()
    linear = [made.linear(cancelling(n, k, dtype, -1), None) for n, k in ((96, 176), (200, 1536), (64, 4864))]
    assert made.rows.sizes is not None
    for layer, width in zip(linear, (176, 1536, 4864), strict=True):
        x = cancelling(made.rows.sizes[-1], width, dtype, 1)
        whole = layer(x)
        assert whole.abs().max() < 1e-2 * width**0.5, "large results would hide the rounding"
        for rows in made.rows.sizes:
            assert torch.equal(layer(x[:rows].contiguous()), whole[:rows]), rows
            assert torch.equal(layer(x[-rows:].contiguous()), whole[-rows:]), rows


class Library:
    """Products whose last bits depend on how many rows there are, as `rounding(rows, row)` says."""

    def __init__(self, rounding: Callable[[int, int], int]) -> None:
        self.rounding = rounding

    def __call__(self, rows: int) -> torch.Tensor:
        """Of equal rows."""
        return self.apply(torch.ones(rows, 8))

    def apply(self, result: torch.Tensor) -> torch.Tensor:
        rows = result.shape[-2]
        ulps = torch.tensor([self.rounding(rows, row) for row in range(rows)], dtype=result.dtype)
        return result * (1 + ulps * torch.finfo(result.dtype).eps).unsqueeze(-1)


def like_amx(rows: int, row: int) -> int:
    return int(rows in (16, 32) or 384 <= rows <= 1024)


unrepeatable = itertools.count()
LIBRARIES = {
    "any": lambda rows, row: 0,
    "amx": like_amx,
    "one row": lambda rows, row: int(rows == 1),
    "fours": lambda rows, row: rows % 4,
    "large ones": lambda rows, row: 0 if rows >= 64 else rows,
    "the largest": lambda rows, row: int(rows == LADDER[-1]),
    "small ones": lambda rows, row: 0 if rows <= 16 else rows,
    "only 48": lambda rows, row: 0 if rows == 48 else row,
    "tail of eights": lambda rows, row: int(row >= rows // 8 * 8),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_sizes_found_agree_in_every_row_whatever_the_library_does(name: str) -> None:
    library = Library(LIBRARIES[name])
    measured = Measured()
    measured.add("product", agreement(library, LADDER))
    found = measured.sizes()
    assert found.invariant
    assert len({library.rounding(size, row) for size in found.sizes or () for row in range(size)}) == 1
    for rows in range(1, 1100):
        blocks = found.split(rows)
        assert set(blocks) <= set(found.sizes or ())
        assert sum(blocks[:-1]) < rows <= sum(blocks), "no block of nothing but padding"


def test_single_rows_stay_single_and_prompts_go_in_large_blocks_on_processors_with_amx() -> None:
    measured = Measured()
    measured.add("product", agreement(Library(like_amx), LADDER))
    found = measured.sizes()
    assert [found.split(rows) for rows in (1, 15, 16, 32, 512, 600)] == [[1], [15], [20], [40], [256, 256], [256, 256, 96]]


def test_sizes_must_agree_for_every_product() -> None:
    measured = Measured()
    measured.add("first", agreement(Library(lambda rows, row: int(rows < 8)), LADDER))
    measured.add("second", agreement(Library(lambda rows, row: int(rows % 8 > 0)), LADDER))
    assert measured.sizes().sizes == tuple(size for size in LADDER if size % 8 == 0)


class Operators(TorchDispatchMode):
    """Records which of torch's operators compute anything."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.called.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measuring_has_torch_compute_nothing_but_products(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Every other operator would wait for its threads, hundreds of times, on a machine that may be busy."""
    monkeypatch.setattr(products.Products, "KNOWN", {})
    spec = SimpleNamespace(kv_heads=2, group=7, head_dim=64)
    pulses: list[int] = []
    with Operators() as operators:
        products.Products(spec, dtype, torch.device("cpu"), lambda: pulses.append(1))  # type: ignore[arg-type]
    assert len(pulses) == operators.called.count("bmm") > 100
    assert len(operators.called) - len(pulses) < 80, "what makes operands once"


def test_a_library_that_never_repeats_itself_is_found_out() -> None:
    measured = Measured()
    measured.add("product", agreement(Library(lambda rows, row: next(unrepeatable)), LADDER))
    assert not measured.sizes().invariant
    assert measured.sizes().split(37) == [37]


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, int], int], Callable[[int], int]], None]:
    """Puts a library's rounding into every product of layers and attention; the latter also rounds by the number of items."""

    def install(rounding: Callable[[int, int], int], by_items: Callable[[int], int]) -> None:
        library, linear, packed, multiply = Library(rounding), F.linear, layers._PackedLinear.__call__, products.multiply
        monkeypatch.setattr(layers.F, "linear", lambda *args: library.apply(linear(*args)))
        monkeypatch.setattr(layers._PackedLinear, "__call__", lambda self, x: library.apply(packed(self, x)))

        def batched(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            items = Library(lambda rows, row: by_items(left.shape[0]))
            return items.apply(library.apply(multiply(left, right)))

        monkeypatch.setattr(products, "multiply", batched)

    monkeypatch.setattr(layers._MeasuredLayers, "KNOWN", {})
    monkeypatch.setattr(products.Products, "KNOWN", {})
    return install


Install = Callable[[Callable[[int, int], int], Callable[[int], int]], None]


@pytest.mark.parametrize("dtype", gate(DTYPES))
def test_logits_are_bit_equal_with_products_that_round_as_with_amx(
    tiny_model: Models, seen: Seen, libraries: Install, caplog: pytest.LogCaptureFixture, dtype: str
) -> None:
    caplog.set_level(logging.INFO)
    libraries(like_amx, lambda items: int(items in (12, 24)))
    runner = tiny_model("llama").load(dtype=dtype)
    assert runner.forward.decoder.batch_invariant
    assert runner.forward.attention.batch_invariant
    sizes = runner.forward.decoder.rows.sizes or ()
    assert {16, 32, 512}.isdisjoint(sizes)
    assert any(f" {sizes[0]} to {sizes[-1]} rows" in message and f" {len(sizes)} sizes" in message for message in caplog.messages)
    assert_invariant(runner, seen)


@pytest.mark.long
def test_products_that_round_as_with_amx_show_in_the_logits_where_nothing_is_measured(
    tiny_model: Models, seen: Seen, libraries: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries(like_amx, lambda items: int(items in (12, 24)))
    monkeypatch.setattr(Measured, "sizes", lambda self: RowSizes(None))
    with pytest.raises(AssertionError, match="position"):
        assert_invariant(tiny_model("llama").load(), seen)


def test_a_promise_that_cannot_be_kept_is_not_made(tiny_model: Models, libraries: Install, caplog: pytest.LogCaptureFixture) -> None:
    libraries(lambda rows, row: next(unrepeatable) % 1000, lambda items: 0)
    runner = tiny_model("llama").load()
    assert not runner.forward.decoder.batch_invariant
    assert not runner.forward.attention.batch_invariant
    for what in ("layers", "attention"):
        assert len([record for record in caplog.records if record.levelname == "WARNING" and what in record.getMessage()]) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    "limits",
    [
        {"ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default"},
        {"ONEDNN_MAX_CPU_ISA": "AVX", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ATEN_CPU_CAPABILITY": "avx2"},
        {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    ],
    ids=lambda limits: limits["ONEDNN_MAX_CPU_ISA"],
)
def test_lesser_processors_keep_the_promise_too(limits: dict[str, str]) -> None:
    """The tests above, in a process whose libraries may use only some of this processor's instructions."""
    tests = [
        "test_rows_have_the_same_bits_in_every_block_size_that_is_used_wherever_they_stand",
        *(f"test_logits_are_bit_equal_alone_in_a_crowd_in_chunks_and_behind_a_prefix[2-qwen3-{dtype}]" for dtype in DTYPES),
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"{__file__}::{name}" for name in tests)]
    done = subprocess.run(command, env=os.environ | limits, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize("kernels", [PlainKernels, PackedKernels])
def test_the_activation_of_a_row_does_not_depend_on_where_it_stands(kernels: Callable[[], Kernels], threads: int) -> None:
    torch.set_num_threads(threads)
    made = kernels()
    weight = torch.zeros(2 * 171, 64)
    weight[:171, 0], weight[171:, 0] = sensitive(171), 1.0
    layer = made.gated(weight, None)
    row = F.one_hot(torch.tensor([0]), 64).float()
    assert made.rows.sizes is not None
    for rows in made.rows.sizes:
        results = layer(row.expand(rows, -1).contiguous())
        assert torch.equal(results, results[:1].expand_as(results)), rows


def sensitive(count: int) -> torch.Tensor:
    """Numbers whose silu torch computes otherwise at the end of a tensor than in its middle."""
    numbers = torch.randn(100 * count, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([F.silu(number.clone()) for number in numbers.split(1)])
    return numbers[F.silu(numbers) != alone][:count]


@pytest.mark.parametrize("dtype", gate([torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("heads", gate([(9, 3, 64), (14, 2, 64), (4, 1, 80), (8, 8, 128)]))
def test_attention_products_have_the_same_bits_whatever_is_computed_beside_them(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    spec = SimpleNamespace(kv_heads=heads[1], group=heads[0] // heads[1], head_dim=heads[2])
    found = products.Products(spec, dtype, torch.device("cpu"))  # type: ignore[arg-type]
    items = 7 * heads[1]
    right = cancelling(items * 128, heads[2], dtype, -1).view(items, 128, -1).transpose(1, 2)
    rows = spec.group * 64
    left = cancelling(items * rows, heads[2], dtype, 1).view(items, rows, -1)
    whole = found(left, right, found.rows.split(rows))
    for item in range(0, items, heads[1]):
        one = slice(item, item + heads[1])
        for few in range(spec.group, rows, 5 * spec.group):
            sizes = found.rows.split(few)
            assert torch.equal(found(left[one, : sum(sizes)], right[one], sizes)[:, :few], whole[one, :few]), (item, few)


def test_packed_and_plain_layers_agree() -> None:
    if not PackedKernels.supports(torch.float32):
        pytest.skip("torch without oneDNN")
    weight, bias, x = torch.randn(352, 96), torch.randn(352), torch.randn(32, 96)
    for name in ("linear", "gated"):
        plain, packed = (getattr(kernels(), name)(weight, bias)(x) for kernels in (PlainKernels, PackedKernels))
        torch.testing.assert_close(packed, plain, rtol=1e-5, atol=1e-4)


def test_a_row_with_nan_fails_alone_and_leaves_no_trace_in_the_pages_it_held(tiny_model: Models, seen: Seen) -> None:
    runner = tiny_model("llama").load(page_size=16, max_total_tokens=96)
    Driver(runner, rows=2, context=64, page_size=16).run(requests([32, 30]))
    expected = {key: value for key, value in seen.take().items() if key[0] == 1}

    driver = Driver(runner, rows=2, context=64, page_size=16)
    bad, good = requests([32, 30])
    assert bad.prompt[3] not in good.prompt
    runner.forward.decoder.embed[bad.prompt[3]] = float("nan")
    result = runner.launch(driver.build([(bad, 32), (good, 30)])).result()
    assert result.failed.tolist() == [True, False]
    assert result.token_ids[0] == -1
    assert torch.equal(seen.take()[1, 30], expected[1, 30])

    first, second = driver.table[0, [0, 16]] // 16
    third = driver.table[1, 0] // 16
    driver.free = [int(second), int(first), int(third)]  # popped from the end: the failed request's pages get a tail
    again = requests([32, 30])[1]
    driver.run([again])
    assert_equal(seen.take(), expected)
