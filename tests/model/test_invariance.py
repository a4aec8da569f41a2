"""On the CPU the numbers of a request, to the last bit, do not depend on what it is computed beside."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from banyan_runtime.model import sampler
from banyan_runtime.model.layers import Kernels, PackedKernels, PlainKernels

from .conftest import VOCAB, TinyModel
from .driver import Driver, Request

Models = Callable[[str], TinyModel]
DTYPES = ["float32", "bfloat16"]


class Seen:
    """The logits of every row by its position: what the sampler is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logits: dict[tuple[int, int], torch.Tensor] = {}
        real = sampler.sample

        def record(logits: torch.Tensor, columns: object, positions: np.ndarray) -> object:
            for row, position in enumerate(positions.tolist()):
                self.logits[int(columns.seed[row]), position] = logits[row].clone()  # type: ignore[attr-defined]
            return real(logits, columns, positions)  # type: ignore[arg-type]

        monkeypatch.setattr(sampler, "sample", record)

    def take(self) -> dict[tuple[int, int], torch.Tensor]:
        taken, self.logits = self.logits, {}
        return taken


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)


@pytest.fixture(params=[1, 2, 3])
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama-576", "qwen3", "qwen2-window"])
def test_logits_are_bit_equal_alone_in_a_crowd_in_chunks_and_behind_a_prefix(
    tiny_model: Models, seen: Seen, threads: int, family: str, dtype: str
) -> None:
    runner = tiny_model(family).load(dtype=dtype)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernels", [PlainKernels, PackedKernels])
def test_rows_have_the_same_bits_in_every_block_size_that_is_used_wherever_they_stand(
    kernels: Callable[[], Kernels], dtype: torch.dtype
) -> None:
    if kernels is PackedKernels and not PackedKernels.supports(dtype):
        pytest.skip("this CPU has no such products")
    made = kernels()
    layers = [made.linear(cancelling(n, k, dtype, -1), None) for n, k in ((96, 176), (200, 1536), (64, 4864))]
    assert made.rows.sizes is not None
    for layer, width in zip(layers, (176, 1536, 4864), strict=True):
        x = cancelling(made.rows.sizes[-1], width, dtype, 1)
        whole = layer(x)
        assert whole.abs().max() < 1e-2 * width**0.5, "large results would hide the rounding"
        for rows in made.rows.sizes:
            assert torch.equal(layer(x[:rows].contiguous()), whole[:rows]), rows
            assert torch.equal(layer(x[-rows:].contiguous()), whole[-rows:]), rows


def test_packed_and_plain_layers_agree() -> None:
    if not PackedKernels.supports(torch.float32):
        pytest.skip("torch without oneDNN")
    weight, bias, x = torch.randn(352, 96), torch.randn(352), torch.randn(32, 96)
    for name in ("linear", "gated"):
        plain, packed = (getattr(kernels(), name)(weight, bias)(x) for kernels in (PlainKernels, PackedKernels))
        torch.testing.assert_close(packed, plain, rtol=1e-5, atol=1e-4)


def test_a_row_with_nan_fails_alone_and_leaves_no_trace_in_the_pages_it_held(
    tiny_model: Models, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    runner = tiny_model("llama").load(page_size=16, max_total_tokens=96, enable_nan_detection=True)
    Driver(runner, rows=2, context=64, page_size=16).run(requests([32, 30]))
    expected = {key: value for key, value in seen.take().items() if key[0] == 1}

    driver = Driver(runner, rows=2, context=64, page_size=16)
    bad, good = requests([32, 30])
    assert bad.prompt[3] not in good.prompt
    runner._decoder.embed[bad.prompt[3]] = float("nan")
    result = runner.launch(driver.build([(bad, 32), (good, 30)])).result()
    assert result.failed.tolist() == [True, False]
    assert result.token_ids[0] == -1
    assert "The logits of row 0 at position 32 hold NaN or nothing admissible; its request fails alone." in caplog.messages
    assert torch.equal(seen.take()[1, 30], expected[1, 30])

    first, second = driver.table[0, [0, 16]] // 16
    third = driver.table[1, 0] // 16
    driver.free = [int(second), int(first), int(third)]  # popped from the end: the failed request's pages get a tail
    again = requests([32, 30])[1]
    driver.run([again])
    assert_equal(seen.take(), expected)
