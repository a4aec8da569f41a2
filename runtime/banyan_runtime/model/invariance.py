"""Finds how many rows a matrix product needs so that a row's result does not depend on how many rows there are.

Kernels choose another order of summation for few rows, so a request's last bits, and in time its text, would change with
what else runs. Which row counts agree is a property of the library and the processor: it is measured at start instead of
assumed (oneDNN in bf16: every count; oneDNN in fp32: all but one row; MKL in fp32: multiples of four).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

CANDIDATES: Final = (1, 2, 4, 8, 16)
_MULTIPLES: Final = (1, 2, 3, 5, 7, 9)
_REFERENCE: Final = 48  # rows; far enough from the special cases of small counts


def row_multiple(product: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype, batch: tuple[int, ...] = ()) -> int:
    """The smallest candidate m such that products of m, 2m, 3m … rows agree bit for bit.

    `product` maps [*batch, rows, width] to [*batch, rows, anything]; every batch extent is also tried alone.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*batch, _REFERENCE, width, generator=generator).to(dtype)
    reference = product(x)

    def agree(rows: int) -> bool:
        return torch.equal(product(x[..., :rows, :].contiguous()), reference[..., :rows, :])

    for candidate in CANDIDATES[:-1]:
        if all(agree(candidate * times) for times in _MULTIPLES if candidate * times < _REFERENCE):
            return candidate
    return CANDIDATES[-1]


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
