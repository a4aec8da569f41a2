"""Finds how many rows a matrix product needs so that a row's result does not depend on how many rows there are.

Kernels choose another order of summation for few rows, so a request's last bits, and in time its text, would change with
what else runs. Which row counts agree is a property of the library, the shape and the processor: it is measured at start
instead of assumed (oneDNN: all but a single row of wide layers; MKL in fp32: multiples of four).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

CANDIDATES: Final = (1, 2, 4, 8, 16)
_MULTIPLES: Final = (1, 2, 3, 5, 7, 9, 17)
_REFERENCE: Final = 272  # rows; far enough from the special cases of small counts
_COMPARED: Final = 48


def row_multiple(product: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """The smallest candidate m such that products of m, 2m, 3m … rows agree bit for bit.

    `product` maps [..., rows, width] to [..., rows, anything]; x is a `probe_input` of `_REFERENCE` rows, and what it is
    multiplied with a `probe_weight`.
    """
    reference = product(x)

    def agree(rows: int) -> bool:
        shown = min(rows, _COMPARED)
        return torch.equal(product(x[..., :rows, :].contiguous())[..., :shown, :], reference[..., :shown, :])

    for candidate in CANDIDATES[:-1]:
        if all(agree(candidate * times) for times in _MULTIPLES):
            return candidate
    return CANDIDATES[-1]


def probe_weight(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """[rows, width] whose products with a `probe_input` are nothing but rounding errors.

    Large terms cancel in pairs, far from each other, so any other order of summation shows in most results. With random
    numbers it would show once in ten thousand results in bf16, and a measurement would miss it.
    """
    half = torch.randn(min(rows, 64), width // 2, generator=torch.Generator().manual_seed(width))
    cancelling = _spread(torch.cat((half, -half), 1), width).to(dtype)
    return cancelling.repeat(-(-rows // 64), 1)[:rows].contiguous()


def probe_input(batch: tuple[int, ...], width: int, dtype: torch.dtype) -> Tensor:
    """[*batch, rows, width] to multiply with a `probe_weight`."""
    half = torch.randn(*batch, _REFERENCE, width // 2, generator=torch.Generator().manual_seed(width + 1))
    return _spread(torch.cat((half, half), -1), width).to(dtype)


def _spread(pairs: Tensor, width: int) -> Tensor:
    """Shuffle the columns, the same way for each width; an odd one gets a column of zeros."""
    if pairs.shape[-1] < width:
        pairs = torch.cat((pairs, pairs.new_zeros(*pairs.shape[:-1], 1)), -1)
    return pairs[..., torch.randperm(width, generator=torch.Generator().manual_seed(width + 2))]


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
