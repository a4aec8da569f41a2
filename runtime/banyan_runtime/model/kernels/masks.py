"""Grammars' masks over logits: bits travel to the GPU as they are, an eighth of a byte for each token."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def allow(
    logits,  # fp32 [n, VOCABULARY]
    words,  # int32 [masks, WORDS]: token t is allowed if words[m, t // 32] >> (t % 32) & 1
    rows,  # int32 [masked, 2]: a row of logits, and its mask
    VOCABULARY: tl.constexpr,
    WORDS: tl.constexpr,
    PART: tl.constexpr,
):
    """Forbid what one row's mask does not allow, in one part of the vocabulary."""
    pair = rows + tl.program_id(0) * 2
    row, mask = tl.load(pair).to(tl.int64), tl.load(pair + 1).to(tl.int64)
    at = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = at < VOCABULARY
    word = tl.load(words + mask * WORDS + at // 32, mask=inside, other=0)
    forbidden = ((word >> (at % 32)) & 1) == 0
    tl.store(logits + row * VOCABULARY + at, float("-inf"), mask=inside & forbidden)
