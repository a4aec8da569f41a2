"""Steps of nobody's texts, whose keys go to the padding slot: for who tries or measures what a step takes."""

from __future__ import annotations

from typing import Literal

import numpy as np

from banyan_runtime.step import I32, PADDING_SLOT, SamplingColumns, Step


def blank(query_lens: I32, kv_lens: I32, page_size: int = 1, mode: Literal["prefill", "decode"] = "prefill") -> Step:
    """A sequence of each length, in the first rows of the table, which draws nothing."""
    count, tokens = len(query_lens), int(query_lens.sum())
    begun = np.repeat(kv_lens - np.cumsum(query_lens, dtype=np.int32), query_lens)
    zeros, ones = np.zeros(count, np.float32), np.ones(count, np.float32)
    none = np.zeros(count, np.int32)
    return Step(
        mode=mode,
        token_ids=np.zeros(tokens, np.int32),
        positions=np.arange(tokens, dtype=np.int32) + begun,
        out_slots=np.full(tokens, PADDING_SLOT, np.int32),
        rows=np.arange(count, dtype=np.int32),
        query_lens=query_lens,
        kv_lens=kv_lens,
        samples=none,
        sampling=SamplingColumns(ones, none, ones, zeros, zeros, zeros, ones, np.arange(count, dtype=np.uint64)),
        page_size=page_size,
    )
