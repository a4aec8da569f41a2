"""Products of very few rows with a matrix, which take as long as reading it, with what comes before and behind them in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from banyan_runtime.model.kernels.dependent import await_earlier


@triton.jit
def product(
    x,  # [rows, WIDTH], `stride` apart
    delta,  # likewise; ADDED: what is added first
    norm,  # [WIDTH]; NORMED: the weight of the norm that comes first (rows.rms_norm)
    weight,  # [outputs, WIDTH]; GATED: gates, then as many ups
    bias,  # BIASED: one number for each of its rows
    sums,  # [rows, WIDTH]; ADDED
    out,  # [rows, outputs]
    stride,
    delta_stride,
    outputs,
    eps,
    ADDED: tl.constexpr,
    NORMED: tl.constexpr,
    BIASED: tl.constexpr,
    GATED: tl.constexpr,  # silu(gate) * up, as rows.silu_times
    DEPENDENT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # WIDTH, or the next power of two
    COLUMNS: tl.constexpr,  # of the weight at a time
    OUTPUTS: tl.constexpr,  # that a program computes
):
    """Some outputs of one row. All rows of these outputs are begun together, so that the weight is still in the cache for the next."""
    row = tl.program_id(0).to(tl.int64)
    each = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    known = each < outputs
    columns = tl.arange(0, COLUMNS)
    lines = weight + each.to(tl.int64)[:, None] * WIDTH
    ups = lines + outputs.to(tl.int64) * WIDTH
    # The first of the weight is on its way before it is known what it is multiplied with.
    own = _part(lines, known, columns, WIDTH)
    also = _part(ups, known, columns, WIDTH) if GATED else own
    await_earlier(DEPENDENT)
    kind = out.dtype.element_ty
    scale = 1.0
    if NORMED:
        at = tl.arange(0, BLOCK)
        wide = _sum(x + row * stride, delta + row * delta_stride, at, WIDTH, ADDED, kind).to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
        if ADDED:
            tl.store(sums + row * WIDTH + at, wide.to(kind), mask=(at < WIDTH) & (tl.program_id(1) == 0))
    gathered = tl.zeros((OUTPUTS, COLUMNS), tl.float32)
    beside = tl.zeros((OUTPUTS, COLUMNS), tl.float32)
    for first in range(0, WIDTH, COLUMNS):
        if first > 0:
            own = _part(lines, known, first + columns, WIDTH)
            if GATED:
                also = _part(ups, known, first + columns, WIDTH)
        values = _sum(x + row * stride, delta + row * delta_stride, first + columns, WIDTH, ADDED, kind)
        if NORMED:
            normed = (values.to(tl.float32) * scale).to(kind)
            values = normed * tl.load(norm + first + columns, mask=first + columns < WIDTH, other=0.0).to(kind)
        factor = values.to(tl.float32)[None, :]
        gathered += own.to(tl.float32) * factor
        if GATED:
            beside += also.to(tl.float32) * factor
    result = tl.sum(gathered, 1)
    if BIASED:
        result += tl.load(bias + each, mask=known, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(beside, 1)
        if BIASED:
            up += tl.load(bias + outputs + each, mask=known, other=0.0).to(tl.float32)
        gate = result.to(kind).to(tl.float32)
        tl.store(out + row * outputs + each, (gate * tl.sigmoid(gate)).to(kind) * up.to(kind), mask=known)
    else:
        tl.store(out + row * outputs + each, result.to(kind), mask=known)


@triton.jit
def _part(lines, known, columns, WIDTH: tl.constexpr):
    return tl.load(lines + columns[None, :], mask=known[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def _sum(x, delta, columns, WIDTH: tl.constexpr, ADDED: tl.constexpr, kind: tl.constexpr):
    values = tl.load(x + columns, mask=columns < WIDTH, other=0.0)
    if ADDED:
        more = tl.load(delta + columns, mask=columns < WIDTH, other=0.0)
        values = (values.to(tl.float32) + more.to(tl.float32)).to(kind)
    return values
