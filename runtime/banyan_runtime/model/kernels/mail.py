"""What goes between the host and a GPU with each step, by kernels that read and write pinned memory of the host: a copy of a few numbers
waits some six microseconds for its turn between kernels, and kernels behind it as long.

They are no dependent launches, and none is begun before `turn_over` ends, which waits for `fetch` as any launch does: what a step is
told is there when its first kernel begins, which those behind it rely on (`dependent.py`). What is fetched by itself is there for who
awaits what came earlier."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def deliver(
    tokens,  # int64 [count]
    failed,  # bool [count]
    owners,  # int64 [count]: the rows that they were drawn for
    latest,  # int64 [rows]: each one's last token
    arriving,  # int32 [count], of the host: the tokens; -1: failed
    count,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    token = tl.load(tokens + at, mask=there)
    tl.store(latest + tl.load(owners + at, mask=there), token, mask=there)
    tl.store(arriving + at, tl.where(tl.load(failed + at, mask=there), -1, token.to(tl.int32)), mask=there)


@triton.jit(do_not_specialize=["count", "width"])
def fetch(
    pages,  # int32 [TURNS, width], of the host
    turn,  # int32 [1]: of the last step that has begun, below TURNS
    target,  # int32 [count]
    count,
    width,
    AHEAD: tl.constexpr,  # 1: the page of the step that begins
    TURNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What a step is told, captured."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    page = pages + (tl.load(turn) + AHEAD) % TURNS * width
    tl.store(target + at, tl.load(page + at, mask=at < count, cache_modifier=".cv"), mask=at < count)


@triton.jit
def turn_over(turn, TURNS: tl.constexpr):
    tl.store(turn, (tl.load(turn) + 1) % TURNS)


@triton.jit(do_not_specialize=["count", "width"])
def answer(
    tokens,  # int64 [count]
    failed,  # bool [count]
    rows,  # int32 [count]: that they were drawn for
    counts,  # int32 [count]: 0: of a padded row
    latest,  # int64 [rows]: each one's last token
    pages,  # int32 [TURNS, width], of the host: the tokens; -1: failed
    turn,  # int32 [1]: of this step
    count,
    width,
    TURNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`deliver`, captured."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    real = there & (tl.load(counts + at, mask=there, other=0) > 0)
    token = tl.load(tokens + at, mask=real, other=0)
    tl.store(latest + tl.load(rows + at, mask=real, other=0).to(tl.int64), token, mask=real)
    page = pages + tl.load(turn) * width
    tl.store(page + at, tl.where(tl.load(failed + at, mask=real, other=0), -1, token.to(tl.int32)), mask=real)
