"""Repetition, frequency and presence penalties: what they count lives where tokens are sampled.

The tokens of each request with penalties are kept by its row, and how often each was generated is counted anew at every step:
counts by row and vocabulary would take more memory than many a model. The host knows only how many tokens there are, so a step
can be launched before anybody knows the tokens of the step before.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from banyan_runtime.model import device as devices
from banyan_runtime.model.device import tensor
from banyan_runtime.step import I32, Bool, Histories, SamplingColumns, TableShape

I64 = npt.NDArray[np.int64]

LARGEST: Final = 1e30
"""Penalised logits stay within this: a repetition penalty of 1e-38 would make infinities."""
_MOST: Final = 1 << 20  # tokens looked at together
_TOGETHER: Final = 32  # rows, likewise: the counts of a vocabulary of 152,000 take 19 MB


class Penalties:
    def __init__(self, shape: TableShape, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._width = _width(shape.positions)
        self._device = device
        self._penalised = np.zeros(shape.rows, dtype=np.bool_)  # rows whose requests have penalties
        self._lens = np.zeros(shape.rows, dtype=np.int64)
        self._prompt_lens = np.zeros(shape.rows, dtype=np.int64)
        self._tokens = devices.zeros((shape.rows, self._width), device)
        self._counts = devices.zeros((_TOGETHER, vocab_size), device)  # of whoever was counted last

    def begin(self, histories: Histories) -> None:
        """Take over what some rows have said so far."""
        for index, (row, prompt_len) in enumerate(zip(histories.rows.tolist(), histories.prompt_lens.tolist(), strict=True)):
            tokens = histories.tokens[index]
            self._penalised[row], self._lens[row], self._prompt_lens[row] = True, len(tokens), prompt_len
            self._tokens[row, : len(tokens)] = tensor(tokens, self._device, torch.int32)

    def apply(self, logits: Tensor, rows: I32, columns: SamplingColumns) -> None:
        """Change fp32 logits [n, vocab_size] of rows [n] in place.

        Repetition over prompt and output first, then frequency and presence over the output: vLLM's order.
        """
        those = penalised(columns)
        self.apply_none(rows[~those])
        at = np.flatnonzero(those)
        chosen = rows[at]
        assert self._penalised[chosen].all(), "a row with penalties has no history"
        # Without a repetition penalty the prompt does not count.
        starts = np.where(columns.repetition_penalty[at] != 1, 0, self._prompt_lens[chosen])
        counted = self._lens[chosen] - starts
        some = np.flatnonzero(counted)
        while len(some):
            part = min(_TOGETHER, max(1, _MOST // int(counted[some].max())))
            now, some = some[:part], some[part:]
            self._change(logits, at[now], chosen[now], starts[now], counted[now], columns)

    def apply_none(self, rows: I32) -> None:
        """These rows sample without penalties: they belong to other requests than those whose tokens were noted."""
        self._penalised[rows] = False

    def count(self, rows: I32, tokens: Tensor) -> None:
        """Note the tokens int64 [n] drawn for rows [n]."""
        at = np.flatnonzero(self._penalised[rows])
        if not len(at):
            return
        chosen = rows[at].astype(np.int64)
        drawn = tokens if len(at) == len(rows) else tokens.index_select(0, tensor(at, self._device))
        self._tokens.view(-1).index_copy_(0, tensor(chosen * self._width + self._lens[chosen], self._device), drawn.to(torch.int32))
        self._lens[chosen] += 1

    def _change(self, logits: Tensor, at: I64, rows: I32, starts: I64, counted: I64, columns: SamplingColumns) -> None:
        def column(values: npt.NDArray[np.generic]) -> Tensor:
            return tensor(values, self._device, torch.float32 if values.dtype == np.float32 else torch.int64).unsqueeze(1)

        # [n, most tokens]: shorter lists repeat their last token, for a token seen twice is written twice with the same value.
        offsets = torch.arange(int(counted.max()), device=self._device)
        ends = column(counted)
        places = torch.minimum(offsets, ends - 1) + column(rows * np.int64(self._width) + starts)
        ids = torch.take(self._tokens, places).long()
        cells = ids + column(at * self._vocab_size)
        values = torch.take(logits, cells)
        repetition = column(columns.repetition_penalty[at])
        values = torch.where(values > 0, values / repetition, values * repetition)
        if columns.frequency_penalty[at].any() or columns.presence_penalty[at].any():
            generated = self._count(ids, (offsets >= column(self._prompt_lens[rows] - starts)) & (offsets < ends)).float()
            values -= column(columns.frequency_penalty[at]) * generated
            values -= column(columns.presence_penalty[at]) * (generated > 0)
        logits.view(-1).index_copy_(0, cells.view(-1), values.clamp_(-LARGEST, LARGEST).view(-1))

    def _count(self, ids: Tensor, generated: Tensor) -> Tensor:
        """How often each of ids [n, m] is among those of its row that were generated, bool [n, m]: int32 [n, m]."""
        cells = ids + torch.arange(0, len(ids) * self._vocab_size, self._vocab_size, device=self._device).unsqueeze(1)
        counts = self._counts.view(-1)
        counts.index_fill_(0, cells.view(-1), 0)  # before, not behind: a step may end anywhere for want of memory
        counts.index_add_(0, cells.view(-1), generated.view(-1).to(torch.int32))
        return torch.take(counts, cells)


def table_bytes(shape: TableShape) -> int:
    """What the tokens of all rows take where memory counts before it is written, as on CUDA."""
    return shape.rows * _width(shape.positions) * torch.int32.itemsize


def _width(positions: int) -> int:
    return positions + 1  # the last token drawn has a position of its own


def penalised(columns: SamplingColumns) -> Bool:
    """Which rows have penalties at all."""
    found: Bool = (columns.repetition_penalty != 1) | (columns.frequency_penalty != 0) | (columns.presence_penalty != 0)
    return found
