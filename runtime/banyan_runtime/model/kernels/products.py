"""Products of very few rows with a matrix, which take as long as reading it, with what comes before and behind them in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from banyan_runtime.model.kernels import cache
from banyan_runtime.model.kernels.dependent import await_earlier
from banyan_runtime.model.kernels.rows import activated


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
    GATED: tl.constexpr,  # activation(gate) * up, as rows.gated
    GELU: tl.constexpr,  # that activation
    WHOLE: tl.constexpr,  # whether all of a program's lines are asked for together, and brought into the cache before it waits
    DEPENDENT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # WIDTH, or the next power of two
    COLUMNS: tl.constexpr,  # of the weight at a time
    OUTPUTS: tl.constexpr,  # that a program computes
):
    """Some outputs of one row. All rows of these outputs are begun together, so that the weight is still in the cache for the next."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * OUTPUTS
    # The first of the weights is on its way before it is known what they are multiplied with.
    own, also = _part(weight, first, outputs, 0, GATED, WIDTH, COLUMNS, OUTPUTS)
    norms = _norm_part(norm, 0, NORMED, WIDTH, COLUMNS)
    own_bias, also_bias = bias_part(bias, first, outputs, BIASED, GATED, OUTPUTS)
    if WHOLE and DEPENDENT:
        cache.piece(weight + first.to(tl.int64) * WIDTH, tl.minimum(OUTPUTS, outputs - first) * WIDTH)
    await_earlier(DEPENDENT)
    x += row * stride
    delta += row * delta_stride
    out += row * outputs
    columns = tl.arange(0, COLUMNS)
    kind: tl.constexpr = out.dtype.element_ty
    if WHOLE:
        tl.static_assert(not (ADDED or NORMED or GATED))
        gathered = own.to(tl.float32) * _factor(x, delta, norms, 1.0, columns, False, False, WIDTH, kind)[None, :]
        for column in tl.static_range(COLUMNS, WIDTH, COLUMNS):
            own, also = _part(weight, first, outputs, column, False, WIDTH, COLUMNS, OUTPUTS)
            gathered += own.to(tl.float32) * _factor(x, delta, norms, 1.0, column + columns, False, False, WIDTH, kind)[None, :]
        _put(out, gathered, gathered, own_bias, also_bias, first, outputs, BIASED, False, GELU, OUTPUTS)
    else:
        scale = 1.0
        if NORMED:
            at = tl.arange(0, BLOCK)
            wide = _sum(x, delta, at, WIDTH, ADDED, kind).to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
            if ADDED:
                tl.store(sums + row * WIDTH + at, wide.to(kind), mask=(at < WIDTH) & (tl.program_id(1) == 0))
        gathered = tl.zeros((OUTPUTS, COLUMNS), tl.float32)
        beside = tl.zeros((OUTPUTS, COLUMNS), tl.float32)
        for column in range(0, WIDTH, COLUMNS):
            if column > 0:
                own, also = _part(weight, first, outputs, column, GATED, WIDTH, COLUMNS, OUTPUTS)
                norms = _norm_part(norm, column, NORMED, WIDTH, COLUMNS)
            factor = _factor(x, delta, norms, scale, column + columns, ADDED, NORMED, WIDTH, kind)
            gathered += own.to(tl.float32) * factor[None, :]
            if GATED:
                beside += also.to(tl.float32) * factor[None, :]
        _put(out, gathered, beside, own_bias, also_bias, first, outputs, BIASED, GATED, GELU, OUTPUTS)


@triton.jit
def _part(
    weight, first, outputs, column, GATED: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, OUTPUTS: tl.constexpr
):  # fmt: skip
    """Of the lines from `first` on some columns; GATED: and of the ups that belong to them."""
    each = first + tl.arange(0, OUTPUTS)
    columns = column + tl.arange(0, COLUMNS)
    there = (each < outputs)[:, None] & (columns < WIDTH)[None, :]
    at = each.to(tl.int64)
    own = tl.load(weight + at[:, None] * WIDTH + columns[None, :], mask=there, other=0.0)
    also = own
    if GATED:
        also = tl.load(weight + (at + outputs)[:, None] * WIDTH + columns[None, :], mask=there, other=0.0)
    return own, also


@triton.jit
def _norm_part(norm, column, NORMED: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """NORMED: likewise of the norm's weight."""
    columns = column + tl.arange(0, COLUMNS)
    found = tl.zeros((COLUMNS,), norm.dtype.element_ty)
    if NORMED:
        found = tl.load(norm + columns, mask=columns < WIDTH, other=0.0)
    return found


@triton.jit
def bias_part(bias, first, outputs, BIASED: tl.constexpr, GATED: tl.constexpr, OUTPUTS: tl.constexpr):
    """BIASED: likewise of the bias."""
    each = first + tl.arange(0, OUTPUTS)
    own = tl.zeros((OUTPUTS,), bias.dtype.element_ty)
    also = own
    if BIASED:
        own = tl.load(bias + each, mask=each < outputs, other=0.0)
        if GATED:
            also = tl.load(bias + outputs + each, mask=each < outputs, other=0.0)
    return own, also


@triton.jit
def _put(
    out, gathered, beside, own_bias, also_bias, first, outputs,
    BIASED: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """The results of the lines from `first` on, of whose columns products are gathered."""
    kind = out.dtype.element_ty
    each = first + tl.arange(0, OUTPUTS)
    known = each < outputs
    result = tl.sum(gathered, 1)
    if BIASED:
        result += own_bias.to(tl.float32)
    if GATED:
        up = tl.sum(beside, 1)
        if BIASED:
            up += also_bias.to(tl.float32)
        gate = result.to(kind).to(tl.float32)
        tl.store(out + each, activated(gate, GELU).to(kind) * up.to(kind), mask=known)
    else:
        tl.store(out + each, result.to(kind), mask=known)


@triton.jit
def _factor(
    x, delta, norms, scale, columns, ADDED: tl.constexpr, NORMED: tl.constexpr, WIDTH: tl.constexpr, kind: tl.constexpr
):  # fmt: skip
    """What some columns of a weight are multiplied with."""
    values = _sum(x, delta, columns, WIDTH, ADDED, kind)
    if NORMED:
        normed = (values.to(tl.float32) * scale).to(kind)
        values = normed * norms.to(kind)
    return values.to(tl.float32)


@triton.jit
def _sum(x, delta, columns, WIDTH: tl.constexpr, ADDED: tl.constexpr, kind: tl.constexpr):
    values = tl.load(x + columns, mask=columns < WIDTH, other=0.0)
    if ADDED:
        more = tl.load(delta + columns, mask=columns < WIDTH, other=0.0)
        values = (values.to(tl.float32) + more.to(tl.float32)).to(kind)
    return values
