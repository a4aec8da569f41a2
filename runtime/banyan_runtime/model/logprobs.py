"""Log probabilities of tokens: of those drawn and of prompts, with the likeliest ones beside them.

log_softmax of the raw logits in fp32, each row by itself, so its bits do not depend on what it is computed beside. What a
row's log_softmax subtracts from its logits is all that is kept of it: a copy of all logits would cost more than the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from banyan_runtime.model.device import tensor
from banyan_runtime.step import PromptScores, TokenLogprobs

_CELLS: Final = 1 << 23  # logits of one slice of a prompt, or of those sorted together: 32 MB in fp32, of which there are a few copies
_MOST_ROWS: Final = 1024
_LEAST_ROWS: Final = 16  # a matrix product of fewer rows wastes the weights it reads
_IN_CACHE: Final = 1 << 20  # logits that are gone through together: 4 MB in fp32
_LOWEST: Final = torch.finfo(torch.float32).min  # for what rounds to a probability of 0: JSON has no infinity


@dataclass(frozen=True, slots=True)
class Scores:
    """`TokenLogprobs` on the device."""

    values: Tensor  # fp32 [n]
    top_ids: Tensor  # int64 [n, k]
    top_values: Tensor  # fp32 [n, k]

    def to_host(self) -> Scores:
        return Scores(*(part.to("cpu", non_blocking=True) for part in (self.values, self.top_ids, self.top_values)))

    def numpy(self) -> TokenLogprobs:
        """The columns of a result; only for scores on the host."""
        return TokenLogprobs(self.values.numpy(), self.top_ids.numpy().astype(np.int32), self.top_values.numpy())


@dataclass(frozen=True, slots=True)
class Raw:
    """What is known of fp32 logits [n, vocab_size] before a token is drawn."""

    logits: Tensor
    normalizers: Tensor  # [n]: subtracted from logits they give log probabilities
    top_ids: Tensor  # int64 [n, k], named ones included
    top_values: Tensor  # fp32 [n, k] log probabilities

    def of(self, tokens: Tensor) -> Scores:
        """The scores of one token int64 [n] for each row. The logits must be unchanged."""
        values = self.logits.gather(1, tokens.unsqueeze(1)).squeeze(1) - self.normalizers
        return Scores(_finite(values), self.top_ids, self.top_values)


def raw(logits: Tensor, top: int, named: Tensor | None = None) -> Raw:
    """With the `top` likeliest tokens of each row, and behind them those of `named` (int64 [n, a])."""
    rows = max(1, _IN_CACHE // logits.shape[1])
    parts = [_normalizers(part) for part in torch.split(logits, rows)]
    normalizers = torch.cat(parts)
    ids, values = likeliest(logits, min(top, logits.shape[1]))
    # Logits that differ may have equal log probabilities.
    ids, order = ids.sort(1)
    values, order = _finite(values.gather(1, order) - normalizers.unsqueeze(1)).sort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, order)
    if named is not None:
        ids = torch.cat([ids, named], 1)
        values = torch.cat([values, _finite(logits.gather(1, named) - normalizers.unsqueeze(1))], 1)
    return Raw(logits, normalizers, ids, values)


def of_prompt(
    hidden: Tensor, logits: Callable[[Tensor], Tensor], vocab_size: int, wanted: PromptScores, named: Tensor | None = None
) -> Scores:
    """Of a prompt's next tokens, given the hidden states [T, hidden_size] of the step and what makes logits of some of them;
    `named`: as in `raw`, a row for each position.

    In slices: the logits of 8,192 positions over a vocabulary of 152,000 would take 5 GB.
    """
    device = hidden.device
    at, targets = tensor(wanted.at, device), tensor(wanted.targets, device)
    top = int(wanted.top.max(initial=0))
    rows = max(_LEAST_ROWS, min(_MOST_ROWS, _CELLS // vocab_size) // _LEAST_ROWS * _LEAST_ROWS)
    parts = [
        raw(logits(hidden.index_select(0, at[start : start + rows])), top, None if named is None else named[start : start + rows]).of(
            targets[start : start + rows]
        )
        for start in range(0, max(1, len(at)), rows)
    ]
    return Scores(
        torch.cat([part.values for part in parts]),
        torch.cat([part.top_ids for part in parts]),
        torch.cat([part.top_values for part in parts]),
    )


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids and values of the `count` largest of each row [n, m]; of equal ones at the edge those of lower ids. Each [n, count]."""
    rows = max(1, _CELLS // logits.shape[1])
    if len(logits) > rows:  # keys take 24 bytes for each logit while they are sorted
        found = [likeliest(part, count) for part in torch.split(logits, rows)]
        return torch.cat([ids for ids, _ in found]), torch.cat([values for _, values in found])
    more = min(count + 1, logits.shape[1])
    values, ids = logits.topk(more)
    # Which of several equal values at the edge topk takes is not defined. Keys that no two cells share are slow, but rarely
    # needed; where looking would make the host wait for the device they are always used.
    if count and more > count and (logits.is_cuda or bool((values[:, count - 1] == values[:, count]).any())):
        ids = _keys(logits).topk(count).indices
        values = logits.gather(1, ids)
    return ids[:, :count], values[:, :count]


def _normalizers(logits: Tensor) -> Tensor:
    """Each row's logarithm of the sum of exponentials, [n]. By way of log_softmax, which computes every row alike; a sum over
    one long row is cut among threads."""
    highest, where = logits.max(1, keepdim=True)
    return (highest - torch.log_softmax(logits, 1).gather(1, where)).squeeze(1)


def _finite(scores: Tensor) -> Tensor:
    return scores.nan_to_num_(nan=_LOWEST, neginf=_LOWEST)


def _keys(scores: Tensor) -> Tensor:
    """int64 keys in the order of (value, lower id first)."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 and 0.0 are equal
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (ordered << 32) + torch.arange(scores.shape[1] - 1, -1, -1, device=scores.device)
