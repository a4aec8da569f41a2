"""Repetition, frequency and presence penalties: what they count lives where tokens are sampled.

A row with penalties has a cell here: the tokens of its request and how often each was generated. The host knows only how
many tokens there are, so a step can be launched before anybody knows the tokens of the step before.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from banyan_runtime.model.device import tensor
from banyan_runtime.step import I32, Bool, Histories, SamplingColumns, TableShape

I64 = npt.NDArray[np.int64]

LARGEST: Final = 1e30
"""Penalised logits stay within this: a repetition penalty of 1e-38 would make infinities, and a temperature of 1e-6 may still
divide them."""
_NOWHERE: Final = -1
_FIRST_CELLS: Final = 8
_MOST: Final = 1 << 20  # tokens looked at together


class Penalties:
    def __init__(self, shape: TableShape, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._width = shape.positions + 1  # the last token drawn has a position of its own
        self._device = device
        self._cells = np.full(shape.rows, _NOWHERE, dtype=np.int64)  # of each row
        self._free: list[int] = []
        # Of each cell; a device's part grows by doubling, as far as rows with penalties run at once.
        self._lens = np.zeros(0, dtype=np.int64)
        self._prompt_lens = np.zeros(0, dtype=np.int64)
        self._tokens = torch.zeros((0, self._width), dtype=torch.int32, device=device)
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)  # of generated tokens

    @property
    def bytes(self) -> int:
        return self._tokens.nbytes + self._counts.nbytes

    def begin(self, histories: Histories) -> None:
        """Take over what some rows have said so far."""
        for index, (row, prompt_len) in enumerate(zip(histories.rows.tolist(), histories.prompt_lens.tolist(), strict=True)):
            if (cell := int(self._cells[row])) == _NOWHERE:
                cell = self._cells[row] = self._take()
            tokens = tensor(histories.tokens[index], self._device)
            self._lens[cell], self._prompt_lens[cell] = len(tokens), prompt_len
            self._tokens[cell, : len(tokens)] = tokens.to(torch.int32)
            self._counts[cell].zero_()
            if prompt_len < len(tokens):
                generated = tokens[prompt_len:]
                self._counts[cell].index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))

    def apply(self, logits: Tensor, rows: I32, columns: SamplingColumns) -> None:
        """Change fp32 logits [n, vocab_size] of rows [n] in place.

        Repetition over prompt and output first, then frequency and presence over the output: vLLM's order.
        """
        penalised = _penalised(columns)
        self._forget(rows[~penalised])
        chosen = np.flatnonzero(penalised)
        cells = self._cells[rows[chosen]]
        assert (cells >= 0).all(), "a row with penalties has no history"
        # Without a repetition penalty the prompt does not count.
        starts = np.where(columns.repetition_penalty[chosen] != 1, 0, self._prompt_lens[cells])
        counted = self._lens[cells] - starts
        some = np.flatnonzero(counted)
        while len(some):
            part = max(1, _MOST // int(counted[some].max()))
            now, some = some[:part], some[part:]
            self._change(logits, chosen[now], cells[now], starts[now], counted[now], columns)

    def count(self, rows: I32, tokens: Tensor) -> None:
        """Note the tokens int64 [n] drawn for rows [n]."""
        chosen = np.flatnonzero(self._cells[rows] >= 0)
        if not len(chosen):
            return
        cells = self._cells[rows[chosen]]
        drawn = tokens if len(chosen) == len(rows) else tokens.index_select(0, tensor(chosen, self._device))
        self._tokens.view(-1).index_copy_(0, tensor(cells * self._width + self._lens[cells], self._device), drawn.to(torch.int32))
        where = tensor(cells * self._vocab_size, self._device) + drawn
        self._counts.view(-1).index_add_(0, where, torch.ones_like(where, dtype=torch.int32))
        self._lens[cells] += 1

    def _change(self, logits: Tensor, at: I64, cells: I64, starts: I64, counted: I64, columns: SamplingColumns) -> None:
        def column(values: npt.NDArray[np.generic]) -> Tensor:
            return tensor(values, self._device, torch.float32 if values.dtype == np.float32 else torch.int64).unsqueeze(1)

        # [n, most tokens]: shorter lists repeat their last token, for a token seen twice is written twice with the same value.
        offsets = torch.arange(int(counted.max()), device=self._device)
        places = torch.minimum(offsets, column(counted - 1)) + column(cells * self._width + starts)
        ids = torch.take(self._tokens, places).long()
        generated = torch.take(self._counts, ids + column(cells * self._vocab_size)).float()
        ids += column(at * self._vocab_size)
        values = torch.take(logits, ids)
        repetition = column(columns.repetition_penalty[at])
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= column(columns.frequency_penalty[at]) * generated
        values -= column(columns.presence_penalty[at]) * (generated > 0)
        logits.view(-1).index_copy_(0, ids.view(-1), values.clamp_(-LARGEST, LARGEST).view(-1))

    def _take(self) -> int:
        if not self._free:
            have = len(self._lens)
            more = have or _FIRST_CELLS
            self._free = list(range(have + more - 1, have - 1, -1))
            self._lens, self._prompt_lens = np.pad(self._lens, (0, more)), np.pad(self._prompt_lens, (0, more))
            self._tokens = torch.cat((self._tokens, self._tokens.new_zeros((more, self._width))))
            self._counts = torch.cat((self._counts, self._counts.new_zeros((more, self._vocab_size))))
        return self._free.pop()

    def _forget(self, rows: I32) -> None:
        """A row that samples without penalties belongs to another request: its cell is free."""
        for row in rows[self._cells[rows] >= 0].tolist():
            self._free.append(int(self._cells[row]))
            self._cells[row] = _NOWHERE


def _penalised(columns: SamplingColumns) -> Bool:
    """Which rows have penalties at all."""
    penalised: Bool = (columns.repetition_penalty != 1) | (columns.frequency_penalty != 0) | (columns.presence_penalty != 0)
    return penalised
