"""What is done to rows of activations between products, each in one launch instead of torch's several."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x,  # rows of [heads, WIDTH], `stride` apart
    weight,  # [WIDTH]
    out,  # [rows, heads, WIDTH]
    stride,
    heads,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # WIDTH, or the next power of two
):
    """The norm of one vector, rounded to its type before the weight is applied (layers.RmsNorm)."""
    vector = tl.program_id(0)
    row, head = vector // heads, vector % heads
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    wide = tl.load(x + row.to(tl.int64) * stride + head * WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    kind = out.dtype.element_ty
    normed = (wide * scale).to(kind) * tl.load(weight + at, mask=inside, other=0.0).to(kind)
    tl.store(out + vector.to(tl.int64) * WIDTH + at, normed, mask=inside)


@triton.jit
def silu_times(
    both,  # [rows, 2 * inner]: gates, then ups
    out,  # [rows, inner]
    inner,
    BLOCK: tl.constexpr,
):
    """silu(gate) * up, each rounded to the type in between, as torch does it."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    gate = tl.load(both + row * 2 * inner + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * inner + inner + at, mask=inside, other=0.0)
    kind = out.dtype.element_ty
    tl.store(out + row * inner + at, (gate * tl.sigmoid(gate)).to(kind) * up, mask=inside)


@triton.jit
def rotate(
    x,  # rows of [heads, 2 * HALF], `stride` apart
    cos,  # [rows, 2 * HALF]
    sin,  # likewise, with the sign that the first half gets
    out,  # [rows, heads, 2 * HALF]
    stride,
    heads,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,  # HALF, or the next power of two
):
    """A head turned to its position (rope.Rope.rotate)."""
    vector = tl.program_id(0)
    row, head = vector // heads, vector % heads
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    source = x + row.to(tl.int64) * stride + head * 2 * HALF + at
    low, high = tl.load(source, mask=inside, other=0.0), tl.load(source + HALF, mask=inside, other=0.0)
    turn = row.to(tl.int64) * 2 * HALF + at
    cos_low, cos_high = tl.load(cos + turn, mask=inside, other=0.0), tl.load(cos + turn + HALF, mask=inside, other=0.0)
    sin_low, sin_high = tl.load(sin + turn, mask=inside, other=0.0), tl.load(sin + turn + HALF, mask=inside, other=0.0)
    to = out + vector.to(tl.int64) * 2 * HALF + at
    tl.store(to, low * cos_low + high * sin_low, mask=inside)
    tl.store(to + HALF, high * cos_high + low * sin_high, mask=inside)
