"""What is done to rows of activations between products, each in one launch instead of torch's several."""

from __future__ import annotations

import triton
import triton.language as tl

from banyan_runtime.model.kernels.dependent import await_earlier


@triton.jit
def begin(
    ids,  # int32 [tokens]; negative: the latest one of its row
    rows,  # int32 [tokens]
    positions,  # int32 [tokens]
    latest,  # int64 [rows]
    embed,  # [vocabulary, WIDTH]
    cos,  # [positions, DIM]
    sin,  # likewise
    hidden,  # [tokens, WIDTH]
    own_cos,  # [tokens, DIM]
    own_sin,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # WIDTH, or the next power of two
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """What one token begins with: its embedding, and by how much its heads are turned."""
    at = tl.program_id(0).to(tl.int64)
    token, position = tl.load(ids + at).to(tl.int64), tl.load(positions + at).to(tl.int64)
    row = tl.load(rows + at)
    await_earlier(DEPENDENT)
    if token < 0:
        token = tl.load(latest + row)
    columns, dims = tl.arange(0, BLOCK), tl.arange(0, DIM_BLOCK)
    inside, real = columns < WIDTH, dims < DIM
    tl.store(hidden + at * WIDTH + columns, tl.load(embed + token * WIDTH + columns, mask=inside), mask=inside)
    tl.store(own_cos + at * DIM + dims, tl.load(cos + position * DIM + dims, mask=real), mask=real)
    tl.store(own_sin + at * DIM + dims, tl.load(sin + position * DIM + dims, mask=real), mask=real)


@triton.jit
def rms_norm(
    x,  # [rows, WIDTH], `stride` apart
    delta,  # likewise; ADDED: what is added first
    weight,  # [WIDTH]
    sums,  # [rows, WIDTH]; ADDED
    out,  # [rows, WIDTH]
    stride,
    delta_stride,
    eps,
    ADDED: tl.constexpr,
    WIDE: tl.constexpr,  # whether the weight is applied before the norm is rounded
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,  # WIDTH, or the next power of two
    DEPENDENT: tl.constexpr,
):
    """The norm of one row, of the sum with another one (layers.RmsNorm)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    kind = out.dtype.element_ty
    gain = tl.load(weight + at, mask=inside, other=0.0)
    await_earlier(DEPENDENT)
    values = tl.load(x + row * stride + at, mask=inside, other=0.0)
    if ADDED:
        more = tl.load(delta + row * delta_stride + at, mask=inside, other=0.0)
        values = (values.to(tl.float32) + more.to(tl.float32)).to(kind)
        tl.store(sums + row * WIDTH + at, values, mask=inside)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    tl.store(out + row * WIDTH + at, weighted(wide * scale, gain, kind, WIDE), mask=inside)


@triton.jit
def weighted(normed, gain, kind: tl.constexpr, WIDE: tl.constexpr):
    """A norm in float32 times its weight, rounded to the model's type in between, or behind."""
    if WIDE:
        return (normed * gain.to(tl.float32)).to(kind)
    return normed.to(kind) * gain.to(kind)


@triton.jit
def gated(
    both,  # [rows, 2 * inner]: gates, then ups
    out,  # [rows, inner]
    inner,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """activation(gate) * up, each rounded to the type in between, as torch does it."""
    await_earlier(DEPENDENT)
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    gate = tl.load(both + row * 2 * inner + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * inner + inner + at, mask=inside, other=0.0)
    kind = out.dtype.element_ty
    tl.store(out + row * inner + at, activated(gate, GELU).to(kind) * up, mask=inside)


@triton.jit
def activated(gate, GELU: tl.constexpr):
    """silu, or gelu in the form with tanh: x * (1 + tanh(y)) / 2 = x * sigmoid(2 * y)."""
    at = gate
    if GELU:
        at = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 * sqrt(2 / pi)
    return gate * tl.sigmoid(at)


@triton.jit
def place(
    qkv,  # rows of [HEADS + 2 * KV_HEADS, 2 * HALF], `stride` apart
    cos,  # [rows, 2 * HALF]
    sin,  # likewise, with the sign that the first half gets
    q_weight,  # [2 * HALF]; NORMED: of the norm of a query's head
    k_weight,  # likewise
    slots,  # int64 or int32 [rows]: where keys and values go; PADDING: nowhere
    queries,  # [rows, HEADS, 2 * HALF]
    keys,  # [KV_HEADS, slots, 2 * HALF], `head_stride` apart; NARROW: in a narrower type
    values,  # likewise
    stride,
    head_stride,
    eps,
    NORMED: tl.constexpr,
    WIDE: tl.constexpr,  # whether the weight is applied before a norm is rounded
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TOGETHER: tl.constexpr,  # heads at a time, a power of two
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,  # HALF, or the next power of two
    PADDING: tl.constexpr,
    LARGEST: tl.constexpr,  # finite number that is kept
    NARROW: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Some heads of a token: queries and keys are normed and turned to their position, keys and values go to their slot
    (heads.PlainHeads, pool.KvPool.store)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    at = tl.arange(0, BLOCK)
    real = at < HALF
    is_key = (head >= HEADS)[:, None]
    kind = queries.dtype.element_ty
    # What the step was told is there, and weights are.
    slot = tl.load(slots + row).to(tl.int64)
    if NORMED:
        low_norms = _of_either(q_weight, k_weight, at, real, is_key)
        high_norms = _of_either(q_weight + HALF, k_weight + HALF, at, real, is_key)
    await_earlier(DEPENDENT)
    inside = (head < HEADS + KV_HEADS)[:, None] & real[None, :]
    source = qkv + row * stride + head[:, None] * 2 * HALF + at[None, :]
    low, high = tl.load(source, mask=inside, other=0.0), tl.load(source + HALF, mask=inside, other=0.0)
    if NORMED:
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        mean = (tl.sum(wide_low * wide_low, 1) + tl.sum(wide_high * wide_high, 1)) / (2 * HALF)
        scale = tl.rsqrt(mean + eps)[:, None]
        low = weighted(wide_low * scale, low_norms, kind, WIDE)
        high = weighted(wide_high * scale, high_norms, kind, WIDE)
    turn = row * 2 * HALF + at
    cos_low, cos_high = tl.load(cos + turn, mask=real, other=0.0), tl.load(cos + turn + HALF, mask=real, other=0.0)
    sin_low, sin_high = tl.load(sin + turn, mask=real, other=0.0), tl.load(sin + turn + HALF, mask=real, other=0.0)
    turned_low = low * cos_low[None, :] + high * sin_low[None, :]
    turned_high = high * cos_high[None, :] + low * sin_high[None, :]
    to = queries + (row * HEADS + head[:, None]) * 2 * HALF + at[None, :]
    is_query = inside & (head < HEADS)[:, None]
    tl.store(to, turned_low, mask=is_query)
    tl.store(to + HALF, turned_high, mask=is_query)
    stored = inside & is_key & (slot != PADDING)
    if tl.max(head, 0) >= HEADS:
        source += KV_HEADS * 2 * HALF
        low, high = tl.load(source, mask=stored, other=0.0), tl.load(source + HALF, mask=stored, other=0.0)
        cell = (head - HEADS).to(tl.int64)[:, None] * head_stride + slot * 2 * HALF + at[None, :]
        tl.store(keys + cell, marked(turned_low, low, keys.dtype.element_ty, LARGEST, NARROW), mask=stored)
        tl.store(keys + cell + HALF, marked(turned_high, high, keys.dtype.element_ty, LARGEST, NARROW), mask=stored)
        tl.store(values + cell, finite(low, LARGEST).to(values.dtype.element_ty), mask=stored)
        tl.store(values + cell + HALF, finite(high, LARGEST).to(values.dtype.element_ty), mask=stored)


@triton.jit
def _of_either(q_weight, k_weight, at, real, is_key):
    of_query, of_key = tl.load(q_weight + at, mask=real, other=0.0), tl.load(k_weight + at, mask=real, other=0.0)
    return tl.where(is_key, of_key[None, :], of_query[None, :])


@triton.jit
def marked(key, value, kind: tl.constexpr, LARGEST: tl.constexpr, NARROW: tl.constexpr):
    """The key, or NaN where the value is not finite."""
    key += value - value
    if NARROW:
        wide = key.to(tl.float32)
        within = tl.minimum(tl.maximum(wide, -LARGEST), LARGEST)
        key = tl.where(wide - wide == 0.0, within, float("nan")).to(kind)
    return key


@triton.jit
def finite(x, LARGEST: tl.constexpr):
    """torch.nan_to_num, in fp32."""
    wide = x.to(tl.float32)
    wide = tl.where(wide == wide, wide, 0.0)
    return tl.minimum(tl.maximum(wide, -LARGEST), LARGEST)
