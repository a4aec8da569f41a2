"""Products of few rows with a matrix whose weights are all on their way, and wait in shared memory, before it is known what they are
multiplied with; and then are multiplied by tensor cores, of which one instruction does what takes a hundred others.

Of a small model's step of one row a product takes as long as its weights' bytes where they are asked for when it begins, and as long as its
instructions where they are there by then (`products.py` executes three for each weight).
"""

from __future__ import annotations

import triton
import triton.language as tl

from banyan_runtime.model.kernels.dependent import await_earlier
from banyan_runtime.model.kernels.rows import activated
from banyan_runtime.model.kernels.tiles import joined

LINES: tl.constexpr = tl.constexpr(16)  # of a weight that a program multiplies, as few as tensor cores take
ALIKE: tl.constexpr = tl.constexpr(8)  # columns of what they are multiplied with, likewise: one row fills them all


@triton.jit(do_not_specialize=["rows"])
def staged(
    x,  # as `products.product` has it, as what follows up to `out`
    delta,
    norm,
    weight,
    bias,
    sums,
    out,
    shares,  # SPLITS > 1: fp32 [SPLITS, tiles, LINES, columns of a result]
    arrived,  # SPLITS > 1: int32 [tiles], zeros, and zeros again when all is done
    rows,
    stride,
    delta_stride,
    outputs,
    eps,
    ADDED: tl.constexpr,
    NORMED: tl.constexpr,
    BIASED: tl.constexpr,
    GATED: tl.constexpr,  # activation(gate) * up, as rows.gated
    GELU: tl.constexpr,  # that activation
    DEPENDENT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # columns that a program multiplies, a power of two
    SPLITS: tl.constexpr,  # programs that share LINES, each with a stretch of their columns
    ROWS: tl.constexpr,  # that a program multiplies; more than 1: there may be fewer
    PARTS: tl.constexpr,  # of the columns, each of which one warp multiplies
):
    """LINES of the weight, of some rows, or a stretch of their columns."""
    tl.static_assert((ROWS == 1 and SPLITS == 1) or not (ADDED or NORMED))
    tl.static_assert(SPLITS == 1 or not GATED)
    kind = out.dtype.element_ty
    EACH: tl.constexpr = BLOCK // PARTS
    OUTPUTS: tl.constexpr = LINES // 2 if GATED else LINES
    first = tl.program_id(1) * OUTPUTS
    begin = tl.program_id(2) * BLOCK
    columns = begin + tl.arange(0, PARTS)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    inside = columns < WIDTH
    number = tl.arange(0, LINES)
    # Lines there are not are read as the last one: masks would cut what is read at once into pieces.
    line = tl.minimum(first + number % OUTPUTS, outputs - 1).to(tl.int64) + (number // OUTPUTS).to(tl.int64) * outputs
    weights = tl.load(
        weight + line[None, :, None] * WIDTH + columns[:, None, :], mask=inside[:, None, :] & (line >= 0)[None, :, None], other=0.0
    )
    gain = tl.zeros((PARTS, EACH), kind)
    if NORMED:
        gain = tl.load(norm + columns, mask=inside, other=0.0).to(kind)
    biases = tl.zeros((LINES,), tl.float32)
    if BIASED:
        biases = tl.load(bias + line).to(tl.float32)
    await_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    if ROWS == 1:
        values = tl.load(x + row * stride + columns, mask=inside, other=0.0)
        if ADDED:
            more = tl.load(delta + row * delta_stride + columns, mask=inside, other=0.0)
            values = (values.to(tl.float32) + more.to(tl.float32)).to(kind)
            tl.store(sums + row * WIDTH + columns, values, mask=inside & (tl.program_id(1) == 0))
        if NORMED:
            wide = values.to(tl.float32)
            scale = tl.rsqrt(tl.sum(tl.sum(wide * wide, 1), 0) / WIDTH + eps)
            values = (wide * scale).to(kind) * gain
        factor = tl.broadcast_to(values[:, :, None], (PARTS, EACH, ALIKE))
        each_row = row + tl.arange(0, ALIKE)
        written = tl.arange(0, ALIKE) == 0
    else:
        each_row = row * ROWS + tl.arange(0, ROWS)
        written = each_row < rows
        at = begin + tl.arange(0, BLOCK)
        values = tl.load(
            x + tl.minimum(each_row, rows - 1)[:, None] * stride + at[None, :],
            mask=(at < WIDTH)[None, :] & (each_row >= 0)[:, None], other=0.0,
        )  # fmt: skip
        factor = tl.permute(tl.reshape(values, (ROWS, PARTS, EACH)), (1, 2, 0))
    result = tl.sum(tl.dot(weights, factor), 0)
    writing = True
    if SPLITS > 1:
        tile, tiles = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.num_programs(0) * tl.num_programs(1)
        COUNT: tl.constexpr = result.shape[1]
        cell = number[:, None] * COUNT + tl.arange(0, COUNT)[None, :]
        writing, result = joined(shares, arrived, tile, tiles, tl.program_id(2), cell, result, SPLITS)
    result += biases[:, None]
    if GATED:
        halves = tl.reshape(result.to(kind), (2, OUTPUTS, result.shape[1]))
        gates, ups = tl.split(tl.permute(halves, (1, 2, 0)))
        found = activated(gates.to(tl.float32), GELU).to(kind) * ups
    else:
        found = result.to(kind)
    each = first + tl.arange(0, OUTPUTS)
    tl.store(out + each_row[None, :] * outputs + each[:, None], found, mask=(each < outputs)[:, None] & written[None, :] & writing)
