"""Logits → tokens: temperature, filters, draw.

Filters are joint: top_k, top_p and min_p all judge the same softmax. Nothing here sorts or draws over [rows, vocabulary]
unless it must: on the CPU that costs more than the model (10 ms a sorted row of 151,936).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from banyan_runtime.model import edits, noise
from banyan_runtime.model.device import tensor
from banyan_runtime.step import F32, I32, U64, Bool, SamplingColumns, TokenMask

GREEDY_BELOW: Final = 1e-6  # temperature
_WIDTHS: Final = (256, 4096)  # candidates looked at before the whole row is sorted
_TIES: Final = 64  # candidates looked at beyond the largest top_k, for equal probabilities at its edge
_SURE: Final = 2.5
"""The largest (log probability + Gumbel) of a row is a Gumbel variable itself: below ln(mass) - 2.5 once in 200,000 draws.
Cells that cannot reach this bound are ruled out before the logarithms; where none reaches it, all are computed."""


class Sampler(Protocol):
    """Makes tokens of logits [n, vocab_size]: in fp32, or for `pick` in the type that they were computed in."""

    settings: int
    """Words by which `pick` is told how to draw a token; 0: it finds the likeliest alone."""

    def compile(self, vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
        """Be ready for such logits, which `pick` gets in that type: no request waits for a compiler then."""

    def allow(self, logits: Tensor, mask: TokenMask, picked: npt.NDArray[np.int64]) -> None:
        """`Forward.allow`."""

    def told(self, columns: SamplingColumns, positions: I32) -> I32:
        """[n, settings] for `pick`: that `sample` would draw with these."""

    def pick(self, logits: Tensor, settings: Tensor | None, tokens: Tensor, failed: Tensor) -> None:
        """Tokens into int64 [n], and which rows failed into bool [n]: those with NaN, and those whose largest logit is infinite; their
        tokens are 0. Drawn as int32 [n, settings] tells; None: that with the largest logit, of equal ones the first. Can be captured."""

    def __call__(self, logits: Tensor, columns: SamplingColumns, positions: I32) -> tuple[Tensor, Tensor]:
        """`sample`."""


class PlainSampler:
    """With torch's operations."""

    settings = 0

    def compile(self, vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
        """Nothing is to be done."""

    def allow(self, logits: Tensor, mask: TokenMask, picked: npt.NDArray[np.int64]) -> None:
        edits.allow(logits, mask, picked)

    def told(self, columns: SamplingColumns, positions: I32) -> I32:
        raise AssertionError("it draws when it is called")

    def pick(self, logits: Tensor, settings: Tensor | None, tokens: Tensor, failed: Tensor) -> None:
        assert settings is None, "it draws when it is called"
        highest, found = logits.max(-1)
        failed.copy_(~torch.isfinite(highest))
        tokens.copy_(found.masked_fill_(failed, 0))

    def __call__(self, logits: Tensor, columns: SamplingColumns, positions: I32) -> tuple[Tensor, Tensor]:
        return sample(logits, columns, positions)


@dataclass(frozen=True, slots=True)
class _Draw:
    """Filters and noise of the rows drawn from, as columns."""

    top_k: I32
    top_p: F32
    min_p: F32
    seed: U64
    position: I32

    def __getitem__(self, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> _Draw:
        return _Draw(self.top_k[rows], self.top_p[rows], self.min_p[rows], self.seed[rows], self.position[rows])


def greedy(columns: SamplingColumns) -> Bool:
    """Which rows get their likeliest token."""
    found: Bool = (columns.temperature < GREEDY_BELOW) | (columns.top_k == 1)
    return found


def sample(logits: Tensor, columns: SamplingColumns, positions: I32) -> tuple[Tensor, Tensor]:
    """One token for each row of fp32 logits [n, vocab_size].

    columns: n cells each; positions: absolute position of each token drawn. Returns token ids int64 [n] and failed bool [n]:
    rows with NaN, or without any admissible token. The tokens of failed rows are some ids of the vocabulary.
    """
    vocabulary = logits.shape[1]
    highest, tokens = logits.max(-1)
    failed = ~torch.isfinite(highest)
    drawn = np.flatnonzero(~greedy(columns))
    if len(drawn):
        cells = _Draw(columns.top_k, columns.top_p, columns.min_p, columns.seed, positions)[drawn]
        where = tensor(drawn, logits.device)
        temperatures = tensor(columns.temperature[drawn], logits.device, torch.float32).unsqueeze(1)
        # Relative to the largest: a huge logit over a small temperature would be infinite, and all probabilities NaN.
        scaled = logits.index_select(0, where).sub_(highest.index_select(0, where).unsqueeze(1)).div_(temperatures)
        probabilities = torch.softmax(scaled, -1)
        # A failed row's probabilities are NaN; any numbers do instead, its token is not used.
        probabilities.masked_fill_(failed.index_select(0, where).unsqueeze(1), 1.0 / vocabulary)
        tokens.index_copy_(0, where, _draw(probabilities, cells))
    # The next step looks its tokens up for all rows together: one that is no token would end it for everybody.
    outside = (tokens < 0) | (tokens >= vocabulary)
    return tokens.masked_fill_(outside, 0), failed | outside


def _draw(probabilities: Tensor, cells: _Draw) -> Tensor:
    """Draw a token id for each row of probabilities [n, vocab_size]."""
    tokens = torch.empty(probabilities.shape[0], dtype=torch.int64, device=probabilities.device)
    filtered = (cells.top_k > 1) | (cells.top_p < 1)
    for rows, draw in ((np.flatnonzero(filtered), _draw_filtered), (np.flatnonzero(~filtered), _draw_open)):
        if len(rows):
            where = tensor(rows, probabilities.device)
            tokens.index_copy_(0, where, draw(probabilities.index_select(0, where), cells[rows]))
    return tokens


def _draw_filtered(probabilities: Tensor, cells: _Draw) -> Tensor:
    """Draw where top_k or top_p cuts the tail off, from as few of the likeliest tokens as decide the cut."""
    n, vocabulary = probabilities.shape
    device = probabilities.device
    tokens = torch.empty(n, dtype=torch.int64, device=device)
    pending = np.arange(n)
    first = max(_WIDTHS[0], int(cells.top_k.max()) + _TIES)
    for width in (first, *(width for width in _WIDTHS[1:] if first < width), vocabulary):
        width = min(width, vocabulary)
        rows = cells[pending]
        where = tensor(pending, device)
        values, ids = _ranked(probabilities.index_select(0, where), width)
        keep = _kept(values, rows, vocabulary)
        last = values.gather(1, keep.sum(1, keepdim=True) - 1)
        # What was not looked at must be less likely than the last token kept, or it might belong before it.
        decided = (values[:, -1:] < last).squeeze(1) | (width == vocabulary)
        scores = values.double().log() + noise.gumbel(noise.hashes(rows.seed, rows.position, ids))
        best = scores.masked_fill_(~keep, -math.inf).argmax(1, keepdim=True)
        tokens.index_copy_(0, where, ids.gather(1, best).squeeze(1))
        pending = pending[~decided.cpu().numpy()]
        if not len(pending):
            break
    return tokens


def _ranked(probabilities: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` likeliest tokens of each row and their ids, likeliest first, equal ones by id."""
    values, ids = probabilities.topk(width, sorted=False)
    ids, order = ids.sort(1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _kept(values: Tensor, cells: _Draw, vocabulary: int) -> Tensor:
    """Which of the ranked tokens pass all filters: bool, a prefix of each row."""
    device = values.device
    limit = tensor(np.where(cells.top_k > 0, cells.top_k, vocabulary), device).unsqueeze(1)
    mass = tensor(np.where(cells.top_p < 1, cells.top_p, np.inf), device, torch.float32).unsqueeze(1)
    floor = tensor(cells.min_p, device, torch.float32).unsqueeze(1) * values[:, :1]
    before = values.double().cumsum(1) - values.double()
    before[:, 0] = 0.0  # the likeliest token is always kept
    return (torch.arange(values.shape[1], device=device) < limit) & (before <= mass) & (values >= floor)


def _draw_open(probabilities: Tensor, cells: _Draw) -> Tensor:
    """Draw where the whole vocabulary takes part, or all that min_p leaves."""
    if (cells.min_p > 0).any():
        floor = tensor(cells.min_p, probabilities.device, torch.float32).unsqueeze(1) * probabilities.amax(1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < floor, 0.0)
    mass = probabilities.sum(1, keepdim=True)
    bits = noise.hashes(cells.seed, cells.position, torch.arange(probabilities.shape[1], device=probabilities.device))
    # log p + g >= ln(mass) - SURE means -ln u <= p·e^SURE / mass, and 1 - u is at most -ln u. The slack covers fp32 rounding.
    possible = noise.distance_to_one(bits) <= probabilities * (math.exp(_SURE) * 1.001 / mass)
    rows, ids = torch.nonzero(possible & (probabilities > 0), as_tuple=True)
    scores = probabilities[rows, ids].double().log() + noise.gumbel(bits[rows, ids])
    best = torch.full((len(probabilities),), -math.inf, dtype=torch.float64, device=probabilities.device)
    best.scatter_reduce_(0, rows, scores, "amax")
    winners = scores == best[rows]
    tokens = torch.full((len(probabilities),), probabilities.shape[1], dtype=torch.int64, device=probabilities.device)
    tokens.scatter_reduce_(0, rows[winners], ids[winners], "amin")
    unsure = torch.nonzero(best < mass.squeeze(1).double().log() - _SURE).squeeze(1)
    if len(unsure):
        everything = probabilities[unsure].double().log() + noise.gumbel(bits[unsure])
        tokens[unsure] = everything.argmax(1)
    return tokens
