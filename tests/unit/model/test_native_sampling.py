"""Tokens drawn by the native runner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from banyan_runtime.model import noise, sampler
from banyan_runtime.step import SamplingColumns
from tests.support.models.natives import native
from tests.support.models.tiny import VOCAB, gate, make

WANTED: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]] = {}
"""What torch drew from each kind of logits, to which every variant is held."""


def settings(n: int, seed: int) -> SamplingColumns:
    random = np.random.default_rng(seed)

    def one_of(*values: float) -> np.ndarray:
        return random.choice(values, n).astype(np.float32)

    neutral = np.zeros(n, np.float32)
    return SamplingColumns(
        temperature=one_of(0, 1e-7, 0.05, 0.7, 1.0, 1.0, 2.5, 100),
        top_k=one_of(-1, -1, -1, 0, 1, 2, 20, 400, 1e6).astype(np.int32),
        top_p=one_of(1, 1, 1, 0, 1e-6, 0.3, 0.9, 0.999),
        min_p=one_of(0, 0, 0, 0.05, 0.5, 1),
        frequency_penalty=neutral,
        presence_penalty=neutral,
        repetition_penalty=neutral + 1,
        seed=random.integers(0, 1 << 64, n, dtype=np.uint64),
    )


@pytest.mark.parametrize("kind", ["flat", "peaked", "alike", "few", "wide"])
@pytest.mark.parametrize("vocabulary", gate([503, 17, 40_001]))
def test_tokens_are_drawn_as_torch_draws_them(variant: str, tmp_path: Path, vocabulary: int, kind: str) -> None:
    """But where two have scores that are equal up to rounding."""
    model = make(tmp_path, "llama", vocab_size=vocabulary, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1)
    runner = native(model)
    rows, generator = 400, torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(rows, vocabulary, generator=generator)
    if kind == "peaked":
        logits *= 6
    elif kind == "alike":
        logits = logits.round()
    elif kind == "few":
        logits[torch.rand(logits.shape, generator=generator) > 3 / vocabulary] = -torch.inf
        logits[:, 3] = logits[:, 3].nan_to_num(neginf=0.0)
    elif kind == "wide":
        logits *= 1e30
    logits[5, vocabulary // 2], logits[6], logits[7, 0] = torch.nan, -torch.inf, torch.inf
    columns, positions = settings(rows, vocabulary), np.arange(rows, dtype=np.int32)
    if (vocabulary, kind) not in WANTED:
        WANTED[vocabulary, kind] = sampler.sample(logits.clone(), columns, positions)
    wanted, wanted_failed = WANTED[vocabulary, kind]
    tokens, failed = runner.forward.sample(logits, columns, positions)
    assert torch.equal(failed, wanted_failed)
    assert failed.nonzero().flatten().tolist() == [5, 6, 7]
    different = ((tokens != wanted) & ~failed).nonzero().flatten().tolist()
    assert len(different) <= rows // 50
    for row in different:
        assert abs(drawn_for(logits[row], columns, row, int(tokens[row])) - drawn_for(logits[row], columns, row, int(wanted[row]))) < 1e-4


def test_later_positions_of_the_same_rows_are_drawn_for_anew(variant: str, tmp_path: Path) -> None:
    runner = native(make(tmp_path, "llama", hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1))
    columns, logits = settings(300, 1), torch.randn(300, VOCAB, generator=torch.Generator().manual_seed(1))
    drawn = []
    for first in (0, 1000, 0):
        positions = np.arange(first, first + 300, dtype=np.int32)
        drawn.append(runner.forward.sample(logits.clone(), columns, positions)[0])
        assert torch.equal(drawn[-1], runner.forward.sample(logits.clone(), replace(columns), positions)[0])
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


def drawn_for(logits: torch.Tensor, columns: SamplingColumns, row: int, token: int) -> float:
    """What a token is drawn for: its log probability and its noise."""
    bits = noise.hashes(columns.seed[row : row + 1], np.array([row], np.int32), torch.tensor([token]))
    scaled = torch.log_softmax((logits.double() - logits.max().double()) / max(float(columns.temperature[row]), 1e-30), -1)
    return float(scaled[token] + noise.gumbel(bits)[0, 0])
