"""Rounds of a step where nobody does better: as many steps, one after another."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from banyan_runtime.model.forward import Forward
from banyan_runtime.model.table import SlotTable
from banyan_runtime.step import SamplingColumns, Step


def one_by_one(forward: Forward, step: Step, token_ids: Tensor, table: SlotTable, columns: SamplingColumns | None) -> Tensor:
    """As `Forward.rounds`."""
    assert step.later_slots is not None
    drawn = torch.empty((len(step.rows), step.rounds), dtype=torch.int64, device=token_ids.device)
    lost = torch.zeros(len(step.rows), dtype=torch.bool, device=token_ids.device)
    for index in range(step.rounds):
        if index:
            now = replace(
                step, positions=step.positions + index, kv_lens=step.kv_lens + index, out_slots=step.later_slots[:, index - 1].copy(),
                rounds=1, later_slots=None, updates=None,
            )  # fmt: skip
        else:
            now = step
        hidden = forward.hidden(now, token_ids, table)
        picked = forward.pick(hidden, columns, now.kv_lens)
        token_ids, lost = picked.tokens, lost | picked.failed
        drawn[:, index] = token_ids.masked_fill(lost, -1)
    return drawn
