"""From the hidden states of prompts to one vector each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from banyan_runtime.step import I8, Pooling, Step

_SLICE: Final = 1024  # tokens that are summed at once, so that their copies in float64 stay small


@dataclass(frozen=True, slots=True)
class Vectors:
    """Of the sequences of a step with pooling."""

    sequences: npt.NDArray[np.int64]  # [n] which ones of the step, ascending
    values: Tensor  # fp32 [n, hidden_size]

    def to_host(self) -> Vectors:
        return Vectors(self.sequences, self.values.to("cpu", non_blocking=True))


class Pooler:
    """Pools step by step: each vector is one of all tokens so far. For those that go on it keeps a vector by row, until the row
    begins anew; beside the row's keys and values that is little.

    Means are summed in float64, where sums of float32 numbers are as good as exact: a vector has the same bits however its prompt is
    cut.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def pool(self, hidden: Tensor, step: Step, kinds: I8) -> Vectors | None:
        """`hidden`: normalised states [T, hidden_size] of all tokens of `step`; `kinds` [B]. None where nobody wants a vector."""
        offsets = (np.cumsum(step.query_lens) - step.query_lens).tolist()
        sequences = np.flatnonzero(kinds)
        vectors: list[Tensor] = []
        for sequence in sequences.tolist():
            start, count, length = offsets[sequence], int(step.query_lens[sequence]), int(step.kv_lens[sequence])
            row, kind = int(step.rows[sequence]), int(kinds[sequence])
            states = hidden[start : start + count]
            if kind == Pooling.LAST:
                vectors.append(states[-1].float())
                continue
            vector = self._kept[row] = _whole(states, kind, None if count == length else self._kept[row])
            vectors.append((vector / length if kind == Pooling.MEAN else vector).float())
        return Vectors(sequences, torch.stack(vectors)) if vectors else None


def _whole(states: Tensor, kind: int, before: Tensor | None) -> Tensor:
    """Of the tokens that `before` was made of and those of `states`: the sum, or for CLS the first one's."""
    if kind == Pooling.CLS:
        return states[0].clone() if before is None else before  # a view would keep all states of the step
    assert kind == Pooling.MEAN, kind
    parts = [part.sum(0, dtype=torch.float64) for part in torch.split(states, _SLICE)]
    return torch.stack(parts if before is None else [before, *parts]).sum(0)
