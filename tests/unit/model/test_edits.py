"""Masks of many rows, unpacked some at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from banyan_runtime.model import edits
from banyan_runtime.step import TokenMask


@pytest.mark.parametrize("together", [1, 3, 64])
def test_each_row_obeys_its_own_mask_and_the_others_none(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    monkeypatch.setattr(edits, "_TOGETHER", together)
    random, vocabulary = np.random.default_rng(1), 70
    words = random.integers(0, 1 << 32, (4, 3), dtype=np.uint32)
    masks = np.array([-1, 0, 1, 2, 3, -1, 3, 2, 1, 0], np.int32)
    picked = np.array([0, 1, 2, 3, 3, 4, 5, 6, 7, 7, 8, 9])
    logits = torch.from_numpy(random.normal(size=(12, vocabulary)).astype(np.float32))
    before = logits.clone()
    edits.allow(logits, TokenMask(words, masks), picked)
    for row, mask in enumerate(masks[picked].tolist()):
        for token in range(vocabulary):
            allowed = mask < 0 or bool(words[mask, token // 32] >> (token % 32) & 1)
            assert logits[row, token] == (before[row, token] if allowed else -torch.inf)
