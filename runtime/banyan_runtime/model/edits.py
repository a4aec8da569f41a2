"""Changes to logits that a step names by token id: biases, forbidden ids, masks of grammars.

Each takes fp32 logits [n, vocab_size] of the sequences `picked` [n] of a step, one of which may occur several times, and
changes them in place.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from banyan_runtime.model.device import tensor
from banyan_runtime.step import Ragged, TokenBiases, TokenMask

I64 = npt.NDArray[np.int64]
_TOGETHER: Final = 64  # rows that masks are unpacked of at once, ten bytes a token


def add_biases(logits: Tensor, bias: TokenBiases, picked: I64) -> None:
    """logit_bias; an id named twice gets both."""
    cells, taken = _cells(bias.ids, picked, logits.shape[1])
    if len(cells):
        logits.view(-1).index_add_(0, tensor(cells, logits.device), tensor(bias.values[taken], logits.device, torch.float32))


def forbid(logits: Tensor, banned: Ragged, picked: I64) -> None:
    """Ids that must not be drawn."""
    cells, _ = _cells(banned, picked, logits.shape[1])
    if len(cells):
        logits.view(-1).index_fill_(0, tensor(cells, logits.device), -math.inf)


def allow(logits: Tensor, mask: TokenMask, picked: I64) -> None:
    """Forbid every id that a sequence's mask does not allow."""
    masks = mask.masks[picked]
    every = np.flatnonzero(masks >= 0)
    for first in range(0, len(every), _TOGETHER):
        rows = every[first : first + _TOGETHER]
        words = np.ascontiguousarray(mask.words[masks[rows]]).astype("<u4", copy=False)
        bits = np.unpackbits(words.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
        where = tensor(rows, logits.device)
        forbidden = tensor(bits, logits.device, torch.uint8) == 0
        logits.index_copy_(0, where, logits.index_select(0, where).masked_fill_(forbidden, -math.inf))


def _cells(lists: Ragged, picked: I64, vocabulary: int) -> tuple[I64, I64]:
    """Flat indices into the picked rows' logits of the ids that their lists name, and where in `values` they stand.

    An id beyond the vocabulary (a tokenizer may have more than the model) has no logit to change.
    """
    lens = np.diff(lists.offsets)[picked].astype(np.int64)
    rows = np.repeat(np.arange(len(picked)), lens)
    places = np.arange(len(rows)) + np.repeat(lists.offsets[picked] - (np.cumsum(lens) - lens), lens)
    ids = lists.values[places]
    known = np.flatnonzero((ids >= 0) & (ids < vocabulary))
    return rows[known] * vocabulary + ids[known], places[known]
