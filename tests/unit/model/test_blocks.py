"""Block formats hold the bytes that GGUF's own library reads and writes, bit for bit."""

from __future__ import annotations

from typing import get_args

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from banyan_runtime.model import block_values, blocks, host
from banyan_runtime.model.block_values import BlockKind
from banyan_runtime.model.blocks import Blocks, dequantize, quantize

KINDS: tuple[BlockKind, ...] = get_args(BlockKind)
HALVES_AT = {"Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q2_K": [80, 82], "Q3_K": [108], "Q6_K": [208], "MXFP4": []}
"""Where float16 stand in a block of a kind, if not at its beginning alone."""


def drawn(kind: BlockKind, rows: int, columns: int) -> npt.NDArray[np.uint8]:
    """Rows of blocks whose bytes are random, but for scales, which are finite."""
    rng = np.random.default_rng(len(kind) + rows)
    values, size = block_values.SIZES[kind]
    data = rng.integers(0, 256, (rows * columns // values, size), np.uint8)
    for at in HALVES_AT.get(kind, [0]):
        data[:, at : at + 2] = rng.standard_normal((len(data), 1)).astype("<f2").view(np.uint8)
    return data.reshape(rows, -1)


def theirs(kind: str, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    found: npt.NDArray[np.float32] = quants.dequantize(data, GGMLQuantizationType[kind])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_any_bytes_are_read_as_by_the_formats_own_library(kind: BlockKind) -> None:
    data = drawn(kind, 1200, 512)  # several pieces of work, of which the last is not full
    ours = dequantize(Blocks(kind, 1200, 512, data))
    np.testing.assert_array_equal(ours.view(np.uint32), theirs(kind, data).view(np.uint32))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_simple_formats_are_written_as_by_the_library(kind: BlockKind) -> None:
    values = np.random.default_rng(5).standard_normal((900, 608)).astype(np.float32)
    values[3] = 0  # blocks without a scale
    values[4, 5] = 40.0
    values[5] = np.round(values[5] * 4) / 8  # halves, where rounding decides
    ours = quantize(values, kind)
    np.testing.assert_array_equal(ours.data, quants.quantize(values, GGMLQuantizationType[kind]))
    assert ours.nbytes == 900 * blocks.row_bytes(kind, 608)


@pytest.mark.parametrize(("kind", "limit"), [("Q8_0", 0.006), ("Q6_K", 0.022), ("Q4_0", 0.10), ("Q4_1", 0.08), ("Q4_K", 0.09)])
def test_what_is_written_is_near_what_it_was(kind: BlockKind, limit: float) -> None:
    values = np.random.default_rng(6).standard_normal((64, 1024)).astype(np.float32)
    values[7] = 0
    values[8] = np.abs(values[8]) + 1  # all on one side of 0
    values[9] = -values[8]
    back = dequantize(quantize(values, kind))
    assert float(np.sqrt(np.mean((back - values) ** 2) / np.mean(values**2))) < limit
    assert not back[7].any()
    again = dequantize(quantize(back, kind))
    assert float(np.abs(again - back).max()) < limit * 4


def test_a_tensor_of_bfloat16_is_quantized_as_its_values() -> None:
    tensor = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    np.testing.assert_array_equal(quantize(tensor, "Q8_0").data, quantize(tensor.float().numpy(), "Q8_0").data)


@pytest.mark.parametrize("cores", [1, 3])
def test_bytes_do_not_depend_on_the_number_of_cores(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(7).standard_normal((3000, 256)).astype(np.float32)
    expected = quantize(values, "Q4_K").data
    monkeypatch.setattr(host, "cores", lambda: cores)
    np.testing.assert_array_equal(quantize(values, "Q4_K").data, expected)


def test_parts_become_one_tensor_and_leave_what_they_were() -> None:
    rng = np.random.default_rng(8)
    top, bottom = (quantize(rng.standard_normal((rows, 256)).astype(np.float32), kind) for rows, kind in ((70_000, "Q4_K"), (3, "Q8_0")))
    middle, norm = torch.full((2, 256), 0.5), torch.ones(256)
    parameters: dict[str, blocks.Parameter] = {"qkv": (top, middle, bottom), "norm": norm}
    assert blocks.nbytes(parameters.values()) == top.nbytes + 2 * 256 * 4 + bottom.nbytes + 256 * 4
    whole = blocks.dequantized(parameters, torch.bfloat16, torch.device("cpu"))
    assert not parameters
    assert list(whole) == ["qkv", "norm"]
    expected = np.concatenate((dequantize(top), middle.numpy(), dequantize(bottom)))
    assert torch.equal(whole["qkv"], torch.from_numpy(expected).to(torch.bfloat16))
    assert whole["norm"] is norm


def test_rows_can_be_taken_in_any_order() -> None:
    whole = quantize(np.random.default_rng(9).standard_normal((6, 32)).astype(np.float32), "Q4_0")
    order = np.array([5, 0, 3])
    np.testing.assert_array_equal(dequantize(whole.taken(order)), dequantize(whole)[order])
