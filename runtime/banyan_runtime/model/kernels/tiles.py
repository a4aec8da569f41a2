"""Products of some rows with a matrix on tensor cores: a weight is read once for a whole tile of rows.

What such a product of a small model takes is not its arithmetic but how long the first bytes of its weights are on their way, and how few
processors read them. So programs ask for theirs before what they multiply them with is there, and lines are cut into stretches where
they are few, whose sums the last program of a tile adds up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from banyan_runtime.model.kernels import cache
from banyan_runtime.model.kernels.dependent import await_earlier, bring_up_next
from banyan_runtime.model.kernels.products import bias_part
from banyan_runtime.model.kernels.rows import activated


@triton.jit(do_not_specialize=["rows"])
def tile(
    x,  # [rows, WIDTH], `stride` apart
    weight,  # [outputs, WIDTH]; GATED: gates, then as many ups
    bias,  # BIASED: one number for each of its rows
    out,  # [rows, outputs]
    parts,  # SPLITS > 1: fp32 [SPLITS, tiles, ROWS, OUTPUTS]
    arrived,  # SPLITS > 1: int32 [tiles], zeros, and zeros again when all is done
    rows,
    stride,
    outputs,
    BIASED: tl.constexpr,
    GATED: tl.constexpr,  # activation(gate) * up, as rows.gated
    GELU: tl.constexpr,  # that activation
    DEPENDENT: tl.constexpr,
    WIDTH: tl.constexpr,  # a multiple of COLUMNS
    ROWS: tl.constexpr,  # of a tile
    OUTPUTS: tl.constexpr,  # likewise
    COLUMNS: tl.constexpr,  # at a time
    SPLITS: tl.constexpr,  # programs that share a tile; GATED: 1, there are outputs enough
    BRING: tl.constexpr,  # columns, at most, that a program brings into the cache before it waits; 0: none
    LATE: tl.constexpr,  # whether the next kernel is brought up when this one has multiplied, not when it begins
):
    """One tile, or a stretch of its columns."""
    tl.static_assert(SPLITS == 1 or not GATED)
    kind = out.dtype.element_ty
    number, split = tl.program_id(0), tl.program_id(1)
    row_tiles = tl.cdiv(rows, ROWS)
    first = number // row_tiles * OUTPUTS  # tiles of the same weights follow one another
    row = number % row_tiles * ROWS + tl.arange(0, ROWS)
    each = first + tl.arange(0, OUTPUTS)
    EACH: tl.constexpr = (WIDTH // COLUMNS + SPLITS - 1) // SPLITS * COLUMNS
    begin = split * EACH
    end = tl.minimum(begin + EACH, WIDTH)
    # Lines there are not are read as the last one: masks would cut what is read at once into pieces.
    line = tl.minimum(each, outputs - 1).to(tl.int64)
    gates = weight + line * WIDTH
    ups = gates + outputs.to(tl.int64) * WIDTH
    if DEPENDENT and BRING > 0:
        FIRST: tl.constexpr = BRING if BRING < EACH else EACH
        _bring(gates, begin, FIRST, WIDTH)
        if GATED:
            _bring(ups, begin, FIRST, WIDTH)
    own_bias, also_bias = bias_part(bias, first, outputs, BIASED, GATED, OUTPUTS)
    await_earlier(DEPENDENT, LATE)
    own_rows = x + tl.minimum(row, rows - 1).to(tl.int64) * stride
    own, also = tl.zeros((ROWS, OUTPUTS), tl.float32), tl.zeros((ROWS, OUTPUTS), tl.float32)
    for column in range(begin, end, COLUMNS):
        at = column + tl.arange(0, COLUMNS)
        values = tl.load(own_rows[:, None] + at[None, :])
        own = tl.dot(values, tl.trans(tl.load(gates[:, None] + at[None, :])), own)
        if GATED:
            also = tl.dot(values, tl.trans(tl.load(ups[:, None] + at[None, :])), also)
    if LATE:
        bring_up_next(DEPENDENT)
    writing = True
    if SPLITS > 1:
        cell = tl.arange(0, ROWS)[:, None] * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
        writing, own = joined(parts, arrived, number, tl.num_programs(0), split, cell, own, SPLITS)
    if writing:
        if BIASED:
            own += own_bias.to(tl.float32)[None, :]
            also += also_bias.to(tl.float32)[None, :]
        result = own.to(kind)
        if GATED:
            gate = result.to(tl.float32)
            result = activated(gate, GELU).to(kind) * also.to(kind)
        known = (row < rows)[:, None] & (each < outputs)[None, :]
        tl.store(out + row.to(tl.int64)[:, None] * outputs + each[None, :], result, mask=known)


@triton.jit
def _bring(lines, begin, BRING: tl.constexpr, WIDTH: tl.constexpr):
    """The beginning of a stretch of some lines into the cache."""
    PER_LINE: tl.constexpr = cache.LINE_BITS // lines.dtype.element_ty.primitive_bitwidth
    COUNT: tl.constexpr = triton.next_power_of_2((BRING + PER_LINE - 1) // PER_LINE)
    at = tl.minimum(begin + tl.minimum(tl.arange(0, COUNT) * PER_LINE, BRING - 1), WIDTH - 1)
    cache.lines(lines[:, None] + at[None, :])


@triton.jit
def joined(
    parts,  # fp32 [SPLITS, tiles, numbers of a tile]
    arrived,  # int32 [tiles], zeros, and zeros again when all is done
    tile,
    tiles,
    split,
    cell,  # where in a tile each of its numbers lies
    own,  # what this program has gathered of it
    SPLITS: tl.constexpr,
):
    """Whether this program is the last of a tile to arrive, and then the sum of what all have gathered."""
    SIZE: tl.constexpr = own.shape[0] * own.shape[1]
    of_all = parts + tl.cast(tile, tl.int64) * SIZE + cell
    apart = tl.cast(tiles, tl.int64) * SIZE
    tl.store(of_all + split * apart, own)
    tl.debug_barrier()
    last = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    tl.debug_barrier()
    if last:
        own = _gathered(of_all, apart, own, SPLITS)
        tl.store(arrived + tile, 0)
    return last, own


@triton.jit
def _gathered(of_all, apart, like, SPLITS: tl.constexpr):
    """The sum of all stretches, in their order whoever comes last. Other processors wrote them: this one's own cache is passed by."""
    sums = tl.zeros_like(like)
    for split in tl.static_range(SPLITS):
        sums += tl.load(of_all + split * apart, cache_modifier=".cg")
    return sums
