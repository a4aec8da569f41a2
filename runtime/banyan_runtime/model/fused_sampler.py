"""`sampler.sample` on CUDA in two launches, without waiting for the GPU: the host prepares the next step meanwhile (`kernels/draw.py`).
And grammars' masks before it, in one (`kernels/masks.py`)."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from banyan_runtime.model import noise, sampler
from banyan_runtime.model.device import tensor
from banyan_runtime.model.kernels import power_of_two
from banyan_runtime.step import I32, U32, SamplingColumns, TokenMask

_PART: Final = 4096  # tokens: 16 for each of a program's threads, and some 40 parts of a large vocabulary, so that one row is work for many
_WARPS: Final = 8


class FusedSampler:
    def __init__(self) -> None:
        from banyan_runtime.model.kernels import dependent, draw, masks

        self.settings = draw.SETTINGS.value
        self._kernels = draw
        self._options = dependent.options
        self._masks = masks
        self._told: tuple[SamplingColumns, I32, U32] | None = None  # columns; of them and of their seeds what positions do not change

    def compile(self, vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
        """Draw once under a mask, and pick once each way."""
        one = np.ones(1, np.float32)
        columns = SamplingColumns(one, np.zeros(1, np.int32), one, 0 * one, 0 * one, 0 * one, one, np.zeros(1, np.uint64))
        logits = torch.zeros(1, vocabulary, device=device)
        self.allow(
            logits, TokenMask(np.full((1, -(-vocabulary // 32)), 0xFFFFFFFF, np.uint32), np.zeros(1, np.int32)), np.zeros(1, np.int64)
        )
        tokens, failed = self(logits, columns, (position := np.zeros(1, np.int32)))
        self(logits.to(dtype), columns, position)
        self.pick(logits.to(dtype), None, tokens, failed)

    def __call__(self, logits: Tensor, columns: SamplingColumns, positions: I32) -> tuple[Tensor, Tensor]:
        """The contract is `sampler.sample`'s. The tokens are its too, but for draws that its fp32 probabilities decide by rounding.

        logits: [n, vocab_size], contiguous, in fp32 or in the type that they were computed in; they stay as they are.
        """
        n, device = len(logits), logits.device
        tokens, failed = torch.empty(n, dtype=torch.int64, device=device), torch.empty(n, dtype=torch.bool, device=device)
        if n:
            self.pick(logits, tensor(self.told(columns, positions), device, torch.int32), tokens, failed)
        return tokens, failed

    def told(self, columns: SamplingColumns, positions: I32) -> I32:
        """All that differs between rows as one array, since every copy to the device costs as much as a launch."""
        last = self._told
        if last is None or last[0] is not columns:  # a step's columns are those of the step before where its rows are
            temperatures = np.where(sampler.greedy(columns), np.float32(0), columns.temperature)
            words = (temperatures, columns.top_k, columns.top_p, columns.min_p, seeds := noise.of_seeds(columns.seed))
            last = self._told = columns, np.stack([word.view(np.int32) for word in words], axis=1), seeds
        told = last[1].copy()
        told[:, -1] = noise.behind(last[2], positions).view(np.int32)
        return told

    def pick(self, logits: Tensor, settings: Tensor | None, tokens: Tensor, failed: Tensor) -> None:
        n, vocabulary = logits.shape
        if not n:
            return
        assert logits.is_contiguous()
        parts = -(-vocabulary // _PART)
        numbers = torch.empty((n, 3, parts), dtype=torch.float64, device=logits.device)
        ids = torch.empty((n, 2, parts), dtype=torch.int32, device=logits.device)
        options = {"DRAWN": settings is not None, "num_warps": _WARPS, **self._options(logits.device)}
        told = ids if settings is None else settings
        self._kernels.survey[(n, parts)](logits, told, numbers, ids, VOCABULARY=vocabulary, PART=_PART, **options)
        self._kernels.choose[(n,)](
            logits, told, numbers, ids, tokens, failed,
            VOCABULARY=vocabulary, PARTS=parts, WIDTH=power_of_two(parts), PART=_PART, **options,
        )  # fmt: skip

    def allow(self, logits: Tensor, mask: TokenMask, picked: npt.NDArray[np.int64]) -> None:
        """The contract is `edits.allow`'s; the bits are read on the device."""
        assert logits.is_contiguous()
        masks = mask.masks[picked]
        masked = np.flatnonzero(masks >= 0)
        if not len(masked):
            return
        device, (_, words), vocabulary = logits.device, mask.words.shape, logits.shape[1]
        assert 32 * words >= vocabulary
        rows = tensor(np.stack((masked, masks[masked]), axis=1), device, torch.int32)
        bits = tensor(mask.words.view(np.int32), device, torch.int32)
        self._masks.allow[(len(masked), -(-vocabulary // _PART))](
            logits, bits, rows, VOCABULARY=vocabulary, WORDS=words, PART=_PART, num_warps=_WARPS
        )
